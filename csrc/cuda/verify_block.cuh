// verify, one block a tile: 16 channels a warp, preparation and solve in the same warps with two barriers between them.
// The simple arrangement; drafts and shapes that verify_stream.cuh is not built for.
#pragma once

#include "verify_parts.cuh"

namespace treewy {
namespace cuda {

constexpr int kBlockMaxWarps = 8;

template <class Tile>
__global__ void __launch_bounds__(kBlockMaxWarps * 32, 1) verify_block_kernel(const __grid_constant__ VerifyParams p, int solvers) {
  extern __shared__ __align__(16) unsigned char shared[];
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, warps = blockDim.x >> 5;
  const int slab = blockIdx.x, hv = blockIdx.y, n = blockIdx.z;
  const int rep = p.HV / p.H, h = hv / rep;
  const int rows = solvers * 16, first_row = slab * rows, row0 = first_row + warp * 16;
  const bool counts = tid == 0 && hv == 0 && slab == 0, writes_k = hv == h * rep && slab == 0;
  const Prep<Tile> s(shared, p.T);

  const int64_t slot = load_index(p.state_indices, n);
  if (slot < 0 || slot >= p.slots) {
    if (counts && slot != -1) count_error(p.errors, kErrorStateIndex);
    write_zeros(p, n, hv, first_row, rows, tid, blockDim.x);
    return;
  }
  const int64_t state_at = slot * p.state_stride_slot + hv * p.state_stride_head + static_cast<int64_t>(row0) * Tile::K;
  StateFragments<Tile> state;
  if (warp < solvers) state.load(p.state, state_at, lane, 0);

  if (__syncthreads_or(load_parents(p, n, s, tid, blockDim.x))) {
    if (counts) count_error(p.errors, kErrorParent);
    write_zeros(p, n, hv, first_row, rows, tid, blockDim.x);
    return;
  }
  if (warp == warps - 1) {
    GateInput<Tile> gates[1];
    gates[0].load(p, n, hv, lane);
    prepare_gates<Tile>(p, n, hv, slab == 0, s, lane, gates);
  }
  stage_rows<Tile>(p, n, h, slot, writes_k, s, warp, warps, lane);
  __syncthreads();
  prepare_coefficients<Tile>(s, p.T, warp, warps, lane);
  if constexpr (Tile::kBlockTiles == 2) {
    __syncthreads();
    prepare_inverse<Tile>(s, p.T, warp, warps, lane);
  }
  if (warp >= solvers) {  // it has helped to prepare
    __syncthreads();
    return;
  }
  uint32_t v[2 * Tile::kBlockTiles] = {};
  if constexpr (!Tile::kConv) load_values<Tile>(p, n, hv, row0, lane, 0, v);
  solve_rows<Tile, false>(p, n, hv, slot, row0, lane, s, state, state_at, v, [] {
    __syncthreads();
    return true;
  });
}

template <class Tile>
int launch_verify_block(const VerifyParams& p, BlockShape shape, int shared_limit, cudaStream_t stream) {
  static std::atomic<uint64_t> allowed{0};
  const int bytes = Prep<Tile>::bytes(p.T);
  if (bytes > shared_limit) return cudaErrorNotSupported;
  if (bytes > 48 * 1024) {
    cudaError_t e = allow_shared(verify_block_kernel<Tile>, shared_limit, allowed);
    if (e != cudaSuccess) return e;
  }
  verify_block_kernel<Tile><<<dim3(p.V / (16 * shape.solvers), p.HV, p.N), shape.warps * 32, bytes, stream>>>(p, shape.solvers);
  return cudaGetLastError();
}

// Every instance of one head dimension; each has a file of its own, so that they compile side by side.
template <int K, bool HalfState, bool Conv>
int launch_verify_block_nodes(const VerifyParams& p, BlockShape shape, int shared_limit, cudaStream_t stream) {
  if (p.T <= 16) return launch_verify_block<VerifyTile<K, 2, HalfState, Conv>>(p, shape, shared_limit, stream);
  return launch_verify_block<VerifyTile<K, 16, HalfState, Conv>>(p, shape, shared_limit, stream);
}

template <int K>
int launch_verify_block_any(const VerifyParams& p, BlockShape shape, int shared_limit, cudaStream_t stream) {
  const bool conv = p.mixed_qkv != nullptr;
  if (p.state_dtype == DType::kFloat32) {
    return conv ? launch_verify_block_nodes<K, false, true>(p, shape, shared_limit, stream)
                : launch_verify_block_nodes<K, false, false>(p, shape, shared_limit, stream);
  }
  return conv ? launch_verify_block_nodes<K, true, true>(p, shape, shared_limit, stream)
              : launch_verify_block_nodes<K, true, false>(p, shape, shared_limit, stream);
}

}  // namespace cuda
}  // namespace treewy
