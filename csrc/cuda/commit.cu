// commit: S_a = e^{G_a} S0 + sum over the accepted path of e^{G_a-G_j} u_j k_j^T, for all layers in one launch, and the
// convolution state of the same rows. A thread owns RowsPerThread x 4 state elements; they are on their way while the
// block walks the path and gathers u and k. Derivation and figures: docs/kernels.md.
#include <initializer_list>

#include "common.cuh"

namespace treewy {
namespace cuda {
namespace {



struct CommitLaunch {
  CommitParams p;
  int slabs;            // blocks per (layer, request, head)
  int conv_blocks;      // blocks per (layer, request)
  int conv_total;       // conv_blocks * L * N; these blocks come first
  int heads_per_key;    // HV / H
  bool vector_conv;     // convolution states are [D, 3] without gaps, 16-bit, and aligned
  bool vector_stash;    // 16-bit k, and u and k rows can be read 16 bytes at a time
  bool vector_state;    // state rows are aligned for 4-element accesses
};

__device__ __forceinline__ float4 load_state4(const float* s, bool vec) {
  if (vec) return __ldcs(reinterpret_cast<const float4*>(s));
  return make_float4(s[0], s[1], s[2], s[3]);
}
template <class Half>
__device__ __forceinline__ float4 load_state4(const Half* s, bool vec) {
  constexpr bool is_bf16 = std::is_same<Half, __nv_bfloat16>::value;
  if (vec) {
    const uint2 w = __ldcs(reinterpret_cast<const uint2*>(s));
    const float2 a = unpack_half2(w.x, is_bf16), b = unpack_half2(w.y, is_bf16);
    return make_float4(a.x, a.y, b.x, b.y);
  }
  return make_float4(float(s[0]), float(s[1]), float(s[2]), float(s[3]));
}
__device__ __forceinline__ void store_state4(float* s, float4 x, bool vec) {
  if (vec) {
    __stcs(reinterpret_cast<float4*>(s), x);
  } else {
    s[0] = x.x, s[1] = x.y, s[2] = x.z, s[3] = x.w;
  }
}
template <class Half>
__device__ __forceinline__ void store_state4(Half* s, float4 x, bool vec) {
  constexpr bool is_bf16 = std::is_same<Half, __nv_bfloat16>::value;
  uint32_t lo = pack_half2(x.x, x.y, is_bf16), hi = pack_half2(x.z, x.w, is_bf16);
  if (vec) {
    __stcs(reinterpret_cast<uint2*>(s), make_uint2(lo, hi));
  } else {
    uint16_t* raw = reinterpret_cast<uint16_t*>(s);
    raw[0] = lo & 0xffff, raw[1] = lo >> 16, raw[2] = hi & 0xffff, raw[3] = hi >> 16;
  }
}

// What a row asks for, after its checks. Every block of the row reaches the same verdict; one counts the error.
struct Row {
  bool active;
  int64_t slot;
  int node;
  int64_t track_slot;  // -1: none
  int track_node;
};

__device__ __forceinline__ Row read_row(const CommitParams& p, int n, ErrorKind& kind, bool& error) {
  Row r{false, -1, -1, -1, -1};
  error = false;
  int64_t slot = load_index(p.state_indices, n);
  int64_t node = load_index(p.accepted, n);
  int64_t track_slot = -1, track_node = -1;
  if (p.track_indices.data != nullptr && p.track_nodes.data != nullptr) {
    track_slot = load_index(p.track_indices, n);
    track_node = load_index(p.track_nodes, n);
  }
  if (slot == -1) return r;
  if (slot < -1 || slot >= p.slots) {
    kind = kErrorStateIndex;
    error = true;
    return r;
  }
  if (node == -1) return r;
  if (node < -1 || node >= p.T) {
    kind = kErrorAcceptedNode;
    error = true;
    return r;
  }
  if (track_slot < -1 || track_slot >= p.slots || track_node < -1 || track_node >= p.T) {
    kind = kErrorTrack;
    error = true;
    return r;
  }
  r.active = true;
  r.slot = slot;
  r.node = static_cast<int>(node);
  if (track_slot >= 0 && track_node >= 0 && track_slot != slot) {
    r.track_slot = track_slot;
    r.track_node = static_cast<int>(track_node);
  }
  return r;
}

// Path of the accepted node, itself first, in shared memory of the warp's own: every warp walks by itself, which costs
// less than a second barrier. length 0: the row must be skipped. All threads of a block call this.
struct Path {
  int length, track_at;
};

__device__ __forceinline__ Path walk_path(const CommitParams& p, const Row& r, int n, bool counts, int* parent, int* path) {
  const int tid = threadIdx.x, lane = tid & 31;
  Path result{0, -1};
  if (p.parents == nullptr) {
    for (int i = lane; i <= r.node; i += 32) path[i] = r.node - i;
    result.length = r.node + 1;
    if (r.track_slot >= 0) result.track_at = r.node - r.track_node;
  } else {
    int bad = 0;
    if (tid < p.T) {
      const int q = p.parents[n * p.parents_stride_row + tid];
      bad = q < -1 || q >= tid;
      parent[tid] = q;
    }
    if (__syncthreads_or(bad)) {
      if (counts && tid == 0) count_error(p.errors, kErrorParent);
      return result;
    }
    for (int t = r.node; t >= 0; t = parent[t]) {
      if (t == r.track_node) result.track_at = result.length;
      if (lane == 0) path[result.length] = t;
      ++result.length;
    }
  }
  __syncwarp();
  if (r.track_slot >= 0 && result.track_at < 0) {
    if (counts && tid == 0) count_error(p.errors, kErrorTrack);
    result.length = 0;
  }
  return result;
}

template <class State, int K, int kThreads>
struct CommitTile {
  static constexpr int kLanesPerRow = K / 4;
  static constexpr int kRowsPerThread = K == 64 ? 4 : 8;
  static constexpr int kRows = kThreads / kLanesPerRow * kRowsPerThread;  // with 256 threads 64, 64, 32 rows for K 64, 128, 256
};

template <class State, int K, int kThreads>
__device__ __forceinline__ void commit_state(const CommitLaunch& c, int block) {
  using Tile = CommitTile<State, K, kThreads>;
  constexpr int RPT = Tile::kRowsPerThread;
  constexpr int kPathChunk = kThreads / 16;  // path nodes gathered into shared memory at a time: one piece of k a thread at K 128
  const CommitParams& p = c.p;
  __shared__ int parent[kMaxNodes], paths[kThreads / 32][kMaxNodes];
  __shared__ __align__(16) float ks[kPathChunk][K];
  __shared__ __align__(16) float us[kPathChunk][Tile::kRows];

  const int slab = block % c.slabs;
  const int rest = block / c.slabs;
  const int hv = rest % p.HV;
  const int rest2 = rest / p.HV;
  const int n = rest2 % p.N;
  const int l = rest2 / p.N;
  const int tid = threadIdx.x, lane = tid & 31;
  const bool counts = l == 0 && hv == 0 && slab == 0;

  ErrorKind kind = kErrorStateIndex;
  bool error;
  const Row r = read_row(p, n, kind, error);
  if (error && counts && tid == 0) count_error(p.errors, kind);
  if (!r.active) return;

  const int col = tid % Tile::kLanesPerRow * 4, row0 = tid / Tile::kLanesPerRow * RPT;
  const int first_row = slab * Tile::kRows;
  State* tile = static_cast<State*>(p.state) + l * p.state_stride_layer + r.slot * p.state_stride_slot + hv * p.state_stride_head +
                (first_row + row0) * K + col;
  float4 acc[RPT];
  auto load_state = [&] {
#pragma unroll
    for (int i = 0; i < RPT; ++i) acc[i] = load_state4(tile + i * K, c.vector_state);
  };
  load_state();

  const int* nodes = paths[tid >> 5];
  const Path path = walk_path(p, r, n, counts, parent, paths[tid >> 5]);
  if (path.length == 0) return;
  const bool track = r.track_slot >= 0;
  const int h = hv / c.heads_per_key;
  const float* g = p.stash.g + l * p.g_stride_layer + n * p.stash.g_stride_row + hv * p.stash.g_stride_head;
  const float* u = p.stash.u + l * p.u_stride_layer + n * p.stash.u_stride_row + hv * p.stash.u_stride_head + first_row;
  const int64_t k_base = l * p.k_stride_layer + n * p.stash.k_stride_row + h * p.stash.k_stride_head;
  const float* rn = p.stash.k_rnorm + l * p.k_rnorm_stride_layer + n * p.stash.k_rnorm_stride_row + h * p.stash.k_rnorm_stride_head;

  // The track state first: the row's own slot still holds the old state for the second pass.
#pragma unroll 1
  for (int pass = track ? 1 : 0; pass >= 0; --pass) {
    const int from = pass == 1 ? path.track_at : 0;
    if (track && pass == 0) load_state();
    // e^{G_a}: the sum of every decay on the path, in the order in which the weights accumulate it below.
    float sum = 0.f;
    for (int base = from; base < path.length; base += 32) {
      float x = base + lane < path.length ? g[nodes[base + lane]] : 0.f;
#pragma unroll
      for (int d = 16; d > 0; d /= 2) x += __shfl_xor_sync(0xffffffffu, x, d);
      sum += x;
    }
    const float decay = expf(sum);
    float before = 0.f;  // decay sum of path[from..base)
#pragma unroll 1
    for (int base = from; base < path.length; base += kPathChunk) {
      const int count = min(kPathChunk, path.length - base);
      // Lane j of every warp: weight of path[base + j].
      float inclusive = lane < count ? g[nodes[base + lane]] : 0.f;
#pragma unroll
      for (int d = 1; d < kPathChunk; d *= 2) {
        const float y = __shfl_up_sync(0xffffffffu, inclusive, d);
        if (lane >= d) inclusive += y;
      }
      float exclusive = __shfl_up_sync(0xffffffffu, inclusive, 1);
      if (lane == 0) exclusive = 0.f;
      const float weight = expf(before + exclusive);
      before += __shfl_sync(0xffffffffu, inclusive, kPathChunk - 1);
      if (base > from) __syncthreads();
      constexpr int kPiecesK = kPathChunk * K / 8, kPiecesU = kPathChunk * Tile::kRows / 4;
      if (c.vector_stash) {
        // Every thread has at most one piece of k and one of u (K 128): both loads are in flight together.
#pragma unroll 1
        for (int piece = tid; piece < (kPiecesK > kPiecesU ? kPiecesK : kPiecesU); piece += kThreads) {
          const int jk = piece / (K / 8), ju = piece / (Tile::kRows / 4);
          const bool has_k = piece < kPiecesK && jk < count, has_u = piece < kPiecesU && ju < count;
          uint4 kk;
          float4 uu;
          float norm;
          if (has_k) {
            const int node = nodes[base + jk];
            kk = *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(p.stash.k) + k_base + node * K + piece % (K / 8) * 8);
            norm = rn[node];
          }
          if (has_u) uu = *reinterpret_cast<const float4*>(u + nodes[base + ju] * K + piece % (Tile::kRows / 4) * 4);
          if (has_u) reinterpret_cast<float4*>(us)[piece] = uu;
          if (has_k) {
            const bool bf = p.act_dtype == DType::kBFloat16;
            const float2 x0 = unpack_half2(kk.x, bf), x1 = unpack_half2(kk.y, bf);
            reinterpret_cast<float4*>(ks)[2 * piece] = make_float4(x0.x * norm, x0.y * norm, x1.x * norm, x1.y * norm);
            const float2 x2 = unpack_half2(kk.z, bf), x3 = unpack_half2(kk.w, bf);
            reinterpret_cast<float4*>(ks)[2 * piece + 1] = make_float4(x2.x * norm, x2.y * norm, x3.x * norm, x3.y * norm);
          }
        }
      } else {
#pragma unroll 1
        for (int i = tid; i < count * K; i += kThreads) {
          const int node = nodes[base + i / K];
          ks[i / K][i % K] = load_float(p.stash.k, k_base + node * K + i % K, p.act_dtype) * rn[node];
        }
#pragma unroll 1
        for (int i = tid; i < count * Tile::kRows; i += kThreads)
          us[i / Tile::kRows][i % Tile::kRows] = u[nodes[base + i / Tile::kRows] * K + i % Tile::kRows];
      }
      __syncthreads();
      if (base == from) {
#pragma unroll
        for (int i = 0; i < RPT; ++i)
          acc[i] = make_float4(acc[i].x * decay, acc[i].y * decay, acc[i].z * decay, acc[i].w * decay);
      }
#pragma unroll 1
      for (int j = 0; j < count; ++j) {
        const float w = __shfl_sync(0xffffffffu, weight, j);
        float4 kk = *reinterpret_cast<const float4*>(&ks[j][col]);
        kk = make_float4(kk.x * w, kk.y * w, kk.z * w, kk.w * w);
#pragma unroll
        for (int i4 = 0; i4 < RPT; i4 += 4) {
          const float4 uu = *reinterpret_cast<const float4*>(&us[j][row0 + i4]);
          const float ui[4] = {uu.x, uu.y, uu.z, uu.w};
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            acc[i4 + i].x = fmaf(ui[i], kk.x, acc[i4 + i].x);
            acc[i4 + i].y = fmaf(ui[i], kk.y, acc[i4 + i].y);
            acc[i4 + i].z = fmaf(ui[i], kk.z, acc[i4 + i].z);
            acc[i4 + i].w = fmaf(ui[i], kk.w, acc[i4 + i].w);
          }
        }
      }
    }
    State* to = pass == 1 ? tile + (r.track_slot - r.slot) * p.state_stride_slot : tile;
#pragma unroll
    for (int i = 0; i < RPT; ++i) store_state4(to + i * K, acc[i], c.vector_state);
    if (pass == 1) __syncthreads();
  }
}

// New convolution state: the last W-1 raw inputs along root..a, older columns from the old state.
template <int kThreads>
__device__ __noinline__ void commit_conv(const CommitLaunch& c, int64_t block) {
  constexpr int kConvChannels = 8 * kThreads;
  const CommitParams& p = c.p;
  __shared__ int parent[kMaxNodes], paths[kThreads / 32][kMaxNodes];
  const int part = block % c.conv_blocks;
  const int64_t rest = block / c.conv_blocks;
  const int n = rest % p.N;
  const int l = rest / p.N;
  ErrorKind kind;
  bool error;
  Row r = read_row(p, n, kind, error);
  if (!r.active) return;
  const int* nodes = paths[threadIdx.x >> 5];
  const Path path = walk_path(p, r, n, false, parent, paths[threadIdx.x >> 5]);
  if (path.length == 0) return;
  const int columns = p.W - 1;
  const int64_t layer = l * p.conv_state_stride_layer;
  const int64_t from = layer + r.slot * p.conv_state_stride_slot;
  const int64_t raw = l * p.conv_stride_layer + n * p.stash.conv_stride_row;
  if (c.vector_conv) {
    // Eight channels x three columns a thread, 48 contiguous bytes: the new columns come from the old ones and from up to
    // three raw rows, all 16 bytes wide.
    const int d = part * kConvChannels + threadIdx.x * 8;
    if (threadIdx.x * 8 >= kConvChannels || d >= p.D) return;
    uint16_t* state = static_cast<uint16_t*>(p.conv_state) + from + d * 3;
    uint4 old4[3];
#pragma unroll
    for (int i = 0; i < 3; ++i) old4[i] = reinterpret_cast<const uint4*>(state)[i];
    for (int pass = r.track_slot >= 0 ? 1 : 0; pass >= 0; --pass) {
      const int first = pass == 1 ? path.track_at : 0, depth = path.length - first;
      uint4 row4[3];  // row4[i]: the node i steps above the accepted one
#pragma unroll
      for (int i = 0; i < 3; ++i)
        if (i < depth) row4[i] = *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(p.stash.conv) + raw + nodes[first + i] * p.stash.conv_stride_node + d);
      uint32_t out[12];
#pragma unroll
      for (int w = 0; w < 12; ++w) {
        uint32_t word = 0;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int e = 2 * w + half, channel = e / 3, column = e % 3, back = 2 - column;
          // Element `at` of an array of words, by constants only.
          auto pick = [](const uint4 (&x)[3], int at) {
            const uint4 v = x[at / 8];
            const uint32_t y = at % 8 / 2 == 0 ? v.x : at % 8 / 2 == 1 ? v.y : at % 8 / 2 == 2 ? v.z : v.w;
            return at % 2 ? y >> 16 : y & 0xffffu;
          };
          uint32_t x = pick(row4, back * 8 + channel);
#pragma unroll
          for (int shift = 1; shift <= column - 0 || shift <= 2; ++shift)
            if (back >= depth && depth == shift && column + shift <= 2) x = pick(old4, channel * 3 + (column + shift <= 2 ? column + shift : 2));
          word |= x << (16 * half);
        }
        out[w] = word;
      }
      uint16_t* to = pass == 1 ? state + (r.track_slot - r.slot) * p.conv_state_stride_slot : state;
#pragma unroll
      for (int i = 0; i < 3; ++i) reinterpret_cast<uint4*>(to)[i] = make_uint4(out[4 * i], out[4 * i + 1], out[4 * i + 2], out[4 * i + 3]);
    }
    return;
  }
  for (int d = part * kConvChannels + threadIdx.x; d < min(p.D, (part + 1) * kConvChannels); d += kThreads) {
    float old[kMaxConvWidth - 1];
#pragma unroll
    for (int w = 0; w < kMaxConvWidth - 1; ++w)
      if (w < columns)
        old[w] = load_float(p.conv_state, from + d * p.conv_state_stride_channel + w * p.conv_state_stride_column, p.conv_dtype);
    for (int pass = r.track_slot >= 0 ? 1 : 0; pass >= 0; --pass) {
      const int depth = path.length - (pass == 1 ? path.track_at : 0);
      const int64_t to = pass == 1 ? layer + r.track_slot * p.conv_state_stride_slot : from;
#pragma unroll
      for (int w = 0; w < kMaxConvWidth - 1; ++w) {
        if (w >= columns) continue;
        const int back = columns - 1 - w;  // nodes above the accepted one
        float x = 0.f;
        if (back < depth) {
          const int node = nodes[(pass == 1 ? path.track_at : 0) + back];
          x = load_float(p.stash.conv, raw + node * p.stash.conv_stride_node + d, p.act_dtype);
        } else {
          const int o = w + depth;
#pragma unroll
          for (int i = 0; i < kMaxConvWidth - 1; ++i)
            if (i == o) x = old[i];
        }
        store_float(p.conv_state, to + d * p.conv_state_stride_channel + w * p.conv_state_stride_column, x, p.conv_dtype);
      }
    }
  }
}

