// Small calls of every launcher, for compute-sanitizer (see sanitize.sh). No tensor library: every buffer is an allocation
// of its own of exactly its size, filled by a copy from the host, so that memcheck sees every byte beyond an end and
// initcheck every read of something that nothing wrote. Results are compared with a plain double recurrence.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "params.h"

using namespace treewy;

#define CHECK(call)                                                                                     \
  do {                                                                                                  \
    int rc_ = int(call);                                                                                \
    if (rc_) {                                                                                          \
      std::printf("%s: %s\n", #call, cudaGetErrorString(cudaError_t(rc_)));                             \
      std::exit(3);                                                                                     \
    }                                                                                                   \
  } while (0)

namespace {

std::mt19937 rng(1);
float normal() {
  static std::normal_distribution<float> d;
  return d(rng);
}

size_t width(DType t) { return t == DType::kFloat32 ? 4 : 2; }
float load(const void* p, DType t, size_t i) {
  if (t == DType::kFloat32) return static_cast<const float*>(p)[i];
  if (t == DType::kBFloat16) return __bfloat162float(static_cast<const __nv_bfloat16*>(p)[i]);
  return __half2float(static_cast<const __half*>(p)[i]);
}
void store(void* p, DType t, size_t i, float x) {
  if (t == DType::kFloat32) static_cast<float*>(p)[i] = x;
  else if (t == DType::kBFloat16) static_cast<__nv_bfloat16*>(p)[i] = __float2bfloat16(x);
  else static_cast<__half*>(p)[i] = __float2half(x);
}

// A device buffer and what the host put into it.
struct Buffer {
  DType type;
  std::vector<char> host;
  void* device = nullptr;
  Buffer(size_t n, DType t, float scale = 0.f, float shift = 0.f) : type(t), host(n * width(t)) {
    for (size_t i = 0; i < n; ++i) store(host.data(), t, i, scale * normal() + shift);
    CHECK(cudaMalloc(&device, host.size()));
    if (scale != 0.f || shift != 0.f) CHECK(cudaMemcpy(device, host.data(), host.size(), cudaMemcpyHostToDevice));
  }
  Buffer(const Buffer&) = delete;
  ~Buffer() { cudaFree(device); }
  float operator[](size_t i) const { return load(host.data(), type, i); }
  size_t size() const { return host.size() / width(type); }
  void fetch() { CHECK(cudaMemcpy(host.data(), device, host.size(), cudaMemcpyDeviceToHost)); }
};

template <class T>
struct Ints {
  std::vector<T> host;
  T* device = nullptr;
  explicit Ints(std::vector<T> x) : host(std::move(x)) {
    CHECK(cudaMalloc(&device, host.size() * sizeof(T)));
    CHECK(cudaMemcpy(device, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  Ints(const Ints&) = delete;
  ~Ints() { cudaFree(device); }
  void fetch() { CHECK(cudaMemcpy(host.data(), device, host.size() * sizeof(T), cudaMemcpyDeviceToHost)); }
};

int failures = 0;

template <class F>
std::vector<int64_t> each_row(int N, F value) {
  std::vector<int64_t> x(N);
  for (int n = 0; n < N; ++n) x[n] = value(n);
  return x;
}

// Rows 0, 1 (padding) and N - 1 are compared with the recurrence.
void run(int T, int draft, int K, DType act, DType st, bool fused, int N = 3, int H = 1, int HV = 2) {
  const int V = K, W = 4, D = 2 * H * K + HV * V, slots = 2 * N, L = 1, Tc = T + 1, R = N + 1;
  char name[128];
  std::snprintf(name, sizeof name, "N=%d T=%d H=%d HV=%d draft=%d K=%d act=%d state=%d %s", N, T, H, HV, draft, K, int(act), int(st),
                fused ? "conv" : "plain");
  Buffer mixed(size_t(N) * T * D, act, 1.f), a(size_t(N) * T * HV, act, 1.f), b(size_t(N) * T * HV, act, 1.f);
  Buffer A_log(HV, DType::kFloat32, 0.5f, 0.5f), dt_bias(HV, DType::kFloat32, 0.5f, -3.f);
  Buffer weight(size_t(D) * W, act, 0.5f), bias(D, act, 0.1f), conv_state(size_t(L) * slots * D * (W - 1), act, 1.f);
  Buffer state(size_t(L) * slots * HV * V * K, st, 0.5f), out(size_t(N) * T * HV * V, DType::kFloat32);
  Buffer u(size_t(R) * HV * Tc * V, DType::kFloat32), k(size_t(R) * H * Tc * K, act), rnorm(size_t(R) * H * Tc, DType::kFloat32);
  Buffer g(size_t(R) * HV * Tc, DType::kFloat32), columns(size_t(R) * Tc * D, act);
  std::vector<int32_t> tree(size_t(N) * T), child(tree.size(), -1), sibling(tree.size(), -1);
  for (int n = 0; n < N; ++n) {
    std::vector<int> last(T, -1);
    for (int t = 0; t < T; ++t) {
      int p = t == 0 ? -1 : draft == 0 ? t - 1 : draft == 1 ? int(rng() % t) : 0;
      tree[size_t(n) * T + t] = p;
      if (p < 0) continue;
      (last[p] < 0 ? child[size_t(n) * T + p] : sibling[size_t(n) * T + last[p]]) = t;
      last[p] = t;
    }
  }
  Ints<int32_t> parents(tree), next(child), side(sibling), linked(std::vector<int32_t>(tree.size(), 7));
  Ints<int32_t> words(std::vector<int32_t>(tree.size() * ((T + 31) / 32), 7));
  Ints<int64_t> errors(std::vector<int64_t>(kErrorKinds, 0)), slot(each_row(N, [](int n) { return int64_t(n == 1 ? -1 : 2 * n + 1); }));
  Ints<int64_t> accepted(each_row(N, [&](int n) { return int64_t(n == 0 ? T - 1 : n == 1 ? 0 : rng() % T); }));
  Ints<int64_t> track_slot(each_row(N, [](int n) { return int64_t(n == 1 ? -1 : 2 * n); })), track_node(each_row(N, [](int n) { return int64_t(n == 0 ? 0 : -1); }));

  VerifyParams p;
  p.N = N, p.T = T, p.H = H, p.HV = HV, p.K = K, p.V = V, p.slots = slots, p.scale = 1.f / std::sqrt(float(K));
  p.act_dtype = act, p.state_dtype = st, p.out_dtype = DType::kFloat32;
  if (fused) {
    p.mixed_qkv = mixed.device, p.mixed_qkv_stride_token = D;
    p.conv_weight = weight.device, p.conv_weight_stride_channel = W, p.conv_bias = bias.device, p.W = W;
    p.conv_state = conv_state.device, p.conv_state_stride_slot = int64_t(D) * (W - 1), p.conv_state_stride_channel = W - 1;
    p.conv_state_stride_column = 1;
  } else {
    const char* base = static_cast<const char*>(mixed.device);
    p.q = base, p.k = base + size_t(H) * K * width(act), p.v = base + size_t(2) * H * K * width(act);
    p.q_stride_token = p.k_stride_token = p.v_stride_token = D, p.q_stride_head = p.k_stride_head = K, p.v_stride_head = V;
  }
  p.a = a.device, p.b = b.device, p.a_stride_token = p.b_stride_token = HV;
  p.A_log = A_log.device, p.dt_bias = dt_bias.device;
  p.state = state.device, p.state_stride_slot = int64_t(HV) * V * K, p.state_stride_head = int64_t(V) * K;
  p.state_indices = {slot.device, true};
  p.parents = draft == 0 ? nullptr : parents.device, p.parents_stride_row = T;
  p.out = out.device, p.out_stride_token = int64_t(HV) * V, p.out_stride_head = V;
  StashLayer s;
  s.u = static_cast<float*>(u.device), s.u_stride_row = int64_t(HV) * Tc * V, s.u_stride_head = int64_t(Tc) * V;
  s.k = k.device, s.k_stride_row = int64_t(H) * Tc * K, s.k_stride_head = int64_t(Tc) * K;
  s.k_rnorm = static_cast<float*>(rnorm.device), s.k_rnorm_stride_row = int64_t(H) * Tc, s.k_rnorm_stride_head = Tc;
  s.g = static_cast<float*>(g.device), s.g_stride_row = int64_t(HV) * Tc, s.g_stride_head = Tc;
  if (fused) s.conv = columns.device, s.conv_stride_row = int64_t(Tc) * D, s.conv_stride_node = D;
  p.stash = s, p.errors = errors.device;
  CHECK(launch_verify_cuda(p, nullptr));

  CommitParams c;
  c.L = L, c.N = N, c.T = T, c.H = H, c.HV = HV, c.K = K, c.V = V, c.slots = slots, c.act_dtype = act, c.state_dtype = st;
  c.conv_dtype = act, c.stash = s, c.parents = p.parents, c.parents_stride_row = T;
  c.u_stride_layer = int64_t(u.size()), c.k_stride_layer = int64_t(k.size()), c.k_rnorm_stride_layer = int64_t(rnorm.size());
  c.g_stride_layer = int64_t(g.size()), c.conv_stride_layer = int64_t(columns.size());
  c.accepted = {accepted.device, true}, c.state_indices = {slot.device, true};
  c.track_indices = {track_slot.device, true}, c.track_nodes = {track_node.device, true};
  c.state = state.device, c.state_stride_layer = int64_t(state.size()), c.state_stride_slot = p.state_stride_slot;
  c.state_stride_head = p.state_stride_head;
  if (fused) {
    c.D = D, c.W = W, c.conv_state = conv_state.device, c.conv_state_stride_layer = int64_t(conv_state.size());
    c.conv_state_stride_slot = int64_t(D) * (W - 1), c.conv_state_stride_channel = W - 1, c.conv_state_stride_column = 1;
  }
  c.errors = errors.device;
  CHECK(launch_commit_cuda(c, nullptr));

  if (draft == 1) {
    LinksParams l;
    l.N = N, l.T = T, l.next_token = next.device, l.next_sibling = side.device;
    l.next_token_stride_row = l.next_sibling_stride_row = T;
    l.parents = linked.device, l.parents_stride_row = T, l.ancestors = words.device, l.errors = errors.device;
    CHECK(launch_links_cuda(l, nullptr));
    linked.fetch();
    if (linked.host != tree) ++failures, std::printf("%s: parents_from_links differs\n", name);
  }
  CHECK(cudaDeviceSynchronize());

  // The recurrence in double, on the inputs as the device saw them. The states before the commit are in `before`.
  std::vector<double> before(state.size());
  for (size_t i = 0; i < before.size(); ++i) before[i] = state[i];
  std::vector<char> old_conv = conv_state.host;
  out.fetch(), state.fetch(), errors.fetch(), conv_state.fetch();
  for (int64_t e : errors.host)
    if (e) ++failures, std::printf("%s: an error was counted\n", name);
  double worst = 0, worst_state = 0;
  for (int n = 0; n < N; n = n < 2 ? (n == 1 && N > 2 ? N - 1 : n + 1) : n + 1) {
    const int64_t where = slot.host[n];
    if (where < 0) {
      for (size_t i = 0; i < size_t(T) * HV * V; ++i)
        if (out[size_t(n) * T * HV * V + i] != 0.f) { ++failures, std::printf("%s: padding row not zero\n", name); break; }
      continue;
    }
    auto raw = [&](int t, int ch) { return double(mixed[(size_t(n) * T + t) * D + ch]); };
    auto value = [&](int t, int ch) {  // after convolution and SiLU, rounded to the activation dtype
      if (!fused) return raw(t, ch);
      double y = bias[ch];
      int node = t;
      for (int w = W - 1; w >= 0; --w) {  // node < 0: column W-1 + node of the conv state
        double x = node >= 0 ? raw(node, ch) : load(old_conv.data(), act, (size_t(where) * D + ch) * (W - 1) + (W - 1 + node));
        y += x * weight[size_t(ch) * W + w];
        node = node > 0 ? tree[size_t(n) * T + node] : node - 1;
      }
      y = y / (1 + std::exp(-y));
      char rounded[4];
      store(rounded, act, 0, float(y));
      return double(load(rounded, act, 0));
    };
    for (int h = 0; h < HV; ++h) {
      const int kh = h / (HV / H);
      std::vector<std::vector<double>> S(T);
      double error = 0, size = 0;
      for (int t = 0; t < T; ++t) {
        const int parent = tree[size_t(n) * T + t];
        std::vector<double> from(size_t(V) * K);
        for (size_t i = 0; i < from.size(); ++i) from[i] = parent < 0 ? before[(size_t(where) * HV + h) * V * K + i] : S[parent][i];
        std::vector<double> q(K), key(K);
        double qq = 1e-6, kk = 1e-6;
        for (int i = 0; i < K; ++i) q[i] = value(t, kh * K + i), key[i] = value(t, (H + kh) * K + i), qq += q[i] * q[i], kk += key[i] * key[i];
        const size_t gate = (size_t(n) * T + t) * HV + h;
        const double x = double(a[gate]) + dt_bias[h], decay = std::exp(-std::exp(double(A_log[h])) * (x > 20 ? x : std::log1p(std::exp(x))));
        const double beta = 1 / (1 + std::exp(-double(b[gate])));
        for (int v = 0; v < V; ++v) {
          double dot = 0, o = 0;
          for (int i = 0; i < K; ++i) dot += (from[size_t(v) * K + i] *= decay) * key[i] / std::sqrt(kk);
          const double uu = beta * (value(t, 2 * H * K + h * V + v) - dot);
          for (int i = 0; i < K; ++i) o += (from[size_t(v) * K + i] += uu * key[i] / std::sqrt(kk)) * q[i] / std::sqrt(qq) * p.scale;
          const double got = out[((size_t(n) * T + t) * HV + h) * V + v];
          error += (got - o) * (got - o), size += o * o;
        }
        S[t] = from;
      }
      worst = std::fmax(worst, std::isfinite(error) ? std::sqrt(error / size) : 1e9);
      auto compare = [&](int64_t at, int64_t node) {
        if (at < 0 || node < 0) return;
        double e = 0, z = 0;
        for (size_t i = 0; i < size_t(V) * K; ++i) {
          const double got = state[(size_t(at) * HV + h) * V * K + i], want = S[node][i];
          e += (got - want) * (got - want), z += want * want;
        }
        worst_state = std::fmax(worst_state, std::isfinite(e) ? std::sqrt(e / z) : 1e9);
      };
      compare(where, accepted.host[n]);
      compare(track_slot.host[n], track_node.host[n]);
    }
  }
  const double flip = fused && act != DType::kFloat32 ? 2e-3 : 0, stored = st == DType::kFloat32 ? 1e-5 : 5e-3;
  if (!(worst <= 1e-5 + flip) || !(worst_state <= stored + flip))
    ++failures, std::printf("%s: out %.3g, state %.3g\n", name, worst, worst_state);
}

}  // namespace

int main(int argc, char** argv) {
  const int sizes[] = {1, 2, 3, 4, 7, 8, 9, 16, 17, 31, 32, 33, 48, 63, 64, 65, 100, 127, 128};
  const int most = argc > 1 ? std::atoi(argv[1]) : 128;
  const DType types[] = {DType::kBFloat16, DType::kFloat32, DType::kFloat16};
  int cases = 0;
  for (int i = 0; i < int(sizeof sizes / sizeof *sizes); ++i) {
    if (sizes[i] > most) continue;
    for (int draft = 0; draft < 3; ++draft)
      for (int fused = 0; fused < 2; ++fused, ++cases) {
        const int K = (i + draft) % 4 < 2 ? 128 : (i + draft) % 4 == 2 ? 64 : 256;
        run(sizes[i], draft, K, types[(i + draft + fused) % 3], types[(i + 2 * draft + 1) % 3], fused);
      }
  }
  // Large batches take other kernels: heads in pairs, rows that heads share. REQUESTS 0: none; by default one a multiprocessor.
  int requests = argc > 2 ? std::atoi(argv[2]) : -1;
  if (requests < 0) CHECK(cudaDeviceGetAttribute(&requests, cudaDevAttrMultiProcessorCount, 0));
  const int batch_sizes[] = {3, 8, 9, 16, 20, 32, 33, 56, 64};
  for (int i = 0; requests > 0 && i < int(sizeof batch_sizes / sizeof *batch_sizes); ++i) {
    if (batch_sizes[i] > most) continue;
    for (int fused = 0; fused < 2; ++fused, ++cases) {
      const bool many = (i + fused) % 2;
      run(batch_sizes[i], 1 + i % 2, 128, i % 2 ? DType::kBFloat16 : DType::kFloat16, types[(i + 1 + fused) % 3], fused, requests, many ? 2 : 1, many ? 8 : 2);
    }
  }
  std::printf("sanitize: %d cases, %d failures\n", cases, failures);
  return failures ? 1 : 0;
}
