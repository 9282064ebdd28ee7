// Rows of activations as products read them, and the norms that are on their way there.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "lanes.h"
#include "program.h"

namespace {

struct Spread {
  float mean, by;
};

// `stored` numbers, of which all but `n` are zeros.
Spread spread(const float *x, int stored, const Norm &m) {
  Floats total{}, squares{};
  if (m.kind == LAYER)
    for (int i = 0; i < stored; i += LANES) total += load<Floats>(x + i);
  const float mean = m.kind == LAYER ? sum(total) / m.n : 0.f;
  for (int i = 0; i < stored; i += LANES) {
    Floats v = load<Floats>(x + i);
    if (m.kind == LAYER) v = i + LANES > m.n ? first_of(v - mean, m.n - i) : v - mean;
    squares += v * v;
  }
  return Spread{mean, 1.f / std::sqrt(sum(squares) / m.n + m.eps)};
}

void norm(const float *x, const Norm &m, Spread s, int head, float *y, int stored) {
  const Floats by = all(s.by);
  const float *gain = m.gain + (size_t)head * m.stride, *shift = m.shift ? m.shift + (size_t)head * m.stride : nullptr;
  for (int i = 0; i < stored; i += LANES) {
    Floats v = (load<Floats>(x + i) - s.mean) * by * load<Floats>(gain + i);
    store(y + i, shift ? v + load<Floats>(shift + i) : v);
  }
}
void norm(const float *x, const Norm &m, float *y) { norm(x, m, spread(x, whole(m.n), m), 0, y, whole(m.n)); }

// Some rows that a product reads: groups of 32 columns one behind the other, and in each group row after row.
struct Read {
  const float *x, *sums, *scales; // 32 numbers of each group and row; one
  const int8_t *q;
  const int32_t *counts;
  int side_by_side; // rows from one group to the next
  Read from(int row) const {
    return Read{x + (size_t)row * GROUP, sums + row, scales + row, q + (size_t)row * GROUP, counts + row, side_by_side};
  }
};

// Rows that are put side by side at once: a row's groups lie in pages of their own, which are many.
constexpr int BESIDE = 8;

struct Rows {
  std::vector<float> x, sums, scales;
  std::vector<int8_t> q;
  std::vector<int32_t> counts;

  void make_room(size_t rows, size_t columns) {
    const size_t numbers = std::max(apart(rows) * (columns + GROUP), x.size()), groups = numbers / GROUP;
    x.resize(numbers), q.resize(numbers);
    sums.resize(groups), scales.resize(groups), counts.resize(groups);
  }
  // An odd number, so that neighbouring groups do not meet in a set of the cache.
  static int apart(int rows) { return rows | 1; }
  // So many rows, whose first group begins at `start`.
  Read read(int rows, size_t start = 0) const {
    return Read{x.data() + start * GROUP, sums.data() + start, scales.data() + start, q.data() + start * GROUP,
                counts.data() + start,    apart(rows)};
  }

  // 32 numbers as m's kind needs them: with their sum, or rounded to 8 bits.
  void put(const Matrix &m, size_t at, Floats low, Floats high, bool quantised) {
    store(x.data() + at * GROUP, low), store(x.data() + at * GROUP + LANES, high);
    if (!quantised) {
      if (m.kind == Q4) sums[at] = sum(low + high);
      return;
    }
    if (m.kind != Q4 && m.kind != Q8) return;
    const float most = top(max(max(low, -low), max(high, -high))), by = most > 0 ? 127.f / most : 0.f;
    Floats numbers{};
    for (int part = 0; part < 2; part++) {
      const Floats near = nearest((part ? high : low) * by);
      store(q.data() + at * GROUP + part * LANES, to_bytes(to_ints(near)));
      numbers += near;
    }
    // Whole numbers far below 2^24.
    const float count = sum(numbers);
    scales[at] = most / 127.f;
    // The minimum goes with the sum of the rounded activations, as the scale does; 8-bit weights are stored plus 128.
    sums[at] = scales[at] * count;
    counts[at] = -128 * (int32_t)count;
  }

  // The rows [a, z) of `rows`, normed where there is a norm, for a product with m. `line` has room for BESIDE of them.
  void prepare(const Matrix &m, const float *from, size_t stride, int n, int a, int z, int rows, const Norm &by,
               bool quantised, float *line) {
    for (int b = a; b < z; b += BESIDE) {
      const int count = std::min(BESIDE, z - b);
      const float *first = from + b * stride;
      for (int i = 0; by.kind && i < count; i++) norm(first + i * stride, by, line + i * stride);
      put_rows(m, by.kind ? line : first, stride, n, count, b, rows, quantised);
    }
  }

  // Up to BESIDE rows of n numbers, whose groups begin at `at`, beside others of `rows`.
  void put_rows(const Matrix &m, const float *from, size_t stride, int n, int count, size_t at, int rows,
                bool quantised) {
    for (int i = 0; i < m.k; i += GROUP, at += apart(rows))
      for (int b = 0; b < count; b++) {
        const float *row = from + b * stride + i;
        const int left = n - i;
        Floats low = load<Floats>(row), high{};
        if (left > LANES) high = load<Floats>(row + LANES);
        if (left < LANES) low = first_of(low, left);
        else if (left < GROUP) high = first_of(high, left - LANES);
        put(m, at + b, low, high, quantised);
      }
  }

  // Some rows of others, which a product with m read or could have read.
  void gather(const Matrix &m, const Read &from, const int32_t *which, int rows, bool quantised) {
    const bool rounded = quantised && (m.kind == Q4 || m.kind == Q8);
    for (int g = 0; g < m.k / GROUP; g++)
      for (int b = 0; b < rows; b++) {
        const size_t at = (size_t)g * apart(rows) + b, there = (size_t)g * from.side_by_side + which[b];
        sums[at] = from.sums[there];
        if (!rounded) std::memcpy(x.data() + at * GROUP, from.x + there * GROUP, 4 * GROUP);
        else {
          std::memcpy(q.data() + at * GROUP, from.q + there * GROUP, GROUP);
          scales[at] = from.scales[there], counts[at] = from.counts[there];
        }
      }
  }
};

} // namespace
