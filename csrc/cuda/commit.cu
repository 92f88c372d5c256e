// commit: S_a = e^{G_a} S0 + sum over the accepted path of e^{G_a-G_j} u_j k_j^T, for all layers in one launch, and the
// convolution state of the same rows. A thread keeps RowsPerThread x 4 state elements; the loads of S0 are in flight
// while the block walks the path and gathers u and k. Derivation and figures: docs/kernels.md.
#include "common.cuh"

namespace treewy {
namespace cuda {
namespace {


constexpr int kThreads = 256;
constexpr int kPathChunk = 16;        // path nodes gathered into shared memory at a time: 8 KB of k, 4 KB of u at K 128
constexpr int kConvChannels = 1024;   // channels of one convolution block

struct CommitLaunch {
  CommitParams p;
  int slabs;            // blocks per (layer, request, head)
  int conv_blocks;      // blocks per (layer, request)
  int conv_total;       // conv_blocks * L * N; these blocks come first
  bool vector_state;    // state rows are aligned for 4-element accesses
};

__device__ __forceinline__ float4 load_state4(const float* s, bool vec) {
  if (vec) return __ldcs(reinterpret_cast<const float4*>(s));
  return make_float4(s[0], s[1], s[2], s[3]);
}
__device__ __forceinline__ void store_state4(float* s, float4 x, bool vec) {
  if (vec) {
    __stcs(reinterpret_cast<float4*>(s), x);
  } else {
    s[0] = x.x, s[1] = x.y, s[2] = x.z, s[3] = x.w;
  }
}
template <class Half>
__device__ __forceinline__ float4 load_state4(const Half* s, bool vec) {
  constexpr bool is_bf16 = sizeof(Half) == 2 && std::is_same<Half, __nv_bfloat16>::value;
  if (vec) {
    uint2 w = __ldcs(reinterpret_cast<const uint2*>(s));
    float2 a = unpack_half2(w.x, is_bf16), b = unpack_half2(w.y, is_bf16);
    return make_float4(a.x, a.y, b.x, b.y);
  }
  return make_float4(float(s[0]), float(s[1]), float(s[2]), float(s[3]));
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

// Path of the accepted node, itself first, into `path`; returns its length, or 0 for a row that must be skipped.
// `track_at` receives the position of the track node in it. All threads of the block call this.
__device__ __forceinline__ int walk_path(const CommitParams& p, const Row& r, int n, bool counts, int* parent, int* path,
                                         int* shared2, int& track_at) {
  const int tid = threadIdx.x;
  track_at = -1;
  if (p.parents == nullptr) {
    if (tid <= r.node) path[tid] = r.node - tid;
    bool bad_track = r.track_slot >= 0 && r.track_node > r.node;
    if (bad_track && counts && tid == 0) count_error(p.errors, kErrorTrack);
    __syncthreads();
    if (bad_track) return 0;
    if (r.track_slot >= 0) track_at = r.node - r.track_node;
    return r.node + 1;
  }
  int bad = 0;
  if (tid < p.T) {
    int q = p.parents[n * p.parents_stride_row + tid];
    bad = q < -1 || q >= tid;
    parent[tid] = q;
  }
  bad = __syncthreads_or(bad);
  if (bad) {
    if (counts && tid == 0) count_error(p.errors, kErrorParent);
    return 0;
  }
  if (tid == 0) {
    int len = 0, at = -1;
    for (int t = r.node; t >= 0; t = parent[t]) {
      if (t == r.track_node) at = len;
      path[len++] = t;
    }
    shared2[0] = len;
    shared2[1] = at;
  }
  __syncthreads();
  if (r.track_slot >= 0) {
    track_at = shared2[1];
    if (track_at < 0) {
      if (counts && tid == 0) count_error(p.errors, kErrorTrack);
      return 0;
    }
  }
  return shared2[0];
}

// weight[i] = sum of g over path[from..i), total = sum over path[from..len). One warp.
__device__ __forceinline__ void scan_decay(const float* g_path, int from, int len, float* weight, float* total) {
  const int lane = threadIdx.x & 31;
  float carry = 0.f;
  for (int base = from; base < len; base += 32) {
    int i = base + lane;
    float x = i < len ? g_path[i] : 0.f, sum = x;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      float y = __shfl_up_sync(0xffffffffu, sum, d);
      if (lane >= d) sum += y;
    }
    float before = __shfl_up_sync(0xffffffffu, sum, 1);
    if (i < len) weight[i] = expf(carry + (lane == 0 ? 0.f : before));
    carry += __shfl_sync(0xffffffffu, sum, 31);
  }
  if (lane == 0) *total = expf(carry);
}

template <class State, int K>
struct CommitTile {
  static constexpr int kLanesPerRow = K / 4;
  static constexpr int kRowsPerPass = kThreads / kLanesPerRow;
  static constexpr int kRowsPerThread = K == 64 ? 4 : 8;
  static constexpr int kRows = kRowsPerPass * kRowsPerThread;  // 64, 64, 32 rows for K 64, 128, 256
};

template <class State, int K>
__device__ __forceinline__ void commit_state(const CommitLaunch& c, int64_t block) {
  using Tile = CommitTile<State, K>;
  const CommitParams& p = c.p;
  __shared__ int parent[kMaxNodes], path[kMaxNodes], shared2[2];
  __shared__ float g_path[kMaxNodes], weight[2][kMaxNodes], total[2];
  __shared__ __align__(16) float ks[kPathChunk][K];
  __shared__ __align__(16) float us[kPathChunk][Tile::kRowsPerPass][Tile::kRowsPerThread];

  const int slab = block % c.slabs;
  const int64_t rest = block / c.slabs;
  const int hv = rest % p.HV;
  const int64_t rest2 = rest / p.HV;
  const int n = rest2 % p.N;
  const int l = rest2 / p.N;
  const int tid = threadIdx.x;
  const bool counts = l == 0 && hv == 0 && slab == 0;

  ErrorKind kind = kErrorStateIndex;
  bool error;
  Row r = read_row(p, n, kind, error);
  if (error && counts && tid == 0) count_error(p.errors, kind);
  if (!r.active) return;

  const int col = tid % Tile::kLanesPerRow * 4, row0 = tid / Tile::kLanesPerRow;
  const int first_row = slab * Tile::kRows;
  State* pool = static_cast<State*>(p.state) + l * p.state_stride_layer + hv * p.state_stride_head;
  State* tile = pool + r.slot * p.state_stride_slot + static_cast<int64_t>(first_row + row0) * K + col;
  float4 acc[Tile::kRowsPerThread];
#pragma unroll
  for (int i = 0; i < Tile::kRowsPerThread; ++i) acc[i] = load_state4(tile + i * Tile::kRowsPerPass * K, c.vector_state);

  int track_at;
  const int len = walk_path(p, r, n, counts, parent, path, shared2, track_at);
  if (len == 0) return;
  const bool track = r.track_slot >= 0;
  const float* g = p.stash.g + l * p.g_stride_layer + n * p.stash.g_stride_row + hv * p.stash.g_stride_head;
  if (tid < len) g_path[tid] = g[path[tid]];
  __syncthreads();
  if (tid < 32) scan_decay(g_path, 0, len, weight[0], &total[0]);
  if (track && tid >= 32 && tid < 64) scan_decay(g_path, track_at, len, weight[1], &total[1]);

  const int h = hv / (p.HV / p.H);
  const float* u = p.stash.u + l * p.u_stride_layer + n * p.stash.u_stride_row + hv * p.stash.u_stride_head + first_row;
  const int64_t k_base = l * p.k_stride_layer + n * p.stash.k_stride_row + h * p.stash.k_stride_head;
  const float* rn = p.stash.k_rnorm + l * p.k_rnorm_stride_layer + n * p.stash.k_rnorm_stride_row + h * p.stash.k_rnorm_stride_head;

  // The track state first: the row's own slot still holds the old state for the second pass.
  for (int pass = track ? 1 : 0; pass >= 0; --pass) {
    const int from = pass == 1 ? track_at : 0;
    if (track && pass == 0) {
#pragma unroll
      for (int i = 0; i < Tile::kRowsPerThread; ++i) acc[i] = load_state4(tile + i * Tile::kRowsPerPass * K, c.vector_state);
    }
    for (int base = from; base < len; base += kPathChunk) {
      const int count = min(kPathChunk, len - base);
      __syncthreads();
#pragma unroll 1
      for (int i = tid; i < count * K; i += kThreads) {
        int j = i / K, kk = i % K, node = path[base + j];
        ks[j][kk] = load_float(p.stash.k, k_base + static_cast<int64_t>(node) * K + kk, p.act_dtype) * rn[node];
      }
#pragma unroll 1
      for (int i = tid; i < count * Tile::kRows; i += kThreads) {
        int j = i / Tile::kRows, rr = i % Tile::kRows, node = path[base + j];
        us[j][rr % Tile::kRowsPerPass][rr / Tile::kRowsPerPass] = u[static_cast<int64_t>(node) * p.V + rr] * weight[pass][base + j];
      }
      __syncthreads();
      if (base == from) {
        const float e = total[pass];
#pragma unroll
        for (int i = 0; i < Tile::kRowsPerThread; ++i)
          acc[i] = make_float4(acc[i].x * e, acc[i].y * e, acc[i].z * e, acc[i].w * e);
      }
#pragma unroll 2
      for (int j = 0; j < count; ++j) {
        const float4 kk = *reinterpret_cast<const float4*>(&ks[j][col]);
#pragma unroll
        for (int i4 = 0; i4 < Tile::kRowsPerThread; i4 += 4) {
          const float4 uu = *reinterpret_cast<const float4*>(&us[j][row0][i4]);
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
    State* to = pass == 1 ? pool + r.track_slot * p.state_stride_slot + static_cast<int64_t>(first_row + row0) * K + col : tile;
#pragma unroll
    for (int i = 0; i < Tile::kRowsPerThread; ++i)
      store_state4(to + i * Tile::kRowsPerPass * K, acc[i], c.vector_state);
  }
}

// New convolution state: the last W-1 raw inputs along root..a, older columns from the old state.
__device__ __forceinline__ void commit_conv(const CommitLaunch& c, int64_t block) {
  const CommitParams& p = c.p;
  __shared__ int parent[kMaxNodes], path[kMaxNodes], shared2[2];
  const int part = block % c.conv_blocks;
  const int64_t rest = block / c.conv_blocks;
  const int n = rest % p.N;
  const int l = rest / p.N;
  ErrorKind kind;
  bool error;
  Row r = read_row(p, n, kind, error);
  if (!r.active) return;
  int track_at;
  const int len = walk_path(p, r, n, false, parent, path, shared2, track_at);
  if (len == 0) return;
  const int columns = p.W - 1;
  const int64_t layer = l * p.conv_state_stride_layer;
  const int64_t from = layer + r.slot * p.conv_state_stride_slot;
  const int64_t raw = l * p.conv_stride_layer + n * p.stash.conv_stride_row;
  for (int d = part * kConvChannels + threadIdx.x; d < min(p.D, (part + 1) * kConvChannels); d += kThreads) {
    float old[kMaxConvWidth - 1];
#pragma unroll
    for (int w = 0; w < kMaxConvWidth - 1; ++w)
      if (w < columns)
        old[w] = load_float(p.conv_state, from + d * p.conv_state_stride_channel + w * p.conv_state_stride_column, p.conv_dtype);
    for (int pass = r.track_slot >= 0 ? 1 : 0; pass >= 0; --pass) {
      const int first = pass == 1 ? track_at : 0;
      const int depth = len - first;
      const int64_t to = pass == 1 ? layer + r.track_slot * p.conv_state_stride_slot : from;
#pragma unroll
      for (int w = 0; w < kMaxConvWidth - 1; ++w) {
        if (w >= columns) continue;
        const int back = columns - 1 - w;  // nodes above the accepted one
        float x = 0.f;
        if (back < depth) {
          x = load_float(p.stash.conv, raw + path[first + back] * p.stash.conv_stride_node + d, p.act_dtype);
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

template <class State, int K>
__global__ void __launch_bounds__(kThreads, 3) commit_kernel(const __grid_constant__ CommitLaunch c) {
  if (blockIdx.x < c.conv_total) {
    commit_conv(c, blockIdx.x);
  } else {
    commit_state<State, K>(c, static_cast<int64_t>(blockIdx.x) - c.conv_total);
  }
}

template <class State, int K>
int launch(const CommitParams& p, cudaStream_t stream) {
  using Tile = CommitTile<State, K>;
  CommitLaunch c{};
  c.p = p;
  c.slabs = p.V / Tile::kRows;
  c.conv_blocks = p.conv_state != nullptr && p.D > 0 ? (p.D + kConvChannels - 1) / kConvChannels : 0;
  c.conv_total = c.conv_blocks * p.L * p.N;
  const int64_t align = 4 * sizeof(State);
  auto aligned = [&](int64_t stride) { return stride * static_cast<int64_t>(sizeof(State)) % align == 0; };
  c.vector_state = reinterpret_cast<uintptr_t>(p.state) % align == 0 && aligned(p.state_stride_layer) &&
                   aligned(p.state_stride_slot) && aligned(p.state_stride_head);
  const int64_t blocks = c.conv_total + static_cast<int64_t>(p.L) * p.N * p.HV * c.slabs;
  if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  commit_kernel<State, K><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(c);
  return cudaGetLastError();
}

template <class State>
int dispatch_dim(const CommitParams& p, cudaStream_t stream) {
  switch (p.K) {
    case 64: return launch<State, 64>(p, stream);
    case 128: return launch<State, 128>(p, stream);
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
