// Sixteen numbers side by side: one vector where registers are as wide or the compiler splits it well, else an array of
// vectors as wide as registers. Both have the operators of numbers, element by element.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr int LANES = 16;

typedef int8_t Bytes __attribute__((vector_size(LANES)));

#if defined(__AVX512F__) || defined(__clang__)

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));

inline Floats all(float x) { return x - Floats{}; }
inline Floats select(Ints which, Floats a, Floats b) { return which ? a : b; }
inline Floats to_floats(Ints v) { return __builtin_convertvector(v, Floats); }
inline Ints to_ints(Floats v) { return __builtin_convertvector(v, Ints); }
inline Floats same_bits(Ints v) { return (Floats)v; }
inline Bytes to_bytes(Ints v) { return __builtin_convertvector(v, Bytes); }

#else

#if defined(__AVX2__)
constexpr int PIECE = 8;
#else
constexpr int PIECE = 4;
#endif

template <class S> struct Wide {
  typedef S Piece __attribute__((vector_size(4 * PIECE)));
  Piece piece[LANES / PIECE];
  S &operator[](int i) { return reinterpret_cast<S *>(piece)[i]; }
};
typedef Wide<float> Floats;
typedef Wide<int32_t> Ints;

#define INLINE inline __attribute__((always_inline))

template <class S, class Make> INLINE Wide<S> made(Make make) {
  Wide<S> found;
#pragma GCC unroll 4
  for (int i = 0; i < LANES / PIECE; i++) found.piece[i] = make(i);
  return found;
}
INLINE Floats all(float x) {
  return made<float>([&](int) { return x - Floats::Piece{}; });
}
INLINE Ints all(int32_t x) {
  return made<int32_t>([&](int) { return x - Ints::Piece{}; });
}

#define ARITHMETIC(op)                                                                                                \
  template <class S> INLINE Wide<S> operator op(const Wide<S> &a, const Wide<S> &b) {                                 \
    return made<S>([&](int i) { return a.piece[i] op b.piece[i]; });                                                  \
  }                                                                                                                   \
  template <class S> INLINE Wide<S> operator op(const Wide<S> &a, std::type_identity_t<S> b) { return a op all(b); }  \
  template <class S> INLINE Wide<S> operator op(std::type_identity_t<S> a, const Wide<S> &b) { return all(a) op b; }
ARITHMETIC(+)
ARITHMETIC(-)
ARITHMETIC(*)
ARITHMETIC(/)
ARITHMETIC(&)
ARITHMETIC(|)
ARITHMETIC(^)
ARITHMETIC(<<)
ARITHMETIC(>>)
#undef ARITHMETIC

#define COMPARISON(op)                                                                                                \
  template <class S> INLINE Ints operator op(const Wide<S> &a, const Wide<S> &b) {                                    \
    return made<int32_t>([&](int i) { return a.piece[i] op b.piece[i]; });                                            \
  }                                                                                                                   \
  template <class S> INLINE Ints operator op(const Wide<S> &a, std::type_identity_t<S> b) { return a op all(b); }
COMPARISON(<)
COMPARISON(>)
#undef COMPARISON

template <class S> INLINE Wide<S> operator-(const Wide<S> &a) {
  return made<S>([&](int i) { return -a.piece[i]; });
}
template <class S, class B> INLINE Wide<S> &operator+=(Wide<S> &a, const B &b) { return a = a + b; }
template <class S, class B> INLINE Wide<S> &operator*=(Wide<S> &a, const B &b) { return a = a * b; }

INLINE Floats select(const Ints &which, const Floats &a, const Floats &b) {
  return made<float>([&](int i) { return which.piece[i] ? a.piece[i] : b.piece[i]; });
}
INLINE Floats to_floats(const Ints &v) {
  return made<float>([&](int i) { return __builtin_convertvector(v.piece[i], Floats::Piece); });
}
INLINE Ints to_ints(const Floats &v) {
  return made<int32_t>([&](int i) { return __builtin_convertvector(v.piece[i], Ints::Piece); });
}
INLINE Floats same_bits(const Ints &v) {
  return made<float>([&](int i) { return (Floats::Piece)v.piece[i]; });
}

inline Bytes to_bytes(Ints v) {
  Bytes found;
  for (int i = 0; i < LANES; i++) found[i] = (int8_t)v[i];
  return found;
}

#undef INLINE
#endif

// Of anything, and piece by piece, so that what is loaded goes to registers at once.
template <class V> inline V load(const void *from) {
  V value;
  if constexpr (requires { value.piece; })
    for (size_t i = 0; i < sizeof value; i += sizeof value.piece[0])
      std::memcpy((char *)&value.piece[i / sizeof value.piece[0]], (const char *)from + i, sizeof value.piece[0]);
  else std::memcpy(&value, from, sizeof value);
  return value;
}
template <class V> inline void store(void *to, const V &value) {
  if constexpr (requires { value.piece; })
    for (size_t i = 0; i < sizeof value; i += sizeof value.piece[0])
      std::memcpy((char *)to + i, &value.piece[i / sizeof value.piece[0]], sizeof value.piece[0]);
  else std::memcpy(to, &value, sizeof value);
}
// 0, 1, 2, ...
inline Ints counting() {
  static constexpr int32_t numbers[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return load<Ints>(numbers);
}

} // namespace
