// verify, persistent: one block a multiprocessor walks over (request, value head) items. Consumer warps stream the state
// through private shared-memory stages and solve; producer warps prepare the next items meanwhile. Memory never waits for
// a solve, and the solve never waits for memory or for the chain norms -> Gram -> coefficients.
#pragma once

#include "verify_parts.cuh"

namespace treewy {
namespace cuda {

constexpr int kConsumers = 8;  // warps; 16 channels each, so that an item of 128 channels is one turn
constexpr int kProducers = 4;  // warps; 12 warps leave 168 registers a thread

template <class Tile>
struct Stream {
  static constexpr int NT = Tile::NT;
  // A short draft is prepared by one warp, four items at a time; a long one by all producers together.
  static constexpr int kGroup = NT <= 2 ? 1 : NT == 4 ? 2 : 4;
  static constexpr int kGroups = kProducers / kGroup;
  static constexpr int kBuffers = NT <= 4 ? 4 : 2;  // a multiple of kGroups: a buffer belongs to one group
  static constexpr int kStages = NT <= 4 ? 2 : 1;   // state tiles in flight a consumer; long drafts are not memory-bound
  static constexpr int kStateBytes = kConsumers * kStages * StateFragments<Tile>::kBytes;
  static_assert(kBuffers % kGroups == 0 && kProducers % kGroup == 0 && Tile::kChunks == 1, "");
  static int bytes(int T) { return kStateBytes + kBuffers * Prep<Tile>::bytes(T); }
};

// Named barriers: 1.. full, then empty, then one a producer group.
__device__ __forceinline__ void barrier_sync(int id, int threads) { asm volatile("barrier.cta.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
__device__ __forceinline__ void barrier_arrive(int id, int threads) {
  __threadfence_block();
  asm volatile("barrier.cta.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ int barrier_or(int id, int threads, int x) {
  int r;
  asm volatile(
      "{ .reg .pred a, b; setp.ne.s32 a, %3, 0; barrier.cta.red.or.pred b, %1, %2, a; selp.s32 %0, 1, 0, b; }"
      : "=r"(r) : "r"(id), "r"(threads), "r"(x) : "memory");
  return r;
}

struct StreamItem {
  int n, hv, split;
};

template <class Tile>
__global__ void __launch_bounds__((kConsumers + kProducers) * 32, 1)
    verify_stream_kernel(const __grid_constant__ VerifyParams p, const int items, const int splits, const int slabs) {
  using S = Stream<Tile>;
  extern __shared__ __align__(16) unsigned char shared[];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int prep_bytes = Prep<Tile>::bytes(p.T);
  unsigned char* preps = shared + S::kStateBytes;
  auto item_at = [&](int item) {
    StreamItem r;
    r.split = item % splits;
    const int rest = item / splits;
    r.hv = rest % p.HV;
    r.n = rest / p.HV;
    return r;
  };
  // -1: padding, -2: out of range.
  auto slot_of = [&](int item) {
    const int64_t slot = load_index(p.state_indices, item / (splits * p.HV));
    return slot >= p.slots || slot < -1 ? -2 : static_cast<int>(slot);
  };
  const int barrier_threads = (slabs + S::kGroup) * 32;

  if (warp < kConsumers) {
    if (warp >= slabs) return;
    unsigned char* stages = shared + warp * S::kStages * StateFragments<Tile>::kBytes;
    auto state_of = [&](int item, int slot) {
      const StreamItem it = item_at(item);
      return slot * p.state_stride_slot + it.hv * p.state_stride_head + static_cast<int64_t>((it.split * slabs + warp) * 16) * Tile::K;
    };
    auto prefetch = [&](int item, int slot, int stage) {
      if (item < items && slot >= 0)
        StateFragments<Tile>::prefetch(stages + stage * StateFragments<Tile>::kBytes, p.state, state_of(item, slot), lane);
      asm volatile("cp.async.commit_group;" ::: "memory");
    };
    int slots[S::kStages + 1];  // of this item and of those whose state is on its way, and of the one after
#pragma unroll
    for (int i = 0; i <= S::kStages; ++i) {
      const int item = blockIdx.x + i * gridDim.x;
      slots[i] = item < items ? slot_of(item) : -1;
    }
#pragma unroll
    for (int i = 0; i < S::kStages; ++i) prefetch(blockIdx.x + i * gridDim.x, slots[i], i);

    int k = 0;
    for (int item = blockIdx.x; item < items; item += gridDim.x, ++k) {
      const int buffer = k % S::kBuffers, stage = k % S::kStages;
      const StreamItem it = item_at(item);
      const int row0 = (it.split * slabs + warp) * 16;
      const int slot = slots[0], ahead = item + S::kStages * gridDim.x;
      const Prep<Tile> s(preps + buffer * prep_bytes, p.T);
      auto ready = [&] {
        // The stage has been read into registers: refill it before waiting for the preparation.
        prefetch(ahead, slots[S::kStages], stage);
        const int next = ahead + gridDim.x;
#pragma unroll
        for (int i = 0; i < S::kStages; ++i) slots[i] = slots[i + 1];
        slots[S::kStages] = next < items ? slot_of(next) : -1;
        barrier_sync(1 + buffer, barrier_threads);
        return *s.skip == 0;
      };
      asm volatile("cp.async.wait_group %0;" ::"n"(S::kStages - 1) : "memory");
      bool sound = false;
      if (slot >= 0) {
        StateFragments<Tile> state;
        state.fetch(stages + stage * StateFragments<Tile>::kBytes, lane);
        sound = solve_rows<Tile>(p, it.n, it.hv, slot, row0, lane, s, state, 0, ready);
      } else {
        ready();
      }
      if (!sound) write_zeros(p, it.n, it.hv, row0, 16, lane, 32);
      if (item + S::kBuffers * static_cast<int64_t>(gridDim.x) < items) barrier_arrive(1 + S::kBuffers + buffer, barrier_threads);
    }
  } else {
    const int group = (warp - kConsumers) / S::kGroup, gw = (warp - kConsumers) % S::kGroup;
    const int rep = p.HV / p.H;
    const int group_barrier = 1 + 2 * S::kBuffers + group;
    auto sync = [&] {
      if constexpr (S::kGroup == 1) {
        __syncwarp();
      } else {
        barrier_sync(group_barrier, S::kGroup * 32);
      }
    };
    for (int k = group;; k += S::kGroups) {
      const int64_t item64 = blockIdx.x + static_cast<int64_t>(k) * gridDim.x;
      if (item64 >= items) break;
      const int item = static_cast<int>(item64), buffer = k % S::kBuffers;
      const StreamItem it = item_at(item);
      const int h = it.hv / rep;
      const int slot = slot_of(item);
      const bool counts = gw == 0 && lane == 0 && it.hv == 0 && it.split == 0;
      const Prep<Tile> s(preps + buffer * prep_bytes, p.T);
      if (k >= S::kBuffers) barrier_sync(1 + S::kBuffers + buffer, barrier_threads);
      bool skip = slot < 0;
      if (skip) {
        if (counts && slot != -1) count_error(p.errors, kErrorStateIndex);
      } else {
        const int bad = load_parents(p, it.n, s, gw * 32 + lane, S::kGroup * 32);
        if constexpr (S::kGroup == 1) {
          skip = __any_sync(0xffffffffu, bad);
        } else {
          skip = barrier_or(group_barrier, S::kGroup * 32, bad);
        }
        __syncwarp();
        if (skip && counts) count_error(p.errors, kErrorParent);
      }
      if (gw == 0 && lane == 0) *s.skip = skip;
      if (!skip) {
        if (gw == S::kGroup - 1) prepare_gates<Tile>(p, it.n, it.hv, it.split == 0, s, lane);
        stage_rows<Tile>(p, it.n, h, slot, it.hv == h * rep && it.split == 0, s, gw, S::kGroup, lane);
        sync();
        prepare_coefficients<Tile>(s, gw, S::kGroup, lane);
      }
      barrier_arrive(1 + buffer, barrier_threads);
    }
  }
}

template <class Tile>
int launch_verify_stream(const VerifyParams& p, int multiprocessors, int shared_limit, cudaStream_t stream) {
  using S = Stream<Tile>;
  static std::atomic<uint64_t> allowed{0};
  const int bytes = S::bytes(p.T);
  if (bytes > shared_limit) return cudaErrorNotSupported;
  cudaError_t e = allow_shared(verify_stream_kernel<Tile>, shared_limit, allowed);
  if (e != cudaSuccess) return e;
  // A small batch is cut across value channels until every multiprocessor has an item.
  int slabs = kConsumers < p.V / 16 ? kConsumers : p.V / 16;
  const int64_t heads = static_cast<int64_t>(p.N) * p.HV;
  while (slabs > 2 && heads * (p.V / 16) / slabs < multiprocessors) slabs /= 2;
  const int splits = p.V / 16 / slabs;
  const int64_t items = heads * splits;
  if (items > 0x3fffffff) return cudaErrorInvalidConfiguration;
  const int blocks = static_cast<int>(items < multiprocessors ? items : multiprocessors);
  verify_stream_kernel<Tile><<<blocks, (kConsumers + kProducers) * 32, bytes, stream>>>(p, static_cast<int>(items), splits, slabs);
  return cudaGetLastError();
}

}  // namespace cuda
}  // namespace treewy
