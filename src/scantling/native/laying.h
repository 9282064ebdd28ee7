// Stored matrices laid into tiles; tiles.py says how tiles look.
#pragma once

#include "products.h"

namespace {

// How a matrix is stored: numbers, or blocks of 32 of them as GGUF has them.
enum Format : int32_t { AS_F32, AS_BF16, AS_F16, AS_Q8_0, AS_Q4_0, AS_Q4_1 };

constexpr int kind_of(int format) {
  return format == AS_F32 ? F32 : format == AS_BF16 ? BF16 : format == AS_F16 ? F16 : format == AS_Q8_0 ? Q8 : Q4;
}
// Of 32 columns.
constexpr int stored_bytes(int format) {
  constexpr int bytes[] = {4 * GROUP, 2 * GROUP, 2 * GROUP, 34, 18, 20};
  return bytes[format];
}

// -8 times a half-precision number.
inline uint16_t minus_eightfold(uint16_t h) {
  const uint16_t sign = (h ^ 0x8000u) & 0x8000u, size = h & 0x7fffu;
  if (size >= 0x7c00u) return sign | size;
  if (size >= 0x7000u) return sign | 0x7c00u;
  if (size >= 0x400u) return sign | (size + 0xc00u);
  uint32_t units = size * 8u, exponent = 0;
  for (; units >= 0x800u; exponent++) units /= 2;
  return (uint16_t)(sign | (exponent * 0x400u + units));
}

template <class Number, int COUNT> inline void turned(const uint8_t *const *from, uint8_t *to) {
  for (int r = 0; r < LANES; r++)
    for (int i = 0; i < COUNT; i++) {
      const Number value = load<Number>(from[r] + i * sizeof(Number));
      std::memcpy(to + (i * LANES + r) * sizeof(Number), &value, sizeof value);
    }
}

// 32 columns of 16 rows.
template <int FORMAT> inline void lay_group(const uint8_t *const *from, uint8_t *to) {
  if constexpr (FORMAT == AS_F32) return turned<uint32_t, GROUP>(from, to);
  if constexpr (FORMAT == AS_BF16) return turned<uint32_t, GROUP / 2>(from, to);
  if constexpr (FORMAT == AS_F16) return turned<uint16_t, GROUP>(from, to);
  for (int r = 0; r < LANES; r++) {
    const uint16_t scale = load<uint16_t>(from[r]);
    uint32_t v[8];
    if constexpr (FORMAT == AS_Q8_0) {
      std::memcpy(v, from[r] + 2, sizeof v);
      for (uint32_t &four : v) four ^= 0x80808080u;
    } else {
      // Columns i and 16 + i stand in byte i, and in tiles i and 4 + i of every eight.
      uint32_t packed[4];
      std::memcpy(packed, from[r] + (FORMAT == AS_Q4_1 ? 4 : 2), sizeof packed);
      constexpr uint32_t low = 0x0f0f0f0fu;
      for (int i = 0; i < 2; i++) {
        const uint32_t one = packed[2 * i], two = packed[2 * i + 1];
        v[i] = (one & low) | (two & low) << 4, v[2 + i] = (one >> 4 & low) | (two & ~low);
      }
      const uint16_t least = FORMAT == AS_Q4_1 ? load<uint16_t>(from[r] + 2) : minus_eightfold(scale);
      std::memcpy(to + 288 + 2 * r, &least, sizeof least);
    }
    constexpr int FOURS = FORMAT == AS_Q8_0 ? 8 : 4;
    for (int i = 0; i < FOURS; i++) std::memcpy(to + 64 * i + 4 * r, v + i, 4);
    std::memcpy(to + 64 * FOURS + 2 * r, &scale, sizeof scale);
  }
}

// Tiles of 16 rows each; a null row is zeros, as columns are that fill up the last group.
template <int FORMAT> void lay(const uint8_t *const *rows, long tiles, long columns, uint8_t *to) {
  constexpr int bytes = stored_bytes(FORMAT), each = bytes / GROUP;
  constexpr bool plain = bytes >= 2 * GROUP;
  static const uint8_t zeros[4 * GROUP] = {};
  const long whole = columns / GROUP, groups = (columns + GROUP - 1) / GROUP;
  uint8_t ends[LANES][4 * GROUP] = {};
  for (long t = 0; t < tiles; t++, rows += LANES)
    for (long g = 0; g < groups; g++, to += tile_bytes(kind_of(FORMAT))) {
      const uint8_t *from[LANES];
      for (int r = 0; r < LANES; r++) {
        from[r] = rows[r] ? rows[r] + g * bytes : zeros;
        if (!plain || g < whole || !rows[r]) continue;
        std::memcpy(ends[r], from[r], (size_t)(columns - whole * GROUP) * each);
        from[r] = ends[r];
      }
      lay_group<FORMAT>(from, to);
    }
}

} // namespace
