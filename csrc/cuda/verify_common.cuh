// What both verify kernels share: one channel of the causal convolution over ancestors, and the raw copy for the stash.
#pragma once

#include "common.cuh"

namespace treewy {
namespace cuda {

int launch_verify_generic(const VerifyParams& p, cudaStream_t stream);

// Capability that the code which runs on the current device was compiled for (86: compute_86). Below the device's own when
// the build does not hold it; cudaErrorNoKernelImageForDevice when it holds nothing that the device runs.
cudaError_t code_capability(int& capability);

// Warps of a block of the block kernel, all of which prepare, and how many of them solve (16 channels each).
struct BlockShape {
  int warps, solvers;
};

// What a launcher has to know of the current device and of the code that runs on it.
struct DeviceFacts {
  int shared_limit, multiprocessors;
  bool moves_registers;  // kernels that move registers between warpgroups are there (kMovesRegisters)
};

// One function per instantiation file; cudaErrorNotSupported: does not fit, try the next.
int launch_verify_block_k64(const VerifyParams& p, BlockShape shape, int shared_limit, cudaStream_t stream);
int launch_verify_block_k128(const VerifyParams& p, BlockShape shape, int shared_limit, cudaStream_t stream);
int launch_verify_block_k256(const VerifyParams& p, BlockShape shape, int shared_limit, cudaStream_t stream);
int launch_verify_stream_f32(const VerifyParams& p, const DeviceFacts& device, cudaStream_t stream);
int launch_verify_stream_f32_conv(const VerifyParams& p, const DeviceFacts& device, cudaStream_t stream);
int launch_verify_stream_half(const VerifyParams& p, const DeviceFacts& device, cudaStream_t stream);
int launch_verify_stream_half_conv(const VerifyParams& p, const DeviceFacts& device, cudaStream_t stream);
int launch_verify_long_f32(const VerifyParams& p, const DeviceFacts& device, cudaStream_t stream);
int launch_verify_long_f32_conv(const VerifyParams& p, const DeviceFacts& device, cudaStream_t stream);
int launch_verify_long_half(const VerifyParams& p, const DeviceFacts& device, cudaStream_t stream);
int launch_verify_long_half_conv(const VerifyParams& p, const DeviceFacts& device, cudaStream_t stream);

// Convolution, SiLU and rounding of channel c at node t. Past the root the taps continue in the convolution state.
__device__ __forceinline__ float conv_silu(const VerifyParams& p, int n, int t, const int* parent, int64_t slot, int c) {
  float acc = p.conv_bias != nullptr ? load_float(p.conv_bias, c, p.act_dtype) : 0.f;
  int node = t, column = p.W - 2;
  for (int w = p.W - 1; w >= 0; --w) {
    float x;
    if (node >= 0) {
      x = load_float(p.mixed_qkv, (static_cast<int64_t>(n) * p.T + node) * p.mixed_qkv_stride_token + c, p.act_dtype);
      node = parent[node];
    } else {
      x = load_float(p.conv_state, slot * p.conv_state_stride_slot + c * p.conv_state_stride_channel + column * p.conv_state_stride_column,
                     p.act_dtype);
      --column;
    }
    acc = fmaf(load_float(p.conv_weight, c * p.conv_weight_stride_channel + w, p.act_dtype), x, acc);
  }
  return round_to(silu(acc), p.act_dtype);
}

__device__ __forceinline__ void copy_raw(const VerifyParams& p, int n, int t, int c) {
  const int64_t from = (static_cast<int64_t>(n) * p.T + t) * p.mixed_qkv_stride_token + c;
  const int64_t to = n * p.stash.conv_stride_row + t * p.stash.conv_stride_node + c;
  if (p.act_dtype == DType::kFloat32) {
    static_cast<float*>(p.stash.conv)[to] = static_cast<const float*>(p.mixed_qkv)[from];
  } else {
    static_cast<uint16_t*>(p.stash.conv)[to] = static_cast<const uint16_t*>(p.mixed_qkv)[from];
  }
}

}  // namespace cuda
}  // namespace treewy