// Three blocks of 256 threads leave 80 registers and keep 96 KB of state in flight, five of 128 threads 96 and 80 KB; the
// smaller blocks end more evenly.
template <class State, int K, int kThreads>
__global__ void __launch_bounds__(kThreads, kThreads == 128 ? 5 : 3) commit_kernel(const __grid_constant__ CommitLaunch c) {
  if (blockIdx.x < c.conv_total) {
    commit_conv<kThreads>(c, blockIdx.x);
  } else {
    commit_state<State, K, kThreads>(c, blockIdx.x - c.conv_total);
  }
}

template <class State, int K, int kThreads = 256>
int launch(const CommitParams& p, cudaStream_t stream) {
  using Tile = CommitTile<State, K, kThreads>;
  constexpr int kConvChannels = 8 * kThreads;
  CommitLaunch c{};
  c.p = p;
  c.slabs = p.V / Tile::kRows;
  c.conv_blocks = p.conv_state != nullptr && p.D > 0 ? (p.D + kConvChannels - 1) / kConvChannels : 0;
  c.conv_total = c.conv_blocks * p.L * p.N;
  const int64_t align = 4 * sizeof(State);
  auto aligned = [&](int64_t stride) { return stride * static_cast<int64_t>(sizeof(State)) % align == 0; };
  c.vector_state = reinterpret_cast<uintptr_t>(p.state) % align == 0 && aligned(p.state_stride_layer) &&
                   aligned(p.state_stride_slot) && aligned(p.state_stride_head);
  c.heads_per_key = p.HV / p.H;
  const StashLayer& st = p.stash;
  auto stash_aligned = [&](const void* base, int size, std::initializer_list<int64_t> strides) {
    bool ok = reinterpret_cast<uintptr_t>(base) % 16 == 0;
    for (int64_t x : strides) ok = ok && x * size % 16 == 0;
    return ok;
  };
  c.vector_stash = p.act_dtype != DType::kFloat32 && stash_aligned(st.u, 4, {p.u_stride_layer, st.u_stride_row, st.u_stride_head}) &&
                   stash_aligned(st.k, element_size(p.act_dtype), {p.k_stride_layer, st.k_stride_row, st.k_stride_head});
  c.vector_conv = c.conv_blocks > 0 && p.W == 4 && p.D % 8 == 0 && p.conv_state_stride_channel == 3 && p.conv_state_stride_column == 1 &&
                  p.conv_dtype != DType::kFloat32 && p.conv_dtype == p.act_dtype &&
                  stash_aligned(p.conv_state, 2, {p.conv_state_stride_layer, p.conv_state_stride_slot}) &&
                  stash_aligned(st.conv, 2, {p.conv_stride_layer, st.conv_stride_row, st.conv_stride_node});
  const int64_t blocks = c.conv_total + static_cast<int64_t>(p.L) * p.N * p.HV * c.slabs;
  if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  commit_kernel<State, K, kThreads><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(c);
  return cudaGetLastError();
}

template <class State>
int dispatch_dim(const CommitParams& p, cudaStream_t stream) {
  switch (p.K) {
    case 64: return launch<State, 64>(p, stream);
    case 128: return launch<State, 128, 128>(p, stream);
    case 256: return launch<State, 256>(p, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace
}  // namespace cuda

int launch_commit_cuda(const CommitParams& p, void* stream) {
  if (p.L == 0 || p.N == 0 || p.T == 0) return cudaSuccess;
  if (p.T > kMaxNodes || p.K != p.V || p.H <= 0 || p.HV % p.H != 0 || (p.conv_state != nullptr && p.W > kMaxConvWidth))
    return cudaErrorInvalidValue;
  cudaStream_t s = static_cast<cudaStream_t>(stream);
  switch (p.state_dtype) {
    case DType::kFloat32: return cuda::dispatch_dim<float>(p, s);
    case DType::kBFloat16: return cuda::dispatch_dim<__nv_bfloat16>(p, s);
    case DType::kFloat16: return cuda::dispatch_dim<__half>(p, s);
  }
  return cudaErrorInvalidValue;
}

}  // namespace treewy
