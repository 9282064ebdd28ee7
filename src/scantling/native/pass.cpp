// One pass of a decoder whose blocks are attention and MLP, with norms around them: any number of rows, each a token of
// some sequence. Widths are filled up with zeros to whole registers, and zeros they stay.
// Weights lie in tiles of 16 rows (see tiles.py), so 16 results grow side by side and no sum crosses lanes. A result is
// computed by one thread in one order, so it depends neither on the number of threads nor on the other rows.
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include <sys/mman.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr int LANES = 16, GROUP = 32, MOST_ROWS = 32, WIDEST_HEAD = 256;
// How far ahead of the arithmetic the weights are asked for, in bytes.
constexpr int AHEAD = 8192;

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef int8_t Bytes __attribute__((vector_size(LANES)));

template <class V> inline V load(const void *from) {
  V value;
  std::memcpy(&value, from, sizeof value);
  return value;
}
template <class V> inline void store(void *to, V value) { std::memcpy(to, &value, sizeof value); }
inline Floats all(float x) { return x - Floats{}; }
inline Floats max(Floats a, Floats b) { return a > b ? a : b; }
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
#else
  Floats value;
  for (int i = 0; i < LANES; i++) value[i] = half(load<uint16_t>(from + 2 * i));
  return value;
#endif
}
inline Floats nibbles(Ints v) {
#if defined(__AVX512F__)
  // The permutation reads the low four bits only.
  const __m512 table = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  return (Floats)_mm512_permutexvar_ps((__m512i)v, table);
#else
  return __builtin_convertvector(v & 15, Floats);
#endif
}
inline Floats nearest(Floats x) {
  // Beyond 2^23 floats are whole numbers.
  const Floats magic = all(12582912.f);
  return (x + magic) - magic;
}
inline Floats exponential(Floats x) {
  // 2^n times a polynomial for the rest of the exponent, |rest| <= 1/2.
  x = max(x, all(-87.f));
  x = x > 88.f ? all(88.f) : x;
  const Floats t = x * 1.44269504f, whole = nearest(t), rest = t - whole;
  Floats p = all(1.5403530e-4f);
  for (float c : {1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.f}) p = p * rest + c;
  Ints n = (__builtin_convertvector(whole, Ints) + 127) << 23;
  return p * (Floats)n;
}
inline Floats hyperbolic(Floats x) {
  Floats e = exponential(x * 2.f);
  return 1.f - 2.f / (e + 1.f);
}

enum Kind : int32_t { F32, BF16, Q4, Q8 };
enum Centre : int32_t { NO_NORM, RMS, LAYER };
enum Scoring : int32_t { SOFTMAX, SIGMOID, TOP_SOFTMAX };
enum Act : int32_t { SILU, GELU, GELU_TANH, RELU, RELU2, QUICK_GELU };

Floats act(Floats x, int32_t kind) {
  switch (kind) {
  case SILU: return x / (1.f + exponential(-x));
  case QUICK_GELU: return x / (1.f + exponential(x * -1.702f));
  case GELU_TANH: return x * 0.5f * (1.f + hyperbolic((x + x * x * x * 0.044715f) * 0.7978845608f));
  case RELU: return max(x, Floats{});
  case RELU2: return max(x, Floats{}) * max(x, Floats{});
  }
  for (int i = 0; i < LANES; i++) x[i] *= 0.5f * (1.f + std::erf(x[i] * 0.70710678f));
  return x;
}

} // namespace

extern "C" {

struct Matrix {
  int32_t kind, n, k, pad; // n rows, a multiple of 16; k columns, a multiple of 32
  const uint8_t *data;
  const float *bias; // n, or null
};

struct Norm {
  const float *gain, *shift; // a multiple of 16 each, zeros at the end; `shift` may be null
  float eps;
  int32_t kind, n, stride; // `n` numbers are normed together; each head's gain begins `stride` after the last
};

struct Layer {
  Matrix qkv, o, up, down, router; // `up` of a gated MLP holds tiles of gate and up in turn; experts lie one by one
  Norm norms[6];                   // of attention before it, after it, after the sum; the same of the MLP
  Norm q_norm, k_norm;
  const float *cos, *sin; // (capacity, turned / 2), or null
  const float *slopes, *sinks; // (heads), or null
  int32_t window, d_ff, gated, act, experts, chosen, scoring, normalize; // a window of 0 is none
  float scale, kept_scale, limit, alpha;
  float *keys, *values; // (pages, kv heads, head, 16) and (pages, kv heads, 16, head)
};

struct Program {
  int32_t d, heads, kv_heads, head, turned, layers, vocab, slots, capacity, threads, quantised, parallel, offset, pad;
  float softcap, logit_softcap, embed_scale, logit_scale, clip, pad_too;
  const Layer *layer;
  Matrix table, out, places; // `table` is looked up; `out` gives the logits; `places`, if any, is added by position
  Norm embed_norm, final_norm;
  const int32_t *pages; // (slots, capacity / 16): where 16 positions of a sequence are kept
  float *logits;        // (MOST_ROWS, out.n)
  void *pool, *scratch;
};
}

