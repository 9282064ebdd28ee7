// What the pass is told of a model; library.py says the same.
#pragma once

#include <cstdint>

// Rows that one pass may have.
constexpr int MOST_ROWS = 128;

enum Kind : int32_t { F32, BF16, Q4, Q8, F16 };
enum Centre : int32_t { NO_NORM, RMS, LAYER };
enum Scoring : int32_t { SOFTMAX, SIGMOID, TOP_SOFTMAX };

struct Matrix {
  int32_t kind, n, k, pad; // n rows, a multiple of 16; k columns, a multiple of 32
  const uint8_t *data;
  const float *bias; // n, or null
};

struct Norm {
  const float *gain, *shift; // a multiple of 16 each, zeros at the end; `shift` may be null
  float eps;
  int32_t kind, n, stride; // `n` numbers are normed together; each head's gain begins `stride` after the last
};

struct Mlp {
  Matrix up, down; // `up` of a gated MLP holds tiles of gate and up in turn; experts lie one by one
  int32_t d_ff, gated, act, pad;
  float limit, alpha;
};

struct Layer {
  Matrix qkv, o, router, shared_gate; // `shared_gate`, if any, gives each row's share of `shared`
  Mlp mlp, shared;                    // that of the experts, if there are any, and one for all rows beside them
  Norm norms[6];                      // of attention before it, after it, after the sum; the same of the MLP
  Norm q_norm, k_norm;
  const float *cos, *sin; // (capacity, turned / 2), or null
  const float *slopes, *sinks; // (heads), or null
  const float *selection;      // (experts), which is added where experts are chosen, or null
  int32_t window, experts, chosen, scoring, normalize; // a window of 0 is none
  int32_t expert_groups, top_groups, best_of_group;    // a group counts by the sum of so many of its experts
  float scale, kept_scale;
  float *keys, *values; // (pages, kv heads, head, 16) and (pages, kv heads, 16, head)
};

struct Program {
  int32_t d, heads, kv_heads, head, turned, layers, vocab, slots, capacity, threads, quantised, parallel, offset, pad;
  float softcap, logit_softcap, embed_scale, logit_scale, clip, pad_too;
  const Layer *layer;
  Matrix table, out, places; // `table` is looked up; `out` gives the logits; `places`, if any, is added by position
  Norm embed_norm, final_norm;
  const int32_t *pages; // (slots, capacity / 16): where 16 positions of a sequence are kept
  float *logits;        // (MOST_ROWS, out.n)
  void *pool, *scratch;
};
