#include "verify_block.cuh"

namespace treewy {
namespace cuda {
namespace {

template <bool HalfState, bool Conv>
int launch(const VerifyParams& p, int warps, int shared_limit, cudaStream_t stream) {
  if (p.T <= 16) return launch_verify_block<VerifyTile<256, 2, HalfState, Conv>>(p, warps, shared_limit, stream);
  return launch_verify_block<VerifyTile<256, 16, HalfState, Conv>>(p, warps, shared_limit, stream);
}

}  // namespace

int launch_verify_block_k256(const VerifyParams& p, int warps, int shared_limit, cudaStream_t stream) {
  const bool conv = p.mixed_qkv != nullptr;
  if (p.state_dtype == DType::kFloat32) {
    return conv ? launch<false, true>(p, warps, shared_limit, stream) : launch<false, false>(p, warps, shared_limit, stream);
  }
  return conv ? launch<true, true>(p, warps, shared_limit, stream) : launch<true, false>(p, warps, shared_limit, stream);
}

}  // namespace cuda
}  // namespace treewy