namespace {

struct Shared {
  float *x, *qkv, *mixed, *update, *hidden, *held; // (MOST_ROWS, width) each
  int width;
};

// What a thread makes of the rows that a product reads.
struct Own {
  std::vector<float> normed, sums, scales, scores, routed, kept;
  std::vector<int8_t> q;
  std::vector<int32_t> counts, picked;
};

struct Barrier {
  std::atomic<int> arrived{0}, round{0};
  int threads = 1;
  void wait() {
    int now = round.load(std::memory_order_relaxed);
    if (arrived.fetch_add(1, std::memory_order_acq_rel) == threads - 1) {
      arrived.store(0, std::memory_order_relaxed);
      round.store(now + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; round.load(std::memory_order_acquire) == now; spins++) {
#if defined(__x86_64__)
      _mm_pause();
#endif
      // Whoever is late may be waiting for this core.
      if (spins > 20000) std::this_thread::yield();
    }
  }
};

struct Job;

struct Pool {
  std::vector<std::thread> workers;
  std::vector<Own> own;
  Shared shared{};
  Barrier barrier;
  std::atomic<int> epoch{0};
  std::atomic<bool> over{false};
  const Job *job = nullptr;
};

struct Job {
  const Program *program;
  int rows;
  const int32_t *token, *slot, *position;
  const uint8_t *wanted;
  int32_t *best;
};

inline size_t tile_bytes(int kind) {
  // Of 16 rows and 32 columns.
  switch (kind) {
  case F32: return 4 * LANES * GROUP;
  case BF16: return 2 * LANES * GROUP;
  case Q4: return LANES * GROUP / 2 + 4 * LANES;
  }
  return LANES * GROUP + 2 * LANES;
}

struct Read {
  const float *x, *sums, *scales;
  const int8_t *q;
  const int32_t *counts;
};

template <int ROWS> inline void ahead(const uint8_t *p, size_t bytes) {
  if (ROWS <= 2)
    for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + AHEAD + i);
}

// y[b][16 t ...] = W x[b] for the tiles [first, last), with activations as they are.
template <int KIND, int ROWS>
void exact(const Matrix &m, int first, int last, const Read &in, float *y, size_t stride) {
  const int groups = m.k / GROUP;
  constexpr size_t bytes = KIND == F32 ? 2048 : KIND == BF16 ? 1024 : KIND == Q4 ? 320 : 544;
  // One sum would wait for itself at every step; their number is the same for any ROWS, so that the bits are.
  constexpr int SUMS = 2;
  for (int t = first; t < last; t++) {
    const uint8_t *p = m.data + (size_t)t * groups * bytes;
    Floats total[ROWS];
    for (int b = 0; b < ROWS; b++) total[b] = m.bias ? load<Floats>(m.bias + t * LANES) : Floats{};
    for (int g = 0; g < groups; g++, p += bytes) {
      ahead<ROWS>(p, bytes);
      Floats part[ROWS][SUMS] = {};
      const float *x = in.x + g * GROUP;
      auto add = [&](Floats w, int i) {
#pragma GCC unroll 8
        for (int b = 0; b < ROWS; b++) part[b][i % SUMS] += w * x[(size_t)b * m.k + i];
      };
      if constexpr (KIND == Q4) {
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
          Ints v = load<Ints>(p + 64 * j);
          add(nibbles(v), 8 * j), add(nibbles(v >> 8), 8 * j + 1);
          add(nibbles(v >> 16), 8 * j + 2), add(nibbles(v >> 24), 8 * j + 3);
          add(nibbles(v >> 4), 8 * j + 4), add(nibbles(v >> 12), 8 * j + 5);
          add(nibbles(v >> 20), 8 * j + 6), add(nibbles(v >> 28), 8 * j + 7);
        }
      } else if constexpr (KIND == Q8) {
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) {
          Ints v = load<Ints>(p + 64 * j);
          add(__builtin_convertvector(v & 255, Floats), 4 * j);
          add(__builtin_convertvector((v >> 8) & 255, Floats), 4 * j + 1);
          add(__builtin_convertvector((v >> 16) & 255, Floats), 4 * j + 2);
          add(__builtin_convertvector((v >> 24) & 255, Floats), 4 * j + 3);
        }
      } else if constexpr (KIND == BF16) {
#pragma GCC unroll 16
        for (int j = 0; j < GROUP / 2; j++) {
          // Two columns side by side in every lane: the first in the low half.
          Ints v = load<Ints>(p + 64 * j);
          add((Floats)(v << 16), 2 * j);
          add((Floats)(v & (int32_t)0xffff0000), 2 * j + 1);
        }
      } else {
#pragma GCC unroll 32
        for (int i = 0; i < GROUP; i++) add(load<Floats>(p + 64 * i), i);
      }
      for (int b = 0; b < ROWS; b++) {
        Floats found = part[b][0];
        for (int i = 1; i < SUMS; i++) found += part[b][i];
        if constexpr (KIND == Q4)
          total[b] += found * halves(p + 256) + halves(p + 288) * in.sums[b * groups + g];
        else if constexpr (KIND == Q8)
          total[b] += (found - 128.f * in.sums[b * groups + g]) * halves(p + 512);
        else
          total[b] += found;
      }
    }
    for (int b = 0; b < ROWS; b++) store(y + b * stride + t * LANES, total[b]);
  }
}

