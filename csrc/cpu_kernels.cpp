// CPU kernels; see cpu_kernels.h. Compiled once per instruction set (TREEWY_ISA: baseline, avx2, avx512). No template or
// inline function of the standard library is used here: the linker would keep one copy for all instruction sets.
//
// verify, for one key head and its value heads (formulas: docs of reference.py, paper arXiv 2412.06464):
//   1. load or convolve q and k, normalise, pack all 2T of them as columns of panels
//   2. Gram entries k_j.k_t and k_j.q_t, for ancestor pairs only
//   3. per value head and block of value rows: S0 times all columns in one pass over the state, then the solve and the
//      outputs with vectors along the value rows, each node walking the list of its ancestors
// Decays of ancestor pairs are products of e^g along the path, as in the recurrence: no difference of large sums, no
// exponential a pair, and what is not an ancestor is never touched, so infinities of other branches cannot leak.

#include "cpu_kernels.h"

#include "cpu_convert.h"
#include "cpu_vector.h"

#ifndef TREEWY_ISA
#define TREEWY_ISA baseline
#endif
#define TREEWY_CAT_(a, b) a##b
#define TREEWY_CAT(a, b) TREEWY_CAT_(a, b)
#define TREEWY_STR_(a) #a
#define TREEWY_STR(a) TREEWY_STR_(a)

namespace treewy {
namespace {

constexpr int NV = 4;        // vectors of value rows in the solve: 8 accumulators, as many as hide the latency of FMA
constexpr int VB = NV * VL;  // value rows of a block; 64 at most, so that it divides every V
constexpr int MR = 4;        // state rows of the small matrix kernel with two vectors of columns
// Sums over K are taken in pieces of this length: one long float32 sum has twice the error, and the yardstick of the
// tests (a library's dot product) sums in pieces too.
constexpr int kSumPiece = 32;
static_assert(VB <= 64 && VB % 8 == 0, "a block of value rows divides V = 64");

class Carver {
 public:
  explicit Carver(void* base) : base_(static_cast<char*>(base)) {}
  float* floats(int64_t n) {
    float* found = reinterpret_cast<float*>(base_ + used_);
    used_ += (n * 4 + 63) / 64 * 64;
    return found;
  }
  int64_t used() const { return used_; }

 private:
  char* base_;
  int64_t used_ = 0;
};

int columns_per_panel(int T) { return 2 * T <= VL ? VL : 2 * VL; }

struct VerifyWork {
  int NR, panels;
  float *khat, *qhat;          // [T, K]
  float* panel;                // [panels, K, NR] k of all nodes, then q of all nodes, then zeros
  float *kk, *kq;              // per ancestor pair: k_j.k_t, k_j.q_t
  float* kq_self;              // [T] k_t.q_t
  float *decay, *ckk, *ckq;    // per ancestor pair: e^{G_t-G_j}, and times the Gram entries
  float *eg, *eG, *beta;       // [T]
  float* sblock;               // [VB, K] state rows in float32
  float* y;                    // [VB, NR]
  float* yt;                   // [panels * NR, VB]
  float* u;                    // [T, VB]
  float *conv_w, *conv_s, *conv_x, *conv_v;  // [W, K] weights, [W, K] bias and state, [T, K] raw inputs, [T, V] outputs
  float* line;                 // [K]
  uint16_t* narrow;            // [256]
  int64_t bytes;

