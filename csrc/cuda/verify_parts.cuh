// What the tensor-core verify kernels are made of: the state as mma fragments, the preparation that is common to a head
// (normalised rows, decays, ancestor sets, coefficients), and the solve of 16 value channels by one warp.
//
// float32 accuracy comes from splitting a float32 operand x into two float16 parts, hi = f16(x), lo = f16(x - hi), which
// together carry 22 to 24 bits; a power of two per row keeps both parts in range. k and q are born with at most 11
// significant bits and need one part only. Derivation, roofline and figures: docs/kernels.md.
#pragma once

#include "common.cuh"
#include "ptx.cuh"
#include "verify_common.cuh"

namespace treewy {
namespace cuda {

// How a kernel arranges its work; which draft length gets what was measured (docs/kernels.md).
enum Options {
  kFixedLayout = 1,      // Prep has room for 8 NT nodes whatever the draft: every address is the base and a constant
  kSkipEmptyTile = 2,    // the second tile of the last block of nodes is skipped where it is empty
  kPairs = 4,            // two value heads of a key head are prepared together
  kSharedRows = 8,       // rows are staged once for all value heads of a key head, which are prepared one after the other
  kFewRegisters = 16,    // rows of k and q are read twice rather than held
  kTwelveConsumers = 32, // and four producers, where registers can move from these to those; else eight
  kEightProducers = 64,  // and eight consumers, likewise; else four
};

// Tile sizes, all in one place. NT: n-tiles of 8 nodes that the kernel is built for.
template <int K_, int NT_, bool HalfState_, bool Conv_, int Options_ = 0>
struct VerifyTile {
  static constexpr bool kFixed = Options_ & kFixedLayout, kTiles = Options_ & kSkipEmptyTile, kShare = Options_ & kSharedRows,
                        kLean = Options_ & kFewRegisters, kMany = Options_ & kTwelveConsumers, kRich = Options_ & kEightProducers;
  static constexpr int kHeads = Options_ & kPairs ? 2 : 1;  // value heads that are prepared together
  static constexpr int K = K_, NT = NT_;
  static constexpr bool kHalfState = HalfState_, kConv = Conv_;
  static constexpr int kChunk = K < 128 ? K : 128;        // state columns held in registers: 64 words a lane at 128
  static constexpr int kChunks = K / kChunk;
  static constexpr int kSteps = kChunk / 16;              // mma k-steps a chunk
  static constexpr int kBlockTiles = NT == 1 ? 1 : 2;     // n-tiles of a node block
  static constexpr int kBlockNodes = 8 * kBlockTiles;
  static constexpr int kBlocks = NT / kBlockTiles;
  static constexpr int kWords = NT <= 4 ? 1 : NT / 4;     // words of an ancestor set
  static constexpr int kDiagFloats = kBlockNodes * 4 * 4 * kBlockTiles;
};

// Tensor cores truncate their sums to float32, which loses half a unit in the last place on average and always towards
// zero. What is lost on average is given back: relative to the result, for one product and for a chain of two.
constexpr float kLossOne = 0.7f / 16777216.f, kLossChain = 1.2f / 16777216.f;

constexpr float kCoefficientScale = 16384.f;  // coefficients are at most 1: this keeps their low parts normal float16

__device__ __forceinline__ uint32_t f16x2(float lo, float hi) {
  __half2 h = __floats2half2_rn(lo, hi);
  return *reinterpret_cast<uint32_t*>(&h);
}
// x, y -> packed high parts and packed low parts.
__device__ __forceinline__ void split(float x, float y, uint32_t& hi, uint32_t& lo) {
  hi = f16x2(x, y);
  float2 h = __half22float2(*reinterpret_cast<__half2*>(&hi));
  lo = f16x2(x - h.x, y - h.y);
}
// c[m] = (hi + lo)(w[m] hi + w[m] lo) without the product of the low parts; w holds hi, hi, lo, lo. The chains take turns.
template <int kCount>
__device__ __forceinline__ void multiply_split(float (&c)[kCount][4], const uint32_t (&hi)[4], const uint32_t (&lo)[4], const uint4 (&w)[kCount]) {
#pragma unroll
  for (int m = 0; m < kCount; ++m) mma_first(c[m], lo, w[m].x, w[m].y);
#pragma unroll
  for (int m = 0; m < kCount; ++m) mma(c[m], hi, w[m].z, w[m].w);
#pragma unroll
  for (int m = 0; m < kCount; ++m) mma(c[m], hi, w[m].x, w[m].y);
}
// Power of two that brings m into [2^14, 2^15), and its inverse; exact, clamped away from subnormals.
__device__ __forceinline__ void pow2_scale(float m, float& scale, float& inverse) {
  int e = max(static_cast<int>(__float_as_uint(m) >> 23), 27);
  scale = __uint_as_float(static_cast<uint32_t>(268 - e) << 23);
  inverse = __uint_as_float(static_cast<uint32_t>(e - 14) << 23);
}

// State rows of a warp as mma A fragments. Lane (g, q4) holds rows 2g and 2g+1 (fragment rows g and g+8) and, of each
// 16-column step, the columns 4*q4..4*q4+3, so that one 16-byte load gives a lane its share and a quad reads 64
// contiguous bytes. The order of columns inside a step is free as long as B agrees.
template <class Tile>
struct StateFragments {
  static constexpr int kSteps = Tile::kSteps;
  float raw[Tile::kHalfState ? 1 : 2][Tile::kHalfState ? 1 : kSteps][4];
  uint2 raw_half[Tile::kHalfState ? 2 : 1][Tile::kHalfState ? kSteps : 1];
  uint32_t hi[kSteps][4];
  uint32_t lo[Tile::kHalfState ? 1 : kSteps][4];
  float inverse[2];

  __device__ __forceinline__ void load(const void* state, int64_t row_offset, int lane, int chunk) {
    const int64_t at = row_offset + (lane >> 2) * 2 * Tile::K + chunk * Tile::kChunk + (lane & 3) * 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        if constexpr (Tile::kHalfState) {
          raw_half[r][s] = load_stream_u2(static_cast<const uint16_t*>(state) + at + r * Tile::K + s * 16);
        } else {
          float4 x = load_stream_f4(static_cast<const float*>(state) + at + r * Tile::K + s * 16);
          raw[r][s][0] = x.x, raw[r][s][1] = x.y, raw[r][s][2] = x.z, raw[r][s][3] = x.w;
        }
      }
    }
  }