#if defined(__AVX512VNNI__)
#define HAS_INTEGER_DOT 1
inline __m512i four(const int8_t *p) { return _mm512_set1_epi32(load<int32_t>(p)); }

// The same with activations as 8-bit numbers and a scale for 32 of them, TILES tiles side by side.
template <int KIND, int ROWS, int TILES>
void rounded(const Matrix &m, int first, int last, const Read &in, float *y, size_t stride) {
  const int groups = m.k / GROUP;
  constexpr size_t bytes = KIND == Q4 ? 320 : 544;
  const __m512i low = _mm512_set1_epi8(15);
  for (int t = first; t + TILES <= last; t += TILES) {
    const uint8_t *tile = m.data + (size_t)t * groups * bytes;
    Floats total[ROWS][TILES];
    for (int b = 0; b < ROWS; b++)
      for (int u = 0; u < TILES; u++) total[b][u] = m.bias ? load<Floats>(m.bias + (t + u) * LANES) : Floats{};
    for (int g = 0; g < groups; g++) {
      __m512i w[TILES][8];
      Floats d[TILES], least[TILES];
      for (int u = 0; u < TILES; u++) {
        const uint8_t *p = tile + ((size_t)u * groups + g) * bytes;
        ahead<ROWS>(p, bytes);
        if constexpr (KIND == Q4)
          for (int j = 0; j < 4; j++) {
            __m512i v = load<__m512i>(p + 64 * j);
            w[u][2 * j] = _mm512_and_si512(v, low);
            w[u][2 * j + 1] = _mm512_and_si512(_mm512_srli_epi16(v, 4), low);
          }
        else
          for (int j = 0; j < 8; j++) w[u][j] = load<__m512i>(p + 64 * j);
        d[u] = halves(p + (KIND == Q4 ? 256 : 512));
        if constexpr (KIND == Q4) least[u] = halves(p + 288);
      }
#pragma GCC unroll 8
      for (int b = 0; b < ROWS; b++) {
        const int8_t *x = in.q + (size_t)b * m.k + g * GROUP;
        const float s = in.scales[b * groups + g];
        const int count = in.counts[b * groups + g];
        __m512i even[TILES], odd[TILES];
        for (int u = 0; u < TILES; u++) {
          even[u] = KIND == Q4 ? _mm512_setzero_si512() : _mm512_set1_epi32(-128 * count);
          odd[u] = _mm512_setzero_si512();
        }
#pragma GCC unroll 4
        for (int j = 0; j < 8; j += 2) {
          const __m512i one = four(x + 4 * j), two = four(x + 4 * j + 4);
          for (int u = 0; u < TILES; u++) {
            even[u] = _mm512_dpbusd_epi32(even[u], w[u][j], one);
            odd[u] = _mm512_dpbusd_epi32(odd[u], w[u][j + 1], two);
          }
        }
        for (int u = 0; u < TILES; u++) {
          total[b][u] += (Floats)_mm512_cvtepi32_ps(_mm512_add_epi32(even[u], odd[u])) * (d[u] * s);
          // The minimum goes with the sum of the rounded activations, as the scale does.
          if constexpr (KIND == Q4) total[b][u] += least[u] * (s * count);
        }
      }
    }
    for (int b = 0; b < ROWS; b++)
      for (int u = 0; u < TILES; u++) store(y + b * stride + (t + u) * LANES, total[b][u]);
  }
}

template <int KIND, int ROWS>
void rounded(const Matrix &m, int first, int last, const Read &in, float *y, size_t stride) {
  constexpr int TILES = ROWS == 8 ? 2 : 1;
  rounded<KIND, ROWS, TILES>(m, first, last, in, y, stride);
  if (TILES == 2 && (last - first) % 2) rounded<KIND, ROWS, 1>(m, last - 1, last, in, y, stride);
}
#else
#define HAS_INTEGER_DOT 0
#endif

template <int ROWS>
void product(const Matrix &m, int first, int last, const Read &in, float *y, size_t stride, bool quantised) {
#if HAS_INTEGER_DOT
  if (quantised && m.kind == Q4) return rounded<Q4, ROWS>(m, first, last, in, y, stride);
  if (quantised && m.kind == Q8) return rounded<Q8, ROWS>(m, first, last, in, y, stride);
#endif
  switch (m.kind) {
  case F32: return exact<F32, ROWS>(m, first, last, in, y, stride);
  case BF16: return exact<BF16, ROWS>(m, first, last, in, y, stride);
  case Q4: return exact<Q4, ROWS>(m, first, last, in, y, stride);
  default: return exact<Q8, ROWS>(m, first, last, in, y, stride);
  }
}

Read read_of(const Own &own, int k, int row) {
  const size_t at = (size_t)row * (k / GROUP);
  return Read{own.normed.data() + (size_t)row * k, own.sums.data() + at, own.scales.data() + at,
              own.q.data() + (size_t)row * k, own.counts.data() + at};
}

