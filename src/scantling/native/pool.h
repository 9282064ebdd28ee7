// The threads of a pass, with what they share and what each has for itself.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "attention.h"
#include "experts.h"
#include "lanes.h"
#include "program.h"
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

} // namespace
