// CUDA on the host, as much of it as the kernels of this package use: every thread of a block is a fiber, warps exchange
// values through mailboxes, asynchronous copies happen as late as their wait allows, shared memory starts as NaN, and device
// buffers end at an unmapped page. For correctness only; ptx.cuh beside this file stands in for the instructions.
#pragma once

#include <sys/mman.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <algorithm>
#include <functional>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
using std::max;
using std::min;

struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

typedef int cudaError_t;
typedef void* cudaStream_t;
enum {
  cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorInvalidConfiguration = 9, cudaErrorInvalidDeviceFunction = 98,
  cudaErrorNoKernelImageForDevice = 209, cudaErrorNotSupported = 801,
  cudaDevAttrMultiProcessorCount = 16, cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
  cudaFuncAttributeMaxDynamicSharedMemorySize = 8, cudaMemcpyHostToDevice = 1, cudaMemcpyDeviceToHost = 2
};
struct cudaFuncAttributes { int ptxVersion = 90, binaryVersion = 90; };

namespace emu {

constexpr int kMaxThreads = 1024, kSharedBytes = 227 * 1024;
constexpr size_t kStack = 512 * 1024;

extern "C" void emu_switch(void** save, void* load);
struct Copy { unsigned char* to; const unsigned char* from; int bytes; int group; };
struct Fiber {
  void* sp = nullptr;
  char* stack = nullptr;
  bool alive = false;
  int parity = 0;
  int group = 0;                 // copy groups committed
  std::vector<Copy> copies;
};
struct Warp { int arrived = 0; unsigned generation = 0; uint32_t mail[2][32][16]; };
struct Barrier { int arrived = 0; unsigned generation = 0; int any[2] = {0, 0}; };
struct State {
  Fiber fibers[kMaxThreads];
  Warp warps[kMaxThreads / 32];
  Barrier barriers[17];
  void* main_sp = nullptr;
  int current = 0, threads = 0, alive = 0;
  long switches = 0, idle = 0;
  dim3 grid, block, at;
  std::function<void()> body;
  unsigned rng = 1;
  unsigned random() { return rng = rng * 1664525u + 1013904223u, rng >> 8; }
};
inline State g;

inline void yield() {
  Fiber& from = g.fibers[g.current];
  int next = g.current;
  // Now and then some warps are passed over, so that their order is not always the same.
  if ((next & 31) == 31 && g.random() % 8 == 0) next += 32 * (g.random() % 4);
  do next = next + 1 >= g.threads ? 0 : next + 1; while (!g.fibers[next].alive);
  if (++g.switches > 4000000000l) std::fprintf(stderr, "emulator: no end in sight\n"), std::abort();
  if (next == g.current) return;
  g.current = next;
  emu_switch(&from.sp, g.fibers[next].sp);
}
inline void entry() {
  g.body();
  Fiber& me = g.fibers[g.current];
  me.alive = false;
  if (--g.alive == 0) emu_switch(&me.sp, g.main_sp);
  yield();
  std::abort();
}

extern unsigned char* shared_memory;

inline void run_block() {
  g.threads = g.alive = g.block.x;
  std::memset(shared_memory, 0xff, kSharedBytes);
  for (auto& w : g.warps) w.arrived = 0;
  for (auto& b : g.barriers) b.arrived = 0;
  for (int i = 0; i < g.threads; ++i) {
    Fiber& f = g.fibers[i];
    if (!f.stack) f.stack = static_cast<char*>(mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    f.alive = true, f.parity = f.group = 0, f.copies.clear();
    void** top = reinterpret_cast<void**>(f.stack + kStack - 64);
    *--top = nullptr;                                  // keeps the stack 16-byte aligned after the return below
    *--top = reinterpret_cast<void*>(&entry);
    for (int r = 0; r < 6; ++r) *--top = nullptr;      // six saved registers
    f.sp = top;
  }
  g.current = 0;
  emu_switch(&g.main_sp, g.fibers[0].sp);
}

template <class F>
void launch(F body, dim3 grid, dim3 block, size_t bytes = 0, void* = nullptr) {
  if (block.x % 32 || block.x > kMaxThreads || bytes > size_t(kSharedBytes)) std::fprintf(stderr, "emulator: bad launch\n"), std::abort();
  g.grid = grid, g.block = block, g.body = body;
  for (unsigned z = 0; z < grid.z; ++z)
    for (unsigned y = 0; y < grid.y; ++y)
      for (unsigned x = 0; x < grid.x; ++x) g.at = dim3(x, y, z), run_block();
}

inline int lane() { return g.current & 31; }
inline Warp& warp() { return g.warps[g.current >> 5]; }
inline void warp_sync() {
  Warp& w = warp();
  const unsigned generation = w.generation;
  if (++w.arrived == 32) w.arrived = 0, ++w.generation;
  else while (w.generation == generation) yield();
}
// Puts n words into this lane's mailbox and returns everyone's.
inline uint32_t (*exchange(const uint32_t* words, int n))[16] {
  Fiber& me = g.fibers[g.current];
  auto mail = warp().mail[me.parity ^= 1];
  for (int i = 0; i < n; ++i) mail[lane()][i] = words[i];
  warp_sync();
  return mail;
}
inline int barrier(int id, int threads, int x = 0) {
  Barrier& b = g.barriers[id];
  const unsigned generation = b.generation;
  if (b.arrived == 0) b.any[generation & 1] = 0;
  b.any[generation & 1] |= x;
  if (++b.arrived == threads) b.arrived = 0, ++b.generation;
  else while (b.generation == generation) yield();
  return b.any[generation & 1];
}
template <class T>
T shuffle(T x, int from) {
  uint32_t words[2] = {0, 0};
  std::memcpy(words, &x, sizeof x);
  auto mail = exchange(words, sizeof(T) > 4 ? 2 : 1);
  T y;
  std::memcpy(&y, mail[from & 31], sizeof y);
  return y;
}

}  // namespace emu

struct Index { unsigned x, y, z; };
#define threadIdx (Index{unsigned(emu::g.current), 0, 0})
#define blockIdx (emu::g.at)
#define blockDim (emu::g.block)
#define gridDim (emu::g.grid)

template <class T> T __shfl_sync(unsigned, T x, int from) { return emu::shuffle(x, from); }
template <class T> T __shfl_xor_sync(unsigned, T x, int d) { return emu::shuffle(x, emu::lane() ^ d); }
template <class T> T __shfl_up_sync(unsigned, T x, int d) { return emu::shuffle(x, emu::lane() >= d ? emu::lane() - d : emu::lane()); }
inline int __any_sync(unsigned, int x) {
  uint32_t w = x != 0;
  auto mail = emu::exchange(&w, 1);
  int any = 0;
  for (int i = 0; i < 32; ++i) any |= mail[i][0];
  return any;
}
inline void __syncwarp() { emu::warp_sync(); }
inline void __syncthreads() { emu::barrier(0, emu::g.threads); }
inline int __syncthreads_or(int x) { return emu::barrier(0, emu::g.threads, x != 0); }
template <class T> T atomicAdd(T* p, T x) { T old = *p; *p += x; return old; }
inline int atomicExch(int* p, int x) { int old = *p; *p = x; return old; }
template <class T> T __ldcs(const T* p) { return *p; }
template <class T> T __ldg(const T* p) { return *p; }
template <class T> void __stcs(T* p, T x) { *p = x; }
inline float __uint_as_float(uint32_t x) { float y; std::memcpy(&y, &x, 4); return y; }
inline uint32_t __float_as_uint(float x) { uint32_t y; std::memcpy(&y, &x, 4); return y; }
inline float rsqrtf(float x) { return 1.f / std::sqrt(x); }

inline const char* cudaGetErrorString(int e) { return e ? "error" : "no error"; }
inline int cudaGetLastError() { return 0; }
inline int cudaGetDevice(int* d) { return *d = 0; }
inline int emu_setting(const char* name, int fallback) { const char* x = std::getenv(name); return x ? std::atoi(x) : fallback; }
inline int cudaDeviceGetAttribute(int* v, int what, int) {
  *v = what == cudaDevAttrMultiProcessorCount ? emu_setting("EMULATE_SMS", 3) : emu_setting("EMULATE_SHARED", emu::kSharedBytes);
  return 0;
}
template <class K> int cudaFuncSetAttribute(K, int, int) { return 0; }
template <class K> int cudaFuncGetAttributes(cudaFuncAttributes* a, K) { *a = {}; return 0; }
template <class T> int cudaMalloc(T** p, size_t bytes) {
  const size_t page = 4096, whole = (bytes + 15) / 16 * 16, mapped = (whole + page - 1) / page * page;
  char* base = static_cast<char*>(mmap(nullptr, mapped + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  mprotect(base + mapped, page, PROT_NONE);
  *p = reinterpret_cast<T*>(base + mapped - whole);
  std::memset(static_cast<void*>(*p), 0xff, whole);
  return 0;
}
inline int cudaFree(void*) { return 0; }
inline int cudaMemcpy(void* to, const void* from, size_t n, int) { std::memcpy(to, from, n); return 0; }
inline int cudaDeviceSynchronize() { return 0; }
