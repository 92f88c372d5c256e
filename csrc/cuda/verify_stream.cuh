// verify, persistent: one block a multiprocessor walks over (request, value head) items. Consumer warps stream the state
// through private shared-memory stages and solve; producer warps prepare the next items meanwhile. Memory never waits for
// a solve, and the solve never waits for memory or for the chain norms -> Gram -> coefficients.
#pragma once

#include "verify_parts.cuh"

namespace treewy {
namespace cuda {

// Raw rows of an item in shared memory, 512 bytes each: k and q of the nodes and, with a convolution, what its taps need of the
// same channels: three older columns, the weights, the bias. Raw v columns of a consumer's 16 channels, 32 bytes a node.
template <class Tile>
struct RawRows {
  static constexpr int kOld = 8 * Tile::NT, kWeight = kOld + 3, kBias = kWeight + 4;
  static constexpr int kBytes = (Tile::kConv ? kBias + 1 : kOld) * 512, kValueBytes = Tile::kConv ? (kOld + 4) * 32 : 0;
};

template <class Tile>
struct Stream {
  static constexpr int NT = Tile::NT, kHeads = Tile::kHeads;
  static constexpr bool kMany = Tile::kMany;
  // Warps; a consumer takes 16 channels at a time. 16 warps leave 128 registers a thread, 12 warps 168. Heads that are prepared
  // together need half the producers, which leaves room for more consumers.
  static constexpr int kConsumers = kMany ? 12 : 8;
  static constexpr int kProducers = !kMany && NT <= 2 && !Tile::kConv ? 8 : 4;
  static constexpr int kThreads = (kConsumers + kProducers) * 32;
  // With a convolution twelve consumers need more than 128 registers each: the producers give them up.
  static constexpr int kConsumerRegisters = 136, kProducerRegisters = 104;
  static constexpr bool kNeedsRegisters = kMany && Tile::kConv;
  // Short drafts are prepared by two warps, two items at a time; longer ones by all producers together.
  static constexpr int kGroup = NT <= 2 ? 2 : kProducers;
  static constexpr int kGroups = kProducers / kGroup;
  // Prepared items, a multiple of kGroups: a buffer belongs to one group. As many as shared memory allows.
  static constexpr int kBuffers = NT == 1 ? 8 : NT == 2 ? 4 : 2;
  static constexpr int kStages = kMany ? 1 : 2;  // state tiles on their way a consumer
  static constexpr int kBarrierBytes = 128 + (kMany ? kConsumers * 64 : 0);  // 2 kBuffers mbarriers; units parked
  static constexpr int kStateBytes = kConsumers * kStages * StateFragments<Tile>::kBytes;
  static constexpr int kRawBytes = RawRows<Tile>::kBytes, kRawValueBytes = RawRows<Tile>::kValueBytes;  // of a group; of a consumer
  static constexpr int kPrepBytes = Prep<Tile>::bytes(8 * NT);
  static constexpr int kBytes = kBarrierBytes + kStateBytes + kBuffers * kPrepBytes + kGroups * kRawBytes + kConsumers * kRawValueBytes;
  // Compiled empty where shared memory or registers are missing; the launcher does not come here then.
  static constexpr bool kThere = kBytes <= kSharedLimit && (kMovesRegisters || !kNeedsRegisters);
  static_assert(NT <= 4 && kBuffers % kGroups == 0 && Tile::kFixed && Tile::kChunks == 1 && Tile::K == 128, "");
};

struct StreamLaunch {
  int items, splits, slabs;  // slabs of 16 channels a head and item; splits items a group of heads
  int heads_per_key;         // q.groups / H
  bool vector_old;           // the convolution state of eight channels is 48 bytes in a row
  int groups;                // HV over the heads of an item: the radix of a cursor's hv
  int leap_item, leap_split, leap_head, leap_row;  // the same for consumers / slabs items at once
  int step_split, step_head, step_row;  // gridDim.x in mixed radix (N, HV, splits): no divisions on the way
};

struct Cursor {
  int item, n, hv, split;  // hv: group of value heads
  // To shared memory and back: a solve needs the registers. 16 bytes of the warp's own.
  __device__ __forceinline__ void park(int4* at) const {
    __syncwarp();
    if ((threadIdx.x & 31) == 0) {
      int4 x;
      x.x = item, x.y = n, x.z = hv, x.w = split;
      *at = x;
    }
    __syncwarp();
  }
  __device__ __forceinline__ void unpark(const int4* at) {
    const int4 x = *at;
    item = x.x, n = x.y, hv = x.z, split = x.w;
  }
  // As many steps as the consumers take items at a time.
  __device__ __forceinline__ void leap(const StreamLaunch& q) {
    item += q.leap_item;
    split += q.leap_split;
    hv += q.leap_head;
    n += q.leap_row;
    if (split >= q.splits) split -= q.splits, ++hv;
    if (hv >= q.groups) hv -= q.groups, ++n;
  }
  Cursor() = default;
  __device__ __forceinline__ Cursor(const StreamLaunch& q, int first) {
    item = first;
    split = first % q.splits;
    hv = first / q.splits % q.groups;
    n = first / q.splits / q.groups;
  }
  __device__ __forceinline__ void advance(const StreamLaunch& q) {
    item += gridDim.x;
    split += q.step_split;
    hv += q.step_head;
    n += q.step_row;
    if (split >= q.splits) split -= q.splits, ++hv;
    if (hv >= q.groups) hv -= q.groups, ++n;
  }
};

// What a consumer warp takes at a time: 16 channels of an item. Units go round the consumers.
template <int kConsumers, int kHeads>
struct Unit {
  Cursor c;
  int k, slab;  // k: which of the block's items; slabs of the item's heads one after the other
  __device__ __forceinline__ Unit(const StreamLaunch& q, int warp) : c(q, blockIdx.x), k(0), slab(warp) { settle(q); }
  __device__ __forceinline__ void advance(const StreamLaunch& q) {
    slab += kConsumers;
    settle(q);
  }
  Unit() = default;
  // To shared memory and back, 32 bytes of the warp's own: a solve needs the registers.
  __device__ __forceinline__ void park(int4* at) const {
    c.park(at);
    if ((threadIdx.x & 31) == 0) {
      int2 x;
      x.x = k, x.y = slab;
      *reinterpret_cast<int2*>(at + 1) = x;
    }
    __syncwarp();
  }
  __device__ __forceinline__ void unpark(const int4* at) {
    c.unpark(at);
    const int2 x = *reinterpret_cast<const int2*>(at + 1);
    k = x.x, slab = x.y;
  }
  __device__ __forceinline__ int head(const StreamLaunch& q) const { return kHeads > 1 && slab >= q.slabs ? 1 : 0; }
  __device__ __forceinline__ int row0(const StreamLaunch& q) const { return (c.split * q.slabs + slab - head(q) * q.slabs) * 16; }
  __device__ __forceinline__ void settle(const StreamLaunch& q) {
    while (slab >= q.slabs * kHeads) {
      slab -= q.slabs * kHeads;
      ++k;
      c.advance(q);
    }
  }
};

// The slot as it stands in memory, not looked at, so that nobody waits for it; and what it means. -1: padding, -2: out of
// range.
struct RawSlot {
  int lo, hi;
};
__device__ __forceinline__ RawSlot raw_slot_of(const VerifyParams& p, const StreamLaunch& q, const Cursor& c) {
  RawSlot r{-1, -1};
  if (c.item < q.items) {
    if (p.state_indices.is_int64) {
      const int2 x = static_cast<const int2*>(p.state_indices.data)[c.n];
      r.lo = x.x, r.hi = x.y;
    } else {
      r.lo = static_cast<const int*>(p.state_indices.data)[c.n];
    }
  }
  return r;
}
__device__ __forceinline__ int checked_slot(const VerifyParams& p, const RawSlot& r) {
  const int hi = p.state_indices.is_int64 ? r.hi : r.lo >> 31;
  const int64_t slot = static_cast<int64_t>(hi) << 32 | static_cast<uint32_t>(r.lo);
  return slot >= p.slots || slot < -1 ? -2 : static_cast<int>(slot);
}

// Everything a producer warp reads from memory for one item, on its way while the item before is being prepared.
template <class Tile, int kGroup = Stream<Tile>::kGroup>
struct ProducerInput {
  using Raw = RawRows<Tile>;
  RawSlot raw_slot;
  int parent;
  GateInput<Tile> gates[Tile::kHeads];

