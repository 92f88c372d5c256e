// Scalar conversions between the storage types and float32. Static, so that each instruction-set variant keeps its own
// copy (an inline function with external linkage compiled for AVX2 could be picked by the linker for the baseline too).
#pragma once

#include <cstdint>
#include <cstring>

#include "params.h"

namespace treewy {

static inline float bits_to_float(uint32_t u) {
  float f;
  memcpy(&f, &u, 4);
  return f;
}
static inline uint32_t float_to_bits(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  return u;
}

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

static inline float to_float(float x) { return x; }
static inline float to_float(BFloat16 x) { return bits_to_float(static_cast<uint32_t>(x.bits) << 16); }
static inline float to_float(Float16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16, mag = static_cast<uint32_t>(x.bits & 0x7fffu) << 13;
  const uint32_t exponent = mag & (0x7c00u << 13);
  uint32_t out = mag + ((127u - 15u) << 23);
  // Infinity and NaN need the all-ones exponent; denormals are renormalised by one subtraction.
  if (exponent == (0x7c00u << 13)) out += (128u - 16u) << 23;
  if (exponent == 0) out = float_to_bits(bits_to_float(out + (1u << 23)) - bits_to_float((127u - 14u) << 23));
  return bits_to_float(sign | out);
}

// All conversions round to nearest, ties to even; NaN stays NaN.
static inline void from_float(float x, float& out) { out = x; }
static inline void from_float(float x, BFloat16& out) {
  const uint32_t u = float_to_bits(x);
  const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  out.bits = static_cast<uint16_t>(x != x ? ((u >> 16) | 0x40u) : rounded);
}
static inline void from_float(float x, Float16& out) {
  const uint32_t u = float_to_bits(x), sign = (u >> 16) & 0x8000u, mag = u & 0x7fffffffu;
  uint32_t h;
  if (mag > 0x7f800000u) {
    h = 0x7e00u | ((mag >> 13) & 0x3ffu);
  } else if (mag >= 0x477ff000u) {  // rounds to a value above the largest float16
    h = 0x7c00u;
  } else if (mag < 0x38800000u) {   // below the smallest normal float16: let a float addition do the rounding
    h = float_to_bits(bits_to_float(mag) + 0.5f) - float_to_bits(0.5f);
  } else {
    h = (mag + 0xfffu + ((mag >> 13) & 1u) - ((127u - 15u) << 23)) >> 13;
  }
  out.bits = static_cast<uint16_t>(sign | h);
}

static inline float load_scalar(const void* base, DType dtype, int64_t i) {
  switch (dtype) {
    case DType::kFloat32: return static_cast<const float*>(base)[i];
    case DType::kBFloat16: return to_float(static_cast<const BFloat16*>(base)[i]);
    default: return to_float(static_cast<const Float16*>(base)[i]);
  }
}
static inline void store_scalar(void* base, DType dtype, int64_t i, float x) {
  switch (dtype) {
    case DType::kFloat32: static_cast<float*>(base)[i] = x; break;
    case DType::kBFloat16: from_float(x, static_cast<BFloat16*>(base)[i]); break;
    default: from_float(x, static_cast<Float16*>(base)[i]); break;
  }
}
static inline int64_t size_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }
static inline int64_t load_index(const IndexVector& v, int64_t i) {
  return v.is_int64 ? static_cast<const int64_t*>(v.data)[i] : static_cast<const int32_t*>(v.data)[i];
}

}  // namespace treewy
