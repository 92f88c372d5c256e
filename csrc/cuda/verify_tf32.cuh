// verify of up to 32 nodes, persistent like verify_stream.cuh, with S0 [k q] in tf32 products: the state goes from shared memory
// through the tensor cores 16 columns at a time and is never held in registers, which leaves room for more warps a
// multiprocessor. k and q rows are used as they are born: asynchronous copies put them where the products read them.
#pragma once

#include "verify_stream.cuh"

namespace treewy {
namespace cuda {

template <class Tile>
struct Tf32Stream {
  static constexpr int NT = Tile::NT;
  static constexpr int kConsumers = NT == 1 && !Tile::kConv ? 16 : 8;  // 24 warps leave 80 registers a thread, 16 warps 128
  static constexpr int kProducers = NT > 1 && Tile::kConv ? 4 : 8;
  static constexpr int kThreads = (kConsumers + kProducers) * 32;
  static constexpr int kGroup = NT <= 2 ? 2 : 4;
  static constexpr int kGroups = kProducers / kGroup;
  // Two buffers a group, so that the rows of the next item find a free one while this one is being prepared.
  static constexpr int kBuffers = 2 * kGroups;
  static constexpr int kStages = kConsumers == 8 ? 2 : 1;
  static constexpr int kBarrierBytes = 128 + kConsumers * 32;  // and a parking place a consumer
  static constexpr int kStateBytes = kConsumers * kStages * StateFragments<Tile>::kBytes;
  static constexpr int kRawBytes = Tile::kConv ? (8 * NT + 3) * 512 : 0;
  static constexpr int kRawValueBytes = Tile::kConv ? (8 * NT + 4) * 32 : 0;
  static constexpr int kBytes = kBarrierBytes + kStateBytes + kBuffers * Prep<Tile>::bytes(8 * NT) + kGroups * kRawBytes + kConsumers * kRawValueBytes;
  static_assert(2 * kBuffers * 8 <= 128 && Tile::K == 128, "");
};

template <class Tile>
__global__ void __launch_bounds__(Tf32Stream<Tile>::kThreads, 1)
    verify_tf32_kernel(const __grid_constant__ VerifyParams p, const __grid_constant__ StreamLaunch q) {
  using S = Tf32Stream<Tile>;
  constexpr int K = Tile::K, NT = Tile::NT, kPrepBytes = Prep<Tile>::bytes(8 * NT);
  if constexpr (S::kBytes > kSharedLimit) return;
  extern __shared__ __align__(16) unsigned char shared[];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  unsigned char* preps = shared + S::kBarrierBytes + S::kStateBytes;
  unsigned char* raws = preps + S::kBuffers * kPrepBytes;
  uint64_t* full = reinterpret_cast<uint64_t*>(shared);
  uint64_t* empty = full + S::kBuffers;
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::kBuffers; ++i) {
      mbarrier_init(full + i, S::kGroup * 32);
      mbarrier_init(empty + i, q.slabs * 32);
    }
  }
  __syncthreads();
  const bool act_bf16 = p.act_dtype == DType::kBFloat16, state_bf16 = p.state_dtype == DType::kBFloat16;

