// Small device helpers shared by every CUDA kernel of the package. Axis letters as in params.h.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>
#include <type_traits>

#include "../params.h"

namespace treewy {
namespace cuda {

// The stash keeps each node's own log decay. A path sum in float32 has an ulp of 4e-6 once real gates have brought it to
// -30 or below, and a commit that takes differences of such sums would be wrong by that much; sums of the nodes' own
// decays over the part of the path that is needed keep a relative error.
constexpr bool kStashNodeDecay = true;

constexpr int kMaxWords = kMaxNodes / 32;

__device__ __forceinline__ int64_t load_index(const IndexVector& v, int n) {
  return v.is_int64 ? static_cast<const int64_t*>(v.data)[n] : static_cast<int64_t>(static_cast<const int32_t*>(v.data)[n]);
}

__device__ __forceinline__ float load_float(const void* base, int64_t i, DType dtype) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(base)[i];
  if (dtype == DType::kBFloat16) return __bfloat162float(static_cast<const __nv_bfloat16*>(base)[i]);
  return __half2float(static_cast<const __half*>(base)[i]);
}

__device__ __forceinline__ void store_float(void* base, int64_t i, float x, DType dtype) {
  if (dtype == DType::kFloat32) {
    static_cast<float*>(base)[i] = x;
  } else if (dtype == DType::kBFloat16) {
    static_cast<__nv_bfloat16*>(base)[i] = __float2bfloat16_rn(x);
  } else {
    static_cast<__half*>(base)[i] = __float2half_rn(x);
  }
}

__device__ __forceinline__ float round_to(float x, DType dtype) {
  if (dtype == DType::kBFloat16) return __bfloat162float(__float2bfloat16_rn(x));
  if (dtype == DType::kFloat16) return __half2float(__float2half_rn(x));
  return x;
}

// Two 16-bit values packed in a word, low half first.
__device__ __forceinline__ float2 unpack_half2(uint32_t w, bool is_bf16) {
  if (is_bf16) return make_float2(__uint_as_float(w << 16), __uint_as_float(w & 0xffff0000u));
  return __half22float2(*reinterpret_cast<__half2*>(&w));
}

__device__ __forceinline__ uint32_t pack_half2(float x, float y, bool is_bf16) {
  if (is_bf16) {
    __nv_bfloat162 h = __floats2bfloat162_rn(x, y);
    return *reinterpret_cast<uint32_t*>(&h);
  }
  __half2 h = __floats2half2_rn(x, y);
  return *reinterpret_cast<uint32_t*>(&h);
}

__device__ __forceinline__ float silu(float x) { return x / (1.f + expf(-x)); }
__device__ __forceinline__ float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }

// g = -exp(A_log) * softplus(x), softplus linear above 20.
__device__ __forceinline__ float log_decay(float A_log, float x) {
  float softplus = x > 20.f ? x : log1pf(expf(x));
  return -expf(A_log) * softplus;
}

__device__ __forceinline__ void count_error(int64_t* errors, ErrorKind kind) {
  if (errors != nullptr) atomicAdd(reinterpret_cast<unsigned long long*>(errors) + kind, 1ull);
}

// Shared memory that one block may ask for, by compute capability (86: 8.6), as CUDA's table of capabilities has it.
__host__ __device__ constexpr int shared_limit_of(int capability) {
  return capability == 80 || capability == 87 ? 163 * 1024 : capability / 10 == 8 || capability / 10 == 12 ? 99 * 1024 : 227 * 1024;
}
#ifdef __CUDA_ARCH__
constexpr int kSharedLimit = shared_limit_of(__CUDA_ARCH__ / 10);
#else
constexpr int kSharedLimit = 0;  // of no use on the host, which asks the device
#endif

// Code that moves registers between warpgroups is compiled for 9.0 alone: what is built for it has them (setmaxnreg, in
// compute_90a code) or spills (compute_90).
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
constexpr bool kMovesRegisters = true;
#else
constexpr bool kMovesRegisters = false;
#endif

// Dynamic shared memory above 48 KB has to be asked for once per kernel and device.
template <class Kernel>
cudaError_t allow_shared(Kernel kernel, int bytes, std::atomic<uint64_t>& done) {
  int device = 0;
  cudaError_t e = cudaGetDevice(&device);
  if (e != cudaSuccess) return e;
  const uint64_t bit = device < 64 ? 1ull << device : 0;
  if (done.load(std::memory_order_relaxed) & bit) return cudaSuccess;
  if ((e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)) != cudaSuccess) return e;
  done.fetch_or(bit, std::memory_order_relaxed);
  return cudaSuccess;
}

__host__ __device__ constexpr int element_size(DType d) { return d == DType::kFloat32 ? 4 : 2; }

}  // namespace cuda
}  // namespace treewy
