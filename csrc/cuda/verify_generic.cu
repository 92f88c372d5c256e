// verify in plain float32 arithmetic: any activation and state type, any alignment, little shared memory. The tensor-core
// kernel of verify.cuh takes the common cases; this one is what is left, and the yardstick of its tests.
//
// A block owns 32 value channels of one (request, value head); four lanes share a channel, each with a quarter of its
// state row in registers. Nodes are taken one by one. Blocks of the same key head write the same bits to the stash.
#include "common.cuh"
#include "verify_common.cuh"

namespace treewy {
namespace cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kRows = kThreads / 4;

template <int K>
__global__ void __launch_bounds__(kThreads) verify_generic_kernel(const __grid_constant__ VerifyParams p) {
  constexpr int kPart = K / 4;
  __shared__ float beta[kMaxNodes], g_node[kMaxNodes], rnorm[kMaxNodes];
  __shared__ double G[kMaxNodes];
  __shared__ int parent[kMaxNodes];
  __shared__ uint32_t bits[kMaxNodes][kMaxWords];
  __shared__ float mk[kMaxNodes], mq[kMaxNodes];
  __shared__ float kv[K], qv[K], sums[2];
  __shared__ float us[kMaxNodes][kRows];

  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
  const int slabs = p.V / kRows;
  const int slab = blockIdx.x % slabs, hv = blockIdx.x / slabs % p.HV, n = blockIdx.x / slabs / p.HV;
  const int h = hv / (p.HV / p.H);
  const int T = p.T;
  const bool first_head = hv % (p.HV / p.H) == 0;
  const int row = slab * kRows + tid / 4, part = tid % 4;
  const int64_t token0 = static_cast<int64_t>(n) * T;
  const bool conv = p.mixed_qkv != nullptr;

  const int64_t slot = load_index(p.state_indices, n);
  int bad = 0;
  if (tid < T) {
    int q = p.parents != nullptr ? p.parents[n * p.parents_stride_row + tid] : tid - 1;
    bad = q < -1 || q >= tid;
    parent[tid] = q;
  }
  bad = __syncthreads_or(bad);
  if (slot < 0 || slot >= p.slots || bad) {
    if (tid == 0 && hv == 0 && slab == 0 && slot != -1)
      count_error(p.errors, slot < -1 || slot >= p.slots ? kErrorStateIndex : kErrorParent);
    for (int i = tid; i < T * kRows; i += kThreads)
      store_float(p.out, (token0 + i / kRows) * p.out_stride_token + hv * p.out_stride_head + slab * kRows + i % kRows, 0.f, p.out_dtype);
    return;
  }

  // The lane's elements are part*4 + 16*i + {0..3}, so that four lanes read 64 contiguous bytes.
  float s0[kPart];
  const int64_t s_base = slot * p.state_stride_slot + hv * p.state_stride_head + static_cast<int64_t>(row) * K;
#pragma unroll
  for (int i = 0; i < kPart; ++i) s0[i] = load_float(p.state, s_base + i / 4 * 16 + part * 4 + i % 4, p.state_dtype);

  if (tid < T) {
    const float A = load_float(p.A_log, hv, p.A_log_dtype), dt = load_float(p.dt_bias, hv, p.dt_bias_dtype);
    g_node[tid] = log_decay(A, load_float(p.a, (token0 + tid) * p.a_stride_token + hv, p.act_dtype) + dt);
    beta[tid] = sigmoid(load_float(p.b, (token0 + tid) * p.b_stride_token + hv, p.act_dtype));
    if (slab == 0) p.stash.g[n * p.stash.g_stride_row + hv * p.stash.g_stride_head + tid] = g_node[tid];
  }
  __syncthreads();
  if (tid == 0) {
    for (int t = 0; t < T; ++t) {
      int q = parent[t];
      G[t] = g_node[t] + (q >= 0 ? G[q] : 0.0);
      for (int w = 0; w < kMaxWords; ++w)
        bits[t][w] = (q >= 0 ? bits[q][w] : 0u) | (t / 32 == w ? 1u << (t % 32) : 0u);
    }
  }

  const int64_t k_stash = n * p.stash.k_stride_row + h * p.stash.k_stride_head;
  for (int t = 0; t < T; ++t) {
    const int64_t token = token0 + t;
    __syncthreads();
    for (int i = tid; i < 2 * K; i += kThreads) {
      const bool is_k = i >= K;
      const int c = i % K;
      float x;
      if (conv) {
        x = conv_silu(p, n, t, parent, slot, (is_k ? p.H * K : 0) + h * K + c);
      } else if (is_k) {
        x = load_float(p.k, token * p.k_stride_token + h * p.k_stride_head + c, p.act_dtype);
      } else {
        x = load_float(p.q, token * p.q_stride_token + h * p.q_stride_head + c, p.act_dtype);
      }
      (is_k ? kv : qv)[c] = x;
      if (is_k) store_float(p.stash.k, k_stash + static_cast<int64_t>(t) * K + c, x, p.act_dtype);
    }
    __syncthreads();
    if (warp < 2) {
      float sum = 0.f;
      for (int c = lane; c < K; c += 32) {
        float x = warp == 0 ? kv[c] : qv[c];
        sum = fmaf(x, x, sum);
      }
      for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
      if (lane == 0) {
        float r = 1.f / sqrtf(sum + 1e-6f);
        sums[warp] = warp == 0 ? r : r * p.scale;
        if (warp == 0) {
          rnorm[t] = r;
          if (first_head && slab == 0) p.stash.k_rnorm[n * p.stash.k_rnorm_stride_row + h * p.stash.k_rnorm_stride_head + t] = r;
        }
      }
    }
    __syncthreads();
    const float rk = sums[0], rq = sums[1];
    for (int j = warp; j <= t; j += kThreads / 32) {
      if (!(bits[t][j / 32] >> (j % 32) & 1u)) {
        if (lane == 0) mk[j] = mq[j] = 0.f;
        continue;
      }
      float dk = 0.f, dq = 0.f;
      for (int c = lane; c < K; c += 32) {
        float x = load_float(p.stash.k, k_stash + static_cast<int64_t>(j) * K + c, p.act_dtype);
        dk = fmaf(x, kv[c], dk);
        dq = fmaf(x, qv[c], dq);
      }
      for (int d = 16; d > 0; d /= 2) {
        dk += __shfl_xor_sync(0xffffffffu, dk, d);
        dq += __shfl_xor_sync(0xffffffffu, dq, d);
      }
      if (lane == 0) {
        float e = expf(static_cast<float>(G[t] - G[j])) * rnorm[j];
        mk[j] = e * dk * rk;
        mq[j] = e * dq * rq;
      }
    }
    float sk = 0.f, sq = 0.f;
#pragma unroll
    for (int i = 0; i < kPart; ++i) {
      int c = i / 4 * 16 + part * 4 + i % 4;
      sk = fmaf(s0[i], kv[c], sk);
      sq = fmaf(s0[i], qv[c], sq);
    }
    __syncthreads();
    float hk = 0.f, hq = 0.f;
    for (int j = part; j < t; j += 4) {
      float u = us[j][tid / 4];
      hk = fmaf(mk[j], u, hk);
      hq = fmaf(mq[j], u, hq);
    }
    const float e = expf(static_cast<float>(G[t]));
    sk = e * rk * sk;
    sq = e * rq * sq + hq;
    sk += hk;
    for (int d = 1; d < 4; d *= 2) {
      sk += __shfl_xor_sync(0xffffffffu, sk, d);
      sq += __shfl_xor_sync(0xffffffffu, sq, d);
    }
    float v;
    if (conv) {
      v = conv_silu(p, n, t, parent, slot, 2 * p.H * K + hv * p.V + row);
    } else {
      v = load_float(p.v, token * p.v_stride_token + hv * p.v_stride_head + row, p.act_dtype);
    }
    const float u = beta[t] * (v - sk);
    if (part == 0) {
      us[t][tid / 4] = u;
      p.stash.u[n * p.stash.u_stride_row + hv * p.stash.u_stride_head + static_cast<int64_t>(t) * p.V + row] = u;
      store_float(p.out, token * p.out_stride_token + hv * p.out_stride_head + row, fmaf(mq[t], u, sq), p.out_dtype);
    }
  }
  if (conv && p.stash.conv != nullptr) {
    for (int i = tid; i < T * kRows; i += kThreads) {
      int c = 2 * p.H * K + hv * p.V + slab * kRows + i % kRows, t = i / kRows;
      copy_raw(p, n, t, c);
    }
    if (first_head && slab == 0) {
      for (int i = tid; i < T * 2 * K; i += kThreads) {
        int c = i % (2 * K), t = i / (2 * K);
        copy_raw(p, n, t, c < K ? h * K + c : p.H * K + h * K + c - K);
      }
    }
  }
}

}  // namespace

cudaError_t code_capability(int& capability) {
  cudaFuncAttributes a;
  const cudaError_t e = cudaFuncGetAttributes(&a, verify_generic_kernel<64>);
  capability = e == cudaSuccess ? a.ptxVersion : 0;
  return e;
}

int launch_verify_generic(const VerifyParams& p, cudaStream_t stream) {
  const int64_t blocks = static_cast<int64_t>(p.N) * p.HV * (p.V / kRows);
  if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  switch (p.K) {
    case 64: verify_generic_kernel<64><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(p); break;
    case 128: verify_generic_kernel<128><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(p); break;
    case 256: verify_generic_kernel<256><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(p); break;
    default: return cudaErrorInvalidValue;
  }
  return cudaGetLastError();
}

}  // namespace cuda
}  // namespace treewy