  if (warp < S::kConsumers) {
    unsigned char* stages = shared + S::kBarrierBytes + warp * S::kStages * StateFragments<Tile>::kBytes;
    // A consumer keeps its slab of 16 channels and takes every (consumers / slabs)-th item of the block.
    const int slab = warp % q.slabs, per_turn = S::kConsumers / q.slabs;
    auto prefetch = [&](const Cursor& c, int slot, int stage) {
      if (slot >= 0)
        StateFragments<Tile>::prefetch(stages + stage * StateFragments<Tile>::kBytes, p.state,
                                       slot * p.state_stride_slot + c.hv * p.state_stride_head + (c.split * q.slabs + slab) * 16 * K, lane);
      copy_commit();
    };
    Cursor here(q, blockIdx.x);
    for (int i = 0; i < warp / q.slabs; ++i) here.advance(q);
    int4* parked = reinterpret_cast<int4*>(shared + 128) + warp * 2;  // here, ahead: the next whose state is to be asked for
    int slots[S::kStages];  // of this item and of those whose state is on its way
    RawSlot raw_slot;       // of the item ahead
    {
      Cursor ahead = here;
#pragma unroll
      for (int i = 0; i < S::kStages; ++i) {
        slots[i] = checked_slot(p, raw_slot_of(p, q, ahead));
        prefetch(ahead, slots[i], i);
        ahead.leap(q);
      }
      raw_slot = raw_slot_of(p, q, ahead);
      ahead.park(parked + 1);
    }
    int k = warp / q.slabs;  // which of the block's items
    for (int turn = 0; here.item < q.items; ++turn, k += per_turn) {
      here.park(parked);
      const int stage = turn % S::kStages;
      const int row0 = (here.split * q.slabs + slab) * 16;
      const int slot = slots[0];
      const Prep<Tile> s(preps + k % S::kBuffers * kPrepBytes, p.T);
      uint32_t v[2 * Tile::kBlockTiles] = {};
      if constexpr (!Tile::kConv) load_values<Tile>(p, here.n, here.hv, row0, lane, 0, v);
      StateStream<Tile> state;
      auto next = [&](bool live) {
        const int next_slot = checked_slot(p, raw_slot);
        mbarrier_wait(full + k % S::kBuffers, k / S::kBuffers & 1);
        const bool sound = live && *s.skip == 0;
        if (sound) {
          // All but the states asked for later, and the raw v columns.
          copy_wait<S::kStages - 1 + (Tile::kConv ? 1 : 0)>();
          state.run(stages + stage * StateFragments<Tile>::kBytes, s, p.T, lane, act_bf16, state_bf16);
        }
#pragma unroll
        for (int i = 0; i + 1 < S::kStages; ++i) slots[i] = slots[i + 1];
        slots[S::kStages - 1] = next_slot;
        Cursor ahead;
        ahead.unpark(parked + 1);
        prefetch(ahead, next_slot, stage);
        ahead.leap(q);
        raw_slot = raw_slot_of(p, q, ahead);
        ahead.park(parked + 1);
        return sound;
      };
      bool sound = false;
      if (slot >= 0) {
        sound = solve_rows<Tile, true>(p, here.n, here.hv, slot, row0, lane, s, state, 0, v, [&] { return next(true); },
                                       raws + S::kGroups * S::kRawBytes + warp * S::kRawValueBytes);
      } else {
        next(false);
      }
      here.unpark(parked);
      if (!sound) write_zeros(p, here.n, here.hv, (here.split * q.slabs + slab) * 16, 16, lane, 32);
      mbarrier_arrive(empty + k % S::kBuffers);
      here.leap(q);
    }
  } else {
    using Input = ProducerInput<Tile, S::kGroup>;
    const int group = (warp - S::kConsumers) / S::kGroup, gw = (warp - S::kConsumers) % S::kGroup;
    const int kind = lane >> 4, i = lane & 15;
    auto sync = [&] { barrier_sync(1 + group, S::kGroup * 32); };
    auto piece = [&](const Prep<Tile>& s, int t) { return s.kq + (kind * s.span() + t) * (K / 8) + (i ^ row_turn(t)); };
    uint4* raw_rows = reinterpret_cast<uint4*>(raws + group * S::kRawBytes) + lane;  // rows of 32 words
    // Rows of item k on their way; without a convolution to their final place, whose buffer must be free.
    auto fetch_rows = [&](const Cursor& c, int k) {
      if constexpr (Tile::kConv) {
        Input::prefetch(p, q, c, gw, lane, raw_rows);
      } else if (c.item < q.items) {
        const int buffer = k % S::kBuffers, use = k / S::kBuffers, h = c.hv / q.heads_per_key;
        if (use > 0) mbarrier_wait(empty + buffer, (use - 1) & 1);
        const Prep<Tile> s(preps + buffer * kPrepBytes, p.T);
        const int64_t stride = kind == 0 ? p.k_stride_token : p.q_stride_token;
        const uint16_t* from = (kind == 0 ? static_cast<const uint16_t*>(p.k) + h * p.k_stride_head : static_cast<const uint16_t*>(p.q) + h * p.q_stride_head) +
                               (static_cast<int64_t>(c.n) * p.T + gw) * stride + i * 8;
        for (int t = gw; t < p.T; t += S::kGroup, from += S::kGroup * stride) copy_async<16>(shared_address(piece(s, t)), from);
        copy_commit();
      }
    };
    Cursor here(q, blockIdx.x);
    for (int j = 0; j < group; ++j) here.advance(q);
    Input in;
    in.load(p, q, here, gw, lane);
    fetch_rows(here, group);
    for (int k = group; here.item < q.items; k += S::kGroups) {
      const int buffer = k % S::kBuffers, use = k / S::kBuffers;
      const int h = here.hv / q.heads_per_key;
      const bool counts = gw == 0 && lane == 0 && here.hv == 0 && here.split == 0;
      const bool writes_k = here.split == 0 && here.hv == h * q.heads_per_key;
      const Prep<Tile> s(preps + buffer * kPrepBytes, p.T);
      if (Tile::kConv && use > 0) mbarrier_wait(empty + buffer, (use - 1) & 1);
      const int tid = gw * 32 + lane;
      int bad = in.parent < -1 || in.parent >= (tid < p.T ? tid : 0);
      if (tid < s.span()) s.parent[tid] = in.parent;
      copy_wait<0>();
      if constexpr (Tile::kConv) {
        if (gw == 0) {
#pragma unroll
          for (int j = 0; j < 3; ++j) raw_rows[(s.span() + j) * 32] = in.old[j];
        }
      }
      bad = barrier_or(1 + group, S::kGroup * 32, bad);
      const int slot = checked_slot(p, in.raw_slot);
      const bool skip = slot < 0 || bad;
      if (skip && counts && slot != -1) count_error(p.errors, slot < 0 ? kErrorStateIndex : kErrorParent);
      if (tid == 0) *s.skip = skip;
      const Cursor now = here;
#pragma unroll
      for (int j = 0; j < S::kGroups; ++j) here.advance(q);
      if (!skip) {
        if (gw == S::kGroup - 1) prepare_gates<Tile>(p, now.n, now.hv, now.split == 0, s, lane, in.gates);
#pragma unroll 1
        for (int t = gw; t < s.span(); t += S::kGroup) {
          if (t >= p.T) {
            stage_zero_row<Tile>(s, kind, t, i);
            continue;
          }
          uint4 raw;
          if constexpr (Tile::kConv) {
            raw = raw_rows[t * 32];
            if (writes_k)
              *reinterpret_cast<uint4*>(static_cast<uint16_t*>(p.stash.conv) + now.n * p.stash.conv_stride_row + t * p.stash.conv_stride_node +
                                        (kind == 0 ? p.H * K : 0) + h * K + i * 8) = raw;
            uint4 taps[4];
            taps[0] = raw;
            int node = t;
#pragma unroll
            for (int j = 1; j < 4; ++j) {
              node = node >= 0 ? s.parent[node] : node - 1;
              taps[j] = raw_rows[(node >= 0 ? node : s.span() - 1 - node) * 32];
            }
            raw = convolve8(taps, in.weight, in.bias, act_bf16);
            *piece(s, t) = raw;
          } else {
            raw = *piece(s, t);  // what this lane copied itself
          }
          measure_row<Tile>(p, now.n, h, writes_k, s, kind, t, i, raw, act_bf16);
        }
      }
      in.load(p, q, here, gw, lane);
      sync();
      fetch_rows(here, k + S::kGroups);
      if (!skip) {
        prepare_coefficients<Tile>(s, p.T, act_bf16, gw, S::kGroup, lane);
        if constexpr (Tile::kBlockTiles == 2) {
          sync();
          prepare_inverse<Tile>(s, p.T, gw, S::kGroup, lane);
        }
      }
      mbarrier_arrive(full + buffer);
    }
  }
}