  // The lane's own share again, from where prefetch() put it.
  __device__ __forceinline__ void fetch(const unsigned char* buffer, int lane) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        if constexpr (Tile::kHalfState) {
          raw_half[r][s] = *reinterpret_cast<const uint2*>(buffer + (r * kSteps + s) * 256 + lane * 8);
        } else {
          const float4 x = *reinterpret_cast<const float4*>(buffer + (r * kSteps + s) * 512 + lane * 16);
          raw[r][s][0] = x.x, raw[r][s][1] = x.y, raw[r][s][2] = x.z, raw[r][s][3] = x.w;
        }
      }
    }
  }
  static constexpr int kBytes = 2 * kSteps * (Tile::kHalfState ? 256 : 512);  // a warp's rows in shared memory
  // Asynchronous copies into memory that only this lane reads: no barrier is ever needed for the state.
  __device__ __forceinline__ static void prefetch(unsigned char* buffer, const void* state, int64_t row_offset, int lane) {
    const int64_t at = row_offset + (lane >> 2) * 2 * Tile::K + (lane & 3) * 4;
    const uint32_t to = shared_address(buffer) + lane * (Tile::kHalfState ? 8 : 16);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        if constexpr (Tile::kHalfState) {
          copy_async<8>(to + (r * kSteps + s) * 256, static_cast<const uint16_t*>(state) + at + r * Tile::K + s * 16);
        } else {
          copy_async<16>(to + (r * kSteps + s) * 512, static_cast<const float*>(state) + at + r * Tile::K + s * 16);
        }
      }
    }
  }

  __device__ __forceinline__ void convert(bool is_bf16) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float part[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        float& m = part[s & 3];
        if constexpr (Tile::kHalfState) {
          float2 a = unpack_half2(raw_half[r][s].x, is_bf16), b = unpack_half2(raw_half[r][s].y, is_bf16);
          m = fmaxf(fmaxf(m, fmaxf(fabsf(a.x), fabsf(a.y))), fmaxf(fabsf(b.x), fabsf(b.y)));
        } else {
#pragma unroll
          for (int e = 0; e < 4; ++e) m = fmaxf(m, fabsf(raw[r][s][e]));
        }
      }
      float m = fmaxf(fmaxf(part[0], part[1]), fmaxf(part[2], part[3]));
      m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
      m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
      float scale;
      pow2_scale(m, scale, inverse[r]);
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        if constexpr (Tile::kHalfState) {
          float2 a = unpack_half2(raw_half[r][s].x, is_bf16), b = unpack_half2(raw_half[r][s].y, is_bf16);
          hi[s][r] = f16x2(a.x * scale, a.y * scale);
          hi[s][2 + r] = f16x2(b.x * scale, b.y * scale);
        } else {
          split(raw[r][s][0] * scale, raw[r][s][1] * scale, hi[s][r], lo[s][r]);
          split(raw[r][s][2] * scale, raw[r][s][3] * scale, hi[s][2 + r], lo[s][2 + r]);
        }
      }
    }
  }

  template <int kChains>
  __device__ __forceinline__ void finish(float (&c)[4], const float (&part)[kChains][4]) const {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float sum = kChains == 2 ? part[0][e] + part[1][e] : (part[0][e] + part[1][e]) + (part[kChains - 2][e] + part[kChains - 1][e]);
      const float restored = fmaf(sum, kLossChain, sum);
      c[e] = Tile::kChunks == 1 ? restored * inverse[e >> 1] : fmaf(restored, inverse[e >> 1], c[e]);
    }
  }

  // c += (16 rows of the state chunk) x (8 rows of k, and of q); bk and bq point to the row of this lane's node. A product waits
  // for the one before it in its chain: four chains take turns. Low parts first: short chains lose less to the tensor cores'
  // truncating adds.
  __device__ __forceinline__ void multiply_pair(float (&ck)[4], float (&cq)[4], const uint4* bk, const uint4* bq, int lane, int chunk) const {
    constexpr int kPairs = kSteps / 2, kFirst = Tile::kHalfState ? 1 : 0;
    static_assert(kPairs % 2 == 0, "");
    float part[2][2][4];  // [k, q][chain]
    const int odd = (lane >> 2) & 1;
#pragma unroll
    for (int pass = kFirst; pass < 2; ++pass) {
      if constexpr (Tile::kLean) __syncwarp();  // no registers for whole rows: they are read once for the low parts, once for the high ones
#pragma unroll
      for (int s = 0; s < kPairs; s += 2) {
        uint4 w[2][2];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int o = ((chunk * kPairs + s + c) ^ odd) * 4 + (lane & 3);
          w[0][c] = bk[o], w[1][c] = bq[o];
        }
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const int step = 2 * (s + c) + half;
            const uint32_t (&a)[4] = pass == 0 ? lo[Tile::kHalfState ? 0 : step] : hi[step];
#pragma unroll
            for (int kind = 0; kind < 2; ++kind) {
              const uint4& x = w[kind][c];
              if (pass == kFirst && s == 0 && half == 0) {
                mma_first(part[kind][c], a, x.x, x.y);
              } else {
                mma(part[kind][c], a, half ? x.z : x.x, half ? x.w : x.y);
              }
            }
          }
      }
    }
    finish(ck, part[0]);
    finish(cq, part[1]);
  }

  // c += (16 rows of the state chunk) x (8 rows of k or q), for short drafts, which have the registers for a chain a pair of steps.
  __device__ __forceinline__ void multiply(float (&c)[4], const uint4* b, int lane, int chunk) const {
    constexpr int kPairs = kSteps / 2;
    float part[kPairs][4];
    const int odd = (lane >> 2) & 1;
    uint4 w[kPairs];
#pragma unroll
    for (int s = 0; s < kPairs; ++s) w[s] = b[((chunk * kPairs + s) ^ odd) * 4 + (lane & 3)];
#pragma unroll
    for (int pass = Tile::kHalfState ? 1 : 0; pass < 2; ++pass) {
#pragma unroll
      for (int s = 0; s < 2 * kPairs; ++s) {
        const int step = 2 * (s % kPairs) + s / kPairs;  // chains take turns
        float (&to)[4] = part[s % kPairs];
        const uint32_t b0 = s / kPairs ? w[s % kPairs].z : w[s % kPairs].x, b1 = s / kPairs ? w[s % kPairs].w : w[s % kPairs].y;
        if (pass == 0) {
          if (s < kPairs) {
            mma_first(to, lo[Tile::kHalfState ? 0 : step], b0, b1);
          } else {
            mma(to, lo[Tile::kHalfState ? 0 : step], b0, b1);
          }
        } else if (Tile::kHalfState && s < kPairs) {
          mma_first(to, hi[step], b0, b1);
        } else {
          mma(to, hi[step], b0, b1);
        }
      }
    }
    finish(c, part);
  }
};

// ---------------------------------------------------------------------------------------------------------------------
// Preparation of one (request, value head) in shared memory.
template <class Tile>
struct Prep {
  int Tpad;
  uint4* kq;          // [2][Tpad][K] float16: scaled k and q rows, columns in fragment order
  float* diag;        // coefficients inside a block. One tile: [j][quad][k, q][2] float32. Two tiles: the inverse of the
                      // unit-lower block (first its float32 entries [t][j]), then the q coefficients, both as in hist
  uint4* hist;        // [pairs][k, q][16 nodes][quad] hi, hi, lo, lo: coefficients against earlier blocks
  float2* gate;       // [Tpad] beta, e^G
  float2* G;          // [Tpad] G in two floats
  float* rk;          // [Tpad] inverse norm of the scaled k row
  float* rq;          // [Tpad] the same of q
  int* parent;        // [Tpad]
  uint32_t* bits;     // [Tpad][kWords] ancestor set, own bit included
  int* jump;          // [Tpad] scratch
  int* skip;          // nonzero: the row is skipped

