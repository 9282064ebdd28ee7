// One pass of a decoder whose blocks are attention and MLP, with norms around them: any number of rows, each a token of
// some sequence. Widths are filled up with zeros to whole registers, and zeros they stay.
// Weights lie in tiles of 16 rows (see tiles.py), so 16 results grow side by side and no sum crosses lanes. A result is
// computed by one thread in one order, so it depends neither on the number of threads nor on the other rows.
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <thread>
#include <vector>

#include <sys/mman.h>

#include "attention.h"
#include "lanes.h"
#include "laying.h"
#include "program.h"
#include "rounded.h"
#include "rows.h"

namespace {

struct Shared {
  float *x, *qkv, *mixed, *update, *hidden, *held; // (MOST_ROWS, width) each
  int width;
  Rows rows; // of a product, where the threads make them together
};

// What a thread has for itself.
struct Own {
  Rows rows; // of a product
  std::vector<float> line, scores, routed, kept;
  std::vector<int32_t> picked;
  std::vector<Reader> readers;
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
  Shared shared;
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

// The matrix of one expert.
Matrix expert_of(Matrix m, int expert) {
  m.data += (size_t)expert * (m.n / LANES) * (m.k / GROUP) * tile_bytes(m.kind);
  if (m.bias) m.bias += (size_t)expert * m.n;
  return m;
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
    } else if (m.kind == F16) value = half(load<uint16_t>(tile + 32 * c + 2 * r));
    else if (m.kind == Q4) {
      const uint8_t byte = tile[64 * (c / 8) + 4 * r + c % 4];
      value = (c % 8 < 4 ? byte & 15 : byte >> 4) * half(load<uint16_t>(tile + 256 + 2 * r)) +
              half(load<uint16_t>(tile + 288 + 2 * r));
    } else
      value = ((int)tile[64 * (c / 4) + 4 * r + c % 4] - 128) * half(load<uint16_t>(tile + 512 + 2 * r));
    y[i] = value * scale;
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
      x = select(x > l.limit, all(l.limit), x);
      up = max(select(up > l.limit, all(l.limit), up), all(-l.limit));
      y = (up + 1.f) * x / (1.f + exponential(x * -l.alpha));
    } else {
      y = act(x, l.act);
      if (l.gated) y *= load<Floats>(from + (size_t)t * each * LANES + LANES);
    }
    store(to + (size_t)t * LANES, y);
  }
}

// The first of the greatest.
int32_t greatest(const float *y, int n) {
  Floats most = all(y[0]);
  int i = 0;
  for (; i + LANES <= n; i += LANES) most = max(most, load<Floats>(y + i));
  float best = top(most);
  for (; i < n; i++) best = y[i] > best ? y[i] : best;
  for (i = 0; i < n && y[i] != best;) i++;
  return i < n ? i : 0;
}

struct Worker {
  Pool &pool;
  const int id;
  const Job &job;
  const Program &p;
  Shared &s;
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
  // `count` rows as a product with m reads them: made by all threads, or, of few rows, by each for itself.
  Read read(const Matrix &m, const float *x, int n, int count, const Norm &by) {
    const bool together = count >= 4 * p.threads;
    Rows &made = together ? s.rows : own.rows;
    int a = 0, z = count;
    if (together) share(count, a, z);
    made.prepare(m, x, w, n, a, z, count, by, quantised, own.line.data());
    if (together) wait();
    return made.read(count);
  }
  void multiply(const Matrix &m, int a, int z, const Read &in, float *y) { product(m, a, z, in, rows, y, w, quantised); }
  void wait() { pool.barrier.wait(); }

