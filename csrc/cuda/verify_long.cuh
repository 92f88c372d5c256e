// verify of 33 to 64 nodes, persistent like verify_stream.cuh, with fewer registers held across a solve (parked cursors, a fixed
// layout) and, with kShare, k and q rows staged once for all value heads of a key head: a block then walks key heads, and the
// value heads of one follow each other.
#pragma once

#include "verify_stream.cuh"

namespace treewy {
namespace cuda {

template <class Tile>
struct LongStream {
  static constexpr int kConsumers = 8, kProducers = Tile::kRich ? 8 : 4;
  static constexpr int kConsumerRegisters = 168, kProducerRegisters = 88;  // of 16 warps; 12 have 168 each
  static constexpr int kThreads = (kConsumers + kProducers) * 32;
  static constexpr int kBuffers = 2;  // of rows, and of what belongs to a value head
  static constexpr int kBarrierBytes = 128 + kConsumers * 32;  // and a parking place a consumer
  static constexpr int kStateBytes = kConsumers * StateFragments<Tile>::kBytes;
  static constexpr int kRawBytes = RawRows<Tile>::kBytes, kRawValueBytes = RawRows<Tile>::kValueBytes;
  static constexpr int kRowBytes = Prep<Tile>::row_bytes(8 * Tile::NT), kRestBytes = Prep<Tile>::rest_bytes(8 * Tile::NT);
  static constexpr int kBytes = kBarrierBytes + kStateBytes + kBuffers * (kRowBytes + kRestBytes) + kRawBytes + kConsumers * kRawValueBytes;
  static constexpr bool kThere = kBytes <= kSharedLimit && (kMovesRegisters || !Tile::kRich);
  static_assert(Tile::kFixed && Tile::K == 128 && Tile::kChunks == 1, "");
};

// With kShare `split` is the value head of the key head: an item is not cut across channels then.
template <bool kShare>
struct Walk : Cursor {
  __device__ __forceinline__ Walk(const StreamLaunch& q, int first) {
    if constexpr (kShare) {
      const int H = q.groups / q.heads_per_key;
      item = first;
      split = 0;
      hv = first % H * q.heads_per_key;
      n = first / H;
    } else {
      static_cast<Cursor&>(*this) = Cursor(q, first);
    }
  }
  Walk() = default;
  __device__ __forceinline__ void next(const StreamLaunch& q, bool leaps) {
    if constexpr (kShare) {
      ++hv;
      if (++split < q.heads_per_key) return;
      hv += q.step_head - split;
      split = 0;
      item += gridDim.x;
      n += q.step_row;
      if (hv >= q.groups) hv -= q.groups, ++n;
    } else if (leaps) {
      leap(q);
    } else {
      advance(q);
    }
  }
  __device__ __forceinline__ int part() const { return kShare ? 0 : split; }
};

template <class Tile>
__global__ void __launch_bounds__(LongStream<Tile>::kThreads, 1)
    verify_long_kernel(const __grid_constant__ VerifyParams p, const __grid_constant__ StreamLaunch q) {
  using S = LongStream<Tile>;
  using W = Walk<Tile::kShare>;
  constexpr int K = Tile::K;
  if constexpr (!S::kThere) return;
  extern __shared__ __align__(16) unsigned char shared[];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  unsigned char* rows = shared + S::kBarrierBytes + S::kStateBytes;
  unsigned char* rests = rows + S::kBuffers * S::kRowBytes;
  unsigned char* raws = rests + S::kBuffers * S::kRestBytes;
  uint64_t* full = reinterpret_cast<uint64_t*>(shared);
  uint64_t* empty = full + S::kBuffers;
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::kBuffers; ++i) {
      mbarrier_init(full + i, S::kProducers * 32);
      mbarrier_init(empty + i, q.slabs * 32);
    }
  }
  __syncthreads();
  const bool act_bf16 = p.act_dtype == DType::kBFloat16;

