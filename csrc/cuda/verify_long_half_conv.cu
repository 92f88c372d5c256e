#include "verify_long.cuh"

namespace treewy {
namespace cuda {

int launch_verify_long_half_conv(const VerifyParams& p, const DeviceFacts& device, cudaStream_t stream) {
  return launch_verify_long_any<true, true>(p, device, stream);
}

}  // namespace cuda
}  // namespace treewy
