// The CPU kernels without torch: verify and commit against the recurrence in double. For machines and vector widths that
// the tests in Python do not reach; test_library.py runs it with the width of AVX-512. For another processor:
//
//   aarch64-linux-gnu-g++ -std=c++17 -O2 -static -Icsrc tests/ops/cpu_selfcheck.cpp csrc/cpu_kernels.cpp csrc/cpu_launch.cpp
//   qemu-aarch64-static ./a.out
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "cpu_convert.h"
#include "params.h"

using namespace treewy;

namespace {

std::mt19937 rng(1);
float normal() { return std::normal_distribution<float>()(rng); }

// A tensor in a storage type, and what it holds after rounding.
struct Stored {
  DType dtype;
  std::vector<char> data;
  Stored(DType d, size_t n, float scale) : dtype(d), data(n * size_of(d)) {
    for (size_t i = 0; i < n; ++i) store_scalar(data.data(), d, i, scale * normal());
  }
  double operator[](int64_t i) const { return load_scalar(data.data(), dtype, i); }
};

// Largest error of `out` and of the committed states, in units of the largest value.
bool check(int N, int T, int H, int HV, int K, DType act, DType state_dtype, bool conv, const std::vector<int32_t>& tree) {
  const int V = K, W = 4, slots = N + 2, D = 2 * H * K + HV * V;
  const size_t tokens = static_cast<size_t>(N) * T;
  Stored q(act, tokens * H * K, 1), k(act, tokens * H * K, 1), v(act, tokens * HV * V, 1), mixed(act, tokens * D, 1);
  Stored a(act, tokens * HV, 1), b(act, tokens * HV, 1), weight(act, D * W, .5f), bias(act, D, .2f), window(act, slots * D * (W - 1), 1);
  Stored A_log(DType::kFloat32, HV, 1), dt_bias(DType::kFloat32, HV, 2), state(state_dtype, static_cast<size_t>(slots) * HV * V * K, .5f);
  std::vector<int64_t> indices(N), accepted(N);
  for (int n = 0; n < N; ++n) indices[n] = N - n, accepted[n] = T - 1 - n % T;
  std::vector<int32_t> parents;
  for (int n = 0; n < N; ++n) parents.insert(parents.end(), tree.begin(), tree.end());
  std::vector<float> out(tokens * HV * V, NAN), u(tokens * HV * V, NAN), rnorm(tokens * H, NAN), g(tokens * HV, NAN);
  std::vector<char> stash_k(tokens * H * K * size_of(act)), stash_conv(tokens * D * size_of(act));
  int64_t errors[kErrorKinds] = {};

  VerifyParams p;
  p.N = N, p.T = T, p.H = H, p.HV = HV, p.K = K, p.V = V, p.slots = slots, p.scale = 1.f / std::sqrt(static_cast<float>(K));
  p.act_dtype = act, p.state_dtype = state_dtype, p.out_dtype = DType::kFloat32;
  if (conv) {
    p.mixed_qkv = mixed.data.data(), p.mixed_qkv_stride_token = D, p.W = W;
    p.conv_weight = weight.data.data(), p.conv_weight_stride_channel = W, p.conv_bias = bias.data.data();
    p.conv_state = window.data.data(), p.conv_state_stride_slot = D * (W - 1), p.conv_state_stride_channel = W - 1, p.conv_state_stride_column = 1;
    p.stash.conv = stash_conv.data(), p.stash.conv_stride_row = static_cast<int64_t>(T) * D, p.stash.conv_stride_node = D;
  } else {
    p.q = q.data.data(), p.k = k.data.data(), p.v = v.data.data();
    p.q_stride_token = p.k_stride_token = H * K, p.q_stride_head = p.k_stride_head = K, p.v_stride_token = HV * V, p.v_stride_head = V;
  }
  p.a = a.data.data(), p.b = b.data.data(), p.a_stride_token = p.b_stride_token = HV;
  p.A_log = A_log.data.data(), p.dt_bias = dt_bias.data.data();
  p.state = state.data.data(), p.state_stride_slot = static_cast<int64_t>(HV) * V * K, p.state_stride_head = V * K;
  p.state_indices = {indices.data(), true};
  p.parents = parents.data(), p.parents_stride_row = T;
  p.out = out.data(), p.out_stride_token = HV * V, p.out_stride_head = V;
  p.stash.u = u.data(), p.stash.u_stride_row = static_cast<int64_t>(HV) * T * V, p.stash.u_stride_head = static_cast<int64_t>(T) * V;
  p.stash.k = stash_k.data(), p.stash.k_stride_row = static_cast<int64_t>(H) * T * K, p.stash.k_stride_head = static_cast<int64_t>(T) * K;
  p.stash.k_rnorm = rnorm.data(), p.stash.k_rnorm_stride_row = H * T, p.stash.k_rnorm_stride_head = T;
  p.stash.g = g.data(), p.stash.g_stride_row = HV * T, p.stash.g_stride_head = T;
  p.errors = errors;
  const Stored before = state;
  launch_verify_cpu(p);

  CommitParams c;
  c.L = 1, c.N = N, c.T = T, c.H = H, c.HV = HV, c.K = K, c.V = V, c.slots = slots;
  c.act_dtype = act, c.state_dtype = state_dtype, c.stash = p.stash, c.parents = parents.data(), c.parents_stride_row = T;
  c.accepted = {accepted.data(), true}, c.state_indices = p.state_indices;
  c.state = state.data.data(), c.state_stride_slot = p.state_stride_slot, c.state_stride_head = p.state_stride_head, c.errors = errors;
  launch_commit_cpu(c);

  double worst = 0, size = 0;
  const auto channel = [&](int n, int t, int d) -> double {  // of the convolution, rounded
    double taps[W];
    int node = t, column = W - 1;
    for (int w = W - 1; w >= 0; --w) {
      if (node >= 0) taps[w] = mixed[(static_cast<int64_t>(n) * T + node) * D + d], node = tree[node];
      else taps[w] = window[(indices[n] * D + d) * (W - 1) + --column];
    }
    double sum = bias[d];
    for (int w = 0; w < W; ++w) sum += taps[w] * weight[d * W + w];
    char rounded[4];
    store_scalar(rounded, act, 0, static_cast<float>(sum / (1 + std::exp(-sum))));
    return load_scalar(rounded, act, 0);
  };
  std::vector<std::vector<double>> states(T, std::vector<double>(static_cast<size_t>(V) * K));
  std::vector<double> kh(K), qh(K);
  for (int n = 0; n < N; ++n)
    for (int hv = 0; hv < HV; ++hv) {
      const int h = hv / (HV / H);
      for (int t = 0; t < T; ++t) {
        const int64_t token = static_cast<int64_t>(n) * T + t;
        double kk = 1e-6, qq = 1e-6;
        for (int i = 0; i < K; ++i) {
          qh[i] = conv ? channel(n, t, h * K + i) : q[(token * H + h) * K + i];
          kh[i] = conv ? channel(n, t, (H + h) * K + i) : k[(token * H + h) * K + i];
          kk += kh[i] * kh[i], qq += qh[i] * qh[i];
        }
        for (int i = 0; i < K; ++i) kh[i] /= std::sqrt(kk), qh[i] *= p.scale / std::sqrt(qq);
        const double decay = std::exp(-std::exp(A_log[hv]) * std::log1p(std::exp(a[token * HV + hv] + dt_bias[hv])));
        const double beta = 1 / (1 + std::exp(-b[token * HV + hv]));
        for (int r = 0; r < V; ++r) {
          double* s = states[t].data() + static_cast<size_t>(r) * K;
          double dot = 0, o = 0;
          for (int i = 0; i < K; ++i) {
            const double parent = tree[t] >= 0 ? states[tree[t]][static_cast<size_t>(r) * K + i]
                                               : before[((indices[n] * HV + hv) * static_cast<int64_t>(V) + r) * K + i];
            s[i] = decay * parent, dot += s[i] * kh[i];
          }
          const double value = conv ? channel(n, t, 2 * H * K + hv * V + r) : v[(token * HV + hv) * V + r];
          const double x = beta * (value - dot);
          for (int i = 0; i < K; ++i) s[i] += x * kh[i], o += s[i] * qh[i];
          worst = std::fmax(worst, std::fabs(o - out[(token * HV + hv) * V + r]));
          size = std::fmax(size, std::fabs(o));
          if (!(std::fabs(out[(token * HV + hv) * V + r]) < 1e30)) worst = 1e30;  // fmax would pass over NaN
        }
      }
      for (int i = 0; i < V * K; ++i) {
        const double want = states[accepted[n]][i], got = state[(indices[n] * HV + hv) * static_cast<int64_t>(V) * K + i];
        const double storage = state_dtype == DType::kFloat32 ? 0 : state_dtype == DType::kBFloat16 ? 1. / 256 : 1. / 2048;
        if (!(std::fabs(want - got) <= 4e-6 + storage * (std::fabs(want) + 6.2e-5))) worst = 1e30;
      }
    }
  const bool good = worst <= 4e-6 * size && errors[0] + errors[1] + errors[2] + errors[3] == 0;
  std::printf("N %d T %d H %d HV %d K %d act %d state %d conv %d: error %.2g of %.2g %s\n", N, T, H, HV, K, static_cast<int>(act),
              static_cast<int>(state_dtype), conv, worst, size, good ? "" : "WRONG");
  return good;
}

}  // namespace

int main() {
  bool good = true;
  const std::vector<std::vector<int32_t>> trees = {{-1}, {-1, 0, 0, 1, 1}, {-1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17},
                                                   {-1, -1, 0, 0, 2, 1, 1, 3, 4}};
  const DType dtypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
  for (size_t i = 0; i < trees.size(); ++i)
    for (int d = 0; d < 3; ++d) {
      // float16 and bfloat16 convolutions may round a near tie differently in float and double: those run plain.
      good = check(2, static_cast<int>(trees[i].size()), 1, 2, 64, dtypes[d], dtypes[(d + i) % 3], d == 0, trees[i]) && good;
      good = check(1, static_cast<int>(trees[i].size()), 2, 2, i % 2 ? 256 : 128, dtypes[d], dtypes[d], false, trees[i]) && good;
    }
  std::puts(good ? "all good" : "FAILED");
  return good ? 0 : 1;
}