  // Nodes that the layout has room for. Fixed: every address is the base and a constant.
  static constexpr bool kFixed = Tile::kFixed;
  __host__ __device__ static constexpr int span_of(int T) { return kFixed ? 8 * Tile::NT : nodes(T); }
  __device__ __forceinline__ int span() const { return kFixed ? 8 * Tile::NT : Tpad; }
  __host__ __device__ static constexpr int nodes(int T) { return (T + Tile::kBlockNodes - 1) / Tile::kBlockNodes * Tile::kBlockNodes; }
  // Rows and their norms; what belongs to one value head (diag to G); all of those and what the heads share (parent to skip).
  __host__ __device__ static constexpr int row_bytes(int T) { return 2 * span_of(T) * (Tile::K * 2 + 4); }
  __host__ __device__ static constexpr int head_bytes(int T) {
    const int span = span_of(T), blocks = span / Tile::kBlockNodes;
    return blocks * Tile::kDiagFloats * 4 + blocks * (blocks - 1) / 2 * 2048 + span * 16;
  }
  __host__ __device__ static constexpr int rest_bytes(int T) { return Tile::kHeads * head_bytes(T) + span_of(T) * 4 * (2 + Tile::kWords) + 16; }
  __host__ __device__ static constexpr int bytes(int T) { return row_bytes(T) + rest_bytes(T); }
  __device__ __forceinline__ Prep(unsigned char* base, int T, int head = 0) : Prep(base, base + row_bytes(T), T, head) {}
  __device__ __forceinline__ Prep(unsigned char* rows, unsigned char* rest, int T, int head = 0) {
    // No instance for 8 or 16 nodes has more than one padded length.
    Tpad = kFixed && Tile::NT <= 2 ? 8 * Tile::NT : nodes(T);
    const int span = span_of(T), blocks = span / Tile::kBlockNodes;
    kq = reinterpret_cast<uint4*>(rows);
    rk = reinterpret_cast<float*>(rows + 2 * span * Tile::K * 2);
    rq = rk + span;
    diag = reinterpret_cast<float*>(rest + (Tile::kHeads > 1 ? head * head_bytes(T) : 0));
    hist = reinterpret_cast<uint4*>(diag + blocks * Tile::kDiagFloats);
    gate = reinterpret_cast<float2*>(hist + blocks * (blocks - 1) / 2 * 128);
    G = gate + span;
    parent = reinterpret_cast<int*>(rest + Tile::kHeads * head_bytes(T));
    bits = reinterpret_cast<uint32_t*>(parent + span);
    jump = reinterpret_cast<int*>(bits + span * Tile::kWords);
    skip = jump + span;
  }
  // The same preparation as another of its value heads sees it.
  __device__ __forceinline__ Prep of_head(int head, int T) const {
    Prep s = *this;
    if constexpr (Tile::kHeads > 1) {
      const int o = head * head_bytes(T);
      s.diag += o / 4, s.hist += o / 16, s.gate += o / 8, s.G += o / 8;
    }
    return s;
  }
};

// Parents of the row into shared memory; nonzero if one is unsound.
template <class Tile>
__device__ __forceinline__ int load_parents(const VerifyParams& p, int n, const Prep<Tile>& s, int tid, int threads) {
  int bad = 0;
  for (int t = tid; t < s.Tpad; t += threads) {
    const int q = t < p.T ? (p.parents != nullptr ? p.parents[n * p.parents_stride_row + t] : t - 1) : -1;
    bad |= q < -1 || q >= t;
    s.parent[t] = q;
  }
  return bad;
}

// A float as it stands in memory: loads that are to be in flight together must not be looked at, and converting is looking.
__device__ __forceinline__ uint32_t load_raw(const void* base, int64_t i, DType dtype) {
  return dtype == DType::kFloat32 ? static_cast<const uint32_t*>(base)[i] : static_cast<const uint16_t*>(base)[i];
}
__device__ __forceinline__ float raw_float(uint32_t raw, DType dtype) {
  return dtype == DType::kFloat32 ? __uint_as_float(raw) : unpack_half2(raw, dtype == DType::kBFloat16).x;
}

// What the gates of a row read from memory; lane t (and t + 32, ..) has node t.
template <class Tile>
struct GateInput {
  static constexpr int kPerLane = Tile::NT <= 4 ? 1 : Tile::NT / 4;
  uint32_t A, dt, a[kPerLane], b[kPerLane];
  __device__ __forceinline__ void load(const VerifyParams& p, int n, int hv, int lane) {
    A = load_raw(p.A_log, hv, p.A_log_dtype);
    dt = load_raw(p.dt_bias, hv, p.dt_bias_dtype);
    const int64_t token = static_cast<int64_t>(n) * p.T + lane;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (lane + 32 * i < p.T) {
        a[i] = load_raw(p.a, (token + 32 * i) * p.a_stride_token + hv, p.act_dtype);
        b[i] = load_raw(p.b, (token + 32 * i) * p.b_stride_token + hv, p.act_dtype);
      }
    }
  }
};

// Gates, G in float64 and ancestor sets by pointer doubling, of every value head from hv on that is prepared together. One
// warp; `parent` must be there.
template <class Tile>
__device__ __forceinline__ void prepare_gates(const VerifyParams& p, int n, int hv, bool writes_g, const Prep<Tile>& s, int lane,
                                              const GateInput<Tile> (&in)[Tile::kHeads]) {
  constexpr int NT = Tile::NT, kPerLane = GateInput<Tile>::kPerLane, kHeads = Tile::kHeads;
  const int T = p.T;
  double G[kHeads][kPerLane];
  float beta[kHeads][kPerLane];
#pragma unroll
  for (int r = 0; r < kHeads; ++r) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int t = lane + 32 * i;
      float own = 0.f;
      beta[r][i] = 0.f;
      if (t < T) {
        own = log_decay(raw_float(in[r].A, p.A_log_dtype), raw_float(in[r].a[i], p.act_dtype) + raw_float(in[r].dt, p.dt_bias_dtype));
        beta[r][i] = sigmoid(raw_float(in[r].b[i], p.act_dtype));
        if (writes_g) p.stash.g[n * p.stash.g_stride_row + (hv + r) * p.stash.g_stride_head + t] = own;
      }
      G[r][i] = own;
    }
  }
  if constexpr (NT <= 4) {
    int up = lane < T ? s.parent[lane] : -1;
    uint32_t set = lane < T ? 1u << lane : 0u;
    for (int reach = 1; reach < T; reach *= 2) {
      double G_up[kHeads];
#pragma unroll
      for (int r = 0; r < kHeads; ++r) G_up[r] = __shfl_sync(0xffffffffu, G[r][0], up & 31);
      const uint32_t set_up = __shfl_sync(0xffffffffu, set, up & 31);
      const int up_up = __shfl_sync(0xffffffffu, up, up & 31);
      if (up >= 0) {
#pragma unroll
        for (int r = 0; r < kHeads; ++r) G[r][0] += G_up[r];
        set |= set_up;
        up = up_up;
      }
    }
    if (lane < s.Tpad) s.bits[lane] = set;
  } else {
    double* Gd[kHeads];  // free until the coefficients are written
#pragma unroll
    for (int r = 0; r < kHeads; ++r) Gd[r] = reinterpret_cast<double*>(s.of_head(r, T).diag);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int t = lane + 32 * i;
      if (t < s.Tpad) {
#pragma unroll
        for (int r = 0; r < kHeads; ++r) Gd[r][t] = G[r][i];
        s.jump[t] = s.parent[t];
        for (int w = 0; w < Tile::kWords; ++w) s.bits[t * Tile::kWords + w] = t < T && w == i ? 1u << lane : 0u;
      }
    }
    __syncwarp();
    for (int reach = 1; reach < T; reach *= 2) {
      double Gn[kHeads][kPerLane];
      int jn[kPerLane];
      uint32_t bn[kPerLane][Tile::kWords];
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        const int t = lane + 32 * i;
        const int up = t < T ? s.jump[t] : -1;
        jn[i] = -1;
#pragma unroll
        for (int r = 0; r < kHeads; ++r) Gn[r][i] = 0.0;
#pragma unroll
        for (int w = 0; w < Tile::kWords; ++w) bn[i][w] = 0u;
        if (up >= 0) {
#pragma unroll
          for (int r = 0; r < kHeads; ++r) Gn[r][i] = Gd[r][up];
          jn[i] = s.jump[up];
#pragma unroll
          for (int w = 0; w < Tile::kWords; ++w) bn[i][w] = s.bits[up * Tile::kWords + w];
        }
      }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        const int t = lane + 32 * i;
        if (t < T) {
#pragma unroll
          for (int r = 0; r < kHeads; ++r) {
            G[r][i] += Gn[r][i];
            Gd[r][t] = G[r][i];
          }
          s.jump[t] = jn[i];
#pragma unroll
          for (int w = 0; w < Tile::kWords; ++w) s.bits[t * Tile::kWords + w] |= bn[i][w];
        }
      }
      __syncwarp();
    }
  }
