#include "verify_stream.cuh"

namespace treewy {
namespace cuda {

int launch_verify_stream_f32(const VerifyParams& p, const DeviceFacts& device, cudaStream_t stream) {
  return launch_verify_stream_any<false, false>(p, device, stream);
}

}  // namespace cuda
}  // namespace treewy