  __device__ __forceinline__ void load(const VerifyParams& p, const StreamLaunch& q, const Cursor& c, int gw, int lane) {
    if (c.item >= q.items) return;
    raw_slot = raw_slot_of(p, q, c);
    const int t = gw * 32 + lane;
    parent = t < p.T ? (p.parents != nullptr ? p.parents[c.n * p.parents_stride_row + t] : t - 1) : -1;
    if (gw == kGroup - 1) {
#pragma unroll
      for (int r = 0; r < Tile::kHeads; ++r) gates[r].load(p, c.n, c.hv * Tile::kHeads + r, lane);
    }
  }
  // The raw rows travel to shared memory; the group must be done with the rows before them. Lanes 0-15: eight channels of
  // k each, lanes 16-31: of q.
  __device__ __forceinline__ static void prefetch(const VerifyParams& p, const StreamLaunch& q, const Cursor& c, int gw, int lane, uint4* rows, int slot) {
    if (c.item >= q.items) return;
    constexpr int K = Tile::K;
    const int h = c.hv * Tile::kHeads / q.heads_per_key, i = lane & 15;
    const bool is_k = lane < 16;
    const uint16_t* from;
    int64_t stride;
    if constexpr (Tile::kConv) {
      stride = p.mixed_qkv_stride_token;
      from = static_cast<const uint16_t*>(p.mixed_qkv) + (is_k ? p.H * K : 0) + h * K;
    } else {
      stride = is_k ? p.k_stride_token : p.q_stride_token;
      from = is_k ? static_cast<const uint16_t*>(p.k) + h * p.k_stride_head : static_cast<const uint16_t*>(p.q) + h * p.q_stride_head;
    }
    from += (static_cast<int64_t>(c.n) * p.T + gw) * stride + i * 8;
    uint32_t to = shared_address(rows) + gw * 512;
    for (int t = gw; t < p.T; t += kGroup, from += kGroup * stride, to += kGroup * 512)
      copy_async<16>(to, from);
    if constexpr (Tile::kConv) {
      if (gw == 0) {
        const int channel = (is_k ? p.H * K : 0) + h * K + i * 8;
        auto row = [&](int at) { return shared_address(rows) + at * 512; };
        if (q.vector_old && slot >= 0) {
          const uint16_t* at = static_cast<const uint16_t*>(p.conv_state) + slot * p.conv_state_stride_slot + channel * 3;
#pragma unroll
          for (int j = 0; j < 3; ++j) copy_async<16>(row(Raw::kOld + j), at + j * 8);
        }
        const uint16_t* w = static_cast<const uint16_t*>(p.conv_weight) + channel * 4;
#pragma unroll
        for (int j = 0; j < 4; ++j) copy_async<16>(row(Raw::kWeight + j), w + j * 8);
        if (p.conv_bias != nullptr) copy_async<16>(row(Raw::kBias), static_cast<const uint16_t*>(p.conv_bias) + channel);
      }
    }
    copy_commit();
  }
  // The older columns of this lane's eight channels, the newest first, to where the taps look for them. Raw rows must be there.
  __device__ __forceinline__ static void place_old(const VerifyParams& p, const StreamLaunch& q, const Cursor& c, int slot, int lane, uint4* rows) {
    uint4* behind = rows + Raw::kOld * 32;
    const int h = c.hv * Tile::kHeads / q.heads_per_key;
    if (slot < 0) return;
    uint32_t column[3][4];
    if (q.vector_old) {
      // Halves 3 e + w: channel e, column w.
      uint32_t x[12];
#pragma unroll
      for (int j = 0; j < 3; ++j) {
        const uint4 y = behind[j * 32];
        x[4 * j] = y.x, x[4 * j + 1] = y.y, x[4 * j + 2] = y.z, x[4 * j + 3] = y.w;
      }
#pragma unroll
      for (int w = 0; w < 3; ++w)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int a = 6 * e + w, b = a + 3;
          const uint32_t lo = (a & 1) ? x[a / 2] >> 16 : x[a / 2] & 0xffffu, hi = (b & 1) ? x[b / 2] & 0xffff0000u : x[b / 2] << 16;
          column[2 - w][e] = lo | hi;
        }
    } else {
      const int channel = (lane < 16 ? p.H * Tile::K : 0) + h * Tile::K + (lane & 15) * 8;
      const uint16_t* at = static_cast<const uint16_t*>(p.conv_state) + slot * p.conv_state_stride_slot + channel * p.conv_state_stride_channel;
#pragma unroll
      for (int j = 0; j < 3; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const uint16_t* x = at + 2 * e * p.conv_state_stride_channel + (2 - j) * p.conv_state_stride_column;
          column[j][e] = x[0] | static_cast<uint32_t>(x[p.conv_state_stride_channel]) << 16;
        }
    }
#pragma unroll
    for (int j = 0; j < 3; ++j) behind[j * 32] = make_uint4(column[j][0], column[j][1], column[j][2], column[j][3]);
  }
};

// The raw rows of key head h, convolved where there is a convolution, to where the products read them, by kGroup warps. Parents
// and older columns must be there.
template <class Tile, int kGroup>
__device__ __forceinline__ void stage_raw_rows(const VerifyParams& p, int n, int h, bool writes_k, const Prep<Tile>& s, const uint4* raw_rows,
                                               int gw, int lane, bool act_bf16) {
  using Raw = RawRows<Tile>;
  constexpr int K = Tile::K;
  const int kind = lane >> 4, i = lane & 15;
  uint4 weight[Tile::kConv ? 4 : 1], bias = make_uint4(0u, 0u, 0u, 0u);
  if constexpr (Tile::kConv) {
#pragma unroll
    for (int j = 0; j < 4; ++j) weight[j] = raw_rows[(Raw::kWeight + j) * 32];
    if (p.conv_bias != nullptr) bias = raw_rows[Raw::kBias * 32];
  }
#pragma unroll 1
  for (int t = gw; t < s.Tpad; t += kGroup) {
    if (t >= p.T) {
      stage_zero_row<Tile>(s, kind, t, i);
      continue;
    }
    uint4 raw = raw_rows[t * 32];
    if constexpr (Tile::kConv) {
      if (writes_k)
        *reinterpret_cast<uint4*>(static_cast<uint16_t*>(p.stash.conv) + n * p.stash.conv_stride_row + t * p.stash.conv_stride_node +
                                  (kind == 0 ? p.H * K : 0) + h * K + i * 8) = raw;
      uint4 taps[4];
      taps[0] = raw;
      int node = t;
#pragma unroll
      for (int j = 1; j < 4; ++j) {
        node = node >= 0 ? s.parent[node] : node - 1;
        taps[j] = raw_rows[(node >= 0 ? node : Raw::kOld - 1 - node) * 32];
      }
      raw = convolve8(taps, weight, bias, act_bf16);
    }
    stage_row<Tile>(p, n, h, writes_k, s, kind, t, i, raw, act_bf16);
  }
}

template <class Tile>
__global__ void __launch_bounds__(Stream<Tile>::kThreads, 1)
    verify_stream_kernel(const __grid_constant__ VerifyParams p, const __grid_constant__ StreamLaunch q) {
  using S = Stream<Tile>;
  constexpr int K = Tile::K;
  if constexpr (!S::kThere) return;
  extern __shared__ __align__(16) unsigned char shared[];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  unsigned char* preps = shared + S::kBarrierBytes + S::kStateBytes;
  unsigned char* raws = preps + S::kBuffers * S::kPrepBytes;
  uint64_t* full = reinterpret_cast<uint64_t*>(shared);
  uint64_t* empty = full + S::kBuffers;
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::kBuffers; ++i) {
      mbarrier_init(full + i, S::kGroup * 32);
      mbarrier_init(empty + i, q.slabs * S::kHeads * 32);
    }
  }
  __syncthreads();
  const bool act_bf16 = p.act_dtype == DType::kBFloat16;

  if (warp < S::kConsumers) {
    if constexpr (S::kMany) take_registers<S::kConsumerRegisters>();
    unsigned char* stages = shared + S::kBarrierBytes + warp * S::kStages * StateFragments<Tile>::kBytes;
    using U = Unit<S::kConsumers, S::kHeads>;
    auto head_of = [&](const U& u) { return u.c.hv * S::kHeads + u.head(q); };
    auto prefetch = [&](const U& u, int slot, int stage) {
      if (slot >= 0)
        StateFragments<Tile>::prefetch(stages + stage * StateFragments<Tile>::kBytes, p.state,
                                       slot * p.state_stride_slot + head_of(u) * p.state_stride_head + u.row0(q) * K, lane);
      copy_commit();
    };
    int4* parked = reinterpret_cast<int4*>(shared + 128) + (S::kMany ? warp * 4 : 0);
    U here(q, warp), ahead = here;  // ahead: the next unit whose state is to be asked for
    int slots[S::kStages];                // of this unit and of those on their way
#pragma unroll
    for (int i = 0; i < S::kStages; ++i) {
      slots[i] = checked_slot(p, raw_slot_of(p, q, ahead.c));
      prefetch(ahead, slots[i], i);
      ahead.advance(q);
    }
    RawSlot raw_slot = raw_slot_of(p, q, ahead.c);
    // v of the first block of nodes, one unit ahead of its use, where registers allow (with two stages `ahead` is too far for that).
    constexpr bool kEarlyV = !Tile::kConv && S::kStages == 1 && Tile::NT == 1;
    uint32_t v_next[2 * Tile::kBlockTiles] = {};
    auto load_v = [&](const U& u) {
      if (u.c.item < q.items) load_values<Tile>(p, u.c.n, head_of(u), u.row0(q), lane, 0, v_next);
    };
    if constexpr (kEarlyV) load_v(here);
    if constexpr (S::kMany) ahead.park(parked + 2);

    for (int turn = 0; here.c.item < q.items; ++turn) {
      const int buffer = here.k % S::kBuffers, use = here.k / S::kBuffers, stage = turn % S::kStages;
      if constexpr (S::kMany) here.park(parked);
      const int row0 = here.row0(q), hv = head_of(here);
      const int slot = slots[0], next_slot = checked_slot(p, raw_slot);  // here, where no other load is on its way
      const Prep<Tile> s(preps + buffer * S::kPrepBytes, p.T, here.head(q));
      if constexpr (!Tile::kConv && !kEarlyV) load_v(here);
      uint32_t v[2 * Tile::kBlockTiles];
#pragma unroll
      for (int c = 0; c < 2 * Tile::kBlockTiles; ++c) v[c] = v_next[c];
      auto ready = [&] {
        // The stage has been read into registers: refill it before waiting for the preparation.
#pragma unroll
        for (int i = 0; i + 1 < S::kStages; ++i) slots[i] = slots[i + 1];
        slots[S::kStages - 1] = next_slot;
        if constexpr (S::kMany) ahead.unpark(parked + 2);
        prefetch(ahead, next_slot, stage);
        if constexpr (kEarlyV) load_v(ahead);
        ahead.advance(q);
        raw_slot = raw_slot_of(p, q, ahead.c);
        if constexpr (S::kMany) ahead.park(parked + 2);
        mbarrier_wait(full + buffer, use & 1);
        return *s.skip == 0;
      };
      copy_wait<S::kStages - 1>();
      bool sound = false;
      if (slot >= 0) {
        StateFragments<Tile> state;
        state.fetch(stages + stage * StateFragments<Tile>::kBytes, lane);
        sound = solve_rows<Tile, true>(p, here.c.n, hv, slot, row0, lane, s, state, 0, v, ready,
                                       raws + S::kGroups * S::kRawBytes + warp * S::kRawValueBytes);
      } else {
        ready();
      }
      if constexpr (S::kMany) here.unpark(parked);
      // The next unit overwrites the raw v columns that this one's lanes have read; where units park, that is a barrier.
      if constexpr (Tile::kConv && !S::kMany) __syncwarp();
      if (!sound) write_zeros(p, here.c.n, head_of(here), here.row0(q), 16, lane, 32);
      mbarrier_arrive(empty + here.k % S::kBuffers);
      here.advance(q);
    }
  } else {
    if constexpr (S::kMany) give_registers<S::kProducerRegisters>();
    const int group = (warp - S::kConsumers) / S::kGroup, gw = (warp - S::kConsumers) % S::kGroup;
    const int group_barrier = 1 + group;
    auto sync = [&] { barrier_sync(group_barrier, S::kGroup * 32); };
    uint4* raw_rows = reinterpret_cast<uint4*>(raws + group * S::kRawBytes) + lane;  // rows of 32 words
    Cursor here(q, blockIdx.x);
    for (int i = 0; i < group; ++i) here.advance(q);
    ProducerInput<Tile> in;
    in.load(p, q, here, gw, lane);
    ProducerInput<Tile>::prefetch(p, q, here, gw, lane, raw_rows, Tile::kConv ? checked_slot(p, in.raw_slot) : 0);
    for (int k = group; here.item < q.items; k += S::kGroups) {
      const int buffer = k % S::kBuffers, use = k / S::kBuffers;
      const int h = here.hv * S::kHeads / q.heads_per_key;
      const bool counts = gw == 0 && lane == 0 && here.hv == 0 && here.split == 0;
      const bool writes_k = here.split == 0 && here.hv * S::kHeads == h * q.heads_per_key;
      const Prep<Tile> s(preps + buffer * S::kPrepBytes, p.T);
      if (use > 0) mbarrier_wait(empty + buffer, (use - 1) & 1);
      const int tid = gw * 32 + lane;
      int bad = in.parent < -1 || in.parent >= (tid < p.T ? tid : 0);
      if (tid < s.Tpad) s.parent[tid] = in.parent;
      copy_wait<0>();
      if constexpr (Tile::kConv) {
        if (gw == 0) ProducerInput<Tile>::place_old(p, q, here, checked_slot(p, in.raw_slot), lane, raw_rows);
      }
      bad = barrier_or(group_barrier, S::kGroup * 32, bad);
      const int slot = checked_slot(p, in.raw_slot);
      const bool skip = slot < 0 || bad;
      if (skip && counts && slot != -1) count_error(p.errors, slot < 0 ? kErrorStateIndex : kErrorParent);
      if (tid == 0) *s.skip = skip;
      const Cursor now = here;
#pragma unroll
      for (int i = 0; i < S::kGroups; ++i) here.advance(q);
      if (!skip) {
        if (gw == S::kGroup - 1) prepare_gates<Tile>(p, now.n, now.hv * S::kHeads, now.split == 0, s, lane, in.gates);
        stage_raw_rows<Tile, S::kGroup>(p, now.n, h, writes_k, s, raw_rows, gw, lane, act_bf16);
      }
      in.load(p, q, here, gw, lane);
      sync();
      ProducerInput<Tile>::prefetch(p, q, here, gw, lane, raw_rows, Tile::kConv ? checked_slot(p, in.raw_slot) : 0);
      if (!skip) {
        prepare_coefficients<Tile>(s, p.T, gw, S::kGroup, lane);
        if constexpr (Tile::kBlockTiles == 2) {
          sync();
          prepare_inverse<Tile>(s, p.T, gw, S::kGroup, lane);
        }
      }
      mbarrier_arrive(full + buffer);
    }
  }
}