#pragma unroll
  for (int r = 0; r < kHeads; ++r) {
    const Prep<Tile> sr = s.of_head(r, T);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int t = lane + 32 * i;
      if (t < s.Tpad) {
        const float hi = static_cast<float>(G[r][i]), lo = static_cast<float>(G[r][i] - static_cast<double>(hi));
        const float e = expf(hi);
        sr.G[t] = make_float2(hi, lo);
        sr.gate[t] = make_float2(beta[r][i], t < T ? fmaf(e, lo, e) : 0.f);
      }
    }
  }
}

// x / (1 + e^-x), rounded as the division routine rounds, without its branches.
__device__ __forceinline__ float silu_fast(float x) {
  const float d = 1.f + expf(fminf(-x, 80.f));
  float r = rcp_approx(d);
  r = fmaf(r, fmaf(-d, r, 1.f), r);
  const float quotient = x * r;
  return fmaf(fmaf(-quotient, d, x), r, quotient);
}

// 1 / sqrt(x) to an ulp: the hardware's estimate and one Newton step.
__device__ __forceinline__ float rsqrt_exact(float x) {
  const float y = rsqrtf(x);
  return fmaf(0.5f * y, fmaf(-x * y, y, 1.f), y);
}

// Eight 16-bit values; one branch for all, where selects would double the work.
__device__ __forceinline__ void unpack8(const uint4& raw, bool is_bf16, float (&x)[8]) {
  const uint32_t w[4] = {raw.x, raw.y, raw.z, raw.w};
  if (is_bf16) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      x[2 * j] = __uint_as_float(w[j] << 16);
      x[2 * j + 1] = __uint_as_float(w[j] & 0xffff0000u);
    }
  } else {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 f = unpack_half2(w[j], false);
      x[2 * j] = f.x, x[2 * j + 1] = f.y;
    }
  }
}

// e^x for x <= 0 from the hardware's exp2: as exact as expf where e^x matters, and flushed to zero below 2^-126.
__device__ __forceinline__ float exp_decay(float x) {
  return exp2_approx(x * 1.4426950408889634f);
}

// Eight channels of a k or q row: norm, power-of-two scale, float16, fragment order. kLanes lanes share a row.
template <class Tile>
__device__ __forceinline__ void stage_row(const VerifyParams& p, int n, int h, bool writes_k, const Prep<Tile>& s, int kind, int t,
                                          int i, uint4 raw, bool act_bf16) {
  constexpr int K = Tile::K, kLanes = K / 8;
  float x[8];
  unpack8(raw, act_bf16, x);
  float sum0 = x[0] * x[0], sum1 = x[1] * x[1];
#pragma unroll
  for (int j = 2; j < 8; j += 2) {
    sum0 = fmaf(x[j], x[j], sum0);
    sum1 = fmaf(x[j + 1], x[j + 1], sum1);
  }
  float sum = sum0 + sum1;
#pragma unroll
  for (int d = kLanes / 2; d > 0; d /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
  // No element exceeds the norm, and the norm lies below 2^((e+2)/2) for sum < 2^(e+1).
  float scale, inverse;
  const int e = (static_cast<int>(__float_as_uint(sum) >> 23) - 127 + 2) >> 1;
  pow2_scale(__uint_as_float(static_cast<uint32_t>(max(e + 127, 1)) << 23), scale, inverse);
  const float r = rsqrt_exact(sum + 1e-6f);
  if (i == 0) (kind == 0 ? s.rk : s.rq)[t] = r * inverse;
  if (kind == 0 && writes_k && t < p.T) {
    uint16_t* to = static_cast<uint16_t*>(p.stash.k) + n * p.stash.k_stride_row + h * p.stash.k_stride_head + static_cast<int64_t>(t) * K;
    *reinterpret_cast<uint4*>(to + i * 8) = raw;
    if (i == 0) p.stash.k_rnorm[n * p.stash.k_rnorm_stride_row + h * p.stash.k_rnorm_stride_head + t] = r;
  }
  // Columns 8i..8i+7 are two groups of four: group c goes to step pair c/8, lane c%4, first or second step (c%8)/4.
  uint2* row = reinterpret_cast<uint2*>(s.kq + (kind * s.span() + t) * (K / 8));
  const int pair = (i / 4) ^ (t & 1), to = pair * 8 + ((2 * i) & 3) * 2 + ((i & 3) >> 1);
  row[to] = make_uint2(f16x2(x[0] * scale, x[1] * scale), f16x2(x[2] * scale, x[3] * scale));
  row[to + 2] = make_uint2(f16x2(x[4] * scale, x[5] * scale), f16x2(x[6] * scale, x[7] * scale));
}

// A row past the last node.
template <class Tile>
__device__ __forceinline__ void stage_zero_row(const Prep<Tile>& s, int kind, int t, int i) {
  if (i == 0) (kind == 0 ? s.rk : s.rq)[t] = 0.f;
  s.kq[(kind * s.span() + t) * (Tile::K / 8) + i] = make_uint4(0u, 0u, 0u, 0u);
}

// Convolution and SiLU of eight channels; in[0] is the node itself, in[3] its oldest tap.
__device__ __forceinline__ uint4 convolve8(const uint4 (&in)[4], const uint4 (&weight)[4], const uint4& bias, bool act_bf16) {
  uint32_t packed[4];
  const uint32_t bb[4] = {bias.x, bias.y, bias.z, bias.w};
#pragma unroll
  for (int c = 0; c < 4; ++c) {  // two channels at a time
    float2 acc = unpack_half2(bb[c], act_bf16);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t word = c == 0 ? in[j].x : c == 1 ? in[j].y : c == 2 ? in[j].z : in[j].w;
      const float2 y = unpack_half2(word, act_bf16);
      const float2 w0 = unpack_half2(j < 2 ? weight[c].y : weight[c].x, act_bf16);
      const float2 w1 = unpack_half2(j < 2 ? weight[c].w : weight[c].z, act_bf16);
      acc.x = fmaf((j & 1) ? w0.x : w0.y, y.x, acc.x);
      acc.y = fmaf((j & 1) ? w1.x : w1.y, y.y, acc.y);
    }
    packed[c] = pack_half2(silu_fast(acc.x), silu_fast(acc.y), act_bf16);
  }
  return make_uint4(packed[0], packed[1], packed[2], packed[3]);
}

