// verify on tensor cores: outputs of every node of a draft tree, and the stash, in one pass over the state.
//
// A warp owns 16 value channels of one (request, value head) and never talks to another warp, except through what is
// common to the head: the normalised k and q rows and the T x T coefficients, which the block prepares in shared memory.
// Nodes are taken in blocks of 16. Per block: S0 [k q] on tensor cores, minus/plus what earlier blocks contribute (tensor
// cores again), then forward substitution inside the block in float32.
//
// float32 accuracy comes from splitting a float32 operand x into two float16 parts, hi = f16(x), lo = f16(x - hi), which
// together carry 22 to 24 bits; a power of two per row keeps both parts in range. k and q are born with at most 11
// significant bits and need one part only. Derivation, roofline and figures: docs/kernels.md.
#pragma once

#include "common.cuh"
#include "verify_common.cuh"

#ifndef TW_S
#define TW_S 8
#define TB_S 2
#define TW_M 8
#define TB_M 1
#endif

namespace treewy {
namespace cuda {

// Tile sizes, all in one place. NT: n-tiles of 8 nodes that the kernel is built for.
template <int K_, int NT_, bool HalfState_, bool Conv_>
struct VerifyTile {
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
  // Threads and blocks a multiprocessor: 128 registers keep 16 warps resident, which covers the memory latency of short
  // drafts; longer drafts keep the history of u in registers and trade warps for it.
  static constexpr int kMaxWarps = NT <= 2 ? TW_S : NT <= 8 ? TW_M : 8;
  static constexpr int kMinBlocks = NT <= 2 ? TB_S : NT <= 8 ? TB_M : 1;
};

struct VerifyShared {
  int Tpad, off_kq, off_diag, off_hist, off_small, bytes;
};

template <class Tile>
__host__ __device__ __forceinline__ VerifyShared verify_shared(int T) {
  VerifyShared s;
  const int blocks = (T + Tile::kBlockNodes - 1) / Tile::kBlockNodes;
  s.Tpad = blocks * Tile::kBlockNodes;
  s.off_kq = 0;
  s.off_diag = s.off_kq + 2 * s.Tpad * Tile::K * 2;
  s.off_hist = s.off_diag + blocks * Tile::kDiagFloats * 4;
  s.off_small = s.off_hist + blocks * (blocks - 1) / 2 * 2048;
  s.bytes = s.off_small + s.Tpad * 4 * (7 + Tile::kWords + 1);
  return s;
}

constexpr float kCoefficientScale = 16384.f;  // coefficients are at most 1: this keeps their low parts normal float16

__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ float4 load_stream_f4(const float* p) {
  float4 x;
  asm volatile("ld.global.nc.L1::no_allocate.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "l"(p));
  return x;
}
__device__ __forceinline__ uint2 load_stream_u2(const void* p) {
  uint2 x;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(x.x), "=r"(x.y) : "l"(p));
  return x;
}

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

  __device__ __forceinline__ void convert(bool is_bf16) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float m = 0.f;
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        if constexpr (Tile::kHalfState) {
          float2 a = unpack_half2(raw_half[r][s].x, is_bf16), b = unpack_half2(raw_half[r][s].y, is_bf16);
          m = fmaxf(fmaxf(m, fmaxf(fabsf(a.x), fabsf(a.y))), fmaxf(fabsf(b.x), fabsf(b.y)));
        } else {
#pragma unroll
          for (int e = 0; e < 4; ++e) m = fmaxf(m, fabsf(raw[r][s][e]));
        }
      }
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

  // c = (16 rows of the state chunk) x (8 rows of k or q); b points to the row of this lane's node. Separate chains for the
  // two halves of the columns and for the low parts: short chains lose less to the tensor cores' truncating adds.
  __device__ __forceinline__ void multiply(float (&c)[4], const uint4* b, int lane, int chunk) const {
    float c0[4] = {0.f, 0.f, 0.f, 0.f}, c1[4] = {0.f, 0.f, 0.f, 0.f}, cl[4] = {0.f, 0.f, 0.f, 0.f};
    const int odd = (lane >> 2) & 1;
#pragma unroll
    for (int s = 0; s < kSteps; s += 2) {
      const uint4 w = b[((chunk * (kSteps / 2) + s / 2) ^ odd) * 4 + (lane & 3)];
      if constexpr (!Tile::kHalfState) {
        mma(cl, lo[s], w.x, w.y);
        mma(cl, lo[s + 1], w.z, w.w);
      }
      if (s < kSteps / 2) {
        mma(c0, hi[s], w.x, w.y);
        mma(c0, hi[s + 1], w.z, w.w);
      } else {
        mma(c1, hi[s], w.x, w.y);
        mma(c1, hi[s + 1], w.z, w.w);
      }
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) c[e] += ((c0[e] + c1[e]) + cl[e]) * inverse[e >> 1];
  }
};

