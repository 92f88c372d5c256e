#include "verify.cuh"

namespace treewy {
namespace cuda {

int launch_verify_k128_f32_conv(const VerifyParams& p, int warps, int shared_limit, cudaStream_t stream) {
  return launch_verify_k128<false, true>(p, warps, shared_limit, stream);
}

}  // namespace cuda
}  // namespace treewy
