#include "verify_stream.cuh"

namespace treewy {
namespace cuda {

int launch_verify_stream_f32(const VerifyParams& p, int multiprocessors, int shared_limit, cudaStream_t stream) {
  return launch_verify_stream_any<false, false>(p, multiprocessors, shared_limit, stream);
}

}  // namespace cuda
}  // namespace treewy