// All k and q rows of the row's key head, by `warps` warps.
template <class Tile>
__device__ __forceinline__ void stage_rows(const VerifyParams& p, int n, int h, int64_t slot, bool writes_k, const Prep<Tile>& s,
                                           int warp, int warps, int lane) {
  constexpr int K = Tile::K, kLanes = K / 8;
  const bool act_bf16 = p.act_dtype == DType::kBFloat16;
  const int T = p.T;
  const int64_t token0 = static_cast<int64_t>(n) * T;
  const int sub = lane / kLanes, i = lane % kLanes;
  const int limit = K == 64 ? s.Tpad / 2 : K == 256 ? 2 * s.Tpad : s.Tpad;
  auto kind_of = [&](int it) { return K == 64 ? sub & 1 : K == 256 ? it & 1 : sub; };  // 0: k, 1: q
  auto node_of = [&](int it) { return K == 64 ? it * 2 + (sub >> 1) : K == 256 ? it >> 1 : it; };
  if constexpr (!Tile::kConv) {
    constexpr int kBatch = 4;  // rows whose loads are in flight together
    for (int it0 = warp; it0 < limit; it0 += warps * kBatch) {
      uint4 raw[kBatch];
#pragma unroll
      for (int c = 0; c < kBatch; ++c) {
        const int it = it0 + c * warps, t = node_of(it);
        raw[c] = make_uint4(0u, 0u, 0u, 0u);
        if (it < limit && t < T) {
          const uint16_t* from = kind_of(it) == 0
                                     ? static_cast<const uint16_t*>(p.k) + (token0 + t) * p.k_stride_token + h * p.k_stride_head
                                     : static_cast<const uint16_t*>(p.q) + (token0 + t) * p.q_stride_token + h * p.q_stride_head;
          raw[c] = *reinterpret_cast<const uint4*>(from + i * 8);
        }
      }
#pragma unroll
      for (int c = 0; c < kBatch; ++c) {
        const int it = it0 + c * warps;
        if (it < limit) stage_row<Tile>(p, n, h, writes_k, s, kind_of(it), node_of(it), i, raw[c], act_bf16);
      }
    }
  } else {
    int loaded = -1;
    uint4 weight[4];
    uint4 bias = make_uint4(0u, 0u, 0u, 0u);
    for (int it = warp; it < limit; it += warps) {
      const int kind = kind_of(it), t = node_of(it);
      const int channel = (kind == 0 ? p.H * K : 0) + h * K + i * 8;
      if (channel != loaded) {
        const uint4* w = reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(p.conv_weight) + channel * 4);
#pragma unroll
        for (int j = 0; j < 4; ++j) weight[j] = w[j];
        if (p.conv_bias != nullptr) bias = *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(p.conv_bias) + channel);
        loaded = channel;
      }
      uint4 raw = make_uint4(0u, 0u, 0u, 0u);
      if (t < T) {
        const uint16_t* mixed = static_cast<const uint16_t*>(p.mixed_qkv) + token0 * p.mixed_qkv_stride_token + channel;
        int node[4];  // of tap 3 - j; negative: j-th column from the right of the convolution state, less one
        node[0] = t;
#pragma unroll
        for (int j = 1; j < 4; ++j) node[j] = node[j - 1] >= 0 ? s.parent[node[j - 1]] : node[j - 1] - 1;
        uint4 in[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (node[j] >= 0) {
            in[j] = *reinterpret_cast<const uint4*>(mixed + node[j] * p.mixed_qkv_stride_token);
          } else {
            const uint16_t* from = static_cast<const uint16_t*>(p.conv_state) + slot * p.conv_state_stride_slot +
                                   channel * p.conv_state_stride_channel + (3 + node[j]) * p.conv_state_stride_column;
            uint32_t y[4];
#pragma unroll
            for (int c = 0; c < 4; ++c)
              y[c] = from[2 * c * p.conv_state_stride_channel] | static_cast<uint32_t>(from[(2 * c + 1) * p.conv_state_stride_channel]) << 16;
            in[j] = make_uint4(y[0], y[1], y[2], y[3]);
          }
        }
        if (writes_k)
          *reinterpret_cast<uint4*>(static_cast<uint16_t*>(p.stash.conv) + n * p.stash.conv_stride_row + t * p.stash.conv_stride_node + channel) = in[0];
        raw = convolve8(in, weight, bias, act_bf16);
      }
      stage_row<Tile>(p, n, h, writes_k, s, kind, t, i, raw, act_bf16);
    }
  }
}