template <class Tile>
int launch_verify_tf32(const VerifyParams& p, int multiprocessors, int shared_limit, cudaStream_t stream) {
  using S = Tf32Stream<Tile>;
  static std::atomic<uint64_t> allowed{0};
  if (S::kBytes > shared_limit) return cudaErrorNotSupported;
  cudaError_t e = allow_shared(verify_tf32_kernel<Tile>, S::kBytes, allowed);
  if (e != cudaSuccess) return e;
  StreamLaunch q{};
  int blocks = 0;
  if (!plan_stream(p, multiprocessors, 1, q, blocks)) return cudaErrorInvalidConfiguration;
  plan_leap(S::kConsumers, blocks, q);
  verify_tf32_kernel<Tile><<<blocks, S::kThreads, S::kBytes, stream>>>(p, q);
  return cudaGetLastError();
}

template <bool HalfState, bool Conv>
int launch_verify_tf32_nodes(const VerifyParams& p, int multiprocessors, int shared_limit, cudaStream_t stream) {
  if (p.T <= 4) return launch_verify_tf32<VerifyTile<128, 1, HalfState, Conv, kModeTf32 | kModePacked>>(p, multiprocessors, shared_limit, stream);
  if (p.T <= 8) return launch_verify_tf32<VerifyTile<128, 1, HalfState, Conv, kModeTf32>>(p, multiprocessors, shared_limit, stream);
  if (p.T <= 16) return launch_verify_tf32<VerifyTile<128, 2, HalfState, Conv, kModeTf32>>(p, multiprocessors, shared_limit, stream);
  if (p.T <= 32) return launch_verify_tf32<VerifyTile<128, 4, HalfState, Conv, kModeTf32 | kModeTiles>>(p, multiprocessors, shared_limit, stream);
  return cudaErrorNotSupported;
}

}  // namespace cuda
}  // namespace treewy