// Zero outputs of a row that is skipped: the block's channels, all nodes.
__device__ __forceinline__ void write_zeros(const VerifyParams& p, int n, int hv, int first_row, int rows) {
  for (int i = threadIdx.x; i < p.T * rows; i += blockDim.x) {
    const int t = i / rows, r = i % rows;
    store_float(p.out, (static_cast<int64_t>(n) * p.T + t) * p.out_stride_token + hv * p.out_stride_head + first_row + r, 0.f, p.out_dtype);
  }
}

template <class Tile>
__global__ void __launch_bounds__(Tile::kMaxWarps * 32, Tile::kMinBlocks) verify_kernel(const __grid_constant__ VerifyParams p) {
  constexpr int K = Tile::K, NT = Tile::NT, kBlockTiles = Tile::kBlockTiles, kBlockNodes = Tile::kBlockNodes;
  extern __shared__ __align__(16) unsigned char shared[];
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, warps = blockDim.x >> 5;
  const int g = lane >> 2, q4 = lane & 3;
  const int slab = blockIdx.x, hv = blockIdx.y, n = blockIdx.z;
  const int rep = p.HV / p.H, h = hv / rep;
  const int T = p.T;
  const bool act_bf16 = p.act_dtype == DType::kBFloat16;
  const bool writes_k = hv == h * rep && slab == 0;
  const int64_t token0 = static_cast<int64_t>(n) * T;

  const VerifyShared at = verify_shared<Tile>(T);
  const int Tpad = at.Tpad;
  uint4* kq = reinterpret_cast<uint4*>(shared + at.off_kq);          // [2][Tpad][K] float16, columns in fragment order
  float* diag = reinterpret_cast<float*>(shared + at.off_diag);      // [blocks][j][quad][k tiles, q tiles][2]
  uint4* hist = reinterpret_cast<uint4*>(shared + at.off_hist);      // [pairs][k, q][16 nodes][quad] hi, hi, lo, lo
  float* rs = reinterpret_cast<float*>(shared + at.off_small);       // [2][Tpad] inverse norms of the scaled k and q rows
  float* beta = rs + 2 * Tpad;
  float* eG = beta + Tpad;
  float* Gh = eG + Tpad;                                             // G in two floats
  float* Gl = Gh + Tpad;
  int* parent = reinterpret_cast<int*>(Gl + Tpad);
  uint32_t* bits = reinterpret_cast<uint32_t*>(parent + Tpad);       // [Tpad][kWords], a node's own bit included
  int* jump = reinterpret_cast<int*>(bits + Tpad * Tile::kWords);

  // ---- which row, and is it sound
  const int64_t slot = load_index(p.state_indices, n);
  const int rows = warps * 16, first_row = slab * rows;
  if (slot < 0 || slot >= p.slots) {
    if (tid == 0 && hv == 0 && slab == 0 && slot != -1) count_error(p.errors, kErrorStateIndex);
    write_zeros(p, n, hv, first_row, rows);
    return;
  }
  const int row0 = first_row + warp * 16;
  const int64_t state_at = slot * p.state_stride_slot + hv * p.state_stride_head + static_cast<int64_t>(row0) * K;
  StateFragments<Tile> state;
  state.load(p.state, state_at, lane, 0);

  int bad = 0;
  for (int t = tid; t < Tpad; t += blockDim.x) {
    int q = t < T ? (p.parents != nullptr ? p.parents[n * p.parents_stride_row + t] : t - 1) : -1;
    bad |= q < -1 || q >= t;
    parent[t] = q;
  }
  if (__syncthreads_or(bad)) {
    if (tid == 0 && hv == 0 && slab == 0) count_error(p.errors, kErrorParent);
    write_zeros(p, n, hv, first_row, rows);
    return;
  }

  // ---- gates, G in float64, ancestor sets by pointer doubling: one warp
  if (warp == warps - 1) {
    const float A = load_float(p.A_log, hv, p.A_log_dtype), dt = load_float(p.dt_bias, hv, p.dt_bias_dtype);
    constexpr int kPerLane = NT <= 4 ? 1 : NT / 4;
    double G[kPerLane];
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int t = lane + 32 * i;
      float own = 0.f, b = 0.f;
      if (t < T) {
        own = log_decay(A, load_float(p.a, (token0 + t) * p.a_stride_token + hv, p.act_dtype) + dt);
        b = sigmoid(load_float(p.b, (token0 + t) * p.b_stride_token + hv, p.act_dtype));
        if (slab == 0) p.stash.g[n * p.stash.g_stride_row + hv * p.stash.g_stride_head + t] = own;
      }
      G[i] = own;
      if (t < Tpad) beta[t] = b;
    }
    if constexpr (NT <= 4) {
      int up = lane < T ? parent[lane] : -1;
      uint32_t set = lane < T ? 1u << lane : 0u;
      for (int reach = 1; reach < T; reach *= 2) {
        const double G_up = __shfl_sync(0xffffffffu, G[0], up & 31);
        const uint32_t set_up = __shfl_sync(0xffffffffu, set, up & 31);
        const int up_up = __shfl_sync(0xffffffffu, up, up & 31);
        if (up >= 0) {
          G[0] += G_up;
          set |= set_up;
          up = up_up;
        }
      }
      if (lane < Tpad) bits[lane] = set;
    } else {
      double* Gd = reinterpret_cast<double*>(diag);  // free until the coefficients are written
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        const int t = lane + 32 * i;
        if (t < Tpad) {
          Gd[t] = G[i];
          jump[t] = parent[t];
          for (int w = 0; w < Tile::kWords; ++w) bits[t * Tile::kWords + w] = t < T && w == i ? 1u << lane : 0u;
        }
      }
      __syncwarp();
      for (int reach = 1; reach < T; reach *= 2) {
        double Gn[kPerLane];
        int jn[kPerLane];
        uint32_t bn[kPerLane][Tile::kWords];
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
          const int t = lane + 32 * i;
          const int up = t < T ? jump[t] : -1;
          jn[i] = -1;
          Gn[i] = 0.0;
#pragma unroll
          for (int w = 0; w < Tile::kWords; ++w) bn[i][w] = 0u;
          if (up >= 0) {
            Gn[i] = Gd[up];
            jn[i] = jump[up];
#pragma unroll
            for (int w = 0; w < Tile::kWords; ++w) bn[i][w] = bits[up * Tile::kWords + w];
          }
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
          const int t = lane + 32 * i;
          if (t < T) {
            G[i] += Gn[i];
            Gd[t] = G[i];
            jump[t] = jn[i];
#pragma unroll
            for (int w = 0; w < Tile::kWords; ++w) bits[t * Tile::kWords + w] |= bn[i][w];
          }
        }
        __syncwarp();
      }
    }
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int t = lane + 32 * i;
      if (t < Tpad) {
        const float hi = static_cast<float>(G[i]), lo = static_cast<float>(G[i] - static_cast<double>(hi));
        const float e = expf(hi);
        Gh[t] = hi;
        Gl[t] = lo;
        eG[t] = t < T ? fmaf(e, lo, e) : 0.f;
      }
    }
  }

  // ---- k and q rows: norm, power-of-two scale, float16, fragment order
  {
    constexpr int kLanes = K / 8;                    // lanes a row
    const int sub = lane / kLanes, i = lane % kLanes;
    const int kind0 = K == 64 ? sub & 1 : sub;       // 0: k, 1: q
    const int kind = K == 256 ? warp & 1 : kind0;    // the number of warps is even
    const int channel = (kind == 0 ? p.H * K : 0) + h * K + i * 8;
    uint4 weight[Tile::kConv ? 4 : 1];
    uint4 bias = make_uint4(0u, 0u, 0u, 0u);
    if constexpr (Tile::kConv) {
      const uint4* w = reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(p.conv_weight) + channel * 4);
#pragma unroll
      for (int j = 0; j < 4; ++j) weight[j] = w[j];
      if (p.conv_bias != nullptr) bias = *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(p.conv_bias) + channel);
    }
    for (int it = warp; it * (K == 64 ? 2 : 1) < (K == 256 ? 2 : 1) * Tpad; it += warps) {
      const int t = K == 64 ? it * 2 + (sub >> 1) : K == 256 ? it >> 1 : it;
      float x[8];
      uint4 raw = make_uint4(0u, 0u, 0u, 0u);
      if (t < T) {
        const int64_t token = token0 + t;
        if constexpr (Tile::kConv) {
          const uint16_t* mixed = static_cast<const uint16_t*>(p.mixed_qkv) + channel;
          {
            const uint32_t b[4] = {bias.x, bias.y, bias.z, bias.w};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              const float2 f = unpack_half2(b[j], act_bf16);
              x[2 * j] = f.x, x[2 * j + 1] = f.y;
            }
          }
          int node = t, column = 2;
#pragma unroll
          for (int tap = 3; tap >= 0; --tap) {
            float y[8];
            if (node >= 0) {
              const uint4 m = *reinterpret_cast<const uint4*>(mixed + (token0 + node) * p.mixed_qkv_stride_token);
              if (tap == 3 && writes_k)
                *reinterpret_cast<uint4*>(static_cast<uint16_t*>(p.stash.conv) + n * p.stash.conv_stride_row + t * p.stash.conv_stride_node + channel) = m;
              const uint32_t mm[4] = {m.x, m.y, m.z, m.w};
#pragma unroll
              for (int j = 0; j < 4; ++j) {
                const float2 f = unpack_half2(mm[j], act_bf16);
                y[2 * j] = f.x, y[2 * j + 1] = f.y;
              }
              node = parent[node];
            } else {
              const int64_t from = slot * p.conv_state_stride_slot + channel * p.conv_state_stride_channel + column * p.conv_state_stride_column;
#pragma unroll
              for (int j = 0; j < 8; ++j) y[j] = load_float(p.conv_state, from + j * p.conv_state_stride_channel, p.act_dtype);
              --column;
            }
#pragma unroll
            for (int j = 0; j < 8; ++j) {
              const uint4 w4 = weight[j / 2];
              const uint32_t w = (j & 1) ? (tap < 2 ? w4.z : w4.w) : (tap < 2 ? w4.x : w4.y);
              const float2 f = unpack_half2(w, act_bf16);
              x[j] = fmaf((tap & 1) ? f.y : f.x, y[j], x[j]);
            }
          }
          uint32_t packed[4];
#pragma unroll
          for (int j = 0; j < 4; ++j) packed[j] = pack_half2(silu(x[2 * j]), silu(x[2 * j + 1]), act_bf16);
          raw = make_uint4(packed[0], packed[1], packed[2], packed[3]);
        } else {
          const uint16_t* from = kind == 0 ? static_cast<const uint16_t*>(p.k) + token * p.k_stride_token + h * p.k_stride_head
                                           : static_cast<const uint16_t*>(p.q) + token * p.q_stride_token + h * p.q_stride_head;
          raw = *reinterpret_cast<const uint4*>(from + i * 8);
        }
      }
      {
        const uint32_t w[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float2 f = unpack_half2(w[j], act_bf16);
          x[2 * j] = f.x, x[2 * j + 1] = f.y;
        }
      }
      float m = 0.f, sum = 0.f;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        m = fmaxf(m, fabsf(x[j]));
        sum = fmaf(x[j], x[j], sum);
      }