// Coefficients e^{G_t-G_j} (k_j . k_t) beta_t and e^{G_t-G_j} (k_j . q_t), j an ancestor. Task: a block of nodes t against
// eight nodes j; tasks go round the warps.
template <class Tile>
__device__ __forceinline__ void prepare_coefficients(const Prep<Tile>& s, int T, int warp, int warps, int lane) {
  constexpr int K = Tile::K, kBlockTiles = Tile::kBlockTiles, kBlockNodes = Tile::kBlockNodes;
  const int g = lane >> 2, q4 = lane & 3, odd = g & 1;
  const int blocks = s.Tpad / kBlockNodes;
  int turn = warp;  // tasks until this warp's next one
  for (int b = 0; b < blocks; ++b) {
    for (int jn = 0; jn < (b + 1) * kBlockTiles; ++jn) {
      if (turn-- != 0) continue;
      turn = warps - 1;
      float ck[4], cq[4], ck1[4], cq1[4];
      const uint4* bj = s.kq + (jn * 8 + g) * (K / 8) + q4;
      const uint4* ak = s.kq + (b * kBlockNodes + g) * (K / 8) + q4;
      const uint4* aq = ak + s.span() * (K / 8);
      const bool empty = Tile::kTiles && jn * 8 >= T;  // its coefficients are zero whatever the products are
      auto products = [&] {
#pragma unroll
        for (int st = 0; st < K / 32; ++st) {
          const int o = (st ^ odd) * 4;
          const uint4 w = bj[o];
          const uint4 k0 = ak[o], q0 = aq[o];
          uint4 k1 = make_uint4(0u, 0u, 0u, 0u), q1 = k1;
          if constexpr (kBlockTiles == 2) {
            k1 = ak[o + 8 * (K / 8)];
            q1 = aq[o + 8 * (K / 8)];
          }
          const uint32_t fk0[4] = {k0.x, k1.x, k0.y, k1.y}, fk1[4] = {k0.z, k1.z, k0.w, k1.w};
          const uint32_t fq0[4] = {q0.x, q1.x, q0.y, q1.y}, fq1[4] = {q0.z, q1.z, q0.w, q1.w};
          if (st == 0) {
            mma_first(ck, fk0, w.x, w.y);
            mma_first(cq, fq0, w.x, w.y);
            mma_first(ck1, fk1, w.z, w.w);
            mma_first(cq1, fq1, w.z, w.w);
          } else {
            mma(ck, fk0, w.x, w.y);
            mma(cq, fq0, w.x, w.y);
            mma(ck1, fk1, w.z, w.w);
            mma(cq1, fq1, w.z, w.w);
          }
        }
      };
      if (Tile::kTiles && empty) {
#pragma unroll
        for (int e = 0; e < 4; ++e) ck[e] = cq[e] = ck1[e] = cq1[e] = 0.f;
      } else {
        products();
      }
      const int j0 = jn * 8 + q4 * 2;
      const float2 rj = *reinterpret_cast<const float2*>(s.rk + j0);
      float pk[2 * kBlockTiles], pq[2 * kBlockTiles];  // k.k of earlier nodes and k.q, with both norms; entries (t = g, j0), (g, j0+1), (g+8, j0), (g+8, j0+1)
      bool ancestor[2 * kBlockTiles];
#pragma unroll
      for (int r = 0; r < kBlockTiles; ++r) {
        const int t = b * kBlockNodes + g + r * 8;
        const float rk = s.rk[t], rq = s.rq[t];
        const uint32_t set = s.bits[t * Tile::kWords + (Tile::kWords == 1 ? 0 : j0 >> 5)] >> (j0 & 31);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int c = 2 * r + e;
          ancestor[c] = set >> e & 1u;
          const float rje = e ? rj.y : rj.x;
          pk[c] = j0 + e < t ? rk * rje * (ck[c] + ck1[c]) : 0.f;
          pq[c] = rq * rje * (cq[c] + cq1[c]);
        }
      }
#pragma unroll
      for (int head = 0; head < Tile::kHeads; ++head) {
        const Prep<Tile> sh = s.of_head(head, T);
        const float4 Gj = *reinterpret_cast<const float4*>(sh.G + j0);
        float M[2 * kBlockTiles], P[2 * kBlockTiles];
#pragma unroll
        for (int r = 0; r < kBlockTiles; ++r) {
          const int t = b * kBlockNodes + g + r * 8;
          const float2 Gt = sh.G[t];
          const float beta = sh.gate[t].x;
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int c = 2 * r + e;
            const float d = (Gt.x - (e ? Gj.z : Gj.x)) + (Gt.y - (e ? Gj.w : Gj.y));
            const float decay = ancestor[c] ? exp_decay(d) : 0.f;
            M[c] = decay * beta * pk[c];
            P[c] = decay * pq[c];
          }
        }
        if constexpr (kBlockTiles == 1) {
          float* d = sh.diag + b * Tile::kDiagFloats + q4 * 2 * 16 + (g >> 1) * 4 + (g & 1);
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            d[c * 16] = M[c];
            d[c * 16 + 2] = P[c];
          }
        } else {
          const bool diagonal = jn >= 2 * b;
          uint32_t* to = diagonal ? reinterpret_cast<uint32_t*>(sh.diag + b * 512 + 256) - 256 + (g * 4 + q4) * 4 + (jn & 1)
                                  : reinterpret_cast<uint32_t*>(sh.hist + (b * (b - 1) / 2 + (jn >> 1)) * 128) + (g * 4 + q4) * 4 + (jn & 1);
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            uint32_t hi, lo;
            if (diagonal) {
              *reinterpret_cast<float2*>(sh.diag + b * 512 + (g + 8 * r) * 16 + (jn & 1) * 8 + q4 * 2) = make_float2(M[2 * r], M[2 * r + 1]);
            } else {
              split(M[2 * r] * kCoefficientScale, M[2 * r + 1] * kCoefficientScale, hi, lo);
              to[r * 128] = hi;
              to[r * 128 + 2] = lo;
            }
            split(P[2 * r] * kCoefficientScale, P[2 * r + 1] * kCoefficientScale, hi, lo);
            to[r * 128 + 256] = hi;
            to[r * 128 + 258] = lo;
          }
        }
      }
    }
  }
}

