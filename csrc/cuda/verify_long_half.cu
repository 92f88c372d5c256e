#include "verify_long.cuh"

namespace treewy {
namespace cuda {

int launch_verify_long_half(const VerifyParams& p, const DeviceFacts& device, cudaStream_t stream) {
  return launch_verify_long_any<true, false>(p, device, stream);
}

}  // namespace cuda
}  // namespace treewy