#pragma unroll
      for (int d = kLanes / 2; d > 0; d /= 2) {
        m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, d));
        sum += __shfl_xor_sync(0xffffffffu, sum, d);
      }
      float scale, inverse;
      pow2_scale(m, scale, inverse);
      const float r = 1.f / sqrtf(sum + 1e-6f);
      if (i == 0) rs[kind * Tpad + t] = r * inverse;
      if (kind == 0 && writes_k && t < T) {
        uint16_t* to = static_cast<uint16_t*>(p.stash.k) + n * p.stash.k_stride_row + h * p.stash.k_stride_head + static_cast<int64_t>(t) * K;
        *reinterpret_cast<uint4*>(to + i * 8) = raw;
        if (i == 0) p.stash.k_rnorm[n * p.stash.k_rnorm_stride_row + h * p.stash.k_rnorm_stride_head + t] = r;
      }
      // Columns 8i..8i+7 are two groups of four: group c goes to step pair c/8, lane c%4, first or second step (c%8)/4.
      uint2* row = reinterpret_cast<uint2*>(kq + static_cast<int64_t>(kind * Tpad + t) * (K / 8));
      const int pair = (i / 4) ^ (t & 1), to = pair * 8 + ((2 * i) & 3) * 2 + ((i & 3) >> 1);
      row[to] = make_uint2(f16x2(x[0] * scale, x[1] * scale), f16x2(x[2] * scale, x[3] * scale));
      row[to + 2] = make_uint2(f16x2(x[4] * scale, x[5] * scale), f16x2(x[6] * scale, x[7] * scale));
    }
  }
  __syncthreads();

  // ---- coefficients. Task (block b, eight nodes j): k_j . k_t and k_j . q_t for the block's nodes t.
  {
    int task = 0;
    const int blocks = Tpad / kBlockNodes;
    for (int b = 0; b < blocks; ++b) {
      for (int jn = 0; jn < (b + 1) * kBlockTiles; ++jn, ++task) {
        if (task % warps != warp) continue;
        float ck[4] = {0.f, 0.f, 0.f, 0.f}, cq[4] = {0.f, 0.f, 0.f, 0.f};
        float ck1[4] = {0.f, 0.f, 0.f, 0.f}, cq1[4] = {0.f, 0.f, 0.f, 0.f};
        const int odd = g & 1;
        const uint4* bj = kq + (jn * 8 + g) * (K / 8) + q4;
        const uint4* ak = kq + (b * kBlockNodes + g) * (K / 8) + q4;
        const uint4* aq = ak + Tpad * (K / 8);
#pragma unroll
        for (int s = 0; s < K / 32; ++s) {
          const int o = (s ^ odd) * 4;
          const uint4 w = bj[o];
          uint4 k0 = ak[o], q0 = aq[o];
          uint4 k1 = make_uint4(0u, 0u, 0u, 0u), q1 = k1;
          if constexpr (kBlockTiles == 2) {
            k1 = ak[o + 8 * (K / 8)];
            q1 = aq[o + 8 * (K / 8)];
          }
          const uint32_t fk0[4] = {k0.x, k1.x, k0.y, k1.y}, fk1[4] = {k0.z, k1.z, k0.w, k1.w};
          const uint32_t fq0[4] = {q0.x, q1.x, q0.y, q1.y}, fq1[4] = {q0.z, q1.z, q0.w, q1.w};
          mma(ck, fk0, w.x, w.y);
          mma(cq, fq0, w.x, w.y);
          mma(ck1, fk1, w.z, w.w);
          mma(cq1, fq1, w.z, w.w);
        }
        const bool diagonal = jn >= b * kBlockTiles;
        float M[4], P[4];  // entries (t = g, j), (g, j+1), (g+8, j), (g+8, j+1)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int t = b * kBlockNodes + g + (e >> 1) * 8, j = jn * 8 + q4 * 2 + (e & 1);
          M[e] = P[e] = 0.f;
          if (kBlockTiles == 1 && e >= 2) continue;
          if (bits[t * Tile::kWords + (Tile::kWords == 1 ? 0 : j >> 5)] >> (j & 31) & 1u) {
            const float decay = expf((Gh[t] - Gh[j]) + (Gl[t] - Gl[j])) * rs[j];
            if (j < t) M[e] = decay * beta[t] * rs[t] * (ck[e] + ck1[e]);
            P[e] = decay * rs[Tpad + t] * (cq[e] + cq1[e]);
          }
        }
        if (diagonal) {
          float* d = diag + b * Tile::kDiagFloats;
#pragma unroll
          for (int e = 0; e < 2 * kBlockTiles; ++e) {
            const int j = (jn - b * kBlockTiles) * 8 + q4 * 2 + (e & 1), tile = e >> 1;
            float* to = d + (j * 4 + (g >> 1)) * (4 * kBlockTiles) + tile * 2 + (g & 1);
            to[0] = M[e];
            to[2 * kBlockTiles] = P[e];
          }
        } else {
          const int pair = b * (b - 1) / 2 + (jn >> 1);
          uint32_t* to = reinterpret_cast<uint32_t*>(hist + (pair * 2 * 16 + g) * 4 + q4) + (jn & 1);
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            uint32_t hi, lo;
            split(M[2 * r] * kCoefficientScale, M[2 * r + 1] * kCoefficientScale, hi, lo);
            to[r * 8 * 16] = hi;
            to[r * 8 * 16 + 2] = lo;
            split(P[2 * r] * kCoefficientScale, P[2 * r + 1] * kCoefficientScale, hi, lo);
            to[r * 8 * 16 + 256] = hi;
            to[r * 8 * 16 + 258] = lo;
          }
        }
      }
    }
  }

  // ---- per warp: solve and outputs, block of nodes by block of nodes
  if constexpr (Tile::kChunks == 1) state.convert(p.state_dtype == DType::kBFloat16);
  const int row = row0 + 2 * g;
  const int64_t v_channel = 2 * p.H * K + static_cast<int64_t>(hv) * p.V + row;
  uint4 v_weight = make_uint4(0u, 0u, 0u, 0u);
  float2 v_bias = make_float2(0.f, 0.f), v_old[3];
  if constexpr (Tile::kConv) {
    v_weight = *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(p.conv_weight) + v_channel * 4);
    if (p.conv_bias != nullptr) v_bias = unpack_half2(*reinterpret_cast<const uint32_t*>(static_cast<const uint16_t*>(p.conv_bias) + v_channel), act_bf16);