// (I + M)^-1 - I of every 16 x 16 unit-lower block, in the place of M: without the identity, what the tensor cores'
// truncating adds lose is lost from a correction and not from u itself. Entries stay at most 1 in size: they are products of
// contractions I - beta k k^T seen through two unit vectors. Lane c has column c.
template <class Tile>
__device__ __forceinline__ void prepare_inverse(const Prep<Tile>& s, int T, int warp, int warps, int lane) {
  if constexpr (Tile::kBlockTiles == 2) {
    // A half warp a block (of a value head); the last one is done twice where their number is odd.
    const int c = lane & 15, blocks = s.Tpad / 16, tasks = blocks * Tile::kHeads;
    for (int first = 2 * warp; first < tasks; first += 2 * warps) {
      const bool alone = first + 1 >= tasks;
      const int task = first + (alone ? 0 : lane >> 4), head = Tile::kHeads > 1 && task >= blocks;
      float* M = s.of_head(head, T).diag + (task - (head ? blocks : 0)) * 512;
      float x[16];
#pragma unroll
      for (int t = 0; t < 16; ++t) {
        float s0 = t == c ? 1.f : 0.f, s1 = 0.f;
#pragma unroll
        for (int j = 0; j < t; j += 4) {
          const float4 m = *reinterpret_cast<const float4*>(M + t * 16 + j);
          s0 = fmaf(-m.x, x[j], s0);
          if (j + 1 < t) s1 = fmaf(-m.y, x[j + 1], s1);
          if (j + 2 < t) s0 = fmaf(-m.z, x[j + 2], s0);
          if (j + 3 < t) s1 = fmaf(-m.w, x[j + 3], s1);
        }
        x[t] = s0 + s1;
      }
#pragma unroll
      for (int t = 0; t < 16; ++t)
        if (t == c) x[t] = 0.f;
      __syncwarp();
      uint32_t* to = reinterpret_cast<uint32_t*>(M) + ((c & 7) >> 1) * 4 + (c >> 3);
#pragma unroll
      for (int t = 0; t < 16; t += 2) {  // an even lane packs node t with its neighbour's entry, an odd lane node t+1
        const float other = __shfl_xor_sync(0xffffffffu, (c & 1) ? x[t] : x[t + 1], 1);
        const float e0 = (c & 1) ? other : x[t], e1 = (c & 1) ? x[t + 1] : other;
        uint32_t hi, lo;
        split(e0 * kCoefficientScale, e1 * kCoefficientScale, hi, lo);
        if (!alone || lane < 16) {
          to[(t + (c & 1)) * 16] = hi;
          to[(t + (c & 1)) * 16 + 2] = lo;
        }
      }
      __syncwarp();
    }
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// One warp, 16 value channels from row0: v inputs, solve, u and outputs. `state` holds the converted fragments of chunk 0
// (or, with several chunks, its raw words). `ready` is called once, when the preparation is needed first; it says whether
// the row is sound, and so does the result.
template <class Tile>
struct ValueInput {
  uint4 weight;
  float2 bias, old[3];
  uint32_t old_word;  // column 2 - q4 of the convolution state, both channels
  uint32_t raw[2 * Tile::kBlockTiles];

  // Two adjacent channels from `channel` on (of v, or of the convolution).
  template <bool kRawV>
  __device__ __forceinline__ void start(const VerifyParams& p, int64_t slot, int64_t channel, bool act_bf16, int q4) {
    if constexpr (Tile::kConv) {
      weight = *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(p.conv_weight) + channel * 4);
      bias = make_float2(0.f, 0.f);
      if (p.conv_bias != nullptr)
        bias = unpack_half2(*reinterpret_cast<const uint32_t*>(static_cast<const uint16_t*>(p.conv_bias) + channel), act_bf16);
      const uint16_t* at = static_cast<const uint16_t*>(p.conv_state) + slot * p.conv_state_stride_slot + channel * p.conv_state_stride_channel;
      if constexpr (kRawV) {
        if (q4 < 3) {
          at += (2 - q4) * p.conv_state_stride_column;
          old_word = at[0] | static_cast<uint32_t>(at[p.conv_state_stride_channel]) << 16;
        }
      } else {
#pragma unroll
        for (int w = 0; w < 3; ++w) {
          const uint16_t* x = at + w * p.conv_state_stride_column;
          old[w] = unpack_half2(x[0] | static_cast<uint32_t>(x[p.conv_state_stride_channel]) << 16, act_bf16);
        }
      }
    }
  }
};

// v of one block of nodes, two adjacent channels a node, as a lane needs them.
template <class Tile>
__device__ __forceinline__ void load_values(const VerifyParams& p, int n, int hv, int row0, int lane, int b, uint32_t (&raw)[2 * Tile::kBlockTiles]) {
  const int t0 = b * Tile::kBlockNodes + 2 * (lane & 3);
  const uint16_t* at = static_cast<const uint16_t*>(p.v) + (static_cast<int64_t>(n) * p.T + t0) * p.v_stride_token + hv * p.v_stride_head +
                       row0 + 2 * (lane >> 2);
#pragma unroll
  for (int c = 0; c < 2 * Tile::kBlockTiles; ++c) {
    const int o = (c >> 1) * 8 + (c & 1);
    raw[c] = t0 + o < p.T ? *reinterpret_cast<const uint32_t*>(at + o * p.v_stride_token) : 0u;
  }
}

template <class Tile, bool kRawV, class Ready>
__device__ __forceinline__ bool solve_rows(const VerifyParams& p, int n, int hv, int64_t slot, int row0, int lane, const Prep<Tile>& s,
                                           StateFragments<Tile>& state, int64_t state_at, const uint32_t (&v0)[2 * Tile::kBlockTiles], Ready ready,
                                           unsigned char* raw_v = nullptr) {
  constexpr int K = Tile::K, V = Tile::K, kBlockTiles = Tile::kBlockTiles, kBlockNodes = Tile::kBlockNodes;
  const int g = lane >> 2, q4 = lane & 3, T = p.T;
  const bool act_bf16 = p.act_dtype == DType::kBFloat16, state_bf16 = p.state_dtype == DType::kBFloat16;
  const int row = row0 + 2 * g;
  const int64_t token0 = static_cast<int64_t>(n) * T;
  const int64_t channel = Tile::kConv ? 2 * p.H * K + static_cast<int64_t>(hv) * V + row : 0;
  const uint16_t* v_at = static_cast<const uint16_t*>(p.mixed_qkv) + token0 * p.mixed_qkv_stride_token + channel;
  ValueInput<Tile> v;
  v.template start<kRawV>(p, slot, channel, act_bf16, q4);
#pragma unroll
  for (int c = 0; c < 2 * kBlockTiles; ++c) v.raw[c] = v0[c];
  // Raw v columns of the warp's 16 channels, one row of 32 bytes a node, older columns behind: the taps then cost no walk
  // through memory. Kernels without the room for it read the taps where they are.
  uint32_t* raw_at = reinterpret_cast<uint32_t*>(raw_v) + g;
  if constexpr (Tile::kConv) {
    if constexpr (kRawV) {
      for (int t = q4; t < T; t += 4)
        copy_async<4>(shared_address(raw_at + t * 8), v_at + t * p.mixed_qkv_stride_token);
      copy_commit();
    }
  }
  if constexpr (Tile::kChunks == 1) state.convert(state_bf16);
  if constexpr (Tile::kConv && kRawV) {
    if (q4 < 3) raw_at[(s.Tpad + q4) * 8] = v.old_word;
  }
  if (!ready()) return false;
  if constexpr (Tile::kConv && kRawV) {
    copy_wait<1>();  // all but the state that was asked for last
    __syncwarp();
  }

  float* u_at = p.stash.u + n * p.stash.u_stride_row + hv * p.stash.u_stride_head + static_cast<int64_t>(2 * q4) * V + row;
  const int64_t out_at = (token0 + 2 * q4) * p.out_stride_token + hv * p.out_stride_head + row;
  constexpr int kHistory = Tile::kBlocks;
  uint32_t u_hi[kHistory][4], u_lo[kHistory][4];
  float u_inverse[kHistory][2];
#pragma unroll
  for (int b = 0; b < Tile::kBlocks; ++b) {
    if (b > 0 && b * kBlockNodes >= T) break;
    if (b > 0 && !Tile::kConv) load_values<Tile>(p, n, hv, row0, lane, b, v.raw);
    float xk[kBlockTiles][4], xq[kBlockTiles][4];
#pragma unroll
    for (int i = 0; i < kBlockTiles; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) xk[i][e] = xq[i][e] = 0.f;
    const bool second = !Tile::kTiles || b * kBlockNodes + 8 < T;  // the second tile has nodes
#pragma unroll
    for (int chunk = 0; chunk < Tile::kChunks; ++chunk) {
      if constexpr (Tile::kChunks > 1) {
        if (b > 0 || chunk > 0) state.load(p.state, state_at, lane, chunk);
        state.convert(state_bf16);
      }
#pragma unroll
      for (int i = 0; i < kBlockTiles; ++i) {
        if (i == 1 && !second) continue;
        const uint4* rowk = s.kq + (b * kBlockNodes + i * 8 + g) * (K / 8);
        const uint4* rowq = rowk + s.span() * (K / 8);
        if constexpr (Tile::NT <= 2) {
          state.multiply(xk[i], rowk, lane, chunk);
          state.multiply(xq[i], rowq, lane, chunk);
        } else {
          state.multiply_pair(xk[i], xq[i], rowk, rowq, lane, chunk);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kBlockTiles; ++i) {
      const int t0 = b * kBlockNodes + i * 8 + q4 * 2;
      const float4 gate = *reinterpret_cast<const float4*>(s.gate + t0);
      const float2 rk = *reinterpret_cast<const float2*>(s.rk + t0), rq = *reinterpret_cast<const float2*>(s.rq + t0);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float2 x;
        if constexpr (Tile::kConv && Tile::kLean) __syncwarp();  // one column at a time: registers
        if constexpr (Tile::kConv) {
          const int t = t0 + e;
          x = make_float2(0.f, 0.f);
          if (t < T) {
            x = v.bias;
            int node = t;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              float2 y;
              if constexpr (kRawV) {
                const uint32_t m = raw_at[(node >= 0 ? node : s.Tpad - 1 - node) * 8];
                if (j == 0)
                  *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(p.stash.conv) + n * p.stash.conv_stride_row + t * p.stash.conv_stride_node + channel) = m;
                y = unpack_half2(m, act_bf16);
                if (j < 3) node = node >= 0 ? s.parent[node] : node - 1;
              } else if (node >= 0) {
                const uint32_t m = *reinterpret_cast<const uint32_t*>(v_at + node * p.mixed_qkv_stride_token);
                if (j == 0)
                  *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(p.stash.conv) + n * p.stash.conv_stride_row + t * p.stash.conv_stride_node + channel) = m;
                y = unpack_half2(m, act_bf16);
                node = s.parent[node];
              } else {
                y = node == -1 ? v.old[2] : node == -2 ? v.old[1] : v.old[0];
                --node;
              }
              const float2 w0 = unpack_half2(j < 2 ? v.weight.y : v.weight.x, act_bf16);
              const float2 w1 = unpack_half2(j < 2 ? v.weight.w : v.weight.z, act_bf16);
              x.x = fmaf((j & 1) ? w0.x : w0.y, y.x, x.x);
              x.y = fmaf((j & 1) ? w1.x : w1.y, y.y, x.y);
            }
            x = unpack_half2(pack_half2(silu_fast(x.x), silu_fast(x.y), act_bf16), act_bf16);
          }
        } else {
          x = unpack_half2(v.raw[2 * i + e], act_bf16);
        }
        const float bt = e ? gate.z : gate.x, eG = e ? gate.w : gate.y;
        const float ek = bt * (eG * (e ? rk.y : rk.x)), eq = eG * (e ? rq.y : rq.x);
        xk[i][e] = fmaf(-ek, xk[i][e], bt * x.x);
        xk[i][2 + e] = fmaf(-ek, xk[i][2 + e], bt * x.y);
        xq[i][e] *= eq;
        xq[i][2 + e] *= eq;
      }
    }
    if constexpr (Tile::kBlocks > 1) {
#pragma unroll
      for (int jb = 0; jb < b; ++jb) {
        const uint4* pair = s.hist + (b * (b - 1) / 2 + jb) * 128 + g * 4 + q4;
        uint4 w[4];  // k and q coefficients of the two tiles
        float c[4][4];
#pragma unroll
        for (int m = 0; m < 4; ++m) w[m] = pair[(m & 1) * 64 + (m >> 1) * 32];
        multiply_split(c, u_hi[jb], u_lo[jb], w);
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const float ck = c[2 * i][e], cq = c[2 * i + 1][e];
            xk[i][e] = fmaf(-u_inverse[jb][e >> 1], fmaf(ck, kLossOne, ck), xk[i][e]);
            xq[i][e] = fmaf(u_inverse[jb][e >> 1], fmaf(cq, kLossOne, cq), xq[i][e]);
          }
      }
    }
    if constexpr (kBlockTiles == 1) {
      // Forward substitution: node j's column is final when its turn comes; its owner hands it to the quad.
      const float4* d = reinterpret_cast<const float4*>(s.diag) + q4;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (j == 4 && T <= 4) break;
        const float4 w = d[j * 4];
        const float u0 = __shfl_sync(0xffffffffu, xk[0][j & 1], (lane & 28) | (j >> 1));
        const float u1 = __shfl_sync(0xffffffffu, xk[0][2 + (j & 1)], (lane & 28) | (j >> 1));
        xk[0][0] = fmaf(-w.x, u0, xk[0][0]);
        xk[0][1] = fmaf(-w.y, u0, xk[0][1]);
        xk[0][2] = fmaf(-w.x, u1, xk[0][2]);
        xk[0][3] = fmaf(-w.y, u1, xk[0][3]);
        xq[0][0] = fmaf(w.z, u0, xq[0][0]);
        xq[0][1] = fmaf(w.w, u0, xq[0][1]);
        xq[0][2] = fmaf(w.z, u1, xq[0][2]);
        xq[0][3] = fmaf(w.w, u1, xq[0][3]);
      }
    } else {
      // The inverse of the block times the right-hand side, then what the block adds to its own outputs. The right-hand
      // side is scaled to 2^10: |u| <= 16 max|x| then still fits, and u needs no scale of its own.
      uint32_t x_hi[4], x_lo[4];
      float inverse[2], scaled[2][4];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float m = fmaxf(fmaxf(fabsf(xk[0][2 * r]), fabsf(xk[0][2 * r + 1])), fmaxf(fabsf(xk[1][2 * r]), fabsf(xk[1][2 * r + 1])));
        m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
        m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
        float scale;
        pow2_scale(m, scale, inverse[r]);
        scale *= 1.f / 16.f;
        inverse[r] *= 16.f;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          scaled[i][2 * r] = xk[i][2 * r] * scale;
          scaled[i][2 * r + 1] = xk[i][2 * r + 1] * scale;
          split(scaled[i][2 * r], scaled[i][2 * r + 1], x_hi[2 * i + r], x_lo[2 * i + r]);
        }
      }
      const uint4* inv = reinterpret_cast<const uint4*>(s.diag + b * 512) + g * 4 + q4;
      {
        const uint4 w[2] = {inv[0], inv[32]};
        float c[2][4];
        multiply_split(c, x_hi, x_lo, w);
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
          for (int e = 0; e < 4; ++e) xk[i][e] = fmaf(c[i][e], 1.f / kCoefficientScale, scaled[i][e]);
      }
      uint32_t (&uh)[4] = u_hi[b], (&ul)[4] = u_lo[b];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        split(xk[0][2 * r], xk[0][2 * r + 1], uh[r], ul[r]);
        split(xk[1][2 * r], xk[1][2 * r + 1], uh[2 + r], ul[2 + r]);
        u_inverse[b][r] = inverse[r] * (1.f / kCoefficientScale);
      }
      {
        const uint4 w[2] = {inv[64], inv[96]};
        float c[2][4];
        multiply_split(c, uh, ul, w);
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            xq[i][e] = fmaf(u_inverse[b][e >> 1], fmaf(c[i][e], kLossOne, c[i][e]), xq[i][e]);
            xk[i][e] *= inverse[e >> 1];
          }
      }
    }
    // ---- u and outputs