  if (warp < S::kConsumers) {
    if constexpr (Tile::kRich) take_registers<S::kConsumerRegisters>();
    unsigned char* stage = shared + S::kBarrierBytes + warp * StateFragments<Tile>::kBytes;
    const int slab = warp % q.slabs, per_turn = S::kConsumers / q.slabs;
    auto prefetch = [&](const W& c, int slot) {
      if (slot >= 0)
        StateFragments<Tile>::prefetch(stage, p.state, slot * p.state_stride_slot + c.hv * p.state_stride_head + (c.part() * q.slabs + slab) * 16 * K, lane);
      copy_commit();
    };
    W here(q, blockIdx.x);
    for (int i = 0; i < warp / q.slabs; ++i) here.next(q, false);
    int4* parked = reinterpret_cast<int4*>(shared + 128) + warp * 2;  // here, ahead: the next whose state is to be asked for
    W ahead = here;
    int next_slot = checked_slot(p, raw_slot_of(p, q, ahead));
    prefetch(ahead, next_slot);
    ahead.next(q, true);
    RawSlot raw_slot = raw_slot_of(p, q, ahead);
    ahead.park(parked + 1);
    int k = warp / q.slabs, key = k;  // which of the block's items, of its key heads
    for (; here.item < q.items; k += per_turn) {
      here.park(parked);
      const int slot = next_slot;
      const int row0 = (here.part() * q.slabs + slab) * 16;
      next_slot = checked_slot(p, raw_slot);  // here, where no other load is on its way
      const Prep<Tile> s(rows + (Tile::kShare ? key : k) % S::kBuffers * S::kRowBytes, rests + k % S::kBuffers * S::kRestBytes, p.T);
      uint32_t v[2 * Tile::kBlockTiles] = {};
      if constexpr (!Tile::kConv) load_values<Tile>(p, here.n, here.hv, row0, lane, 0, v);
      auto ready = [&] {
        // The stage has been read into registers: refill it before waiting for the preparation.
        W then;
        then.unpark(parked + 1);
        prefetch(then, next_slot);
        then.next(q, true);
        raw_slot = raw_slot_of(p, q, then);
        then.park(parked + 1);
        mbarrier_wait(full + k % S::kBuffers, k / S::kBuffers & 1);
        return *s.skip == 0;
      };
      copy_wait<0>();
      bool sound = false;
      if (slot >= 0) {
        StateFragments<Tile> state;
        state.fetch(stage, lane);
        sound = solve_rows<Tile, true>(p, here.n, here.hv, slot, row0, lane, s, state, 0, v, ready, raws + S::kRawBytes + warp * S::kRawValueBytes);
      } else {
        ready();
      }
      here.unpark(parked);
      if (!sound) write_zeros(p, here.n, here.hv, (here.part() * q.slabs + slab) * 16, 16, lane, 32);
      mbarrier_arrive(empty + k % S::kBuffers);
      here.next(q, true);
      if (Tile::kShare && here.split == 0) ++key;
    }
  } else {
    if constexpr (Tile::kRich) give_registers<S::kProducerRegisters>();
    const int gw = warp - S::kConsumers;
    auto sync = [&] { barrier_sync(1, S::kProducers * 32); };
    using Input = ProducerInput<Tile, S::kProducers>;
    uint4* raw_rows = reinterpret_cast<uint4*>(raws) + lane;  // rows of 32 words
    W here(q, blockIdx.x);
    Input in;
    in.load(p, q, here, gw, lane);
    Input::prefetch(p, q, here, gw, lane, raw_rows, Tile::kConv ? checked_slot(p, in.raw_slot) : 0);
    for (int k = 0, key = 0; here.item < q.items; ++k) {
      const int buffer = k % S::kBuffers, use = k / S::kBuffers;
      const int h = here.hv / q.heads_per_key;
      const bool counts = gw == 0 && lane == 0 && here.hv == 0 && here.part() == 0;
      const bool writes_k = here.part() == 0 && here.hv == h * q.heads_per_key;
      const bool stages = !Tile::kShare || here.split == 0;  // rows are new
      const Prep<Tile> s(rows + (Tile::kShare ? key : k) % S::kBuffers * S::kRowBytes, rests + buffer * S::kRestBytes, p.T);
      // Item k - 2 is done with the buffer; so is, with shared rows, the last item of the key head before the last.
      if (use > 0) mbarrier_wait(empty + buffer, (use - 1) & 1);
      const int tid = gw * 32 + lane;
      int bad = in.parent < -1 || in.parent >= (tid < p.T ? tid : 0);
      if (tid < s.Tpad) s.parent[tid] = in.parent;
      if (stages) copy_wait<0>();
      if constexpr (Tile::kConv) {
        if (gw == 0 && stages) Input::place_old(p, q, here, checked_slot(p, in.raw_slot), lane, raw_rows);
      }
      bad = barrier_or(1, S::kProducers * 32, bad);
      const int slot = checked_slot(p, in.raw_slot);
      const bool skip = slot < 0 || bad;
      if (skip && counts && slot != -1) count_error(p.errors, slot < 0 ? kErrorStateIndex : kErrorParent);
      if (tid == 0) *s.skip = skip;
      const W now = here;
      here.next(q, false);
      if (!skip) {
        if (gw == S::kProducers - 1) prepare_gates<Tile>(p, now.n, now.hv, now.part() == 0, s, lane, in.gates);
        if (stages) stage_raw_rows<Tile, S::kProducers>(p, now.n, h, writes_k, s, raw_rows, gw, lane, act_bf16);
      }
      in.load(p, q, here, gw, lane);
      sync();
      if (!Tile::kShare || here.split == 0) {
        Input::prefetch(p, q, here, gw, lane, raw_rows, Tile::kConv ? checked_slot(p, in.raw_slot) : 0);
        ++key;
      }
      if (!skip) {
        prepare_coefficients<Tile>(s, p.T, gw, S::kProducers, lane);
        sync();
        prepare_inverse<Tile>(s, p.T, gw, S::kProducers, lane);
      }
      mbarrier_arrive(full + buffer);
    }
  }
}