#pragma unroll
    for (int w = 0; w < 3; ++w) {
      const int64_t from = slot * p.conv_state_stride_slot + v_channel * p.conv_state_stride_channel + w * p.conv_state_stride_column;
      v_old[w].x = load_float(p.conv_state, from, p.act_dtype);
      v_old[w].y = load_float(p.conv_state, from + p.conv_state_stride_channel, p.act_dtype);
    }
  }
  uint32_t u_hi[Tile::kBlocks > 1 ? Tile::kBlocks - 1 : 1][4], u_lo[Tile::kBlocks > 1 ? Tile::kBlocks - 1 : 1][4];
  float u_inverse[Tile::kBlocks > 1 ? Tile::kBlocks - 1 : 1][2];
#pragma unroll
  for (int b = 0; b < Tile::kBlocks; ++b) {
    if (b > 0 && b * kBlockNodes >= T) break;
    float xk[kBlockTiles][4], xq[kBlockTiles][4];
#pragma unroll
    for (int i = 0; i < kBlockTiles; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) xk[i][e] = xq[i][e] = 0.f;
#pragma unroll
    for (int chunk = 0; chunk < Tile::kChunks; ++chunk) {
      if constexpr (Tile::kChunks > 1) {
        if (b > 0 || chunk > 0) state.load(p.state, state_at, lane, chunk);
        state.convert(p.state_dtype == DType::kBFloat16);
      }
#pragma unroll
      for (int i = 0; i < kBlockTiles; ++i) {
        const uint4* rowk = kq + (b * kBlockNodes + i * 8 + g) * (K / 8);
        state.multiply(xk[i], rowk, lane, chunk);
        state.multiply(xq[i], rowk + Tpad * (K / 8), lane, chunk);
      }
    }
    if (b == 0) __syncthreads();
#pragma unroll
    for (int i = 0; i < kBlockTiles; ++i) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int t = b * kBlockNodes + i * 8 + q4 * 2 + e;
        float2 v = make_float2(0.f, 0.f);
        if (t < T) {
          if constexpr (Tile::kConv) {
            const uint16_t* mixed = static_cast<const uint16_t*>(p.mixed_qkv) + v_channel;
            v = v_bias;
            int node = t, column = 2;
#pragma unroll
            for (int tap = 3; tap >= 0; --tap) {
              float2 y;
              if (node >= 0) {
                const uint32_t m = *reinterpret_cast<const uint32_t*>(mixed + (token0 + node) * p.mixed_qkv_stride_token);
                if (tap == 3)
                  *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(p.stash.conv) + n * p.stash.conv_stride_row + t * p.stash.conv_stride_node + v_channel) = m;
                y = unpack_half2(m, act_bf16);
                node = parent[node];
              } else {
                y = column == 2 ? v_old[2] : column == 1 ? v_old[1] : v_old[0];
                --column;
              }
              const float2 w0 = unpack_half2(tap < 2 ? v_weight.x : v_weight.y, act_bf16);
              const float2 w1 = unpack_half2(tap < 2 ? v_weight.z : v_weight.w, act_bf16);
              v.x = fmaf((tap & 1) ? w0.y : w0.x, y.x, v.x);
              v.y = fmaf((tap & 1) ? w1.y : w1.x, y.y, v.y);
            }
            v = unpack_half2(pack_half2(silu(v.x), silu(v.y), act_bf16), act_bf16);
          } else {
            v = unpack_half2(*reinterpret_cast<const uint32_t*>(static_cast<const uint16_t*>(p.v) + (token0 + t) * p.v_stride_token +
                                                                hv * p.v_stride_head + row), act_bf16);
          }
        }
        const float bt = beta[t], ek = bt * (eG[t] * rs[t]), eq = eG[t] * rs[Tpad + t];
        xk[i][e] = fmaf(-ek, xk[i][e], bt * v.x);
        xk[i][2 + e] = fmaf(-ek, xk[i][2 + e], bt * v.y);
        xq[i][e] *= eq;
        xq[i][2 + e] *= eq;
      }
    }
    if constexpr (Tile::kBlocks > 1) {
#pragma unroll
      for (int jb = 0; jb < b; ++jb) {
        const uint4* pair = hist + (b * (b - 1) / 2 + jb) * 128 + g * 4 + q4;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint4 wk = pair[i * 32], wq = pair[64 + i * 32];
          float ck[4] = {0.f, 0.f, 0.f, 0.f}, cq[4] = {0.f, 0.f, 0.f, 0.f};
          mma(ck, u_lo[jb], wk.x, wk.y);
          mma(cq, u_lo[jb], wq.x, wq.y);
          mma(ck, u_hi[jb], wk.z, wk.w);
          mma(cq, u_hi[jb], wq.z, wq.w);
          mma(ck, u_hi[jb], wk.x, wk.y);
          mma(cq, u_hi[jb], wq.x, wq.y);
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            xk[i][e] = fmaf(-u_inverse[jb][e >> 1], ck[e], xk[i][e]);
            xq[i][e] = fmaf(u_inverse[jb][e >> 1], cq[e], xq[i][e]);
          }
        }
      }
    }
    // Forward substitution: node j's column is final when its turn comes; its owner hands it to the quad.
    const float4* d = reinterpret_cast<const float4*>(diag + b * Tile::kDiagFloats) + q4 * kBlockTiles;
