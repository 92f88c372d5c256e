// launch_verify_cuda: picks the kernel and its grid.
#include <atomic>

#include "common.cuh"
#include "verify_common.cuh"

namespace treewy {
namespace cuda {
namespace {

// Asked once per device; all facts packed in one word so that concurrent first calls are harmless.
cudaError_t device_facts(DeviceFacts& f) {
  constexpr int kDevices = 64;
  static std::atomic<uint64_t> known[kDevices];
  int device = 0;
  cudaError_t e = cudaGetDevice(&device);
  if (e != cudaSuccess) return e;
  uint64_t w = device < kDevices ? known[device].load(std::memory_order_relaxed) : 0;
  if (w == 0) {
    int shared = 0, count = 0, capability = 0;
    if ((e = code_capability(capability)) != cudaSuccess) return e;
    if ((e = cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device)) != cudaSuccess) return e;
    if ((e = cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device)) != cudaSuccess) return e;
    // Code for a capability with less shared memory lacks the kernels that its own parts have no room for (8.6 code on 8.7).
    if (shared > shared_limit_of(capability)) shared = shared_limit_of(capability);
    w = static_cast<uint64_t>(shared) << 32 | (capability == 90 ? 1u << 31 : 0u) | static_cast<uint32_t>(count);
    if (device < kDevices) known[device].store(w, std::memory_order_relaxed);
  }
  f.shared_limit = static_cast<int>(w >> 32);
  f.multiprocessors = static_cast<int>(w & 0x7fffffffu);
  f.moves_registers = w >> 31 & 1u;
  return cudaSuccess;
}

bool aligned(const void* p, int bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

// The tensor-core kernel takes 16-bit activations whose rows can be read 16 bytes at a time; the rest goes the plain way.
bool fits_tensor_cores(const VerifyParams& p) {
  if (p.act_dtype == DType::kFloat32) return false;
  const int state_group = p.state_dtype == DType::kFloat32 ? 16 : 8;
  if (!aligned(p.state, state_group) || p.state_stride_slot % 4 != 0 || p.state_stride_head % 4 != 0) return false;
  if (p.mixed_qkv != nullptr) {
    if (p.W != 4 || p.conv_weight_stride_channel != 4 || !aligned(p.conv_weight, 16) || !aligned(p.conv_bias, 16) ||
        !aligned(p.mixed_qkv, 16) || p.mixed_qkv_stride_token % 8 != 0 || !aligned(p.stash.conv, 16) ||
        p.stash.conv_stride_row % 8 != 0 || p.stash.conv_stride_node % 8 != 0 || p.stash.conv == nullptr)
      return false;
  } else if (!aligned(p.q, 16) || !aligned(p.k, 16) || !aligned(p.v, 4) || p.q_stride_token % 8 != 0 || p.q_stride_head % 8 != 0 ||
             p.k_stride_token % 8 != 0 || p.k_stride_head % 8 != 0 || p.v_stride_token % 2 != 0 || p.v_stride_head % 2 != 0) {
    return false;
  }
  return aligned(p.stash.k, 16) && p.stash.k_stride_row % 8 == 0 && p.stash.k_stride_head % 8 == 0 && aligned(p.stash.u, 8) &&
         p.stash.u_stride_row % 2 == 0 && p.stash.u_stride_head % 2 == 0 && aligned(p.out, 2 * element_size(p.out_dtype)) &&
         p.out_stride_token % 2 == 0 && p.out_stride_head % 2 == 0;
}

// Warps of a block: as many value channels as possible share the preparation of k, q and the coefficients, but a small
// batch is spread until every multiprocessor has a block.
BlockShape choose_shape(const VerifyParams& p, int multiprocessors) {
  int warps = p.V / 16 < 8 ? p.V / 16 : 8;
  const int64_t slabs = static_cast<int64_t>(p.N) * p.HV * (p.V / 16);
  if (p.T > 16) {
    // Preparation is most of a long draft's work: eight warps do it, and it is done again for other channels only while
    // that finds idle multiprocessors. 256 threads of 255 registers: one block a multiprocessor.
    while (warps > 2 && slabs / (warps / 2) <= multiprocessors) warps /= 2;
    return {8, warps};
  }
  while (warps > 2 && slabs / warps < 2 * multiprocessors) warps /= 2;
  return {warps, warps};
}

}  // namespace
}  // namespace cuda

int launch_verify_cuda(const VerifyParams& p, void* stream) {
  if (p.N == 0 || p.T == 0) return cudaSuccess;
  if (p.T > kMaxNodes || p.K != p.V || (p.K != 64 && p.K != 128 && p.K != 256) || p.H <= 0 || p.HV % p.H != 0 ||
      (p.mixed_qkv != nullptr && p.W > kMaxConvWidth))
    return cudaErrorInvalidValue;
  cudaStream_t s = static_cast<cudaStream_t>(stream);
  if (!cuda::fits_tensor_cores(p) || p.N > 65535 || p.HV > 65535) return cuda::launch_verify_generic(p, s);
  cuda::DeviceFacts facts;
  cudaError_t e = cuda::device_facts(facts);
  if (e != cudaSuccess) {
    cudaGetLastError();  // not for whoever asks next
    return e;
  }
  const int limit = facts.shared_limit;
  const bool half = p.state_dtype != DType::kFloat32, conv = p.mixed_qkv != nullptr;
  int r = cudaErrorNotSupported;
  if (p.K == 128 && p.T <= 32) {
    r = half ? (conv ? cuda::launch_verify_stream_half_conv(p, facts, s) : cuda::launch_verify_stream_half(p, facts, s))
             : (conv ? cuda::launch_verify_stream_f32_conv(p, facts, s) : cuda::launch_verify_stream_f32(p, facts, s));
  } else if (p.K == 128 && p.T <= 64) {
    r = half ? (conv ? cuda::launch_verify_long_half_conv(p, facts, s) : cuda::launch_verify_long_half(p, facts, s))
             : (conv ? cuda::launch_verify_long_f32_conv(p, facts, s) : cuda::launch_verify_long_f32(p, facts, s));
  }
  if (r == cudaErrorNotSupported) {
    const cuda::BlockShape shape = cuda::choose_shape(p, facts.multiprocessors);
    r = p.K == 64    ? cuda::launch_verify_block_k64(p, shape, limit, s)
        : p.K == 128 ? cuda::launch_verify_block_k128(p, shape, limit, s)
                     : cuda::launch_verify_block_k256(p, shape, limit, s);
  }
  // Parts with 100 KB of shared memory do not hold the coefficients of the longest drafts.
  return r == cudaErrorNotSupported ? cuda::launch_verify_generic(p, s) : r;
}

}  // namespace treewy
