#include "verify.cuh"

namespace treewy {
namespace cuda {

int launch_verify_k64(const VerifyParams& p, int warps, int shared_limit, cudaStream_t stream) {
  const bool conv = p.mixed_qkv != nullptr;
  if (p.state_dtype == DType::kFloat32) {
    return conv ? launch_verify_other<64, false, true>(p, warps, shared_limit, stream)
                : launch_verify_other<64, false, false>(p, warps, shared_limit, stream);
  }
  return conv ? launch_verify_other<64, true, true>(p, warps, shared_limit, stream)
              : launch_verify_other<64, true, false>(p, warps, shared_limit, stream);
}

}  // namespace cuda
}  // namespace treewy
