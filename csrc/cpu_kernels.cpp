// CPU kernels; see cpu_kernels.h. Compiled once per instruction set (TREEWY_ISA: baseline, avx2, avx512).
#include "cpu_kernels.h"

#include <math.h>

#include "cpu_convert.h"

#ifndef TREEWY_ISA
#define TREEWY_ISA baseline
#endif
#define TREEWY_CAT_(a, b) a##b
#define TREEWY_CAT(a, b) TREEWY_CAT_(a, b)
#define TREEWY_STR_(a) #a
#define TREEWY_STR(a) TREEWY_STR_(a)

namespace treewy {
namespace {

int64_t verify_workspace(const VerifyParams& p) {
  const int64_t T = p.T, pairs = T * (T + 1) / 2;
  return 4 * (2 * T * p.K + 2 * pairs + 2 * pairs + pairs + 3 * T + T * p.V * 2) + 64;
}

float silu(float x) { return x / (1.f + expf(-x)); }

// One channel of the causal convolution over ancestors.
float conv_channel(const VerifyParams& p, const Row& row, int32_t n, int32_t t, int64_t d) {
  float sum = p.conv_bias ? load_scalar(p.conv_bias, p.act_dtype, d) : 0.f;
  const int32_t begin = row.anc_begin[t], depth = row.anc_begin[t + 1] - begin;
  for (int32_t w = 0; w < p.W; ++w) {
    const int32_t back = p.W - 1 - w;
    float x;
    if (back <= depth) {
      const int32_t node = back == 0 ? t : row.anc[begin + depth - back];
      x = load_scalar(p.mixed_qkv, p.act_dtype, (static_cast<int64_t>(n) * p.T + node) * p.mixed_qkv_stride_token + d);
    } else {
      const int32_t column = p.W - 1 - (back - depth);
      x = load_scalar(p.conv_state, p.act_dtype, row.slot * p.conv_state_stride_slot + d * p.conv_state_stride_channel +
                                                     column * p.conv_state_stride_column);
    }
    sum += x * load_scalar(p.conv_weight, p.act_dtype, d * p.conv_weight_stride_channel + w);
  }
  const float y = silu(sum);
  if (p.act_dtype == DType::kBFloat16) {
    BFloat16 r;
    from_float(y, r);
    return to_float(r);
  }
  if (p.act_dtype == DType::kFloat16) {
    Float16 r;
    from_float(y, r);
    return to_float(r);
  }
  return y;
}

void verify(const VerifyParams& p, const Row& row, const VerifyTask& task, void* workspace) {
  const int32_t T = p.T, K = p.K, n = task.n, h = task.h;
  const int64_t pairs = static_cast<int64_t>(T) * (T + 1) / 2;
  float* khat = static_cast<float*>(workspace);
  float* qhat = khat + T * K;
  float* kk = qhat + T * K;
  float* kq = kk + pairs;
  float* decay = kq + pairs;
  float* ckk = decay + pairs;
  float* ckq = ckk + pairs;
  float* eG = ckq + pairs;
  float* beta = eG + T;
  float* u = beta + 2 * T;
  const int64_t group = p.HV / p.H;
  const bool first = task.hv0 == h * group && task.v0 == 0;
  const int64_t item_row = n * p.stash.k_stride_row + h * p.stash.k_stride_head;

  for (int32_t t = 0; t < T; ++t) {
    const int64_t token = static_cast<int64_t>(n) * T + t;
    float sk = 0, sq = 0;
    for (int32_t i = 0; i < K; ++i) {
      float kv, qv;
      if (p.mixed_qkv) {
        qv = conv_channel(p, row, n, t, static_cast<int64_t>(h) * K + i);
        kv = conv_channel(p, row, n, t, static_cast<int64_t>(p.H + h) * K + i);
      } else {
        qv = load_scalar(p.q, p.act_dtype, token * p.q_stride_token + h * p.q_stride_head + i);
        kv = load_scalar(p.k, p.act_dtype, token * p.k_stride_token + h * p.k_stride_head + i);
      }
      khat[t * K + i] = kv, qhat[t * K + i] = qv;
      sk += kv * kv, sq += qv * qv;
    }
    const float rk = 1.f / sqrtf(sk + 1e-6f), rq = 1.f / sqrtf(sq + 1e-6f);
    if (first) {
      for (int32_t i = 0; i < K; ++i) store_scalar(p.stash.k, p.act_dtype, item_row + t * K + i, khat[t * K + i]);
      p.stash.k_rnorm[n * p.stash.k_rnorm_stride_row + h * p.stash.k_rnorm_stride_head + t] = rk;
    }
    for (int32_t i = 0; i < K; ++i) khat[t * K + i] *= rk, qhat[t * K + i] *= rq * p.scale;
  }
  for (int32_t t = 0; t < T; ++t)
    for (int32_t x = row.anc_begin[t]; x < row.anc_begin[t + 1]; ++x) {
      const int32_t j = row.anc[x];
      float skk = 0, skq = 0;
      for (int32_t i = 0; i < K; ++i) skk += khat[t * K + i] * khat[j * K + i], skq += qhat[t * K + i] * khat[j * K + i];
      kk[x] = skk, kq[x] = skq;
    }
  for (int32_t hv = task.hv0; hv < task.hv1; ++hv) {
    const float A = expf(load_scalar(p.A_log, p.A_log_dtype, hv)), bias = load_scalar(p.dt_bias, p.dt_bias_dtype, hv);
    double G[kMaxNodes];
    for (int32_t t = 0; t < T; ++t) {
      const int64_t token = static_cast<int64_t>(n) * T + t;
      const float x = load_scalar(p.a, p.act_dtype, token * p.a_stride_token + hv) + bias;
      const double softplus = x > 20.f ? x : log1p(exp(static_cast<double>(x)));
      const double g = -static_cast<double>(A) * softplus;
      const int32_t begin = row.anc_begin[t], depth = row.anc_begin[t + 1] - begin;
      const int32_t parent = depth ? row.anc[begin + depth - 1] : -1;
      G[t] = g + (parent >= 0 ? G[parent] : 0.);
      eG[t] = static_cast<float>(exp(G[t]));
      beta[t] = 1.f / (1.f + expf(-load_scalar(p.b, p.act_dtype, token * p.b_stride_token + hv)));
      for (int32_t i = 0; i < depth; ++i) {
        const float e = static_cast<float>(exp(G[t] - G[row.anc[begin + i]]));
        ckk[begin + i] = e * kk[begin + i], ckq[begin + i] = e * kq[begin + i];
      }
      if (task.v0 == 0) p.stash.g[n * p.stash.g_stride_row + hv * p.stash.g_stride_head + t] = static_cast<float>(g);
    }
    for (int32_t v = task.v0; v < task.v1; ++v) {
      const int64_t srow = row.slot * p.state_stride_slot + hv * p.state_stride_head + static_cast<int64_t>(v) * K;
      for (int32_t t = 0; t < T; ++t) {
        const int64_t token = static_cast<int64_t>(n) * T + t;
        const float vt = p.mixed_qkv
                             ? conv_channel(p, row, n, t, 2 * static_cast<int64_t>(p.H) * K + static_cast<int64_t>(hv) * p.V + v)
                             : load_scalar(p.v, p.act_dtype, token * p.v_stride_token + hv * p.v_stride_head + v);
        float sk = 0, sq = 0, self = 0;
        for (int32_t i = 0; i < K; ++i) {
          const float s = load_scalar(p.state, p.state_dtype, srow + i);
          sk += s * khat[t * K + i], sq += s * qhat[t * K + i], self += khat[t * K + i] * qhat[t * K + i];
        }
        float uu = vt - eG[t] * sk, oo = eG[t] * sq;
        for (int32_t x = row.anc_begin[t]; x < row.anc_begin[t + 1]; ++x) uu -= ckk[x] * u[row.anc[x]], oo += ckq[x] * u[row.anc[x]];
        u[t] = beta[t] * uu;
        oo += self * u[t];
        p.stash.u[n * p.stash.u_stride_row + hv * p.stash.u_stride_head + static_cast<int64_t>(t) * p.V + v] = u[t];
        store_scalar(p.out, p.out_dtype, token * p.out_stride_token + hv * p.out_stride_head + v, oo);
      }
    }
  }
}

int64_t commit_workspace(const CommitParams& p) { return 4 * (2 * static_cast<int64_t>(p.T) + p.K) + 64; }

void commit_node(const CommitParams& p, const Row& row, const CommitTask& task, int32_t a, int64_t slot, float* work) {
  const int32_t begin = row.anc_begin[a], depth = row.anc_begin[a + 1] - begin;
  const int64_t h = task.hv / (p.HV / p.H);
  const float* g = p.stash.g + task.l * p.g_stride_layer + task.n * p.stash.g_stride_row + task.hv * p.stash.g_stride_head;
  const float* rnorm = p.stash.k_rnorm + task.l * p.k_rnorm_stride_layer + task.n * p.stash.k_rnorm_stride_row + h * p.stash.k_rnorm_stride_head;
  const float* u = p.stash.u + task.l * p.u_stride_layer + task.n * p.stash.u_stride_row + task.hv * p.stash.u_stride_head;
  const int64_t k = task.l * p.k_stride_layer + task.n * p.stash.k_stride_row + h * p.stash.k_stride_head;
  float* coef = work;
  float* line = coef + p.T;
  float sum = 0.f;
  for (int32_t i = depth; i >= 0; --i) {
    const int32_t j = i < depth ? row.anc[begin + i] : a;
    coef[i] = expf(sum) * rnorm[j];
    sum += g[j];
  }
  const float eG = expf(sum);
  for (int32_t v = task.v0; v < task.v1; ++v) {
    const int64_t head = task.l * p.state_stride_layer + task.hv * p.state_stride_head + static_cast<int64_t>(v) * p.K;
    for (int32_t i = 0; i < p.K; ++i) line[i] = eG * load_scalar(p.state, p.state_dtype, head + row.slot * p.state_stride_slot + i);
    for (int32_t x = 0; x <= depth; ++x) {
      const int32_t j = x < depth ? row.anc[begin + x] : a;
      const float c = coef[x] * u[static_cast<int64_t>(j) * p.V + v];
      for (int32_t i = 0; i < p.K; ++i) line[i] += c * load_scalar(p.stash.k, p.act_dtype, k + static_cast<int64_t>(j) * p.K + i);
    }
    for (int32_t i = 0; i < p.K; ++i) store_scalar(p.state, p.state_dtype, head + slot * p.state_stride_slot + i, line[i]);
  }
}

void commit(const CommitParams& p, const Row& row, const CommitTask& task, void* workspace) {
  // The track state first: it is built from the old state.
  if (row.track_slot >= 0) commit_node(p, row, task, row.track_node, row.track_slot, static_cast<float*>(workspace));
  commit_node(p, row, task, row.accepted, row.slot, static_cast<float*>(workspace));
}

}  // namespace

extern const CpuKernels TREEWY_CAT(kernels_, TREEWY_ISA);
const CpuKernels TREEWY_CAT(kernels_, TREEWY_ISA) = {TREEWY_STR(TREEWY_ISA), verify_workspace, verify, commit_workspace, commit};

}  // namespace treewy