// Items and grid; false: too many items.
inline bool plan_stream(const VerifyParams& p, int multiprocessors, int heads_per_item, StreamLaunch& q, int& blocks) {
  // A small batch is cut across value channels until every multiprocessor has an item.
  constexpr int kSlabs = 128 / 16;
  q.slabs = kSlabs;
  q.groups = p.HV / heads_per_item;
  const int64_t groups = static_cast<int64_t>(p.N) * q.groups;
  while (heads_per_item == 1 && q.slabs > 2 && groups * kSlabs / q.slabs * 2 <= multiprocessors) q.slabs /= 2;
  q.splits = kSlabs / q.slabs;
  if (groups * q.splits > 0x3fffffff) return false;
  q.items = static_cast<int>(groups * q.splits);
  blocks = q.items < multiprocessors ? q.items : multiprocessors;
  q.heads_per_key = p.HV / p.H;
  q.vector_old = p.conv_state_stride_channel == 3 && p.conv_state_stride_column == 1 && p.conv_state_stride_slot % 8 == 0 &&
                 reinterpret_cast<uintptr_t>(p.conv_state) % 16 == 0;
  q.step_split = blocks % q.splits;
  q.step_head = blocks / q.splits % q.groups;
  q.step_row = blocks / q.splits / q.groups;
  return true;
}

