// An MLP as the threads share it.
#pragma once

#include "lanes.h"
#include "program.h"
#include "rows.h"
#include "worker.h"

namespace {

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

inline void Worker::mlp(const Layer &l) {
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
inline void Worker::widen(const Mlp &m, const Read &in) {
  int a, z;
  const int each = m.gated ? 2 : 1;
  share(m.up.n / LANES / each, a, z);
  multiply(m.up, a * each, z * each, in, s.qkv);
  for (int b = 0; b < rows; b++) activate(m, s.qkv + b * w, s.hidden + b * w, a, z);
}

} // namespace