// The matrix of one expert.
Matrix expert_of(Matrix m, int expert) {
  m.data += (size_t)expert * (m.n / LANES) * (m.k / GROUP) * tile_bytes(m.kind);
  if (m.bias) m.bias += (size_t)expert * m.n;
  return m;
}

// Some of the rows of a product, a few tiles at a time so that they stay in the cache for all of `rows`.
void product_of(const Matrix &m, int first, int last, const Own &own, int rows, float *y, size_t stride, bool quantised) {
  const int step = rows > 8 ? 8 : last - first;
  for (int t = first; t < last; t += step) {
    const int end = t + step < last ? t + step : last;
    for (int b = 0; b < rows;) {
      const Read in = read_of(own, m.k, b);
      float *out = y + b * stride;
      const int left = rows - b;
      if (left >= 8) product<8>(m, t, end, in, out, stride, quantised), b += 8;
      else if (left >= 4) product<4>(m, t, end, in, out, stride, quantised), b += 4;
      else if (left >= 2) product<2>(m, t, end, in, out, stride, quantised), b += 2;
      else product<1>(m, t, end, in, out, stride, quantised), b += 1;
    }
  }
}

inline int whole(int n) { return (n + LANES - 1) / LANES * LANES; }
inline Floats first_of(Floats v, int n) {
  for (int i = n; i < LANES; i++) v[i] = 0;
  return v;
}

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

// The rows as products read them: normed where there is a norm, with the sums or the 8-bit numbers that m's kind needs.
void prepare(Own &own, const Matrix &m, const float *x, size_t stride, int n, int rows, const Norm &by,
             bool quantised) {
  const int groups = m.k / GROUP;
  for (int b = 0; b < rows; b++) {
    float *y = own.normed.data() + (size_t)b * m.k;
    if (by.kind) norm(x + b * stride, by, y);
    else std::memcpy(y, x + b * stride, 4 * (size_t)n);
    std::memset(y + n, 0, 4 * (size_t)(m.k - n));
    if (m.kind != Q4 && m.kind != Q8) continue;
    for (int g = 0; g < groups; g++) {
      const Floats low = load<Floats>(y + g * GROUP), high = load<Floats>(y + g * GROUP + LANES);
      const size_t at = (size_t)b * groups + g;
      if (!quantised) {
        own.sums[at] = sum(low + high);
        continue;
      }
      const float most = top(max(max(low, -low), max(high, -high))), by = most > 0 ? 127.f / most : 0.f;
      int8_t *q = own.q.data() + (size_t)b * m.k + g * GROUP;
      Floats counts{};
      for (int part = 0; part < 2; part++) {
        const Floats near = nearest((part ? high : low) * by);
        store(q + part * LANES, __builtin_convertvector(__builtin_convertvector(near, Ints), Bytes));
        counts += near;
      }
      // Whole numbers far below 2^24.
      const int32_t count = (int32_t)sum(counts);
      own.scales[at] = most / 127.f;
      own.counts[at] = count;
    }
  }
}

void look_up(const Matrix &m, int row, float *y, int n, float scale) {
  const int groups = m.k / GROUP, r = row % LANES;
  const size_t bytes = tile_bytes(m.kind);
  const uint8_t *p = m.data + (size_t)(row / LANES) * groups * bytes;
  for (int i = 0; i < n; i++) {
    const uint8_t *tile = p + (size_t)(i / GROUP) * bytes;
    const int c = i % GROUP;
    float value;
    if (m.kind == F32) value = load<float>(tile + 64 * c + 4 * r);
    else if (m.kind == BF16) {
      uint32_t bits = (uint32_t)load<uint16_t>(tile + 64 * (c / 2) + 4 * r + 2 * (c % 2)) << 16;
      std::memcpy(&value, &bits, 4);
    } else if (m.kind == Q4) {
      const uint8_t byte = tile[64 * (c / 8) + 4 * r + c % 4];
      value = (c % 8 < 4 ? byte & 15 : byte >> 4) * half(load<uint16_t>(tile + 256 + 2 * r)) +
              half(load<uint16_t>(tile + 288 + 2 * r));
    } else
      value = ((int)tile[64 * (c / 4) + 4 * r + c % 4] - 128) * half(load<uint16_t>(tile + 512 + 2 * r));
    y[i] = value * scale;
  }
}

void turn(float *x, const float *cos, const float *sin, int turned) {
  const int n = turned / 2;
  for (int i = 0; i < n; i++) {
    const float a = x[i], b = x[i + n];
    x[i] = a * cos[i] - b * sin[i];
    x[i + n] = b * cos[i] + a * sin[i];
  }
}

float *page_of(const Program &p, float *kept, int slot, int kv, int position) {
  const int page = p.pages[(size_t)slot * (p.capacity / LANES) + position / LANES];
  return kept + ((size_t)page * p.kv_heads + kv) * LANES * p.head;
}

void clip(float *x, int n, float limit) {
  for (int i = 0; i < n; i++) x[i] = x[i] > limit ? limit : x[i] < -limit ? -limit : x[i];
}

