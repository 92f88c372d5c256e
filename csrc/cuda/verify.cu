// launch_verify_cuda: picks the kernel.
#include "common.cuh"
#include "verify_common.cuh"

namespace treewy {

int launch_verify_cuda(const VerifyParams& p, void* stream) {
  if (p.N == 0 || p.T == 0) return cudaSuccess;
  if (p.T > kMaxNodes || p.K != p.V || (p.K != 64 && p.K != 128 && p.K != 256) || p.H <= 0 || p.HV % p.H != 0 ||
      (p.mixed_qkv != nullptr && p.W > kMaxConvWidth))
    return cudaErrorInvalidValue;
  return cuda::launch_verify_generic(p, static_cast<cudaStream_t>(stream));
}

}  // namespace treewy