#pragma unroll
    for (int j = 0; j < kBlockNodes; ++j) {
      if (b * kBlockNodes + j >= T) break;
      const float u0 = __shfl_sync(0xffffffffu, xk[j / 8][j & 1], (lane & 28) | ((j & 7) >> 1));
      const float u1 = __shfl_sync(0xffffffffu, xk[j / 8][2 + (j & 1)], (lane & 28) | ((j & 7) >> 1));
      if constexpr (kBlockTiles == 1) {
        const float4 w = d[j * 4];
        xk[0][0] = fmaf(-w.x, u0, xk[0][0]);
        xk[0][1] = fmaf(-w.y, u0, xk[0][1]);
        xk[0][2] = fmaf(-w.x, u1, xk[0][2]);
        xk[0][3] = fmaf(-w.y, u1, xk[0][3]);
        xq[0][0] = fmaf(w.z, u0, xq[0][0]);
        xq[0][1] = fmaf(w.w, u0, xq[0][1]);
        xq[0][2] = fmaf(w.z, u1, xq[0][2]);
        xq[0][3] = fmaf(w.w, u1, xq[0][3]);
      } else {
        const float4 m = d[j * 8], o = d[j * 8 + 1];
        const float mm[4] = {m.x, m.y, m.z, m.w}, oo[4] = {o.x, o.y, o.z, o.w};
#pragma unroll
        for (int i = j / 8; i < 2; ++i) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const float u = e < 2 ? u0 : u1;
            xk[i][e] = fmaf(-mm[i * 2 + (e & 1)], u, xk[i][e]);
            xq[i][e] = fmaf(oo[i * 2 + (e & 1)], u, xq[i][e]);
          }
        }
      }
    }
    // ---- u and outputs