  void embed() {
    int a, z;
    share(rows, a, z);
    for (int b = a; b < z; b++) {
      float *x = s.x + b * w;
      look_up(p.table, job.token[b], x, p.d, p.embed_scale);
      std::memset(x + p.d, 0, 4 * (size_t)(whole(p.d) - p.d));
      if (p.places.data) {
        float *place = own.line.data();
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

  // Rows of one sequence that stand together read in pieces, as large as there is work for all threads.
  void look(const Layer &l) {
    const int group = p.heads / p.kv_heads;
    int piece = rows * p.kv_heads < 4 * p.threads ? 1 : group, unit = 0;
    if (rows * p.kv_heads >= 32 * p.threads) piece *= TOGETHER;
    for (int first = 0, last; first < rows; first = last) {
      for (last = first + 1; last < rows && job.slot[last] == job.slot[first];) last++;
      const int heads = (last - first) * group;
      for (int kv = 0; kv < p.kv_heads; kv++)
        for (int start = 0; start < heads; start += piece)
          if (unit++ % p.threads == id) {
            const int count = start + piece < heads ? piece : heads - start;
            for (int i = 0; i < count; i++) {
              const int b = first + (start + i) / group, h = kv * group + (start + i) % group;
              const size_t at = b * w + (size_t)h * p.head;
              own.readers[i] = Reader{s.qkv + at, s.mixed + at, h, job.position[b]};
            }
            attend(p, l, job.slot[first], kv, own.readers.data(), count, own.scores.data());
          }
    }
  }

  void attention(const Layer &l) {
    const int heads = p.heads + p.kv_heads;
    const bool wide = l.q_norm.kind && l.q_norm.n > p.head;
    int a, z;
    const Read in = read(l.qkv, s.x, p.d, rows, l.norms[0]);
    share(l.qkv.n / LANES, a, z);
    multiply(l.qkv, a, z, in, s.qkv);
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
    look(l);
    wait();
    const Read mixed = read(l.o, s.mixed, p.heads * p.head, rows, Norm{});
    share(l.o.n / LANES, a, z);
    multiply(l.o, a, z, mixed, p.parallel ? s.held : s.update);
    if (p.parallel) wait();
    else add(a, z, l.norms, false);
  }

  void mlp(const Layer &l) {
    int a, z;
    const int each = l.gated ? 2 : 1;
    const Read in = read(l.up, s.x, p.d, rows, l.norms[3]);
    share(l.up.n / LANES / each, a, z);
    multiply(l.up, a * each, z * each, in, s.qkv);
    for (int b = 0; b < rows; b++) activate(l, s.qkv + b * w, s.hidden + b * w, a, z);
    wait();
    const Read hidden = read(l.down, s.hidden, whole(l.d_ff), rows, Norm{});
    share(l.down.n / LANES, a, z);
    multiply(l.down, a, z, hidden, s.update);
    add(a, z, l.norms + 3, p.parallel);
  }

  // One expert after the other of each row; every thread chooses for itself, and all alike.
  void experts(const Layer &l) {
    const int each = l.gated ? 2 : 1;
    const Matrix &reads = l.up.kind == Q4 || l.up.kind == Q8 ? l.up : l.router;
    int a, z;
    for (int j = 0; j < l.chosen; j++) {
      const Read in = read(reads, s.x, p.d, rows, l.norms[3]);
      if (j == 0)
        for (int b = 0; b < rows; b++) {
          product(l.router, 0, l.router.n / LANES, in.from(b), 1, own.routed.data(), 0, quantised);
          choose(l, own.routed.data(), own.picked.data() + b * l.chosen, own.kept.data() + b * l.chosen);
        }
      share(l.up.n / LANES / each, a, z);
      for (int b = 0; b < rows; b++) {
        const Matrix m = expert_of(l.up, own.picked[b * l.chosen + j]);
        product(m, a * each, z * each, in.from(b), 1, s.qkv + b * w, 0, quantised);
        activate(l, s.qkv + b * w, s.hidden + b * w, a, z);
      }
      wait();
      const Read hidden = read(l.down, s.hidden, whole(l.d_ff), rows, Norm{});
      share(l.down.n / LANES, a, z);
      for (int b = 0; b < rows; b++) {
        const Matrix m = expert_of(l.down, own.picked[b * l.chosen + j]);
        product(m, a, z, hidden.from(b), 1, s.held + b * w, 0, quantised);
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
    const Read in = read(p.out, s.update, p.d, wanted, p.final_norm);
    share(p.out.n / LANES, a, z);
    product(p.out, a, z, in, wanted, p.logits, p.out.n, quantised);
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
      job.best[b] = greatest(p.logits + (size_t)b * p.out.n, p.vocab);
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

// Sixteen rows of each tile, and where the tiles go.
void sc_lay(int format, const uint8_t *const *rows, long tiles, long columns, uint8_t *to) {
  switch (format) {
  case AS_F32: return lay<AS_F32>(rows, tiles, columns, to);
  case AS_BF16: return lay<AS_BF16>(rows, tiles, columns, to);
  case AS_F16: return lay<AS_F16>(rows, tiles, columns, to);
  case AS_Q8_0: return lay<AS_Q8_0>(rows, tiles, columns, to);
  case AS_Q4_0: return lay<AS_Q4_0>(rows, tiles, columns, to);
  case AS_Q4_1: return lay<AS_Q4_1>(rows, tiles, columns, to);
  }
}

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
                        scratch + 4 * row, scratch + 5 * row, (int)widest,       Rows{}};
  pool->shared.rows.make_room(MOST_ROWS, widest);
  int experts = 0, chosen = 0;
  for (int i = 0; i < p->layers; i++) {
    experts = p->layer[i].router.n > experts ? p->layer[i].router.n : experts;
    chosen = p->layer[i].chosen > chosen ? p->layer[i].chosen : chosen;
  }
  pool->own.resize(p->threads);
  for (Own &own : pool->own) {
    // With more rows than that the threads make them together.
    own.rows.make_room(4 * p->threads < MOST_ROWS ? 4 * p->threads : MOST_ROWS, widest);
    own.line.resize(widest + GROUP), own.readers.resize(TOGETHER * (p->heads / p->kv_heads));
    own.scores.resize(TOGETHER * (scores_of(p->capacity) + p->head));
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
