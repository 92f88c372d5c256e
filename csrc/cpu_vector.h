// Vectors of the instruction set that the including file is compiled for, in the compilers' portable vector extension,
// with intrinsics only where that extension has no words (sums across lanes, transposes, float16). All static: see
// cpu_convert.h.
#pragma once

#include <math.h>
#include <stdint.h>

#if defined(__AVX2__) || defined(__F16C__)
#include <immintrin.h>
#endif

#include "cpu_convert.h"

namespace treewy {

// VL floats a vector. TREEWY_VL sets any width by hand, without intrinsics: tests run the code of wide machines on narrow
// ones.
#if defined(TREEWY_VL)
#define TREEWY_INTRINSICS 0
constexpr int VL = TREEWY_VL;
#elif defined(__AVX512F__)
#define TREEWY_INTRINSICS 512
constexpr int VL = 16;
#elif defined(__AVX2__)
#define TREEWY_INTRINSICS 256
constexpr int VL = 8;
#else
#define TREEWY_INTRINSICS 0
constexpr int VL = 4;  // SSE2, NEON
#endif

typedef float vf __attribute__((vector_size(VL * 4)));
typedef int32_t vi __attribute__((vector_size(VL * 4)));
typedef float vf_anywhere __attribute__((vector_size(VL * 4), aligned(4), may_alias));

static inline vf load(const float* p) { return *reinterpret_cast<const vf_anywhere*>(p); }
static inline void store(float* p, vf x) { *reinterpret_cast<vf_anywhere*>(p) = x; }
static inline vf splat(float x) { return x - vf{}; }

// exp with a relative error below 2 ulp; NaN stays, overflow gives infinity, underflow goes through the denormals to 0.
static inline vf vexp(vf x) {
  x = x > 89.f ? splat(89.f) : x;
  x = x < -104.f ? splat(-104.f) : x;
  const float magic = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer
  const vf n = (x * 1.44269504088896341f + magic) - magic;
  const vf r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts
  vf p = 1.9875691500e-4f * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.f;
  // 2^n in two factors, because n reaches from -150 to 128.
  const vi i = __builtin_convertvector(n, vi), half = i >> 1;
  const vi e1 = (half + 127) << 23, e2 = (i - half + 127) << 23;
  return p * (vf)e1 * (vf)e2;  // casts between vectors keep the bits
}

static inline float sum_lanes(vf x) {
#if TREEWY_INTRINSICS == 512
  return _mm512_reduce_add_ps((__m512)x);
#elif TREEWY_INTRINSICS == 256
  const __m256 y = (__m256)x;
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
#else
  for (int half = VL / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) x[i] += x[i + half];
  return x[0];
#endif
}

// out[i] = sum of the lanes of x[i], i < 4.
static inline void sum_lanes4(const vf* x, float* out) {
#if TREEWY_INTRINSICS == 256
  const __m256 s = _mm256_hadd_ps(_mm256_hadd_ps((__m256)x[0], (__m256)x[1]), _mm256_hadd_ps((__m256)x[2], (__m256)x[3]));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1)));
#else
  for (int i = 0; i < 4; ++i) out[i] = sum_lanes(x[i]);
#endif
}

// to[c * to_stride + r] = from[r * from_stride + c] for r < rows, c < columns; both multiples of 8, or anything without AVX2.
static inline void transpose(const float* from, int64_t from_stride, int rows, int columns, float* to, int64_t to_stride) {
#if defined(__AVX2__)
  for (int r = 0; r < rows; r += 8)
    for (int c = 0; c < columns; c += 8) {
      const float* f = from + r * from_stride + c;
      __m256 x[8], y[8];
      for (int i = 0; i < 8; ++i) x[i] = _mm256_loadu_ps(f + i * from_stride);
      for (int i = 0; i < 8; i += 2) {
        y[i] = _mm256_unpacklo_ps(x[i], x[i + 1]);
        y[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
      }
      for (int i = 0; i < 8; i += 4) {
        x[i] = _mm256_shuffle_ps(y[i], y[i + 2], 0x44);
        x[i + 1] = _mm256_shuffle_ps(y[i], y[i + 2], 0xee);
        x[i + 2] = _mm256_shuffle_ps(y[i + 1], y[i + 3], 0x44);
        x[i + 3] = _mm256_shuffle_ps(y[i + 1], y[i + 3], 0xee);
      }
      float* o = to + c * to_stride + r;
      for (int i = 0; i < 4; ++i) {
        _mm256_storeu_ps(o + i * to_stride, _mm256_permute2f128_ps(x[i], x[i + 4], 0x20));
        _mm256_storeu_ps(o + (i + 4) * to_stride, _mm256_permute2f128_ps(x[i], x[i + 4], 0x31));
      }
    }
#else
  for (int c = 0; c < columns; ++c)
    for (int r = 0; r < rows; ++r) to[c * to_stride + r] = from[r * from_stride + c];
#endif
}

// ---- rows of storage types; n is a multiple of 8 -------------------------------------------------------------------

static inline void row_to_float(const float* from, float* __restrict to, int n) {
  for (int i = 0; i < n; ++i) to[i] = from[i];
}
static inline void row_to_float(const BFloat16* from, float* __restrict to, int n) {
  for (int i = 0; i < n; ++i) to[i] = to_float(from[i]);
}
static inline void row_to_float(const Float16* from, float* __restrict to, int n) {
#if defined(__F16C__)
  for (int i = 0; i < n; i += 8)
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
#elif defined(__aarch64__)
  for (int i = 0; i < n; ++i) to[i] = static_cast<float>(reinterpret_cast<const __fp16*>(from)[i]);
#else
  for (int i = 0; i < n; ++i) to[i] = to_float(from[i]);
#endif
}
static inline void row_from_float(const float* from, float* __restrict to, int n) {
  for (int i = 0; i < n; ++i) to[i] = from[i];
}
static inline void row_from_float(const float* from, BFloat16* __restrict to, int n) {
  for (int i = 0; i < n; ++i) from_float(from[i], to[i]);
}
static inline void row_from_float(const float* from, Float16* __restrict to, int n) {
#if defined(__F16C__)
  for (int i = 0; i < n; i += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
#elif defined(__aarch64__)
  for (int i = 0; i < n; ++i) reinterpret_cast<__fp16*>(to)[i] = static_cast<__fp16>(from[i]);
#else
  for (int i = 0; i < n; ++i) from_float(from[i], to[i]);
#endif
}

static inline void load_row(const void* base, DType dtype, int64_t i, float* to, int n) {
  switch (dtype) {
    case DType::kFloat32: row_to_float(static_cast<const float*>(base) + i, to, n); break;
    case DType::kBFloat16: row_to_float(static_cast<const BFloat16*>(base) + i, to, n); break;
    default: row_to_float(static_cast<const Float16*>(base) + i, to, n); break;
  }
}
static inline void store_row(void* base, DType dtype, int64_t i, const float* from, int n) {
  switch (dtype) {
    case DType::kFloat32: row_from_float(from, static_cast<float*>(base) + i, n); break;
    case DType::kBFloat16: row_from_float(from, static_cast<BFloat16*>(base) + i, n); break;
    default: row_from_float(from, static_cast<Float16*>(base) + i, n); break;
  }
}
// Round to a storage type and back, in place. `scratch` holds n 16-bit values.
static inline void round_row(float* x, DType dtype, int n, uint16_t* scratch) {
  if (dtype == DType::kFloat32) return;
  store_row(scratch, dtype, 0, x, n);
  load_row(scratch, dtype, 0, x, n);
}

}  // namespace treewy
