// Logits of a pass, and the likeliest token of each.
#pragma once

#include <cstdint>
#include <cstring>

#include "lanes.h"
#include "program.h"
#include "rounded.h"
#include "rows.h"
#include "worker.h"

namespace {

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

inline void Worker::score() {
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

} // namespace