#pragma unroll
    for (int c = 0; c < 2 * kBlockTiles; ++c) {
      const int o = b * kBlockNodes + (c >> 1) * 8 + (c & 1);
      if (o + 2 * q4 < T) {
        const int i = c >> 1, e = c & 1;
        *reinterpret_cast<float2*>(u_at + o * V) = make_float2(xk[i][e], xk[i][2 + e]);
        const float o0 = xq[i][e] * p.scale, o1 = xq[i][2 + e] * p.scale;
        const int64_t to = out_at + o * p.out_stride_token;
        if (p.out_dtype == DType::kFloat32) {
          *reinterpret_cast<float2*>(static_cast<float*>(p.out) + to) = make_float2(o0, o1);
        } else {
          *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(p.out) + to) = pack_half2(o0, o1, act_bf16);
        }
      }
    }
  }
  return true;
}

// Zero outputs of a row that is skipped: `rows` value channels, all nodes.
__device__ __forceinline__ void write_zeros(const VerifyParams& p, int n, int hv, int first_row, int rows, int tid, int threads) {
  for (int i = tid; i < p.T * rows; i += threads) {
    const int t = i / rows, r = i % rows;
    store_float(p.out, (static_cast<int64_t>(n) * p.T + t) * p.out_stride_token + hv * p.out_stride_head + first_row + r, 0.f, p.out_dtype);
  }
}

}  // namespace cuda
}  // namespace treewy