template <class Tile>
int launch_verify_long(const VerifyParams& p, const DeviceFacts& device, cudaStream_t stream) {
  using S = LongStream<Tile>;
  static std::atomic<uint64_t> allowed{0};
  if (S::kBytes > device.shared_limit || (Tile::kRich && !device.moves_registers)) return cudaErrorNotSupported;
  StreamLaunch q{};
  int blocks = 0;
  if (!plan_stream(p, device.multiprocessors, 1, q, blocks)) return cudaErrorInvalidConfiguration;
  if (Tile::kShare) {
    // Whole key heads, where there are enough of them.
    q.items = p.N * p.H;
    if (q.splits != 1 || q.items < device.multiprocessors || q.heads_per_key == 1) return cudaErrorNotSupported;
    blocks = device.multiprocessors;
    q.step_head = blocks % p.H * q.heads_per_key;
    q.step_row = blocks / p.H;
  }
  plan_leap(S::kConsumers, blocks, q);
  cudaError_t e = allow_shared(verify_long_kernel<Tile>, S::kBytes, allowed);
  if (e != cudaSuccess) return e;
  verify_long_kernel<Tile><<<blocks, S::kThreads, S::kBytes, stream>>>(p, q);
  return cudaGetLastError();
}

template <bool HalfState, bool Conv>
int launch_verify_long_any(const VerifyParams& p, const DeviceFacts& device, cudaStream_t stream) {
  constexpr int kBase = kFixedLayout | kSkipEmptyTile | kFewRegisters;
  int r = cudaErrorNotSupported;
  // With a convolution eight producers have too few registers for shared rows to gain by them.
  if constexpr (!Conv) r = launch_verify_long<VerifyTile<128, 8, HalfState, Conv, kBase | kSharedRows | kEightProducers>>(p, device, stream);
  if (r == cudaErrorNotSupported) r = launch_verify_long<VerifyTile<128, 8, HalfState, Conv, kBase | kSharedRows>>(p, device, stream);
  if (r == cudaErrorNotSupported) r = launch_verify_long<VerifyTile<128, 8, HalfState, Conv, kBase | kEightProducers>>(p, device, stream);
  return r == cudaErrorNotSupported ? launch_verify_long<VerifyTile<128, 8, HalfState, Conv, kBase>>(p, device, stream) : r;
}

}  // namespace cuda
}  // namespace treewy
