// The host's version of csrc/cuda/ptx.cuh: what each instruction does to a warp of fibers.
#pragma once
#include "cuda_fp16.h"

namespace treewy {
namespace cuda {

inline uint32_t shared_address(const void* p) { return uint32_t(static_cast<const unsigned char*>(p) - emu::shared_memory); }
template <int kBytes>
void copy_async(uint32_t to, const void* from) {
  if (to + kBytes > emu::kSharedBytes || to % kBytes || reinterpret_cast<uintptr_t>(from) % kBytes) std::fprintf(stderr, "emulator: bad copy\n"), std::abort();
  emu::Fiber& f = emu::g.fibers[emu::g.current];
  f.copies.push_back({emu::shared_memory + to, static_cast<const unsigned char*>(from), kBytes, f.group});
}
inline void copy_commit() { ++emu::g.fibers[emu::g.current].group; }
template <int kGroups>
void copy_wait() {
  emu::Fiber& f = emu::g.fibers[emu::g.current];
  size_t kept = 0;
  for (auto& c : f.copies) {
    if (c.group < f.group - kGroups) std::memcpy(c.to, c.from, c.bytes);
    else f.copies[kept++] = c;
  }
  f.copies.resize(kept);
}
inline float rcp_approx(float x) { return 1.f / x; }
inline float exp2_approx(float x) { return std::exp2(x); }

// Sums in double, cut to float32 towards zero as the tensor cores do.
inline float truncate(double x) {
  float y = float(x);
  if (std::isfinite(y) && std::fabs(double(y)) > std::fabs(x)) y = std::nextafter(y, 0.f);
  return y;
}
inline double half_of(uint32_t word, int i) { __half h{uint16_t(word >> (16 * i))}; return float(h); }
inline void mma_any(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, bool zero, int kind) {
  uint32_t words[6] = {a[0], a[1], a[2], a[3], b0, b1};
  auto mail = emu::exchange(words, 6);
  const int g = emu::lane() >> 2, q = emu::lane() & 3;
  for (int e = 0; e < 4; ++e) {
    const int row = g + 8 * (e >> 1), col = 2 * q + (e & 1);
    double sum = zero ? 0. : double(c[e]);
    for (int k4 = 0; k4 < 4; ++k4) {
      const uint32_t* A = mail[(row & 7) * 4 + k4];
      const uint32_t* B = mail[col * 4 + k4];
      for (int part = 0; part < 2; ++part) {
        const uint32_t x = A[(row >> 3) + 2 * part], y = B[4 + part];
        if (kind == 1) sum += double(__uint_as_float(x & 0xffffe000u)) * __uint_as_float(y & 0xffffe000u);
        else if (kind == 2) sum += double(__uint_as_float(x << 16)) * __uint_as_float(y << 16) + double(__uint_as_float(x & 0xffff0000u)) * __uint_as_float(y & 0xffff0000u);
        else sum += half_of(x, 0) * half_of(y, 0) + half_of(x, 1) * half_of(y, 1);
      }
    }
    c[e] = truncate(sum);
  }
}
inline void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) { mma_any(c, a, b0, b1, false, 0); }
inline void mma_first(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) { mma_any(c, a, b0, b1, true, 0); }
inline void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) { mma_any(c, a, b0, b1, false, 2); }
inline void mma_tf32(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  mma_any(c, {a0, a1, a2, a3}, b0, b1, false, 1);
}
inline void mma_tf32_first(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  mma_any(c, {a0, a1, a2, a3}, b0, b1, true, 1);
}
inline float4 load_stream_f4(const float* p) { return *reinterpret_cast<const float4*>(p); }
inline uint2 load_stream_u2(const void* p) { return *static_cast<const uint2*>(p); }

struct EmulatedBarrier { int16_t expected, pending; int32_t phase; };
inline void mbarrier_init(uint64_t* bar, int count) { *reinterpret_cast<EmulatedBarrier*>(bar) = {int16_t(count), int16_t(count), 0}; }
inline void mbarrier_arrive(uint64_t* bar) {
  auto b = reinterpret_cast<EmulatedBarrier*>(bar);
  if (--b->pending == 0) b->pending = b->expected, ++b->phase;
}
inline void mbarrier_wait(uint64_t* bar, int parity) {
  auto b = reinterpret_cast<volatile EmulatedBarrier*>(bar);
  while ((b->phase & 1) == parity) emu::yield();
}
template <int> void take_registers() {}
template <int> void give_registers() {}
inline void barrier_sync(int id, int threads) { emu::barrier(id, threads); }
inline int barrier_or(int id, int threads, int x) { return emu::barrier(id, threads, x != 0); }

}  // namespace cuda
}  // namespace treewy