#pragma unroll
    for (int i = 0; i < kBlockTiles; ++i) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int t = b * kBlockNodes + i * 8 + q4 * 2 + e;
        if (t < T) {
          float* u = p.stash.u + n * p.stash.u_stride_row + hv * p.stash.u_stride_head + static_cast<int64_t>(t) * p.V + row;
          *reinterpret_cast<float2*>(u) = make_float2(xk[i][e], xk[i][2 + e]);
          const float o0 = xq[i][e] * p.scale, o1 = xq[i][2 + e] * p.scale;
          const int64_t to = (token0 + t) * p.out_stride_token + hv * p.out_stride_head + row;
          if (p.out_dtype == DType::kFloat32) {
            *reinterpret_cast<float2*>(static_cast<float*>(p.out) + to) = make_float2(o0, o1);
          } else {
            *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(p.out) + to) = pack_half2(o0, o1, act_bf16);
          }
        }
      }
    }
    // ---- keep u for the blocks to come
    if constexpr (Tile::kBlocks > 1) {
      if (b + 1 < Tile::kBlocks) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float m = fmaxf(fmaxf(fabsf(xk[0][2 * r]), fabsf(xk[0][2 * r + 1])), fmaxf(fabsf(xk[1][2 * r]), fabsf(xk[1][2 * r + 1])));
          m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
          m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
          float scale, inverse;
          pow2_scale(m, scale, inverse);
          u_inverse[b][r] = inverse * (1.f / kCoefficientScale);
          split(xk[0][2 * r] * scale, xk[0][2 * r + 1] * scale, u_hi[b][r], u_lo[b][r]);
          split(xk[1][2 * r] * scale, xk[1][2 * r + 1] * scale, u_hi[b][2 + r], u_lo[b][2 + r]);
        }
      }
    }
  }
}