  VerifyWork(const VerifyParams& p, void* base) {
    const int64_t T = p.T, K = p.K, pairs = T * (T - 1) / 2 + 1;
    Carver c(base);
    NR = columns_per_panel(p.T), panels = static_cast<int>((2 * T + NR - 1) / NR);
    khat = c.floats(T * K), qhat = c.floats(T * K);
    panel = c.floats(panels * K * NR);
    kk = c.floats(pairs), kq = c.floats(pairs), kq_self = c.floats(T);
    decay = c.floats(pairs), ckk = c.floats(pairs), ckq = c.floats(pairs);
    eg = c.floats(T), eG = c.floats(T), beta = c.floats(T);
    sblock = c.floats(VB * K), y = c.floats(VB * NR), yt = c.floats(panels * NR * VB), u = c.floats(T * VB);
    if (p.mixed_qkv) {
      conv_w = c.floats(kMaxConvWidth * K), conv_s = c.floats(kMaxConvWidth * K), conv_x = c.floats(T * K);
      conv_v = c.floats(T * p.V);
    }
    line = c.floats(256);
    narrow = reinterpret_cast<uint16_t*>(c.floats(128));
    bytes = c.used();
  }
};

int64_t verify_workspace(const VerifyParams& p) { return VerifyWork(p, nullptr).bytes; }

// ---- step 1 ------------------------------------------------------------------------------------------------------

// Causal convolution over ancestors, SiLU and rounding for `count` channels from `channel` on, of all nodes: to[t * count].
void convolve(const VerifyParams& p, const Row& row, const VerifyWork& w, int32_t n, int64_t channel, int count, float* to) {
  const int W = p.W;
  float* bias = w.conv_s + (kMaxConvWidth - 1) * count;
  for (int i = 0; i < count; ++i) {
    for (int x = 0; x < W; ++x)
      w.conv_w[x * count + i] = load_scalar(p.conv_weight, p.act_dtype, (channel + i) * p.conv_weight_stride_channel + x);
    for (int x = 0; x < W - 1; ++x)
      w.conv_s[x * count + i] = load_scalar(p.conv_state, p.act_dtype,
                                            row.slot * p.conv_state_stride_slot + (channel + i) * p.conv_state_stride_channel +
                                                x * p.conv_state_stride_column);
    bias[i] = p.conv_bias ? load_scalar(p.conv_bias, p.act_dtype, channel + i) : 0.f;
  }
  for (int t = 0; t < p.T; ++t)
    load_row(p.mixed_qkv, p.act_dtype, (static_cast<int64_t>(n) * p.T + t) * p.mixed_qkv_stride_token + channel,
             w.conv_x + static_cast<int64_t>(t) * count, count);
  for (int t = 0; t < p.T; ++t) {
    const int begin = row.anc_begin[t], depth = row.anc_begin[t + 1] - begin;
    // Input of each tap: a node on the path, or a column of the state that lies (back - depth) tokens before the root.
    const float* tap[kMaxConvWidth];
    for (int x = 0; x < W; ++x) {
      const int back = W - 1 - x;
      if (back == 0) tap[x] = w.conv_x + static_cast<int64_t>(t) * count;
      else if (back <= depth) tap[x] = w.conv_x + static_cast<int64_t>(row.anc[begin + depth - back]) * count;
      else tap[x] = w.conv_s + (W - 1 - (back - depth)) * count;
    }
    float* out = to + static_cast<int64_t>(t) * count;
    for (int i = 0; i < count; i += VL) {
      vf sum = load(bias + i);
      for (int x = 0; x < W; ++x) sum += load(tap[x] + i) * load(w.conv_w + x * count + i);
      store(out + i, sum / (1.f + vexp(-sum)));
    }
    round_row(out, p.act_dtype, count, w.narrow);
  }
}

// 1 / sqrt(sum x^2 + 1e-6)
float inverse_norm(const float* x, int n) {
  vf sum = {};
  for (int i = 0; i < n; i += VL) sum += load(x + i) * load(x + i);
  return 1.f / sqrtf(sum_lanes(sum) + 1e-6f);
}

void scale_row(float* x, float by, int n) {
  for (int i = 0; i < n; i += VL) store(x + i, load(x + i) * by);
}

void prepare_keys(const VerifyParams& p, const Row& row, const VerifyTask& task, const VerifyWork& w, bool write_stash) {
  const int T = p.T, K = p.K;
  const int64_t token0 = static_cast<int64_t>(task.n) * T;
  if (p.mixed_qkv) {
    convolve(p, row, w, task.n, static_cast<int64_t>(task.h) * K, K, w.qhat);
    convolve(p, row, w, task.n, static_cast<int64_t>(p.H + task.h) * K, K, w.khat);
  } else {
    for (int t = 0; t < T; ++t) {
      load_row(p.q, p.act_dtype, (token0 + t) * p.q_stride_token + task.h * p.q_stride_head, w.qhat + static_cast<int64_t>(t) * K, K);
      load_row(p.k, p.act_dtype, (token0 + t) * p.k_stride_token + task.h * p.k_stride_head, w.khat + static_cast<int64_t>(t) * K, K);
    }
  }
  for (int t = 0; t < T; ++t) {
    float *k = w.khat + static_cast<int64_t>(t) * K, *q = w.qhat + static_cast<int64_t>(t) * K;
    const float rk = inverse_norm(k, K), rq = inverse_norm(q, K);
    if (write_stash) {
      store_row(p.stash.k, p.act_dtype,
                task.n * p.stash.k_stride_row + task.h * p.stash.k_stride_head + static_cast<int64_t>(t) * K, k, K);
      p.stash.k_rnorm[task.n * p.stash.k_rnorm_stride_row + task.h * p.stash.k_rnorm_stride_head + t] = rk;
    }
    scale_row(k, rk, K);
    scale_row(q, rq, K);
    scale_row(q, p.scale, K);
  }
  for (int c = 0; c < w.panels * w.NR; ++c) {
    float* to = w.panel + static_cast<int64_t>(c / w.NR) * K * w.NR + c % w.NR;
    const float* from = c < T ? w.khat + static_cast<int64_t>(c) * K : w.qhat + static_cast<int64_t>(c - T) * K;
    if (c < 2 * T) {
      for (int i = 0; i < K; ++i) to[static_cast<int64_t>(i) * w.NR] = from[i];
    } else {
      for (int i = 0; i < K; ++i) to[static_cast<int64_t>(i) * w.NR] = 0.f;
    }
  }
}

// ---- step 2 ------------------------------------------------------------------------------------------------------

void gram(const VerifyParams& p, const Row& row, const VerifyWork& w) {
  const int K = p.K;
  for (int t = 0; t < p.T; ++t) {
    const float *kt = w.khat + static_cast<int64_t>(t) * K, *qt = w.qhat + static_cast<int64_t>(t) * K;
    vf self = {};
    for (int i = 0; i < K; i += VL) self += load(kt + i) * load(qt + i);
    w.kq_self[t] = sum_lanes(self);
    const int end = row.anc_begin[t + 1];
    int x = row.anc_begin[t];
    // Four ancestors at a time: eight accumulators a pass over K.
    for (; x < end; x += 4) {
      const int many = end - x < 4 ? end - x : 4;
      const float* kj[4];
      for (int i = 0; i < 4; ++i) kj[i] = w.khat + static_cast<int64_t>(row.anc[x + (i < many ? i : many - 1)]) * K;
      vf kk[4] = {}, kq[4] = {};
      for (int i = 0; i < K; i += VL) {
        const vf a = load(kt + i), b = load(qt + i);
        for (int j = 0; j < 4; ++j) {
          const vf c = load(kj[j] + i);
          kk[j] += c * a;
          kq[j] += c * b;
        }
      }
      float skk[4], skq[4];
      sum_lanes4(kk, skk);
      sum_lanes4(kq, skq);
      for (int i = 0; i < many; ++i) w.kk[x + i] = skk[i], w.kq[x + i] = skq[i];
    }
  }
}

// ---- step 3 ------------------------------------------------------------------------------------------------------

void gates(const VerifyParams& p, const Row& row, const VerifyTask& task, const VerifyWork& w, int hv, bool write_stash) {
  const double A = exp(static_cast<double>(load_scalar(p.A_log, p.A_log_dtype, hv)));
  const float bias = load_scalar(p.dt_bias, p.dt_bias_dtype, hv);
  for (int t = 0; t < p.T; ++t) {
    const int64_t token = static_cast<int64_t>(task.n) * p.T + t;
    const double x = static_cast<double>(load_scalar(p.a, p.act_dtype, token * p.a_stride_token + hv)) + bias;
    const double g = -A * (x > 20. ? x : log1p(exp(x)));
    w.eg[t] = static_cast<float>(exp(g));
    w.beta[t] = static_cast<float>(1. / (1. + exp(-static_cast<double>(load_scalar(p.b, p.act_dtype, token * p.b_stride_token + hv)))));
    if (write_stash) p.stash.g[task.n * p.stash.g_stride_row + hv * p.stash.g_stride_head + t] = static_cast<float>(g);

    const int begin = row.anc_begin[t], depth = row.anc_begin[t + 1] - begin;
    if (depth == 0) {
      w.eG[t] = w.eg[t];
      continue;
    }
    const int parent = row.anc[begin + depth - 1];
    const float e = w.eg[t];
    w.eG[t] = w.eG[parent] * e;
    const float* above = w.decay + row.anc_begin[parent];
    float* here = w.decay + begin;
    for (int i = 0; i < depth - 1; ++i) here[i] = above[i] * e;
    here[depth - 1] = e;
    for (int i = 0; i < depth; ++i) w.ckk[begin + i] = here[i] * w.kk[begin + i], w.ckq[begin + i] = here[i] * w.kq[begin + i];
  }
}

// y[r, c] = sum over k of s[r, k] * panel[k, c]: R rows, C vectors of columns.
template <int R, int C>
inline void multiply(const float* s, int64_t s_stride, const float* panel, int K, float* y) {
  for (int piece = 0; piece < K; piece += kSumPiece) {
    vf acc[R][C] = {};
    const float* b = panel + static_cast<int64_t>(piece) * C * VL;
    const float* a = s + piece;
    for (int k = 0; k < kSumPiece; ++k, b += C * VL) {
      vf x[C];
      for (int c = 0; c < C; ++c) x[c] = load(b + c * VL);
      for (int r = 0; r < R; ++r) {
        const vf f = splat(a[r * s_stride + k]);
        for (int c = 0; c < C; ++c) acc[r][c] += f * x[c];
      }
    }
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < C; ++c) {
        float* out = y + (r * C + c) * VL;
        store(out, piece == 0 ? acc[r][c] : load(out) + acc[r][c]);
      }
  }
}

// The solve and the outputs of one block of value rows, v0 .. v0+VB.
void solve(const VerifyParams& p, const Row& row, const VerifyTask& task, const VerifyWork& w, int hv, int v0) {
  const int T = p.T;
  float vline[VB], oline[VB];
  for (int t = 0; t < T; ++t) {
    const int64_t token = static_cast<int64_t>(task.n) * T + t;
    const float* v = vline;
    if (p.mixed_qkv) v = w.conv_v + static_cast<int64_t>(t) * p.V + v0;
    else load_row(p.v, p.act_dtype, token * p.v_stride_token + hv * p.v_stride_head + v0, vline, VB);
    const float *sk = w.yt + static_cast<int64_t>(t) * VB, *sq = w.yt + static_cast<int64_t>(T + t) * VB;
    const float eG = w.eG[t];
    vf u[NV], o[NV];
    for (int i = 0; i < NV; ++i) u[i] = load(v + i * VL) - eG * load(sk + i * VL), o[i] = eG * load(sq + i * VL);
    const int end = row.anc_begin[t + 1];
    for (int x = row.anc_begin[t]; x < end;) {
      const int stop = end - x < kSumPiece ? end : x + kSumPiece;
      vf pu[NV] = {}, po[NV] = {};
      for (; x < stop; ++x) {
        const float* uj = w.u + static_cast<int64_t>(row.anc[x]) * VB;
        const vf ckk = splat(w.ckk[x]), ckq = splat(w.ckq[x]);
        for (int i = 0; i < NV; ++i) {
          const vf c = load(uj + i * VL);
          pu[i] += ckk * c;
          po[i] += ckq * c;
        }
      }
      for (int i = 0; i < NV; ++i) u[i] -= pu[i], o[i] += po[i];
    }
    const float beta = w.beta[t], self = w.kq_self[t];
    float* mine = w.u + static_cast<int64_t>(t) * VB;
    for (int i = 0; i < NV; ++i) {
      u[i] *= beta;
      o[i] += self * u[i];
      store(mine + i * VL, u[i]);
      store(oline + i * VL, o[i]);
    }
    row_from_float(mine, p.stash.u + task.n * p.stash.u_stride_row + hv * p.stash.u_stride_head + static_cast<int64_t>(t) * p.V + v0, VB);
    store_row(p.out, p.out_dtype, token * p.out_stride_token + hv * p.out_stride_head + v0, oline, VB);
  }
}

void verify(const VerifyParams& p, const Row& row, const VerifyTask& task, void* workspace) {
  const VerifyWork w(p, workspace);
  const int K = p.K, group = p.HV / p.H;
  prepare_keys(p, row, task, w, task.hv0 == task.h * group && task.v0 == 0);
  gram(p, row, w);
  for (int hv = task.hv0; hv < task.hv1; ++hv) {
    gates(p, row, task, w, hv, task.v0 == 0);
    if (p.mixed_qkv)
      for (int v = 0; v < p.V; v += K)  // K channels at a time fit the scratch; V = K
        convolve(p, row, w, task.n, 2 * static_cast<int64_t>(p.H) * K + static_cast<int64_t>(hv) * p.V + v, K, w.conv_v);
    for (int v0 = task.v0; v0 < task.v1; v0 += VB) {
      const int64_t at = row.slot * p.state_stride_slot + hv * p.state_stride_head + static_cast<int64_t>(v0) * K;
      const float* s = static_cast<const float*>(p.state) + at;
      if (p.state_dtype != DType::kFloat32) {
        load_row(p.state, p.state_dtype, at, w.sblock, VB * K);
        s = w.sblock;
      }
      for (int i = 0; i < w.panels; ++i) {
        const float* panel = w.panel + static_cast<int64_t>(i) * K * w.NR;
        if (w.NR == VL) {
          for (int r = 0; r < VB; r += 2 * MR) multiply<2 * MR, 1>(s + static_cast<int64_t>(r) * K, K, panel, K, w.y + r * w.NR);
        } else {
          for (int r = 0; r < VB; r += MR) multiply<MR, 2>(s + static_cast<int64_t>(r) * K, K, panel, K, w.y + r * w.NR);
        }
        transpose(w.y, w.NR, VB, w.NR, w.yt + static_cast<int64_t>(i) * w.NR * VB, VB);
      }
      solve(p, row, task, w, hv, v0);
    }
  }
}

// ---- commit ------------------------------------------------------------------------------------------------------

struct CommitWork {
  float* keys;    // [T, K] keys of the path times e^{G_a-G_j} and their inverse norms
  float* sblock;  // [MR, K]
  int64_t bytes;
  CommitWork(const CommitParams& p, void* base) {
    Carver c(base);
    keys = c.floats(static_cast<int64_t>(p.T) * p.K);
    sblock = c.floats(MR * p.K);
    bytes = c.used();
  }
};

int64_t commit_workspace(const CommitParams& p) { return CommitWork(p, nullptr).bytes; }

// MR state rows: s = eG * s + sum over the path of u_j[row] * keys[j].
void add_path(const float* s, float* to, int K, float eG, const float* keys, const float* u, const int64_t* u_node, int nodes) {
  constexpr int C = 2;
  for (int k = 0; k < K; k += C * VL) {
    vf acc[MR][C];
    for (int r = 0; r < MR; ++r)
      for (int c = 0; c < C; ++c) acc[r][c] = eG * load(s + static_cast<int64_t>(r) * K + k + c * VL);
    for (int x = 0; x < nodes; ++x) {
      vf key[C];
      for (int c = 0; c < C; ++c) key[c] = load(keys + static_cast<int64_t>(x) * K + k + c * VL);
      for (int r = 0; r < MR; ++r) {
        const vf f = splat(u[u_node[x] + r]);
        for (int c = 0; c < C; ++c) acc[r][c] += f * key[c];
      }
    }
    for (int r = 0; r < MR; ++r)
      for (int c = 0; c < C; ++c) store(to + static_cast<int64_t>(r) * K + k + c * VL, acc[r][c]);
  }
}

void commit_node(const CommitParams& p, const Row& row, const CommitTask& task, int32_t a, int64_t slot, const CommitWork& w) {
  const int K = p.K, begin = row.anc_begin[a], depth = row.anc_begin[a + 1] - begin;
  const int64_t h = task.hv / (p.HV / p.H), n = task.n, l = task.l, hv = task.hv;
  const float* g = p.stash.g + l * p.g_stride_layer + n * p.stash.g_stride_row + hv * p.stash.g_stride_head;
  const float* rnorm = p.stash.k_rnorm + l * p.k_rnorm_stride_layer + n * p.stash.k_rnorm_stride_row + h * p.stash.k_rnorm_stride_head;
  const float* u = p.stash.u + l * p.u_stride_layer + n * p.stash.u_stride_row + hv * p.stash.u_stride_head;
  const int64_t k = l * p.k_stride_layer + n * p.stash.k_stride_row + h * p.stash.k_stride_head;
  int64_t u_node[kMaxNodes];
  double sum = 0;  // of g below node j on the path
  for (int i = depth; i >= 0; --i) {
    const int j = i < depth ? row.anc[begin + i] : a;
    float* key = w.keys + static_cast<int64_t>(i) * K;
    load_row(p.stash.k, p.act_dtype, k + static_cast<int64_t>(j) * K, key, K);
    scale_row(key, static_cast<float>(exp(sum)) * rnorm[j], K);
    u_node[i] = static_cast<int64_t>(j) * p.V;
    sum += g[j];
  }
  const float eG = static_cast<float>(exp(sum));
  for (int v = task.v0; v < task.v1; v += MR) {
    const int64_t at = l * p.state_stride_layer + hv * p.state_stride_head + static_cast<int64_t>(v) * K;
    const int64_t from = at + row.slot * p.state_stride_slot, to = at + slot * p.state_stride_slot;
    if (p.state_dtype == DType::kFloat32) {
      float* s = static_cast<float*>(p.state);
      add_path(s + from, s + to, K, eG, w.keys, u + v, u_node, depth + 1);
    } else {
      load_row(p.state, p.state_dtype, from, w.sblock, MR * K);
      add_path(w.sblock, w.sblock, K, eG, w.keys, u + v, u_node, depth + 1);
      store_row(p.state, p.state_dtype, to, w.sblock, MR * K);
    }
  }
}

void commit(const CommitParams& p, const Row& row, const CommitTask& task, void* workspace) {
  const CommitWork w(p, workspace);
  // The track state first: it is built from the old state.
  if (row.track_slot >= 0) commit_node(p, row, task, row.track_node, row.track_slot, w);
  commit_node(p, row, task, row.accepted, row.slot, w);
}

}  // namespace

extern const CpuKernels TREEWY_CAT(kernels_, TREEWY_ISA);
const CpuKernels TREEWY_CAT(kernels_, TREEWY_ISA) = {TREEWY_STR(TREEWY_ISA), verify_workspace, verify, commit_workspace, commit};

}  // namespace treewy
