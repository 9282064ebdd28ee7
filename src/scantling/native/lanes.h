// Functions of sixteen numbers side by side.
#pragma once

#include <initializer_list>

#include "wide.h"

namespace {

constexpr int GROUP = 32;

inline Floats max(Floats a, Floats b) { return select(a > b, a, b); }
inline float top(Floats v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float best = v[0];
  for (int i = 1; i < LANES; i++) best = v[i] > best ? v[i] : best;
  return best;
#endif
}
inline float sum(Floats v) {
  // In a fixed tree, whatever the instruction set: halves, then halves of halves.
#if defined(__AVX512F__)
  const __m512 whole = (__m512)v;
  __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(whole), _mm512_extractf32x8_ps(whole, 1));
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return four[0] + four[1];
#else
  for (int half = LANES / 2; half; half /= 2)
    for (int i = 0; i < half; i++) v[i] += v[i + half];
  return v[0];
#endif
}
inline float half(uint16_t h) {
  uint32_t sign = (h & 0x8000u) << 16, rest = h & 0x7fffu, bits;
  if (rest >= 0x7c00u) bits = 0x7f800000u | (rest & 0x3ffu) << 13;
  else if (rest >= 0x400u) bits = (rest << 13) + (112u << 23);
  else {
    float small = rest * 0x1p-24f;
    std::memcpy(&bits, &small, 4);
  }
  bits |= sign;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline Floats halves(const uint8_t *from) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#elif defined(__F16C__) && defined(__AVX2__)
  Floats value;
  for (int i = 0; i < LANES; i += 8) {
    const __m256 eight = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + 2 * i)));
    std::memcpy((char *)&value + 4 * i, &eight, sizeof eight);
  }
  return value;
#else
  Floats value;
  for (int i = 0; i < LANES; i++) value[i] = half(load<uint16_t>(from + 2 * i));
  return value;
#endif
}
// The first or the second sixteen of 32 halves.
inline Floats halves(Ints v, int second) {
#if defined(__AVX512F__)
  const __m512i all = (__m512i)v;
  return (Floats)_mm512_cvtph_ps(second ? _mm512_extracti64x4_epi64(all, 1) : _mm512_castsi512_si256(all));
#else
  uint8_t bytes[sizeof v];
  std::memcpy(bytes, &v, sizeof v);
  return halves(bytes + 32 * second);
#endif
}
inline Floats nibbles(Ints v) {
#if defined(__AVX512F__)
  // The permutation reads the low four bits only.
  const __m512 table = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  return (Floats)_mm512_permutexvar_ps((__m512i)v, table);
#else
  return to_floats(v & 15);
#endif
}
inline int whole(int n) { return (n + LANES - 1) / LANES * LANES; }
inline Floats first_of(Floats v, int n) {
  for (int i = n; i < LANES; i++) v[i] = 0;
  return v;
}
inline Floats nearest(Floats x) {
  // Beyond 2^23 floats are whole numbers.
  const Floats magic = all(12582912.f);
  return (x + magic) - magic;
}
inline Floats exponential(Floats x) {
  // 2^n times a polynomial for the rest of the exponent, |rest| <= 1/2.
  x = max(x, all(-87.f));
  x = select(x > 88.f, all(88.f), x);
  const Floats t = x * 1.44269504f, whole = nearest(t), rest = t - whole;
  Floats p = all(1.5403530e-4f);
  for (float c : {1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.f}) p = p * rest + c;
  return p * same_bits((to_ints(whole) + 127) << 23);
}
inline Floats hyperbolic(Floats x) {
  Floats e = exponential(x * 2.f);
  return 1.f - 2.f / (e + 1.f);
}

inline Floats error_function(Floats x) {
  // Abramowitz and Stegun, 7.1.26: off by less than 1.5e-7.
  const Floats size = max(x, -x), t = 1.f / (size * 0.3275911f + 1.f);
  Floats p = all(1.061405429f);
  for (float c : {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f}) p = p * t + c;
  const Floats found = 1.f - p * t * exponential(-(x * x));
  return select(x < 0.f, -found, found);
}

enum Act : int32_t { SILU, GELU, GELU_TANH, RELU, RELU2, QUICK_GELU };

Floats act(Floats x, int32_t kind) {
  switch (kind) {
  case SILU: return x / (1.f + exponential(-x));
  case QUICK_GELU: return x / (1.f + exponential(x * -1.702f));
  case GELU_TANH: return x * 0.5f * (1.f + hyperbolic((x + x * x * x * 0.044715f) * 0.7978845608f));
  case RELU: return max(x, Floats{});
  case RELU2: return max(x, Floats{}) * max(x, Floats{});
  }
  return x * 0.5f * (1.f + error_function(x * 0.70710678f));
}

} // namespace