// Two value heads of a key head are prepared together where that leaves no multiprocessor with more heads than the others
// need anyway, give or take one in eight.
inline bool pairs_pay(const VerifyParams& p, int multiprocessors) {
  if (p.HV / p.H % 2 != 0) return false;
  const int64_t heads = static_cast<int64_t>(p.N) * p.HV;
  const int64_t alone = (heads + multiprocessors - 1) / multiprocessors, paired = (heads / 2 + multiprocessors - 1) / multiprocessors * 2;
  return 8 * paired <= 9 * alone;
}

// For consumers that keep their slab of 16 channels and leap over the items in between.
inline void plan_leap(int consumers, int blocks, StreamLaunch& q) {
  const int turns = consumers / q.slabs;
  q.leap_item = turns * blocks;
  q.leap_split = q.leap_item % q.splits;
  q.leap_head = q.leap_item / q.splits % q.groups;
  q.leap_row = q.leap_item / q.splits / q.groups;
}

template <class Tile>
int launch_verify_stream(const VerifyParams& p, const DeviceFacts& device, cudaStream_t stream) {
  using S = Stream<Tile>;
  static std::atomic<uint64_t> allowed{0};
  if (S::kBytes > device.shared_limit || (S::kNeedsRegisters && !device.moves_registers)) return cudaErrorNotSupported;
  cudaError_t e = allow_shared(verify_stream_kernel<Tile>, S::kBytes, allowed);
  if (e != cudaSuccess) return e;
  StreamLaunch q{};
  int blocks = 0;
  if (!plan_stream(p, device.multiprocessors, Tile::kHeads, q, blocks)) return cudaErrorInvalidConfiguration;
  verify_stream_kernel<Tile><<<blocks, S::kThreads, S::kBytes, stream>>>(p, q);
  return cudaGetLastError();
}

