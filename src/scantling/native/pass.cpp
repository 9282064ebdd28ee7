// One pass of a decoder whose blocks are norm, attention, norm, MLP: any number of rows, each a token of some sequence.
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

template <class V> inline V load(const void *from) {
  V value;
  std::memcpy(&value, from, sizeof value);
  return value;
}
template <class V> inline void store(void *to, V value) { std::memcpy(to, &value, sizeof value); }
inline Floats all(float x) { return x - Floats{}; }
inline Floats max(Floats a, Floats b) { return a > b ? a : b; }
inline float top(Floats v) {
  float best = v[0];
  for (int i = 1; i < LANES; i++) best = v[i] > best ? v[i] : best;
  return best;
}
inline float sum(Floats v) {
  // In a fixed tree, whatever the instruction set.
  for (int half = LANES / 2; half; half /= 2)
    for (int i = 0; i < half; i++) v[i] += v[i + half];
  return v[0];
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

struct Layer {
  Matrix qkv, o, up, down; // `up` of a gated MLP holds tiles of gate and up in turn
  const float *attn_norm, *mlp_norm;
  const float *q_norm, *k_norm; // of each head, or null
  const float *cos, *sin;       // (capacity, turned / 2), or null
  int32_t window, pad;          // 0 for none
  float *keys, *values;         // (slots, kv heads, capacity / 16, head, 16) and (slots, kv heads, capacity, head)
};

struct Program {
  int32_t d, heads, kv_heads, head, turned, d_ff, gated, act, layers, vocab, slots, capacity, threads, quantised;
  float eps, qk_eps, scale, softcap, logit_softcap, embed_scale, logit_scale, pad;
  const Layer *layer;
  Matrix table, out; // `table` is looked up; `out` gives the logits
  const float *final_norm;
  float *logits; // (MOST_ROWS, out.n)
  void *pool, *scratch;
};
}

