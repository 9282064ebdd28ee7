// Which rows go to which experts.
#pragma once

#include <cmath>
#include <vector>

#include "lanes.h"
#include "products.h"
#include "program.h"
#include "rows.h"

namespace {

// The matrix of one expert.
Matrix expert_of(Matrix m, int expert) {
  m.data += (size_t)expert * (m.n / LANES) * (m.k / GROUP) * tile_bytes(m.kind);
  if (m.bias) m.bias += (size_t)expert * m.n;
  return m;
}

// Where the greatest of `n` numbers stands that is not yet taken, the first of equal ones; it is then taken.
int take_best(const float *of, int n, std::vector<uint8_t> &taken) {
  int best = -1;
  for (int i = 0; i < n; i++)
    if (!taken[i] && (best < 0 || of[i] > of[best])) best = i;
  taken[best] = 1;
  return best;
}

// Scores of the experts of all but the best groups become as low as can be.
void keep_best_groups(const Layer &l, std::vector<float> &scores) {
  const int each = l.experts / l.expert_groups;
  std::vector<float> best(l.expert_groups);
  std::vector<uint8_t> taken(l.experts), kept(l.expert_groups);
  for (int g = 0; g < l.expert_groups; g++) {
    taken.assign(each, 0);
    for (int i = 0; i < l.best_of_group; i++)
      best[g] += scores[g * each + take_best(scores.data() + g * each, each, taken)];
  }
  for (int i = 0; i < l.top_groups; i++) take_best(best.data(), l.expert_groups, kept);
  for (int e = 0; e < l.experts; e++)
    if (!kept[e / each]) scores[e] = -INFINITY;
}

// Which experts a row goes to, the best first, and with what weight each counts.
void choose(const Layer &l, const float *logits, int32_t *picked, float *kept) {
  std::vector<float> scores(logits, logits + l.experts);
  if (l.scoring == SIGMOID)
    for (float &s : scores) s = 1.f / (1.f + std::exp(-s));
  if (l.scoring == SOFTMAX) {
    float most = scores[0], total = 0;
    for (float s : scores) most = s > most ? s : most;
    for (float &s : scores) total += s = std::exp(s - most);
    for (float &s : scores) s /= total;
  }
  std::vector<float> wanted = scores;
  if (l.selection)
    for (int e = 0; e < l.experts; e++) wanted[e] += l.selection[e];
  if (l.expert_groups > 1) keep_best_groups(l, wanted);
  std::vector<uint8_t> taken(l.experts);
  float total = 0;
  for (int j = 0; j < l.chosen; j++) {
    picked[j] = take_best(wanted.data(), l.experts, taken), kept[j] = scores[picked[j]];
    if (l.scoring == TOP_SOFTMAX) kept[j] = std::exp(kept[j] - scores[picked[0]]);
    total += kept[j];
  }
  for (int j = 0; j < l.chosen; j++) {
    if (l.normalize || l.scoring == TOP_SOFTMAX) kept[j] /= total + (l.scoring == TOP_SOFTMAX ? 0.f : 1e-20f);
    kept[j] *= l.kept_scale;
  }
}

// Rows in the order of their experts, each once for every expert that it goes to.
struct Order {
  struct Span {
    int expert, first, rows; // of those in order
    size_t start;            // of their groups, where those of all experts are made for one product
  };
  std::vector<Span> spans;          // of the experts that have rows
  std::vector<int32_t> row, place;  // which row each one is; where a row's choice stands
  std::vector<int32_t> count, from; // of each expert

  // Rows that the spans of so many take, each being filled up to an odd number.
  static size_t cells(size_t sent) { return sent + sent / 2; }

  // `picked` (rows, chosen) are the experts of each row.
  void sort(const Layer &l, const int32_t *picked, int rows) {
    const int sent = rows * l.chosen, groups = l.mlp.down.k / GROUP;
    row.resize(sent), place.resize(sent), from.resize(l.experts), count.assign(l.experts, 0);
    for (int i = 0; i < sent; i++) count[picked[i]]++;
    spans.clear();
    size_t start = 0;
    for (int e = 0, first = 0; e < l.experts; first += count[e++]) {
      from[e] = first;
      if (!count[e]) continue;
      spans.push_back(Span{e, first, count[e], start});
      start += (size_t)Rows::apart(count[e]) * groups;
    }
    for (int i = 0; i < sent; i++) {
      place[i] = from[picked[i]]++;
      row[place[i]] = i / l.chosen;
    }
  }

  // Whether the rows of an expert stand together.
  bool together(const Span &s) const { return row[s.first + s.rows - 1] - row[s.first] == s.rows - 1; }
};

} // namespace
