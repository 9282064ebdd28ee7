// One pass of a decoder whose blocks are attention and MLP, with norms around them: any number of rows, each a token of
// some sequence. Widths are filled up with zeros to whole registers, and zeros they stay.
// Weights lie in tiles of 16 rows (see tiles.py), so 16 results grow side by side and no sum crosses lanes. A result is
// computed by one thread in one order, so it depends neither on the number of threads nor on the other rows.
// Here are the steps of a pass, its threads and what is called from outside; the headers hold the steps themselves.
#include <cstdint>
#include <functional>
#include <thread>

#include <sys/mman.h>

#include "attention.h"
#include "lanes.h"
#include "laying.h"
#include "looking.h"
#include "mlp.h"
#include "pool.h"
#include "products.h"
#include "program.h"
#include "rounded.h"
#include "rows.h"
#include "scoring.h"
#include "sending.h"
#include "stream.h"
#include "worker.h"

namespace {

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
