// Products of tiled matrices with rows of activations.
//
// A result is the sum over groups of 32 columns in their order; a group's sum grows column by column from zero, and is
// then scaled and added. All functions here keep to that, so a row's result is the same bits whichever computes it.
#pragma once

#include "lanes.h"
#include "program.h"
#include "rows.h"

namespace {

// Of 16 rows and 32 columns.
inline constexpr size_t tile_bytes(int kind) {
  switch (kind) {
  case F32: return 4 * LANES * GROUP;
  case BF16:
  case F16: return 2 * LANES * GROUP;
  case Q4: return LANES * GROUP / 2 + 4 * LANES;
  }
  return LANES * GROUP + 2 * LANES;
}

// Asks for weights that lie so many bytes ahead of the arithmetic.
template <int FAR> inline void ahead(const uint8_t *p, size_t bytes) {
  for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + FAR + i);
}

// Column c of those that lie in the lanes of one load.
template <int KIND> inline Floats column(Ints v, int c) {
  // Of four bits: the low ones of each byte, then the high ones.
  if constexpr (KIND == Q4) return nibbles(v >> (8 * (c % 4) + 4 * (c / 4)));
  if constexpr (KIND == Q8) return to_floats((v ^ (int32_t)0x80808080) << (24 - 8 * c) >> 24);
  // Two side by side: the first in the low half.
  if constexpr (KIND == BF16) return same_bits(c ? v & (int32_t)0xffff0000 : v << 16);
  // One column behind the other.
  if constexpr (KIND == F16) return halves(v, c);
  return same_bits(v);
}

// Hands over the 32 columns of a group in order, before their scale and minimum, of TILES tiles so many bytes apart: a
// sum waits for itself at every column, and those of other tiles fill the time.
template <int KIND, int TILES, class Take> inline void columns(const uint8_t *p, size_t apart, Take take) {
  constexpr int LOADS = KIND == Q4 ? 4 : KIND == Q8 ? 8 : KIND == F32 ? GROUP : GROUP / 2;
  constexpr int EACH = GROUP / LOADS;
#pragma GCC unroll 32
  for (int j = 0; j < LOADS; j++) {
    Ints v[TILES];
#pragma GCC unroll 4
    for (int u = 0; u < TILES; u++) v[u] = load<Ints>(p + u * apart + 64 * j);
#pragma GCC unroll 8
    for (int c = 0; c < EACH; c++)
#pragma GCC unroll 4
      for (int u = 0; u < TILES; u++) take(column<KIND>(v[u], c), EACH * j + c, u);
  }
}

template <int KIND> inline Floats scale_of(const uint8_t *p) {
  if constexpr (KIND == Q4 || KIND == Q8) return halves(p + (KIND == Q4 ? 256 : 512));
  return Floats{};
}
template <int KIND> inline Floats least_of(const uint8_t *p) {
  if constexpr (KIND == Q4) return halves(p + 288);
  return Floats{};
}

// A total with what a group adds to it; `sum` is that of the activations.
template <int KIND> inline Floats grown(Floats total, Floats found, Floats scale, Floats least, const float *sum) {
  if constexpr (KIND != Q4 && KIND != Q8) return total + found;
  total += found * scale;
  if constexpr (KIND == Q4) total += least * *sum;
  return total;
}
inline Floats start_of(const Matrix &m, int tile) { return m.bias ? load<Floats>(m.bias + tile * LANES) : Floats{}; }

// Products of the tiles [first, last), a multiple of TILES, with up to four rows: reading the weights takes the time.
template <int KIND, int ROWS, int TILES>
void few(const Matrix &m, int first, int last, const Read &in, float *y, size_t stride) {
  const int groups = m.k / GROUP;
  constexpr size_t bytes = tile_bytes(KIND);
  const size_t apart = groups * bytes;
  for (int t = first; t < last; t += TILES) {
    const uint8_t *p = m.data + (size_t)t * apart;
    Floats total[ROWS][TILES];
    for (int b = 0; b < ROWS; b++)
      for (int u = 0; u < TILES; u++) total[b][u] = start_of(m, t + u);
    for (int g = 0; g < groups; g++, p += bytes) {
      for (int u = 0; u < TILES; u++) ahead<16384>(p + u * apart, bytes);
      Floats part[ROWS][TILES] = {};
      const size_t at = (size_t)g * in.side_by_side;
      const float *x = in.x + at * GROUP;
      columns<KIND, TILES>(p, apart, [&](Floats w, int i, int u) {
#pragma GCC unroll 4
        for (int b = 0; b < ROWS; b++) part[b][u] += w * x[b * GROUP + i];
      });
      for (int u = 0; u < TILES; u++) {
        const Floats scale = scale_of<KIND>(p + u * apart), least = least_of<KIND>(p + u * apart);
        for (int b = 0; b < ROWS; b++)
          total[b][u] = grown<KIND>(total[b][u], part[b][u], scale, least, in.sums + at + b);
      }
    }
    for (int b = 0; b < ROWS; b++)
      for (int u = 0; u < TILES; u++) store(y + b * stride + (t + u) * LANES, total[b][u]);
  }
}

template <int KIND, int ROWS>
void few(const Matrix &m, int first, int last, const Read &in, float *y, size_t stride) {
  constexpr int TILES = ROWS == 1 ? 2 : 1;
  const int even = first + (last - first) / TILES * TILES;
  few<KIND, ROWS, TILES>(m, first, even, in, y, stride);
  few<KIND, ROWS, 1>(m, even, last, in, y, stride);
}

