// The same products with activations as 8-bit numbers and a scale for 32 of them, where the processor has them.
#pragma once

#include "products.h"

#if defined(__AVX512VNNI__)
#define HAS_INTEGER_DOT 1

namespace {

// A group of a tile as the integer product takes it.
template <int KIND> struct Quanta {
  __m512i w[8];
  Floats scale, least;

  explicit Quanta(const uint8_t *p) : scale(scale_of<KIND>(p)), least(least_of<KIND>(p)) {
    const __m512i low = _mm512_set1_epi8(15);
    if constexpr (KIND == Q4) {
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++) {
        const __m512i v = load<__m512i>(p + 64 * j);
        w[2 * j] = _mm512_and_si512(v, low);
        w[2 * j + 1] = _mm512_and_si512(_mm512_srli_epi16(v, 4), low);
      }
    } else {
#pragma GCC unroll 8
      for (int j = 0; j < 8; j++) w[j] = load<__m512i>(p + 64 * j);
    }
  }
};

// Totals of TILES tiles and one row, with what a group adds; the row's numbers stand at `at`.
template <int KIND, int TILES>
inline void dot(const Quanta<KIND> (&of)[TILES], const Read &in, size_t at, Floats (&total)[TILES]) {
  const int8_t *x = in.q + at * GROUP;
  __m512i even[TILES], odd[TILES];
#pragma GCC unroll 4
  for (int u = 0; u < TILES; u++) {
    even[u] = KIND == Q4 ? _mm512_setzero_si512() : _mm512_set1_epi32(in.counts[at]);
    odd[u] = _mm512_setzero_si512();
  }
#pragma GCC unroll 4
  for (int j = 0; j < 8; j += 2) {
    const __m512i one = _mm512_set1_epi32(load<int32_t>(x + 4 * j)), two = _mm512_set1_epi32(load<int32_t>(x + 4 * j + 4));
#pragma GCC unroll 4
    for (int u = 0; u < TILES; u++) {
      even[u] = _mm512_dpbusd_epi32(even[u], of[u].w[j], one);
      odd[u] = _mm512_dpbusd_epi32(odd[u], of[u].w[j + 1], two);
    }
  }
#pragma GCC unroll 4
  for (int u = 0; u < TILES; u++) {
    total[u] += (Floats)_mm512_cvtepi32_ps(_mm512_add_epi32(even[u], odd[u])) * (of[u].scale * in.scales[at]);
    if constexpr (KIND == Q4) total[u] += of[u].least * in.sums[at];
  }
}

template <int KIND, int ROWS>
void few_rounded(const Matrix &m, int first, int last, const Read &in, float *y, size_t stride) {
  const int groups = m.k / GROUP;
  constexpr size_t bytes = tile_bytes(KIND);
  for (int t = first; t < last; t++) {
    const uint8_t *p = m.data + (size_t)t * groups * bytes;
    Floats total[ROWS][1];
    for (int b = 0; b < ROWS; b++) total[b][0] = start_of(m, t);
    for (int g = 0; g < groups; g++, p += bytes) {
      ahead<8192>(p, bytes);
      const Quanta<KIND> quanta[] = {Quanta<KIND>(p)};
#pragma GCC unroll 4
      for (int b = 0; b < ROWS; b++) dot<KIND, 1>(quanta, in, (size_t)g * in.side_by_side + b, total[b]);
    }
    for (int b = 0; b < ROWS; b++) store(y + b * stride + t * LANES, total[b][0]);
  }
}

template <int KIND, int TILES>
inline void group_of(const Quanta<KIND> (&quanta)[TILES], const Read &in, size_t at, int rows, float *totals) {
  for (int b = 0; b < rows; b++, totals += TILES * LANES) {
    Floats total[TILES];
#pragma GCC unroll 4
    for (int u = 0; u < TILES; u++) total[u] = load<Floats>(totals + u * LANES);
    dot<KIND, TILES>(quanta, in, at + b, total);
#pragma GCC unroll 4
    for (int u = 0; u < TILES; u++) store(totals + u * LANES, total[u]);
  }
}

template <int KIND, int TILES>
void many_rounded(const Matrix &m, int tile, const Read &in, int rows, float *y, size_t stride) {
  const int groups = m.k / GROUP;
  constexpr size_t bytes = tile_bytes(KIND);
  const uint8_t *p = m.data + (size_t)tile * groups * bytes, *beside = p + groups * bytes;
  alignas(64) float totals[MOST_ROWS * TILES * LANES];
  begin<TILES>(m, tile, rows, totals);
  for (int g = 0; g < groups; g++, p += bytes, beside += bytes) {
    const size_t at = (size_t)g * in.side_by_side;
    ahead<2048>(p, bytes);
    if constexpr (TILES == 1) {
      group_of<KIND, 1>({Quanta<KIND>(p)}, in, at, rows, totals);
    } else {
      ahead<2048>(beside, bytes);
      group_of<KIND, 2>({Quanta<KIND>(p), Quanta<KIND>(beside)}, in, at, rows, totals);
    }
  }
  finish<TILES>(totals, tile, rows, y, stride);
}

template <int KIND>
void rounded(const Matrix &m, int first, int last, const Read &in, int rows, float *y, size_t stride) {
  switch (rows) {
  case 1: return few_rounded<KIND, 1>(m, first, last, in, y, stride);
  case 2: return few_rounded<KIND, 2>(m, first, last, in, y, stride);
  case 3: return few_rounded<KIND, 3>(m, first, last, in, y, stride);
  case 4: return few_rounded<KIND, 4>(m, first, last, in, y, stride);
  }
  int t = first;
  for (; t + 2 <= last; t += 2) many_rounded<KIND, 2>(m, t, in, rows, y, stride);
  if (t < last) many_rounded<KIND, 1>(m, t, in, rows, y, stride);
}

} // namespace
#else
#define HAS_INTEGER_DOT 0
#endif

namespace {

// Products of the tiles [first, last) of a matrix of any kind with `rows` rows.
void product(const Matrix &m, int first, int last, const Read &in, int rows, float *y, size_t stride, bool quantised) {
#if HAS_INTEGER_DOT
  if (quantised && m.kind == Q4) return rounded<Q4>(m, first, last, in, rows, y, stride);
  if (quantised && m.kind == Q8) return rounded<Q8>(m, first, last, in, rows, y, stride);
#endif
  switch (m.kind) {
  case F32: return exact<F32>(m, first, last, in, rows, y, stride);
  case BF16: return exact<BF16>(m, first, last, in, rows, y, stride);
  case F16: return exact<F16>(m, first, last, in, rows, y, stride);
  case Q4: return exact<Q4>(m, first, last, in, rows, y, stride);
  default: return exact<Q8>(m, first, last, in, rows, y, stride);
  }
}

} // namespace