// Norms and turns of a row's head h of queries and keys together; a key and its value go into the cache.
void place(const Program &p, const Layer &l, float *qkv, int slot, int position, int h, const Spread *given) {
  const int n = p.turned / 2, kv = h - p.heads;
  const bool key = kv >= 0;
  float *x = qkv + (size_t)h * p.head, *v = qkv + (size_t)(p.heads + p.kv_heads + kv) * p.head;
  if (p.clip > 0) {
    clip(x, p.head, p.clip);
    if (key) clip(v, p.head, p.clip);
  }
  const Norm &m = key ? l.k_norm : l.q_norm;
  if (m.kind) norm(x, m, given ? given[key] : spread(x, p.head, m), key ? kv : h, x, p.head);
  if (l.cos) turn(x, l.cos + (size_t)position * n, l.sin + (size_t)position * n, p.turned);
  if (!key) return;
  float *column = page_of(p, l.keys, slot, kv, position) + position % LANES;
  for (int i = 0; i < p.head; i++) column[(size_t)i * LANES] = x[i];
  std::memcpy(page_of(p, l.values, slot, kv, position) + (size_t)(position % LANES) * p.head, v, 4 * (size_t)p.head);
}

// Values weighed by the scores of Q heads that read them, N registers of each from register `part` on.
template <int Q, int N>
void weigh(const Program &p, const float *page, int start, int end, const float *scores, size_t stride, Floats (&mixed)[Q][4],
           int part) {
  for (int s = start; s < end; s++)
    for (int i = 0; i < N; i++) {
      const Floats v = load<Floats>(page + (size_t)s * p.head + (part + i) * LANES);
      for (int g = 0; g < Q; g++) mixed[g][i] += v * scores[g * stride + s];
    }
}

// What the heads [h, h + Q), which share keys and values, read at a position; each as if it were alone.
template <int Q>
void attend(const Program &p, const Layer &l, const float *q, int slot, int h, int position, float *out, float *scores) {
  const int kv = h / (p.heads / p.kv_heads), first = l.window && position >= l.window ? position - l.window + 1 : 0;
  const int from = first / LANES, to = position / LANES + 1, parts = p.head / LANES;
  const size_t stride = p.capacity + LANES;
  const Floats lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const auto outside = [&](int t, int i) { return t * LANES + i < first || t * LANES + i > position; };
  Floats most[Q], weight[Q] = {};
  for (int g = 0; g < Q; g++) most[g] = all(-3e38f);
  for (int t = from; t < to; t++) {
    const float *k = page_of(p, l.keys, slot, kv, t * LANES);
    Floats part[Q][4] = {};
    for (int i = 0; i < p.head; i += 4)
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++) {
        const Floats key = load<Floats>(k + (size_t)(i + j) * LANES);
        for (int g = 0; g < Q; g++) part[g][j] += key * q[(size_t)g * p.head + i + j];
      }
    for (int g = 0; g < Q; g++) {
      Floats score = ((part[g][0] + part[g][1]) + (part[g][2] + part[g][3])) * l.scale;
      if (p.softcap > 0) score = hyperbolic(score / p.softcap) * p.softcap;
      if (l.slopes) score += (lanes + (float)(t * LANES - position)) * l.slopes[h + g];
      if (t == from || t == to - 1)
        for (int i = 0; i < LANES; i++)
          if (outside(t, i)) score[i] = -3e38f;
      most[g] = max(most[g], score);
      store(scores + g * stride + (size_t)t * LANES, score);
    }
  }
  float by[Q];
  for (int g = 0; g < Q; g++) {
    float best = top(most[g]);
    if (l.sinks && l.sinks[h + g] > best) best = l.sinks[h + g];
    const Floats peak = all(best);
    for (int t = from; t < to; t++) {
      float *score = scores + g * stride + (size_t)t * LANES;
      Floats e = exponential(load<Floats>(score) - peak);
      if (t == from || t == to - 1)
        for (int i = 0; i < LANES; i++)
          if (outside(t, i)) e[i] = 0;
      weight[g] += e;
      store(score, e);
    }
    float weights = sum(weight[g]);
    if (l.sinks) weights += exponential(all(l.sinks[h + g]) - peak)[0];
    by[g] = 1.f / weights;
  }
  for (int part = 0; part < parts; part += 4) {
    Floats mixed[Q][4] = {};
    for (int t = from; t < to; t++) {
      const float *page = page_of(p, l.values, slot, kv, t * LANES), *of = scores + (size_t)t * LANES;
      const int start = t == from ? first % LANES : 0, end = t == to - 1 ? position % LANES + 1 : LANES;
      switch (parts - part) {
      case 1: weigh<Q, 1>(p, page, start, end, of, stride, mixed, part); break;
      case 2: weigh<Q, 2>(p, page, start, end, of, stride, mixed, part); break;
      case 3: weigh<Q, 3>(p, page, start, end, of, stride, mixed, part); break;
      default: weigh<Q, 4>(p, page, start, end, of, stride, mixed, part);
      }
    }
    for (int g = 0; g < Q; g++)
      for (int i = part; i < parts && i < part + 4; i++) store(out + (size_t)g * p.head + i * LANES, mixed[g][i - part] * by[g]);
  }
}

