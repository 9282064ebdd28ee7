// What one thread does in a pass.
#pragma once

#include <cstdint>

#include "experts.h"
#include "pool.h"
#include "program.h"
#include "rounded.h"
#include "rows.h"

namespace {

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

  // The stream, in stream.h.
  void embed();
  void add(int a, int z, const Norm *norms, bool with_held);

  // Attention, in looking.h.
  void attention(const Layer &l);
  void look(const Layer &l);

  // An MLP, in mlp.h.
  void mlp(const Layer &l);
  void widen(const Mlp &m, const Read &in);

  // Experts, in sending.h.
  void experts(const Layer &l);
  static const Matrix &neediest(const Layer &l);
  void route(const Layer &l, const Read &in);
  void widen(const Mlp &m, const Order::Span &span, const Read &in);
  const Rows &read_sent(const Mlp &m);
  void combine(const Layer &l, int b, int a, int z);
  void add_shared(const Layer &l, int a, int z);

  // Logits, in scoring.h.
  void score();
};

} // namespace