namespace {

struct Shared {
  float *x, *qkv, *mixed, *update, *hidden; // (MOST_ROWS, width) each
  int width;
};

// What a thread makes of the rows that a product reads.
struct Own {
  std::vector<float> normed, sums, scales, scores;
  std::vector<int8_t> q;
  std::vector<int32_t> counts;
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

// The same with activations as 8-bit numbers and a scale for 32 of them.
template <int KIND, int ROWS>
void rounded(const Matrix &m, int first, int last, const Read &in, float *y, size_t stride) {
  const int groups = m.k / GROUP;
  constexpr size_t bytes = KIND == Q4 ? 320 : 544;
  const __m512i low = _mm512_set1_epi8(15);
  for (int t = first; t < last; t++) {
    const uint8_t *p = m.data + (size_t)t * groups * bytes;
    Floats total[ROWS];
    for (int b = 0; b < ROWS; b++) total[b] = m.bias ? load<Floats>(m.bias + t * LANES) : Floats{};
    for (int g = 0; g < groups; g++, p += bytes) {
      ahead<ROWS>(p, bytes);
      __m512i w[8];
      if constexpr (KIND == Q4)
        for (int j = 0; j < 4; j++) {
          __m512i v = load<__m512i>(p + 64 * j);
          w[2 * j] = _mm512_and_si512(v, low);
          w[2 * j + 1] = _mm512_and_si512(_mm512_srli_epi16(v, 4), low);
        }
      else
        for (int j = 0; j < 8; j++) w[j] = load<__m512i>(p + 64 * j);
      const Floats d = halves(p + (KIND == Q4 ? 256 : 512));
      for (int b = 0; b < ROWS; b++) {
        const int8_t *x = in.q + (size_t)b * m.k + g * GROUP;
        const float s = in.scales[b * groups + g];
        __m512i even = KIND == Q4 ? _mm512_setzero_si512() : _mm512_set1_epi32(-128 * in.counts[b * groups + g]);
        __m512i odd = _mm512_setzero_si512();
#pragma GCC unroll 4
        for (int j = 0; j < 8; j += 2) {
          even = _mm512_dpbusd_epi32(even, w[j], four(x + 4 * j));
          odd = _mm512_dpbusd_epi32(odd, w[j + 1], four(x + 4 * j + 4));
        }
        total[b] += (Floats)_mm512_cvtepi32_ps(_mm512_add_epi32(even, odd)) * (d * s);
        // The minimum goes with the sum of the rounded activations, as the scale does.
        if constexpr (KIND == Q4) total[b] += halves(p + 288) * (s * in.counts[b * groups + g]);
      }
    }
    for (int b = 0; b < ROWS; b++) store(y + b * stride + t * LANES, total[b]);
  }
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

// Some of the rows of a product, a few tiles at a time so that they stay in the cache for all of `rows`.
void product_of(const Matrix &m, int first, int last, const Own &own, int rows, float *y, size_t stride, bool quantised) {
  const int groups = m.k / GROUP, step = rows > 8 ? 8 : last - first;
  for (int t = first; t < last; t += step) {
    const int end = t + step < last ? t + step : last;
    for (int b = 0; b < rows;) {
      Read in{own.normed.data() + (size_t)b * m.k, own.sums.data() + (size_t)b * groups,
              own.scales.data() + (size_t)b * groups, own.q.data() + (size_t)b * m.k,
              own.counts.data() + (size_t)b * groups};
      float *out = y + b * stride;
      const int left = rows - b;
      if (left >= 8) product<8>(m, t, end, in, out, stride, quantised), b += 8;
      else if (left >= 4) product<4>(m, t, end, in, out, stride, quantised), b += 4;
      else if (left >= 2) product<2>(m, t, end, in, out, stride, quantised), b += 2;
      else product<1>(m, t, end, in, out, stride, quantised), b += 1;
    }
  }
}

float mean_square(const float *x, int n) {
  Floats squares{};
  for (int i = 0; i < n; i += LANES) {
    Floats v = load<Floats>(x + i);
    squares += v * v;
  }
  return sum(squares) / n;
}

void norm(const float *x, const float *gain, float *y, int n, float eps) {
  const Floats by = all(1.f / std::sqrt(mean_square(x, n) + eps));
  for (int i = 0; i < n; i += LANES) store(y + i, load<Floats>(x + i) * by * load<Floats>(gain + i));
}

// The rows as products read them: normed where there is a gain, with the sums or the 8-bit numbers that m's kind needs.
void prepare(Own &own, const Matrix &m, const float *x, size_t stride, int n, int rows, const float *gain, float eps,
             bool quantised) {
  const int groups = m.k / GROUP;
  for (int b = 0; b < rows; b++) {
    float *y = own.normed.data() + (size_t)b * m.k;
    if (gain) norm(x + b * stride, gain, y, n, eps);
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
      Ints counts{};
      for (int part = 0; part < 2; part++) {
        const Ints whole = __builtin_convertvector(nearest((part ? high : low) * by), Ints);
        for (int i = 0; i < LANES; i++) q[part * LANES + i] = (int8_t)whole[i];
        counts += whole;
      }
      int32_t count = 0;
      for (int i = 0; i < LANES; i++) count += counts[i];
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

float *key_of(const Program &p, const Layer &l, int slot, int kv, int position) {
  const size_t before = ((size_t)slot * p.kv_heads + kv) * p.capacity + position / LANES * LANES;
  return l.keys + before * p.head + position % LANES;
}

float *value_of(const Program &p, const Layer &l, int slot, int kv, int position) {
  return l.values + (((size_t)slot * p.kv_heads + kv) * p.capacity + position) * p.head;
}

// Norms and turns of one row's heads [first, last) of queries and keys together; keys and values go into the cache.
void place(const Program &p, const Layer &l, float *qkv, int slot, int position, int first, int last) {
  const int n = p.turned / 2;
  for (int h = first; h < last; h++) {
    float *x = qkv + (size_t)h * p.head;
    const bool key = h >= p.heads;
    const float *gain = key ? l.k_norm : l.q_norm;
    if (gain) norm(x, gain, x, p.head, p.qk_eps);
    if (l.cos) turn(x, l.cos + (size_t)position * n, l.sin + (size_t)position * n, p.turned);
    if (!key) continue;
    const int kv = h - p.heads;
    float *column = key_of(p, l, slot, kv, position);
    for (int i = 0; i < p.head; i++) column[(size_t)i * LANES] = x[i];
    std::memcpy(value_of(p, l, slot, kv, position), qkv + (size_t)(p.heads + p.kv_heads + kv) * p.head,
                4 * (size_t)p.head);
  }
}

void attend(const Program &p, const Layer &l, const float *q, int slot, int kv, int position, float *out, float *scores) {
  const int first = l.window && position >= l.window ? position - l.window + 1 : 0;
  const int from = first / LANES, to = position / LANES + 1;
  Floats most = all(-3e38f);
  for (int t = from; t < to; t++) {
    const float *k = key_of(p, l, slot, kv, t * LANES);
    Floats part[4] = {};
    for (int i = 0; i < p.head; i += 4)
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++) part[j] += load<Floats>(k + (size_t)(i + j) * LANES) * q[i + j];
    Floats score = ((part[0] + part[1]) + (part[2] + part[3])) * p.scale;
    if (p.softcap > 0) score = hyperbolic(score / p.softcap) * p.softcap;
    if (t == from || t == to - 1)
      for (int i = 0; i < LANES; i++)
        if (t * LANES + i < first || t * LANES + i > position) score[i] = -3e38f;
    most = max(most, score);
    store(scores + (size_t)t * LANES, score);
  }
  const Floats peak = all(top(most));
  Floats weight{}, mixed[WIDEST_HEAD / LANES] = {};
  for (int t = from; t < to; t++) {
    Floats e = exponential(load<Floats>(scores + (size_t)t * LANES) - peak);
    if (t == from || t == to - 1)
      for (int i = 0; i < LANES; i++)
        if (t * LANES + i < first || t * LANES + i > position) e[i] = 0;
    weight += e;
    store(scores + (size_t)t * LANES, e);
  }
  const int parts = p.head / LANES;
  for (int s = first; s <= position; s++) {
    const float *v = value_of(p, l, slot, kv, s);
    for (int i = 0; i < parts; i++) mixed[i] += load<Floats>(v + i * LANES) * scores[s];
  }
  const Floats by = all(1.f / sum(weight));
  for (int i = 0; i < parts; i++) store(out + i * LANES, mixed[i] * by);
}

void work(Pool &pool, int id) {
  const Job &job = *pool.job;
  const Program &p = *job.program;
  const Shared &s = pool.shared;
  Own &own = pool.own[id];
  const size_t w = s.width;
  const int rows = job.rows, heads = p.heads + p.kv_heads;
  const bool quantised = p.quantised;
  auto share = [&](int n, int &a, int &z) {
    a = (int)((int64_t)n * id / p.threads), z = (int)((int64_t)n * (id + 1) / p.threads);
  };
  auto multiply = [&](const Matrix &m, int a, int z, int n, float *y) {
    product_of(m, a, z, own, n, y, w, quantised);
  };
  int a, z;
  share(rows, a, z);
  for (int b = a; b < z; b++) look_up(p.table, job.token[b], s.x + b * w, p.d, p.embed_scale);
  pool.barrier.wait();
  for (int i = 0; i < p.layers; i++) {
    const Layer &l = p.layer[i];
    prepare(own, l.qkv, s.x, w, p.d, rows, l.attn_norm, p.eps, quantised);
    share(l.qkv.n / LANES, a, z);
    multiply(l.qkv, a, z, rows, s.qkv);
    pool.barrier.wait();
    share(rows * heads, a, z);
    for (int u = a; u < z; u++)
      place(p, l, s.qkv + u / heads * w, job.slot[u / heads], job.position[u / heads], u % heads, u % heads + 1);
    pool.barrier.wait();
    share(rows * p.heads, a, z);
    for (int u = a; u < z; u++) {
      const int b = u / p.heads, h = u % p.heads;
      attend(p, l, s.qkv + b * w + (size_t)h * p.head, job.slot[b], h / (p.heads / p.kv_heads), job.position[b],
             s.mixed + b * w + (size_t)h * p.head, own.scores.data());
    }
    pool.barrier.wait();
    auto add = [&](const Matrix &m) {
      share(m.n / LANES, a, z);
      multiply(m, a, z, rows, s.update);
      for (int b = 0; b < rows; b++)
        for (int c = a * LANES; c < z * LANES; c++) s.x[b * w + c] += s.update[b * w + c];
      pool.barrier.wait();
    };
    prepare(own, l.o, s.mixed, w, p.heads * p.head, rows, nullptr, 0, quantised);
    add(l.o);
    prepare(own, l.up, s.x, w, p.d, rows, l.mlp_norm, p.eps, quantised);
    const int each = p.gated ? 2 : 1;
    share(l.up.n / LANES / each, a, z);
    multiply(l.up, a * each, z * each, rows, s.qkv);
    for (int b = 0; b < rows; b++)
      for (int t = a; t < z; t++) {
        const float *from = s.qkv + b * w + (size_t)t * each * LANES;
        Floats y = act(load<Floats>(from), p.act);
        if (p.gated) y *= load<Floats>(from + LANES);
        store(s.hidden + b * w + (size_t)t * LANES, y);
      }
    pool.barrier.wait();
    prepare(own, l.down, s.hidden, w, p.d_ff, rows, nullptr, 0, quantised);
    add(l.down);
  }
  int wanted = 0;
  for (int b = 0; b < rows; b++)
    if (job.wanted[b]) {
      // Rows whose logits are asked for stand one behind the other.
      if (id == 0) std::memcpy(s.update + wanted * w, s.x + b * w, 4 * (size_t)p.d);
      wanted++;
    }
  pool.barrier.wait();
  if (!wanted) return;
  prepare(own, p.out, s.update, w, p.d, wanted, p.final_norm, p.eps, quantised);
  share(p.out.n / LANES, a, z);
  product_of(p.out, a, z, own, wanted, p.logits, p.out.n, quantised);
  for (int b = 0; b < wanted; b++)
    for (int c = a * LANES; c < z * LANES; c += LANES) {
      float *y = p.logits + (size_t)b * p.out.n + c;
      Floats v = load<Floats>(y) * p.logit_scale;
      if (p.logit_softcap > 0) v = hyperbolic(v / p.logit_softcap) * p.logit_softcap;
      store(y, v);
    }
  pool.barrier.wait();
  share(wanted, a, z);
  for (int b = a; b < z; b++) {
    const float *y = p.logits + (size_t)b * p.out.n;
    int32_t best = 0;
    for (int i = 1; i < p.vocab; i++) best = y[i] > y[best] ? i : best;
    job.best[b] = best;
  }
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
int sc_sizes(int which) { return which == 0 ? sizeof(Program) : which == 1 ? sizeof(Layer) : sizeof(Matrix); }
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
long sc_scratch(long widest) { return 5L * MOST_ROWS * widest; }

void sc_start(Program *p, float *scratch, long widest) {
  Pool *pool = new Pool;
  const size_t row = MOST_ROWS * (size_t)widest;
  pool->shared = Shared{scratch, scratch + row, scratch + 2 * row, scratch + 3 * row, scratch + 4 * row, (int)widest};
  pool->own.resize(p->threads);
  for (Own &own : pool->own) {
    const size_t numbers = MOST_ROWS * (size_t)(widest + GROUP), groups = numbers / GROUP;
    own.normed.resize(numbers), own.q.resize(numbers);
    own.sums.resize(groups), own.scales.resize(groups), own.counts.resize(groups);
    own.scores.resize(p->capacity + LANES);
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
