// CPU launchers: check the values inside tensors, list every node's ancestors, split the work into tasks, run them on
// OpenMP threads (the pool that torch uses, so torch.set_num_threads holds) with the kernels of the best instruction set.

#ifdef _OPENMP
#include <omp.h>
#endif

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "cpu_convert.h"
#include "cpu_kernels.h"
#include "params.h"

namespace treewy {
namespace {

const CpuKernels& choose_kernels() {
#ifdef TREEWY_X86_VARIANTS
  __builtin_cpu_init();
  // TREEWY_CPU_ISA=baseline|avx2 lowers the choice, for tests and comparisons.
  const char* limit = std::getenv("TREEWY_CPU_ISA");
  const bool baseline = limit && !std::strcmp(limit, "baseline"), avx2_only = limit && !std::strcmp(limit, "avx2");
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (avx512 && !baseline && !avx2_only) return kernels_avx512;
  if (avx2 && !baseline) return kernels_avx2;
#endif
  return kernels_baseline;
}

const CpuKernels& kernels() {
  static const CpuKernels& chosen = choose_kernels();
  return chosen;
}

// Waking threads costs tens of microseconds when they sleep; calls with less work than this run on the calling thread.
constexpr int64_t kSerialMultiplyAdds = 1 << 20;  // verify: about 0.1 ms
constexpr int64_t kSerialElements = 1 << 17;      // commit: 0.5 MiB of float32 state

int max_threads() {
#ifdef _OPENMP
  return omp_in_parallel() ? 1 : omp_get_max_threads();
#else
  return 1;
#endif
}
int thread_index() {
#ifdef _OPENMP
  return omp_get_thread_num();
#else
  return 0;
#endif
}

// Ancestor lists of N trees; filled row by row.
class Trees {
 public:
  Trees(int32_t N, int32_t T) : T_(T), begin_(static_cast<size_t>(N) * (T + 1)), anc_(static_cast<size_t>(N) * T * (T - 1) / 2 + 1) {}

  // False if a parent is out of range. `parents` null: chain.
  bool fill(int32_t n, const int32_t* parents, Row& row) {
    int32_t* begin = begin_.data() + static_cast<size_t>(n) * (T_ + 1);
    uint8_t* anc = anc_.data() + static_cast<size_t>(n) * T_ * (T_ - 1) / 2;
    int32_t used = 0;
    for (int32_t t = 0; t < T_; ++t) {
      const int32_t parent = parents ? parents[t] : t - 1;
      if (parent < -1 || parent >= t) return false;
      begin[t] = used;
      if (parent >= 0) {
        const int32_t depth = begin[parent + 1] - begin[parent];
        std::memcpy(anc + used, anc + begin[parent], depth);
        anc[used + depth] = static_cast<uint8_t>(parent);
        used += depth + 1;
      }
      begin[t + 1] = used;
    }
    row.anc = anc, row.anc_begin = begin;
    return true;
  }

