// Attention of a pass: heads made ready and kept, then what they read.
#pragma once

#include <algorithm>

#include "lanes.h"
#include "program.h"
#include "rows.h"

namespace {

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

// A head of a row, and where it stands.
struct Reader {
  const float *q;
  float *out;
  int head, position;
};

// Heads whose scores stand side by side.
constexpr int TOGETHER = 12;

inline size_t scores_of(int capacity) { return (size_t)capacity + 2 * LANES; }

// What N heads that share keys and values read; each as if it were alone.
template <int N> struct Attention {
  const Program &p;
  const Layer &l;
  const int slot, kv;
  const Reader *readers;
  const size_t stride;
  float *scores, *turned;                         // (N, stride); (head, N)
  int from = 0, to = 0, start = 1 << 30, end = 0; // pages and positions that any of them reads

  Attention(const Program &p, const Layer &l, int slot, int kv, const Reader *readers, float *scores)
      : p(p), l(l), slot(slot), kv(kv), readers(readers), stride(scores_of(p.capacity)), scores(scores),
        turned(scores + TOGETHER * stride) {
    for (int n = 0; n < N; n++) {
      const int first = first_read(n), position = readers[n].position;
      start = first < start ? first : start, end = position + 1 > end ? position + 1 : end;
      for (int i = 0; i < p.head; i++) turned[i * N + n] = readers[n].q[i];
    }
    from = start / LANES, to = (end - 1) / LANES + 1;
  }

  int first_read(int n) const {
    const int position = readers[n].position;
    return l.window && position >= l.window ? position - l.window + 1 : 0;
  }

  // Products of queries with the keys of PAGES pages.
  template <int PAGES> void meet(int t) {
    const float *keys[PAGES], *soon[PAGES];
    for (int u = 0; u < PAGES; u++) {
      keys[u] = page_of(p, l.keys, slot, kv, (t + u) * LANES);
      soon[u] = page_of(p, l.keys, slot, kv, std::min(t + u + PAGES, to - 1) * LANES);
    }
    Floats found[N][PAGES] = {};
    for (int i = 0; i < p.head; i++) {
      Floats key[PAGES];
#pragma GCC unroll 2
      for (int u = 0; u < PAGES; u++) {
        key[u] = load<Floats>(keys[u] + (size_t)i * LANES);
        __builtin_prefetch(soon[u] + (size_t)i * LANES);
      }
#pragma GCC unroll 16
      for (int n = 0; n < N; n++) {
        const Floats one = all(turned[i * N + n]);
#pragma GCC unroll 2
        for (int u = 0; u < PAGES; u++) found[n][u] += key[u] * one;
      }
    }
#pragma GCC unroll 16
    for (int n = 0; n < N; n++)
#pragma GCC unroll 2
      for (int u = 0; u < PAGES; u++) store(scores + n * stride + (size_t)(t + u) * LANES, found[n][u]);
  }

  // One head's scores become weights that are not yet divided by their sum, which is returned.
  float weigh(int n) {
    const int position = readers[n].position, first = first_read(n), h = readers[n].head;
    const int a = first / LANES, z = position / LANES + 1;
    const Ints numbers = counting();
    float *own = scores + n * stride;
    const auto masked = [&](Floats v, int t, float by) {
      if (t > a && t < z - 1) return v;
      const Ints at = numbers + t * LANES;
      return select((at < first) | (at > position), all(by), v);
    };
    Floats most = all(-3e38f), weights{};
    for (int t = a; t < z; t++) {
      Floats score = load<Floats>(own + (size_t)t * LANES) * l.scale;
      if (p.softcap > 0) score = hyperbolic(score / p.softcap) * p.softcap;
      if (l.slopes) score += to_floats(numbers + (t * LANES - position)) * l.slopes[h];
      score = masked(score, t, -3e38f);
      most = max(most, score);
      store(own + (size_t)t * LANES, score);
    }
    float best = top(most);
    if (l.sinks && l.sinks[h] > best) best = l.sinks[h];
    const Floats peak = all(best);
    for (int t = a; t < z; t++) {
      const Floats e = masked(exponential(load<Floats>(own + (size_t)t * LANES) - peak), t, 0);
      weights += e;
      store(own + (size_t)t * LANES, e);
    }
    // Where others read and this head does not.
    std::memset(own + (size_t)from * LANES, 0, 4 * (size_t)(a - from) * LANES);
    std::memset(own + (size_t)z * LANES, 0, 4 * (size_t)(to - z) * LANES);
    float total = sum(weights);
    if (l.sinks) total += exponential(all(l.sinks[h]) - peak)[0];
    return total;
  }

  // Values by their weights, PARTS registers of each from register `part` on.
  template <int PARTS> void mix(int part, const float *by) {
    Floats mixed[N][PARTS] = {};
    for (int t = from; t < to; t++) {
      const float *page = page_of(p, l.values, slot, kv, t * LANES) + part * LANES, *of = scores + (size_t)t * LANES;
      const float *soon = page_of(p, l.values, slot, kv, std::min(t + 1, to - 1) * LANES) + part * LANES;
      const int a = t == from ? start % LANES : 0, z = t == to - 1 ? (end - 1) % LANES + 1 : LANES;
      for (int s = a; s < z; s++) {
        Floats v[PARTS];
#pragma GCC unroll 4
        for (int i = 0; i < PARTS; i++) {
          v[i] = load<Floats>(page + (size_t)s * p.head + i * LANES);
          __builtin_prefetch(soon + (size_t)s * p.head + i * LANES);
        }
#pragma GCC unroll 16
        for (int n = 0; n < N; n++) {
          const Floats one = all(of[n * stride + s]);
#pragma GCC unroll 4
          for (int i = 0; i < PARTS; i++) mixed[n][i] += v[i] * one;
        }
      }
    }
#pragma GCC unroll 16
    for (int n = 0; n < N; n++)
#pragma GCC unroll 4
      for (int i = 0; i < PARTS; i++) store(readers[n].out + (part + i) * LANES, mixed[n][i] * by[n]);
  }

  void run() {
    int t = from;
    for (; t + 2 <= to; t += 2) meet<2>(t);
    if (t < to) meet<1>(t);
    float by[N];
    for (int n = 0; n < N; n++) by[n] = 1.f / weigh(n);
    constexpr int MOST = N > 4 ? 2 : 4;
    const int parts = p.head / LANES;
    int part = 0;
    for (; part + MOST <= parts; part += MOST) mix<MOST>(part, by);
    if (MOST == 4 && part + 2 <= parts) mix<2>(part, by), part += 2;
    if (part < parts) mix<1>(part, by);
  }
};

// What any number of heads that share keys and values read.
void attend(const Program &p, const Layer &l, int slot, int kv, const Reader *readers, int count, float *scores) {
  while (count) {
    const int now = count >= 12 ? 12 : count >= 8 ? 8 : count >= 4 ? 4 : count;
    switch (now) {
    case 12: Attention<12>(p, l, slot, kv, readers, scores).run(); break;
    case 8: Attention<8>(p, l, slot, kv, readers, scores).run(); break;
    case 4: Attention<4>(p, l, slot, kv, readers, scores).run(); break;
    case 3: Attention<3>(p, l, slot, kv, readers, scores).run(); break;
    case 2: Attention<2>(p, l, slot, kv, readers, scores).run(); break;
    default: Attention<1>(p, l, slot, kv, readers, scores).run();
    }
    readers += now, count -= now;
  }
}

} // namespace
