// What the CPU launchers (cpu_launch.cpp) and the kernels (cpu_kernels.cpp) agree on. The kernels are compiled once per
// instruction set with the same source, each in its own namespace; the launchers pick one table of functions at run time.
#pragma once

#include <cstdint>

#include "params.h"

namespace treewy {

// One request after its in-tensor values were checked.
struct Row {
  bool live = false;             // false: padding or fault; verify writes zeros to out and nothing else
  int64_t slot = -1;
  int32_t accepted = -1;         // commit only
  int64_t track_slot = -1;       // commit only; -1: no track
  int32_t track_node = -1;
  const uint8_t* anc = nullptr;  // strict ancestors of node t, root first: anc[anc_begin[t] .. anc_begin[t+1])
  const int32_t* anc_begin = nullptr;  // [T+1]
};

// A verify task: value rows [v0, v1) of value heads [hv0, hv1), all of key head h of request n. Value rows do not depend
// on each other, so any split is valid; keys, norms and Gram entries are recomputed by each task of a key head.
struct VerifyTask {
  int32_t n, h, hv0, hv1, v0, v1;
};

struct CommitTask {
  int32_t l, n, hv, v0, v1;
};

struct CpuKernels {
  const char* name;
  int64_t (*verify_workspace)(const VerifyParams& p);  // bytes per thread, 64-byte aligned
  void (*verify)(const VerifyParams& p, const Row& row, const VerifyTask& task, void* workspace);
  int64_t (*commit_workspace)(const CommitParams& p);
  void (*commit)(const CommitParams& p, const Row& row, const CommitTask& task, void* workspace);
};

extern const CpuKernels kernels_baseline;
#ifdef TREEWY_X86_VARIANTS
extern const CpuKernels kernels_avx2;
extern const CpuKernels kernels_avx512;
#endif

}  // namespace treewy
