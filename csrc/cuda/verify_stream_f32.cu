#include "verify_stream.cuh"

namespace treewy {
namespace cuda {

int launch_verify_stream_f32(const VerifyParams& p, int multiprocessors, int shared_limit, cudaStream_t stream) {
  if (p.T <= 8) return launch_verify_stream<VerifyTile<128, 1, false, false>>(p, multiprocessors, shared_limit, stream);
  if (p.T <= 16) return launch_verify_stream<VerifyTile<128, 2, false, false>>(p, multiprocessors, shared_limit, stream);
  if (p.T <= 32) return launch_verify_stream<VerifyTile<128, 4, false, false>>(p, multiprocessors, shared_limit, stream);
  if (p.T <= 64) return launch_verify_stream<VerifyTile<128, 8, false, false>>(p, multiprocessors, shared_limit, stream);
  return cudaErrorNotSupported;
}

}  // namespace cuda
}  // namespace treewy
