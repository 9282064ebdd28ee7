// Attention as the threads share it.
#pragma once

#include "attention.h"
#include "program.h"
#include "rows.h"
#include "worker.h"

namespace {

// Rows of one sequence that stand together read in pieces, as large as there is work for all threads. Where heads are
// as many for each thread, a thread has whole ones, and what it reads again is near.
inline void Worker::look(const Layer &l) {
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

inline void Worker::attention(const Layer &l) {
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

} // namespace