 private:
  int32_t T_;
  std::vector<int32_t> begin_;
  std::vector<uint8_t> anc_;
};

// Faults are looked for in the order that params.h names at ErrorKind; a row counts under the first that holds.
std::vector<Row> check_rows(const VerifyParams& p, Trees& trees) {
  std::vector<Row> rows(p.N);
  for (int32_t n = 0; n < p.N; ++n) {
    Row& row = rows[n];
    const int64_t slot = load_index(p.state_indices, n);
    if (slot == -1) continue;
    if (slot < 0 || slot >= p.slots) {
      ++p.errors[kErrorStateIndex];
    } else if (!trees.fill(n, p.parents ? p.parents + n * p.parents_stride_row : nullptr, row)) {
      ++p.errors[kErrorParent];
    } else {
      row.live = true, row.slot = slot;
    }
  }
  return rows;
}

bool on_path(const Row& row, int32_t node, int32_t candidate) {
  return candidate == node || std::find(row.anc + row.anc_begin[node], row.anc + row.anc_begin[node + 1],
                                        static_cast<uint8_t>(candidate)) != row.anc + row.anc_begin[node + 1];
}

std::vector<Row> check_rows(const CommitParams& p, Trees& trees) {
  std::vector<Row> rows(p.N);
  for (int32_t n = 0; n < p.N; ++n) {
    Row& row = rows[n];
    const int64_t slot = load_index(p.state_indices, n), accepted = load_index(p.accepted, n);
    if (slot == -1) continue;
    const int64_t track_slot = p.track_indices.data ? load_index(p.track_indices, n) : -1;
    const int64_t track_node = p.track_nodes.data ? load_index(p.track_nodes, n) : -1;
    // A track into the row's own slot would be overwritten at once by the accepted state: there is nothing to do for it.
    const bool track = track_slot >= 0 && track_node >= 0 && track_slot != slot;
    if (slot < 0 || slot >= p.slots) {
      ++p.errors[kErrorStateIndex];
    } else if (accepted == -1) {
      continue;
    } else if (accepted < 0 || accepted >= p.T) {
      ++p.errors[kErrorAcceptedNode];
    } else if (track_slot < -1 || track_slot >= p.slots || track_node < -1 || track_node >= p.T) {
      ++p.errors[kErrorTrack];
    } else if (!trees.fill(n, p.parents ? p.parents + n * p.parents_stride_row : nullptr, row)) {
      ++p.errors[kErrorParent];
    } else if (track && !on_path(row, static_cast<int32_t>(accepted), static_cast<int32_t>(track_node))) {
      ++p.errors[kErrorTrack];
    } else {
      row.live = true, row.slot = slot, row.accepted = static_cast<int32_t>(accepted);
      if (track) row.track_slot = track_slot, row.track_node = static_cast<int32_t>(track_node);
    }
  }
  return rows;
}

constexpr int32_t kLeastRows = 64;  // value rows that a task keeps at least: a block of the widest instruction set

// Per-thread scratch, 64-byte aligned.
class Scratch {
 public:
  Scratch(int64_t bytes, int threads)
      : stride_((bytes + 127) / 64 * 64), data_(new char[stride_ * threads + 64]) {}
  void* of_thread(int i) {
    const uintptr_t base = (reinterpret_cast<uintptr_t>(data_.get()) + 63) / 64 * 64;
    return reinterpret_cast<void*>(base + stride_ * i);
  }

