// The stream of a pass: how it begins, and how sublayers come into it.
#pragma once

#include <cstring>

#include "lanes.h"
#include "products.h"
#include "program.h"
#include "rows.h"
#include "worker.h"

namespace {

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

inline void Worker::embed() {
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
inline void Worker::add(int a, int z, const Norm *norms, bool with_held) {
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

} // namespace