template <class Tile>
int launch_verify_tile(const VerifyParams& p, int warps, int shared_limit, cudaStream_t stream) {
  const VerifyShared s = verify_shared<Tile>(p.T);
  if (s.bytes > shared_limit) return cudaErrorNotSupported;
  if (warps > Tile::kMaxWarps) warps = Tile::kMaxWarps;
  if (s.bytes > 48 * 1024) {
    cudaError_t e = cudaFuncSetAttribute(verify_kernel<Tile>, cudaFuncAttributeMaxDynamicSharedMemorySize, s.bytes);
    if (e != cudaSuccess) return e;
  }
  verify_kernel<Tile><<<dim3(p.V / (16 * warps), p.HV, p.N), warps * 32, s.bytes, stream>>>(p);
  return cudaGetLastError();
}

// One function per instantiation file.
int launch_verify_k128_f32(const VerifyParams& p, int warps, int shared_limit, cudaStream_t stream);
int launch_verify_k128_half(const VerifyParams& p, int warps, int shared_limit, cudaStream_t stream);
int launch_verify_k128_f32_conv(const VerifyParams& p, int warps, int shared_limit, cudaStream_t stream);
int launch_verify_k128_half_conv(const VerifyParams& p, int warps, int shared_limit, cudaStream_t stream);
int launch_verify_k64(const VerifyParams& p, int warps, int shared_limit, cudaStream_t stream);
int launch_verify_k256(const VerifyParams& p, int warps, int shared_limit, cudaStream_t stream);

