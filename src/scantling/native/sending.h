// Rows on their way through experts, as the threads share them.
#pragma once

#include <algorithm>
#include <cmath>

#include "experts.h"
#include "mlp.h"
#include "program.h"
#include "rounded.h"
#include "rows.h"
#include "worker.h"

namespace {

// Of the matrices that read the same rows, one that needs the most of them: sums, or numbers of 8 bits.
inline const Matrix &Worker::neediest(const Layer &l) {
  const Matrix *found = &l.router;
  for (const Matrix *m : {&l.mlp.up, &l.shared.up, &l.shared_gate})
    if (m->data && (m->kind == Q4 || (m->kind == Q8 && found->kind != Q4))) found = m;
  return *found;
}

// Each expert's matrices are read once, for all rows that go to it. A row is the sum of what its experts give, the
// best first, whatever order they come in.
inline void Worker::experts(const Layer &l) {
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
inline void Worker::route(const Layer &l, const Read &in) {
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
inline void Worker::widen(const Mlp &m, const Order::Span &span, const Read &in) {
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
inline const Rows &Worker::read_sent(const Mlp &m) {
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
inline void Worker::combine(const Layer &l, int b, int a, int z) {
  float *to = s.update + b * w;
  for (int j = 0; j < l.chosen; j++) {
    const float *from = s.sent.given.data() + own.order.place[b * l.chosen + j] * s.sent.width;
    const float by = s.sent.kept[b * l.chosen + j];
    for (int c = a * LANES; c < z * LANES; c++) to[c] = j ? to[c] + from[c] * by : from[c] * by;
  }
}

// What the MLP beside the experts gives.
inline void Worker::add_shared(const Layer &l, int a, int z) {
  const Read hidden = read(l.shared.down, s.hidden, whole(l.shared.d_ff), rows, Norm{});
  multiply(l.shared.down, a, z, hidden, s.held);
  for (int b = 0; b < rows; b++) {
    const float by = l.shared_gate.data ? 1.f / (1.f + std::exp(-s.sent.shares[b * LANES])) : 1.f;
    for (int c = a * LANES; c < z * LANES; c++) s.update[b * w + c] += s.held[b * w + c] * by;
  }
}

} // namespace