// Which experts a row goes to, the best first, and with what weight each counts.
void choose(const Layer &l, const float *logits, int32_t *picked, float *kept) {
  std::vector<float> scores(logits, logits + l.experts);
  if (l.scoring == SIGMOID)
    for (float &s : scores) s = 1.f / (1.f + std::exp(-s));
  if (l.scoring == SOFTMAX) {
    float most = scores[0], total = 0;
    for (float s : scores) most = s > most ? s : most;
    for (float &s : scores) total += s = std::exp(s - most);
    for (float &s : scores) s /= total;
  }
  float total = 0;
  for (int j = 0; j < l.chosen; j++) {
    int best = -1;
    for (int e = 0; e < l.experts; e++) {
      bool taken = false;
      for (int i = 0; i < j; i++) taken |= picked[i] == e;
      if (!taken && (best < 0 || scores[e] > scores[best])) best = e;
    }
    picked[j] = best, kept[j] = scores[best];
    if (l.scoring == TOP_SOFTMAX) kept[j] = std::exp(scores[best] - scores[picked[0]]);
    total += kept[j];
  }
  for (int j = 0; j < l.chosen; j++) {
    if (l.normalize || l.scoring == TOP_SOFTMAX) kept[j] /= total + (l.scoring == TOP_SOFTMAX ? 0.f : 1e-20f);
    kept[j] *= l.kept_scale;
  }
}

// What an MLP's hidden channels are, of the tiles [a, z) of its first product.
void activate(const Layer &l, const float *from, float *to, int a, int z) {
  const int each = l.gated ? 2 : 1;
  for (int t = a; t < z; t++) {
    Floats x = load<Floats>(from + (size_t)t * each * LANES), y;
    if (l.limit > 0) {
      Floats up = load<Floats>(from + (size_t)t * each * LANES + LANES);
      x = x > l.limit ? all(l.limit) : x;
      up = max(up > l.limit ? all(l.limit) : up, all(-l.limit));
      y = (up + 1.f) * x / (1.f + exponential(x * -l.alpha));
    } else {
      y = act(x, l.act);
      if (l.gated) y *= load<Floats>(from + (size_t)t * each * LANES + LANES);
    }
    store(to + (size_t)t * LANES, y);
  }
}

struct Worker {
  Pool &pool;
  const int id;
  const Job &job;
  const Program &p;
  const Shared &s;
  Own &own;
  const size_t w;
  const int rows;
  const bool quantised;

  explicit Worker(Pool &pool, int id)
      : pool(pool), id(id), job(*pool.job), p(*job.program), s(pool.shared), own(pool.own[id]), w(s.width),
        rows(job.rows), quantised(p.quantised) {}

  // The part of n things that this thread does.
  void share(int n, int &a, int &z) const {
    a = (int)((int64_t)n * id / p.threads), z = (int)((int64_t)n * (id + 1) / p.threads);
  }
  void multiply(const Matrix &m, int a, int z, int count, float *y) { product_of(m, a, z, own, count, y, w, quantised); }
  void wait() { pool.barrier.wait(); }

  void embed() {
    int a, z;
    share(rows, a, z);
    for (int b = a; b < z; b++) {
      float *x = s.x + b * w;
      look_up(p.table, job.token[b], x, p.d, p.embed_scale);
      std::memset(x + p.d, 0, 4 * (size_t)(whole(p.d) - p.d));
      if (p.places.data) {
        float *place = own.normed.data();
        look_up(p.places, job.position[b] + p.offset, place, p.d, 1.f);
        for (int i = 0; i < p.d; i++) x[i] += place[i];
      }
      if (p.embed_norm.kind) norm(x, p.embed_norm, x);
    }
    wait();
  }

  // Brings `update` into the stream; of blocks whose sublayers read the same stream, with what was held.
  void add(int a, int z, const Norm *norms, bool with_held) {
    if (!norms[1].kind && !norms[2].kind) {
      for (int b = 0; b < rows; b++)
        for (int c = a * LANES; c < z * LANES; c++)
          s.x[b * w + c] = (with_held ? s.x[b * w + c] + s.held[b * w + c] : s.x[b * w + c]) + s.update[b * w + c];
      wait();
      return;
    }
    wait();
    share(rows, a, z);
    for (int b = a; b < z; b++) {
      float *x = s.x + b * w, *update = s.update + b * w;
      if (norms[1].kind) norm(update, norms[1], update);
      for (int c = 0; c < p.d; c++) x[c] += update[c];
      if (norms[2].kind) norm(x, norms[2], x);
    }
    wait();
  }

