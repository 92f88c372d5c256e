#include "verify_block.cuh"

namespace treewy {
namespace cuda {

int launch_verify_block_k128(const VerifyParams& p, BlockShape shape, int shared_limit, cudaStream_t stream) {
  return launch_verify_block_any<128>(p, shape, shared_limit, stream);
}

}  // namespace cuda
}  // namespace treewy