template <int NT, bool HalfState, bool Conv>
int launch_verify_stream_nodes(const VerifyParams& p, const DeviceFacts& device, cudaStream_t stream) {
  constexpr int kBase = kFixedLayout | (NT == 4 ? kSkipEmptyTile : 0);
  int r = cudaErrorNotSupported;
  if (pairs_pay(p, device.multiprocessors)) {
    if constexpr (NT == 1 || (NT == 2 && !Conv))
      r = launch_verify_stream<VerifyTile<128, NT, HalfState, Conv, kBase | kPairs | kTwelveConsumers>>(p, device, stream);
    if constexpr (NT == 4 || Conv) {
      if (r == cudaErrorNotSupported) r = launch_verify_stream<VerifyTile<128, NT, HalfState, Conv, kBase | kPairs>>(p, device, stream);
    }
  }
  return r == cudaErrorNotSupported ? launch_verify_stream<VerifyTile<128, NT, HalfState, Conv, kBase>>(p, device, stream) : r;
}

template <bool HalfState, bool Conv>
int launch_verify_stream_any(const VerifyParams& p, const DeviceFacts& device, cudaStream_t stream) {
  if (p.T <= 8) return launch_verify_stream_nodes<1, HalfState, Conv>(p, device, stream);
  if (p.T <= 16) return launch_verify_stream_nodes<2, HalfState, Conv>(p, device, stream);
  return launch_verify_stream_nodes<4, HalfState, Conv>(p, device, stream);
}

}  // namespace cuda
}  // namespace treewy