  void attention(const Layer &l) {
    const int heads = p.heads + p.kv_heads;
    const bool wide = l.q_norm.kind && l.q_norm.n > p.head;
    int a, z;
    prepare(own, l.qkv, s.x, w, p.d, rows, l.norms[0], quantised);
    share(l.qkv.n / LANES, a, z);
    multiply(l.qkv, a, z, rows, s.qkv);
    wait();
    const int each = wide ? heads : 1;
    share(rows * heads / each, a, z);
    for (int u = a; u < z; u++) {
      const int b = u * each / heads;
      float *qkv = s.qkv + b * w;
      Spread both[2];
      if (wide) {
        both[0] = spread(qkv, p.heads * p.head, l.q_norm);
        both[1] = spread(qkv + (size_t)p.heads * p.head, p.kv_heads * p.head, l.k_norm);
      }
      for (int h = u * each % heads, end = h + each; h < end; h++)
        place(p, l, qkv, job.slot[b], job.position[b], h, wide ? both : nullptr);
    }
    wait();
    // Heads that share keys go together where there is work enough for all threads.
    const int group = p.heads / p.kv_heads;
    const int together = rows * p.kv_heads < 4 * p.threads ? 1 : group % 4 == 0 ? 4 : group % 3 == 0 ? 3 : group % 2 ? 1 : 2;
    share(rows * p.heads / together, a, z);
    for (int u = a; u < z; u++) {
      const int b = u * together / p.heads, h = u * together % p.heads;
      const float *q = s.qkv + b * w + (size_t)h * p.head;
      float *out = s.mixed + b * w + (size_t)h * p.head, *scores = own.scores.data();
      switch (together) {
      case 4: attend<4>(p, l, q, job.slot[b], h, job.position[b], out, scores); break;
      case 3: attend<3>(p, l, q, job.slot[b], h, job.position[b], out, scores); break;
      case 2: attend<2>(p, l, q, job.slot[b], h, job.position[b], out, scores); break;
      default: attend<1>(p, l, q, job.slot[b], h, job.position[b], out, scores);
      }
    }
    wait();
    prepare(own, l.o, s.mixed, w, p.heads * p.head, rows, Norm{}, quantised);
    share(l.o.n / LANES, a, z);
    multiply(l.o, a, z, rows, p.parallel ? s.held : s.update);
    if (p.parallel) wait();
    else add(a, z, l.norms, false);
  }

  void mlp(const Layer &l) {
    int a, z;
    const int each = l.gated ? 2 : 1;
    prepare(own, l.up, s.x, w, p.d, rows, l.norms[3], quantised);
    share(l.up.n / LANES / each, a, z);
    multiply(l.up, a * each, z * each, rows, s.qkv);
    for (int b = 0; b < rows; b++) activate(l, s.qkv + b * w, s.hidden + b * w, a, z);
    wait();
    prepare(own, l.down, s.hidden, w, whole(l.d_ff), rows, Norm{}, quantised);
    share(l.down.n / LANES, a, z);
    multiply(l.down, a, z, rows, s.update);
    add(a, z, l.norms + 3, p.parallel);
  }

  // One expert after the other of each row; every thread chooses for itself, and all alike.
  void experts(const Layer &l) {
    const int each = l.gated ? 2 : 1;
    const Matrix &reads = l.up.kind == Q4 || l.up.kind == Q8 ? l.up : l.router;
    int a, z;
    for (int j = 0; j < l.chosen; j++) {
      prepare(own, reads, s.x, w, p.d, rows, l.norms[3], quantised);
      if (j == 0)
        for (int b = 0; b < rows; b++) {
          product<1>(l.router, 0, l.router.n / LANES, read_of(own, l.router.k, b), own.routed.data(), 0, quantised);
          choose(l, own.routed.data(), own.picked.data() + b * l.chosen, own.kept.data() + b * l.chosen);
        }
      share(l.up.n / LANES / each, a, z);
      for (int b = 0; b < rows; b++) {
        const Matrix m = expert_of(l.up, own.picked[b * l.chosen + j]);
        product<1>(m, a * each, z * each, read_of(own, m.k, b), s.qkv + b * w, 0, quantised);
        activate(l, s.qkv + b * w, s.hidden + b * w, a, z);
      }
      wait();
      prepare(own, l.down, s.hidden, w, whole(l.d_ff), rows, Norm{}, quantised);
      share(l.down.n / LANES, a, z);
      for (int b = 0; b < rows; b++) {
        const Matrix m = expert_of(l.down, own.picked[b * l.chosen + j]);
        product<1>(m, a, z, read_of(own, m.k, b), s.held + b * w, 0, quantised);
        const float by = own.kept[b * l.chosen + j];
        for (int c = a * LANES; c < z * LANES; c++) {
          const float given = s.held[b * w + c] * by;
          s.update[b * w + c] = j ? s.update[b * w + c] + given : given;
        }
      }
      if (j + 1 < l.chosen) wait();
    }
    add(a, z, l.norms + 3, false);
  }

  void score() {
    int wanted = 0, a, z;
    for (int b = 0; b < rows; b++)
      if (job.wanted[b]) {
        // Rows whose logits are asked for stand one behind the other.
        if (id == 0) std::memcpy(s.update + wanted * w, s.x + b * w, 4 * (size_t)whole(p.d));
        wanted++;
      }
    wait();
    if (!wanted) return;
    prepare(own, p.out, s.update, w, p.d, wanted, p.final_norm, quantised);
    share(p.out.n / LANES, a, z);
    product_of(p.out, a, z, own, wanted, p.logits, p.out.n, quantised);
    for (int b = 0; b < wanted; b++)
      for (int c = a * LANES; c < z * LANES; c += LANES) {
        float *y = p.logits + (size_t)b * p.out.n + c;
        Floats v = load<Floats>(y) * p.logit_scale;
        if (p.logit_softcap > 0) v = hyperbolic(v / p.logit_softcap) * p.logit_softcap;
        store(y, v);
      }
    wait();
    share(wanted, a, z);
    for (int b = a; b < z; b++) {
      const float *y = p.logits + (size_t)b * p.out.n;
      int32_t best = 0;
      for (int i = 1; i < p.vocab; i++) best = y[i] > y[best] ? i : best;
      job.best[b] = best;
    }
  }
};

