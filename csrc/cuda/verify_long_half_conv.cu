#include "verify_long.cuh"

namespace treewy {
namespace cuda {

int launch_verify_long_half_conv(const VerifyParams& p, int mode, int multiprocessors, int shared_limit, cudaStream_t stream) {
  return launch_verify_long_modes<true, true>(p, mode, multiprocessors, shared_limit, stream);
}

}  // namespace cuda
}  // namespace treewy
