#include "verify_stream.cuh"

namespace treewy {
namespace cuda {

int launch_verify_stream_half_conv(const VerifyParams& p, const DeviceFacts& device, cudaStream_t stream) {
  return launch_verify_stream_any<true, true>(p, device, stream);
}

}  // namespace cuda
}  // namespace treewy