 private:
  int64_t stride_;
  std::unique_ptr<char[]> data_;
};

template <typename Task, typename F>
void run_tasks(const std::vector<Task>& tasks, int threads, int64_t workspace, F&& f) {
  threads = std::max(1, std::min<int>(threads, static_cast<int>(tasks.size())));
  Scratch scratch(workspace, threads);
  const int64_t count = static_cast<int64_t>(tasks.size());
#ifdef _OPENMP
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
#endif
  for (int64_t i = 0; i < count; ++i) f(tasks[i], scratch.of_thread(thread_index()));
}

// A row that is not live: zeros in every output of the request.
void zero_outputs(const VerifyParams& p, int32_t n) {
  const int64_t item = size_of(p.out_dtype);
  for (int32_t t = 0; t < p.T; ++t)
    for (int32_t hv = 0; hv < p.HV; ++hv)
      std::memset(static_cast<char*>(p.out) +
                      ((static_cast<int64_t>(n) * p.T + t) * p.out_stride_token + hv * p.out_stride_head) * item,
                  0, p.V * item);
}

void copy_conv_columns(const VerifyParams& p, int32_t n) {
  const int64_t item = size_of(p.act_dtype), D = 2 * static_cast<int64_t>(p.H) * p.K + static_cast<int64_t>(p.HV) * p.V;
  for (int32_t t = 0; t < p.T; ++t)
    std::memcpy(static_cast<char*>(p.stash.conv) + (n * p.stash.conv_stride_row + t * p.stash.conv_stride_node) * item,
                static_cast<const char*>(p.mixed_qkv) + (static_cast<int64_t>(n) * p.T + t) * p.mixed_qkv_stride_token * item,
                D * item);
}

template <typename T>
void move_elements(const void* from, int64_t from_stride, void* to, int64_t to_stride, int32_t count) {
  const T* f = static_cast<const T*>(from);
  T* t = static_cast<T*>(to);
  for (int32_t i = 0; i < count; ++i) t[i * to_stride] = f[i * from_stride];
}
void move_column(const void* from, int64_t from_stride, void* to, int64_t to_stride, int64_t item, int32_t count) {
  if (item == 4) move_elements<uint32_t>(from, from_stride, to, to_stride, count);
  else move_elements<uint16_t>(from, from_stride, to, to_stride, count);
}

// New convolution window after node `a` into `slot`: the last W-1 raw inputs along root..a, older columns from the
// window of the row's slot, which may be the same.
void commit_conv(const CommitParams& p, int32_t l, int32_t n, const Row& row, int32_t a, int64_t slot) {
  const int32_t columns = p.W - 1, depth = row.anc_begin[a + 1] - row.anc_begin[a];
  const char* conv = static_cast<const char*>(p.stash.conv);
  const int64_t act = size_of(p.act_dtype), item = size_of(p.conv_dtype);
  char* layer = static_cast<char*>(p.conv_state) + l * p.conv_state_stride_layer * item;
  const char* from = layer + row.slot * p.conv_state_stride_slot * item;
  char* to = layer + slot * p.conv_state_stride_slot * item;
  const char* raw[kMaxConvWidth - 1];  // raw inputs of the newest nodes; null: an old column
  for (int32_t c = 0; c < columns; ++c) {
    const int32_t back = columns - 1 - c;  // 0: node a itself, 1: its parent, ...
    if (back > depth) {
      raw[c] = nullptr;
      continue;
    }
    const int32_t node = back == 0 ? a : row.anc[row.anc_begin[a + 1] - back];
    raw[c] = conv + (l * p.conv_stride_layer + n * p.stash.conv_stride_row + node * p.stash.conv_stride_node) * act;
  }
  // Old columns move left by the number of nodes on the path, depth + 1, so going from left to right never overwrites one
  // that is still needed.
  for (int32_t c = 0; c < columns; ++c) {
    char* out = to + c * p.conv_state_stride_column * item;
    if (!raw[c]) {
      const char* old = from + (c + depth + 1) * p.conv_state_stride_column * item;
      move_column(old, p.conv_state_stride_channel, out, p.conv_state_stride_channel, item, p.D);
    } else if (p.act_dtype == p.conv_dtype) {
      move_column(raw[c], 1, out, p.conv_state_stride_channel, item, p.D);
    } else {
      for (int32_t d = 0; d < p.D; ++d)
        store_scalar(out, p.conv_dtype, d * p.conv_state_stride_channel, load_scalar(raw[c], p.act_dtype, d));
    }
  }
}

}  // namespace

const char* cpu_isa() { return kernels().name; }

int launch_verify_cpu(const VerifyParams& p) {
  Trees trees(p.N, p.T);
  const std::vector<Row> rows = check_rows(p, trees);
  const int32_t group = p.HV / p.H;
  const int32_t live = static_cast<int32_t>(std::count_if(rows.begin(), rows.end(), [](const Row& r) { return r.live; }));
  // A task is a key head with all its value heads, unless that leaves threads idle: then one value head, then a part of
  // its value rows.
  const int64_t work = static_cast<int64_t>(live) * p.HV * p.V * p.K * 2 * p.T;
  const int64_t wanted = work < kSerialMultiplyAdds ? 1 : max_threads();
  const int32_t heads = static_cast<int64_t>(live) * p.H >= wanted ? group : 1;
  int32_t v_step = p.V;
  while (v_step > kLeastRows && static_cast<int64_t>(live) * (p.HV / heads) * (p.V / v_step) < wanted) v_step /= 2;

  std::vector<VerifyTask> tasks;
  for (int32_t n = 0; n < p.N; ++n) {
    if (!rows[n].live) {
      zero_outputs(p, n);
      continue;
    }
    for (int32_t h = 0; h < p.H; ++h)
      for (int32_t hv = h * group; hv < (h + 1) * group; hv += heads)
        for (int32_t v = 0; v < p.V; v += v_step) tasks.push_back({n, h, hv, hv + heads, v, v + v_step});
    if (p.stash.conv) tasks.push_back({n, -1, 0, 0, 0, 0});  // h = -1: the raw convolution columns of the request
  }
  const CpuKernels& kern = kernels();
  run_tasks(tasks, static_cast<int>(wanted), kern.verify_workspace(p),
            [&](const VerifyTask& task, void* work) {
              if (task.h >= 0) kern.verify(p, rows[task.n], task, work);
              else copy_conv_columns(p, task.n);
            });
  return 0;
}

int launch_commit_cpu(const CommitParams& p) {
  Trees trees(p.N, p.T);
  const std::vector<Row> rows = check_rows(p, trees);
  const int32_t live = static_cast<int32_t>(std::count_if(rows.begin(), rows.end(), [](const Row& r) { return r.live; }));
  const int64_t work = static_cast<int64_t>(live) * p.L * p.HV * p.V * p.K;
  const int64_t wanted = work < kSerialElements ? 1 : max_threads();
  int32_t v_step = p.V;
  while (v_step > kLeastRows && static_cast<int64_t>(live) * p.L * p.HV * (p.V / v_step) < wanted) v_step /= 2;

  std::vector<CommitTask> tasks;
  for (int32_t l = 0; l < p.L; ++l)
    for (int32_t n = 0; n < p.N; ++n) {
      if (!rows[n].live) continue;
      // hv = -1: the convolution windows of this layer and request.
      if (p.conv_state) tasks.push_back({l, n, -1, 0, 0});
      for (int32_t hv = 0; hv < p.HV; ++hv)
        for (int32_t v = 0; v < p.V; v += v_step) tasks.push_back({l, n, hv, v, v + v_step});
    }
  const CpuKernels& kern = kernels();
  run_tasks(tasks, static_cast<int>(wanted), kern.commit_workspace(p), [&](const CommitTask& task, void* work) {
    const Row& row = rows[task.n];
    if (task.hv >= 0) {
      kern.commit(p, row, task, work);
    } else {
      // The track window first: it is built from the old one.
      if (row.track_slot >= 0) commit_conv(p, task.l, task.n, row, row.track_node, row.track_slot);
      commit_conv(p, task.l, task.n, row, row.accepted, row.slot);
    }
  });
  return 0;
}

int launch_links_cpu(const LinksParams& p) {
  const auto load = [&](const void* base, int64_t stride, int32_t n, int32_t t) -> int64_t {
    const int64_t i = n * stride + t;
    return p.is_int64 ? static_cast<const int64_t*>(base)[i] : static_cast<const int32_t*>(base)[i];
  };
  const int32_t words = (p.T + 31) / 32;
  for (int32_t n = 0; n < p.N; ++n) {
    int32_t parents[kMaxNodes];
    bool reached[kMaxNodes] = {};
    std::fill(parents, parents + p.T, -1);
    bool good = true;
    for (int32_t t = 0; t < p.T && good; ++t) {
      const int64_t child = load(p.next_token, p.next_token_stride_row, n, t);
      const int64_t sibling = load(p.next_sibling, p.next_sibling_stride_row, n, t);
      good = child >= -1 && child < p.T && sibling >= -1 && sibling < p.T;
    }
    // A node is reached once at most, so a cycle among siblings ends the walk.
    for (int32_t t = 0; t < p.T && good; ++t)
      for (int64_t c = load(p.next_token, p.next_token_stride_row, n, t); c != -1 && good;
           c = load(p.next_sibling, p.next_sibling_stride_row, n, static_cast<int32_t>(c))) {
        good = c > t && !reached[c];
        reached[c] = true;
        parents[c] = t;
      }
    if (!good) {
      ++p.errors[kErrorLink];
      std::fill(parents, parents + p.T, -1);
    }
    std::copy(parents, parents + p.T, p.parents + n * p.parents_stride_row);
    if (!p.ancestors) continue;
    uint32_t* sets = reinterpret_cast<uint32_t*>(p.ancestors) + static_cast<int64_t>(n) * p.T * words;
    for (int32_t t = 0; t < p.T; ++t) {
      uint32_t* set = sets + t * words;
      if (parents[t] >= 0) std::copy(sets + parents[t] * words, sets + (parents[t] + 1) * words, set);
      else std::fill(set, set + words, 0u);
      set[t / 32] |= 1u << (t % 32);
    }
  }
  return 0;
}

}  // namespace treewy