// How many rows, and tiles side by side, have their sums in registers at once.
#if defined(__AVX512F__)
constexpr int MOST_BLOCK = 8, SIDE = 2;
#elif defined(__AVX2__) || defined(__aarch64__)
constexpr int MOST_BLOCK = 6, SIDE = 1;
#else
constexpr int MOST_BLOCK = 3, SIDE = 1;
#endif

// A group of TILES tiles.
template <int TILES> struct Panel {
  float w[GROUP * TILES * LANES];
  Floats scale[TILES], least[TILES];
};

// What a group adds to the totals (rows, TILES, 16).
template <int KIND, int TILES, int ROWS>
inline void block(const Panel<TILES> &panel, const float *x, const float *sums, float *totals) {
  Floats part[ROWS][TILES] = {};
  for (int i = 0; i < GROUP; i++) {
    Floats w[TILES];
#pragma GCC unroll 4
    for (int u = 0; u < TILES; u++) w[u] = load<Floats>(panel.w + (i * TILES + u) * LANES);
#pragma GCC unroll 16
    for (int b = 0; b < ROWS; b++) {
      const Floats one = all(x[b * GROUP + i]);
#pragma GCC unroll 4
      for (int u = 0; u < TILES; u++) part[b][u] += w[u] * one;
    }
  }
#pragma GCC unroll 16
  for (int b = 0; b < ROWS; b++)
#pragma GCC unroll 4
    for (int u = 0; u < TILES; u++) {
      float *total = totals + (b * TILES + u) * LANES;
      store(total, grown<KIND>(load<Floats>(total), part[b][u], panel.scale[u], panel.least[u], sums + b));
    }
}

template <int KIND, int TILES, int ROWS = MOST_BLOCK>
inline void up_to(int rows, const Panel<TILES> &panel, const float *x, const float *sums, float *totals) {
  if (rows >= ROWS) return block<KIND, TILES, ROWS>(panel, x, sums, totals);
  if constexpr (ROWS > 1) up_to<KIND, TILES, ROWS - 1>(rows, panel, x, sums, totals);
}

template <int TILES> void begin(const Matrix &m, int tile, int rows, float *totals) {
  for (int b = 0; b < rows; b++)
    for (int u = 0; u < TILES; u++) store(totals + (b * TILES + u) * LANES, start_of(m, tile + u));
}
template <int TILES> void finish(const float *totals, int tile, int rows, float *y, size_t stride) {
  for (int b = 0; b < rows; b++)
    std::memcpy(y + b * stride + tile * LANES, totals + b * TILES * LANES, 4 * TILES * LANES);
}

// The same with any number of rows: a group is unpacked once, and the totals stay in the first-level cache.
template <int KIND, int TILES>
void many(const Matrix &m, int tile, const Read &in, int rows, float *y, size_t stride) {
  const int groups = m.k / GROUP;
  constexpr size_t bytes = tile_bytes(KIND);
  const uint8_t *p = m.data + (size_t)tile * groups * bytes;
  alignas(64) float totals[MOST_ROWS * TILES * LANES];
  alignas(64) Panel<TILES> panel;
  begin<TILES>(m, tile, rows, totals);
  constexpr int FAR = bytes > 1024 ? 2 * bytes : 2048;
  // Only some lines can be on their way at once, and more would be waited for: each block of rows asks for a part.
  const int blocks = (rows + MOST_BLOCK - 1) / MOST_BLOCK, each = ((int)bytes / 64 + blocks - 1) / blocks * 64;
  for (int g = 0; g < groups; g++) {
    for (int u = 0; u < TILES; u++) {
      const uint8_t *from = p + ((size_t)u * groups + g) * bytes;
      columns<KIND, 1>(from, 0, [&](Floats w, int i, int) { store(panel.w + (i * TILES + u) * LANES, w); });
      panel.scale[u] = scale_of<KIND>(from), panel.least[u] = least_of<KIND>(from);
    }
    const size_t at = (size_t)g * in.side_by_side;
    const uint8_t *soon = p + g * bytes;
    for (int b = 0, left = (int)bytes; b < rows; b += MOST_BLOCK, soon += each, left -= each) {
      for (int u = 0; left > 0 && u < TILES; u++) ahead<FAR>(soon + u * groups * bytes, left < each ? left : each);
      up_to<KIND, TILES>(rows - b, panel, in.x + (at + b) * GROUP, in.sums + at + b, totals + b * TILES * LANES);
    }
  }
  finish<TILES>(totals, tile, rows, y, stride);
}

// Products of the tiles [first, last) with `rows` rows.
template <int KIND>
void exact(const Matrix &m, int first, int last, const Read &in, int rows, float *y, size_t stride) {
  switch (rows) {
  case 1: return few<KIND, 1>(m, first, last, in, y, stride);
  case 2: return few<KIND, 2>(m, first, last, in, y, stride);
  case 3: return few<KIND, 3>(m, first, last, in, y, stride);
  case 4: return few<KIND, 4>(m, first, last, in, y, stride);
  }
  int t = first;
  for (; t + SIDE <= last; t += SIDE) many<KIND, SIDE>(m, t, in, rows, y, stride);
  if (t < last) many<KIND, 1>(m, t, in, rows, y, stride);
}

} // namespace
