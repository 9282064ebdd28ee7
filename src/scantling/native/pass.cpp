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
#include "experts.h"
#include "lanes.h"
#include "laying.h"
#include "program.h"
#include "rounded.h"
#include "rows.h"

namespace {

// Rows on their way through experts; those that are sent have a line for each choice of a row.
struct Sent {
  Rows rows;                               // of the experts' second products
  std::vector<float> logits, shares, kept; // (MOST_ROWS, experts), (MOST_ROWS, 16), (MOST_ROWS, chosen)
  std::vector<int32_t> picked;             // (MOST_ROWS, chosen)
  std::vector<float> hidden, given;        // (MOST_ROWS * chosen, an odd number of cache lines)
  size_t hidden_width = 0, width = 0;      // of these
};

struct Shared {
  float *x, *qkv, *mixed, *update, *hidden, *held; // (MOST_ROWS, width) each
  int width;
  Rows rows; // of a product, where the threads make them together
  Sent sent;
};

// What a thread has for itself.
struct Own {
  Rows rows, gathered; // of a product; of one expert's
  std::vector<float> line, scores;
  std::vector<Reader> readers;
  Order order;
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

// What an MLP's hidden channels are, of the tiles [a, z) of its first product.
void activate(const Mlp &m, const float *from, float *to, int a, int z) {
  const int each = m.gated ? 2 : 1;
  for (int t = a; t < z; t++) {
    Floats x = load<Floats>(from + (size_t)t * each * LANES), y;
    if (m.limit > 0) {
      Floats up = load<Floats>(from + (size_t)t * each * LANES + LANES);
      x = select(x > m.limit, all(m.limit), x);
      up = max(select(up > m.limit, all(m.limit), up), all(-m.limit));
      y = (up + 1.f) * x / (1.f + exponential(x * -m.alpha));
    } else {
      y = act(x, m.act);
      if (m.gated) y *= load<Floats>(from + (size_t)t * each * LANES + LANES);
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

  // Rows of one sequence that stand together read in pieces, as large as there is work for all threads. Where heads are
  // as many for each thread, a thread has whole ones, and what it reads again is near.
  void look(const Layer &l) {
    const bool whole_heads = p.kv_heads % p.threads == 0;
    const int group = p.heads / p.kv_heads;
    int piece = rows * p.kv_heads < 4 * p.threads ? 1 : group, unit = 0;
    if (rows * p.kv_heads >= 32 * p.threads) piece *= TOGETHER;
    for (int first = 0, last; first < rows; first = last) {
      for (last = first + 1; last < rows && job.slot[last] == job.slot[first];) last++;
      const int heads = (last - first) * group;
      for (int kv = 0; kv < p.kv_heads; kv++)
        for (int start = 0; start < heads; start += piece)
          if ((whole_heads ? kv : unit++) % p.threads == id) {
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
    const Read in = read(l.mlp.up, s.x, p.d, rows, l.norms[3]);
    widen(l.mlp, in);
    wait();
    const Read hidden = read(l.mlp.down, s.hidden, whole(l.mlp.d_ff), rows, Norm{});
    share(l.mlp.down.n / LANES, a, z);
    multiply(l.mlp.down, a, z, hidden, s.update);
    add(a, z, l.norms + 3, p.parallel);
  }

  // All rows' hidden channels.
  void widen(const Mlp &m, const Read &in) {
    int a, z;
    const int each = m.gated ? 2 : 1;
    share(m.up.n / LANES / each, a, z);
    multiply(m.up, a * each, z * each, in, s.qkv);
    for (int b = 0; b < rows; b++) activate(m, s.qkv + b * w, s.hidden + b * w, a, z);
  }

  // Of the matrices that read the same rows, one that needs the most of them: sums, or numbers of 8 bits.
  static const Matrix &neediest(const Layer &l) {
    const Matrix *found = &l.router;
    for (const Matrix *m : {&l.mlp.up, &l.shared.up, &l.shared_gate})
      if (m->data && (m->kind == Q4 || (m->kind == Q8 && found->kind != Q4))) found = m;
    return *found;
  }

  // Each expert's matrices are read once, for all rows that go to it. A row is the sum of what its experts give, the
  // best first, whatever order they come in.
  void experts(const Layer &l) {
    int a, z;
    const Read in = read(neediest(l), s.x, p.d, rows, l.norms[3]);
    route(l, in);
    const Order &order = own.order;
    for (const Order::Span &span : order.spans) widen(l.mlp, span, in);
    if (l.shared.up.data) widen(l.shared, in);
    wait();
    const Rows &hidden = read_sent(l.mlp);
    share(l.mlp.down.n / LANES, a, z);
    for (const Order::Span &span : order.spans)
      product(expert_of(l.mlp.down, span.expert), a, z, hidden.read(span.rows, span.start), span.rows,
              s.sent.given.data() + span.first * s.sent.width, s.sent.width, quantised);
    for (int b = 0; b < rows; b++) combine(l, b, a, z);
    if (l.shared.up.data) add_shared(l, a, z);
    add(a, z, l.norms + 3, false);
  }

  // Every row's experts, its share of the MLP beside them, and the rows in the order of their experts.
  void route(const Layer &l, const Read &in) {
    const bool by_rows = rows >= 4 * p.threads;
    int a = 0, z = rows, first, last;
    if (by_rows) share(rows, a, z);
    share(l.router.n / LANES, first, last);
    if (by_rows) first = 0, last = l.router.n / LANES;
    float *logits = s.sent.logits.data();
    product(l.router, first, last, in.from(a), z - a, logits + (size_t)a * l.router.n, l.router.n, quantised);
    if (l.shared_gate.data && (by_rows || id == 0))
      product(l.shared_gate, 0, 1, in.from(a), z - a, s.sent.shares.data() + a * LANES, LANES, quantised);
    if (!by_rows) wait();
    share(rows, a, z);
    for (int b = a; b < z; b++)
      choose(l, logits + (size_t)b * l.router.n, s.sent.picked.data() + (size_t)b * l.chosen,
             s.sent.kept.data() + (size_t)b * l.chosen);
    wait();
    own.order.sort(l, s.sent.picked.data(), rows);
  }

  // The hidden channels of the rows of one expert.
  void widen(const Mlp &m, const Order::Span &span, const Read &in) {
    int a, z;
    const int each = m.gated ? 2 : 1;
    const int32_t *which = own.order.row.data() + span.first;
    Read read = in.from(*which);
    if (!own.order.together(span)) {
      own.gathered.gather(m.up, in, which, span.rows, quantised);
      read = own.gathered.read(span.rows);
    }
    share(m.up.n / LANES / each, a, z);
    product(expert_of(m.up, span.expert), a * each, z * each, read, span.rows, s.mixed, w, quantised);
    float *hidden = s.sent.hidden.data() + span.first * s.sent.hidden_width;
    for (int b = 0; b < span.rows; b++) activate(m, s.mixed + b * w, hidden + b * s.sent.hidden_width, a, z);
  }

  // The hidden channels as the experts' second products read them.
  const Rows &read_sent(const Mlp &m) {
    const int count = (int)own.order.row.size();
    const bool together = count >= 4 * p.threads;
    Rows &made = together ? s.sent.rows : own.gathered;
    int a = 0, z = count;
    if (together) share(count, a, z);
    for (const Order::Span &span : own.order.spans)
      for (int b = std::max(a, span.first), end = std::min(z, span.first + span.rows); b < end; b += BESIDE)
        made.put_rows(m.down, s.sent.hidden.data() + b * s.sent.hidden_width, s.sent.hidden_width, whole(m.d_ff),
                      std::min(BESIDE, end - b), span.start + b - span.first, span.rows, quantised);
    if (together) wait();
    return made;
  }

  // What row b's experts give, in their order.
  void combine(const Layer &l, int b, int a, int z) {
    float *to = s.update + b * w;
    for (int j = 0; j < l.chosen; j++) {
      const float *from = s.sent.given.data() + own.order.place[b * l.chosen + j] * s.sent.width;
      const float by = s.sent.kept[b * l.chosen + j];
      for (int c = a * LANES; c < z * LANES; c++) to[c] = j ? to[c] + from[c] * by : from[c] * by;
    }
  }

  // What the MLP beside the experts gives.
  void add_shared(const Layer &l, int a, int z) {
    const Read hidden = read(l.shared.down, s.hidden, whole(l.shared.d_ff), rows, Norm{});
    multiply(l.shared.down, a, z, hidden, s.held);
    for (int b = 0; b < rows; b++) {
      const float by = l.shared_gate.data ? 1.f / (1.f + std::exp(-s.sent.shares[b * LANES])) : 1.f;
      for (int c = a * LANES; c < z * LANES; c++) s.update[b * w + c] += s.held[b * w + c] * by;
    }
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

template <class T> void grow(std::vector<T> &v, size_t n) {
  if (v.size() < n) v.resize(n);
}

void room_for_experts(Pool &pool, const Program &p, const Layer &l) {
  Sent &sent = pool.shared.sent;
  const size_t most = (size_t)MOST_ROWS * l.chosen;
  // An odd number of cache lines, so that rows do not meet in a set of the cache.
  sent.width = (whole(p.d) / LANES | 1) * LANES;
  sent.hidden_width = std::max<size_t>(sent.hidden_width, (whole(l.mlp.d_ff) / LANES | 1) * LANES);
  grow(sent.logits, (size_t)MOST_ROWS * l.router.n), grow(sent.shares, (size_t)MOST_ROWS * LANES);
  grow(sent.kept, most), grow(sent.picked, most);
  grow(sent.given, most * sent.width), grow(sent.hidden, most * sent.hidden_width + GROUP);
  sent.rows.make_room(Order::cells(most), l.mlp.down.k);
  for (Own &own : pool.own) {
    own.gathered.make_room(MOST_ROWS, l.mlp.up.k);
    own.gathered.make_room(Order::cells(4 * p.threads), l.mlp.down.k);
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
int sc_sizes(int which) {
  const int sizes[] = {sizeof(Program), sizeof(Layer), sizeof(Mlp), sizeof(Matrix), sizeof(Norm)};
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
                        scratch + 4 * row, scratch + 5 * row, (int)widest,       Rows{},           Sent{}};
  pool->shared.rows.make_room(MOST_ROWS, widest);
  pool->own.resize(p->threads);
  for (Own &own : pool->own) {
    // With more rows than that the threads make them together.
    own.rows.make_room(4 * p->threads < MOST_ROWS ? 4 * p->threads : MOST_ROWS, widest);
    own.line.resize(BESIDE * widest + GROUP), own.readers.resize(TOGETHER * (p->heads / p->kv_heads));
    own.scores.resize(TOGETHER * (scores_of(p->capacity) + p->head));
  }
  for (int i = 0; i < p->layers; i++)
    if (p->layer[i].experts) room_for_experts(*pool, *p, p->layer[i]);
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
