#include "verify_block.cuh"

namespace treewy {
namespace cuda {

int launch_verify_block_k256(const VerifyParams& p, int warps, int shared_limit, cudaStream_t stream) {
  return launch_verify_block_any<256>(p, warps, shared_limit, stream);
}

}  // namespace cuda
}  // namespace treewy
