#pragma once
#include "cuda_runtime.h"
struct __half {
  uint16_t bits;
  operator float() const { _Float16 h; std::memcpy(&h, &bits, 2); return float(h); }
};
struct alignas(4) __half2 { __half x, y; };
inline __half __float2half_rn(float x) { _Float16 h = _Float16(x); __half r; std::memcpy(&r.bits, &h, 2); return r; }
inline __half __float2half(float x) { return __float2half_rn(x); }
inline float __half2float(__half h) { return float(h); }
inline __half2 __floats2half2_rn(float x, float y) { return {__float2half_rn(x), __float2half_rn(y)}; }
inline float2 __half22float2(__half2 h) { return {float(h.x), float(h.y)}; }
