#include "verify_stream.cuh"

namespace treewy {
namespace cuda {

int launch_verify_stream_f32_conv(const VerifyParams& p, const DeviceFacts& device, cudaStream_t stream) {
  return launch_verify_stream_any<false, true>(p, device, stream);
}

}  // namespace cuda
}  // namespace treewy