void work(Pool &pool, int id) {
  Worker worker(pool, id);
  worker.embed();
  for (int i = 0; i < worker.p.layers; i++) {
    const Layer &l = worker.p.layer[i];
    worker.attention(l);
    if (l.experts) worker.experts(l);
    else worker.mlp(l);
  }
  worker.score();
}

void serve(Pool &pool, int id) {
  int seen = 0;
  while (true) {
    int now = pool.epoch.load(std::memory_order_acquire);
    for (int spins = 0; now == seen && spins < 4000; spins++) {
#if defined(__x86_64__)
      _mm_pause();
#endif
      now = pool.epoch.load(std::memory_order_acquire);
    }
    if (now == seen) {
      pool.epoch.wait(seen, std::memory_order_acquire);
      continue;
    }
    seen = now;
    if (pool.over.load(std::memory_order_acquire)) return;
    work(pool, id);
    pool.barrier.wait();
  }
}

} // namespace

extern "C" {

// Sizes of the structures, so that the caller can check its own.
int sc_sizes(int which) {
  const int sizes[] = {sizeof(Program), sizeof(Layer), sizeof(Matrix), sizeof(Norm)};
  return sizes[which];
}
int sc_most_rows() { return MOST_ROWS; }
int sc_integer_dot() { return HAS_INTEGER_DOT; }
long sc_tile_bytes(int kind) { return (long)tile_bytes(kind); }

// Zeroed memory at the start of a huge page, and huge pages where the system gives them; null where it gives none.
void *sc_arena(size_t bytes) {
  const size_t page = (size_t)2 << 20, whole = (bytes + page - 1) / page * page;
  char *found = (char *)mmap(nullptr, whole + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (found == MAP_FAILED) return nullptr;
  char *first = (char *)(((uintptr_t)found + page - 1) / page * page);
  if (first > found) munmap(found, first - found);
  if (found + page > first) munmap(first + whole, found + page - first);
#if defined(MADV_HUGEPAGE)
  madvise(first, whole, MADV_HUGEPAGE);
#endif
  return first;
}
void sc_free(void *arena, size_t bytes) {
  const size_t page = (size_t)2 << 20;
  munmap(arena, (bytes + page - 1) / page * page);
}

// Floats that `sc_start` needs for what the threads share.
long sc_scratch(long widest) { return 6L * MOST_ROWS * widest; }

void sc_start(Program *p, float *scratch, long widest) {
  Pool *pool = new Pool;
  const size_t row = MOST_ROWS * (size_t)widest;
  pool->shared = Shared{scratch,           scratch + row,     scratch + 2 * row, scratch + 3 * row,
                        scratch + 4 * row, scratch + 5 * row, (int)widest};
  int experts = 0, chosen = 0;
  for (int i = 0; i < p->layers; i++) {
    experts = p->layer[i].router.n > experts ? p->layer[i].router.n : experts;
    chosen = p->layer[i].chosen > chosen ? p->layer[i].chosen : chosen;
  }
  pool->own.resize(p->threads);
  for (Own &own : pool->own) {
    const size_t numbers = MOST_ROWS * (size_t)(widest + GROUP), groups = numbers / GROUP;
    own.normed.resize(numbers), own.q.resize(numbers);
    own.sums.resize(groups), own.scales.resize(groups), own.counts.resize(groups);
    own.scores.resize(4 * (p->capacity + LANES));
    own.routed.resize(experts), own.kept.resize(MOST_ROWS * chosen), own.picked.resize(MOST_ROWS * chosen);
  }
  pool->barrier.threads = p->threads;
  for (int id = 1; id < p->threads; id++) pool->workers.emplace_back(serve, std::ref(*pool), id);
  p->pool = pool;
}

void sc_stop(Program *p) {
  Pool *pool = (Pool *)p->pool;
  pool->over.store(true, std::memory_order_release);
  pool->epoch.fetch_add(1, std::memory_order_acq_rel);
  pool->epoch.notify_all();
  for (std::thread &worker : pool->workers) worker.join();
  delete pool;
  p->pool = nullptr;
}

void sc_pass(const Program *p, int rows, const int32_t *token, const int32_t *slot, const int32_t *position,
             const uint8_t *wanted, int32_t *best) {
  Pool &pool = *(Pool *)p->pool;
  Job job{p, rows, token, slot, position, wanted, best};
  pool.job = &job;
  pool.epoch.fetch_add(1, std::memory_order_acq_rel);
  pool.epoch.notify_all();
  work(pool, 0);
  pool.barrier.wait();
}
}