template <bool HalfState, bool Conv>
int launch_verify_k128(const VerifyParams& p, int warps, int shared_limit, cudaStream_t stream) {
  if (p.T <= 8) return launch_verify_tile<VerifyTile<128, 1, HalfState, Conv>>(p, warps, shared_limit, stream);
  if (p.T <= 16) return launch_verify_tile<VerifyTile<128, 2, HalfState, Conv>>(p, warps, shared_limit, stream);
  if (p.T <= 32) return launch_verify_tile<VerifyTile<128, 4, HalfState, Conv>>(p, warps, shared_limit, stream);
  if (p.T <= 64) return launch_verify_tile<VerifyTile<128, 8, HalfState, Conv>>(p, warps, shared_limit, stream);
  return launch_verify_tile<VerifyTile<128, 16, HalfState, Conv>>(p, warps, shared_limit, stream);
}

template <int K, bool HalfState, bool Conv>
int launch_verify_other(const VerifyParams& p, int warps, int shared_limit, cudaStream_t stream) {
  if (p.T <= 16) return launch_verify_tile<VerifyTile<K, 2, HalfState, Conv>>(p, warps, shared_limit, stream);
  return launch_verify_tile<VerifyTile<K, 16, HalfState, Conv>>(p, warps, shared_limit, stream);
}

}  // namespace cuda
}  // namespace treewy
