#include "verify_stream.cuh"

namespace treewy {
namespace cuda {

int launch_verify_stream_half_conv(const VerifyParams& p, int multiprocessors, int shared_limit, cudaStream_t stream) {
  if (p.T <= 8) return launch_verify_stream<VerifyTile<128, 1, true, true>>(p, multiprocessors, shared_limit, stream);
  if (p.T <= 16) return launch_verify_stream<VerifyTile<128, 2, true, true>>(p, multiprocessors, shared_limit, stream);
  if (p.T <= 32) return launch_verify_stream<VerifyTile<128, 4, true, true>>(p, multiprocessors, shared_limit, stream);
  if (p.T <= 64) return launch_verify_stream<VerifyTile<128, 8, true, true>>(p, multiprocessors, shared_limit, stream);
  return cudaErrorNotSupported;
}

}  // namespace cuda
}  // namespace treewy
