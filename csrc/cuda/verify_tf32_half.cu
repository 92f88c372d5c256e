#include "verify_tf32.cuh"

namespace treewy {
namespace cuda {

int launch_verify_tf32_half(const VerifyParams& p, int multiprocessors, int shared_limit, cudaStream_t stream) {
  return launch_verify_tf32_nodes<true, false>(p, multiprocessors, shared_limit, stream);
}

}  // namespace cuda
}  // namespace treewy
