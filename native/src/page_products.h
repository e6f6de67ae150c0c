// Building blocks of the attention kernels over exact pages: products of a few rows with a page, and the softmax of a row.
// Like simd.h everything is in an unnamed namespace, so that each compilation has its own.
#pragma once

#include "kernel.h"
#include "simd.h"

namespace vera {
namespace VERA_ISA {
namespace {

constexpr float kMinusInfinity = -__builtin_inff();

VERA_INLINE int least(int a, int b) { return a < b ? a : b; }
VERA_INLINE int most(int a, int b) { return a > b ? a : b; }
VERA_INLINE int round_up(int n, int step) { return (n + step - 1) / step * step; }

// How many vectors one register block spans beside `rows` rows: the largest power of two that leaves a quarter of the registers
// to operands, and at most 64 floats.
constexpr int block_vectors(int rows) {
  int vectors = 1;
  while (2 * vectors * rows <= kRegisters * 3 / 4 && 2 * vectors * kWidth <= 64) vectors *= 2;
  return vectors;
}

// sums[r][v] += factor(r) * row(v). The side with fewer vectors is held in registers while the other one streams: with both held,
// 16 registers do not suffice.
template <int R, int V, class Factor, class Row>
VERA_INLINE void add_outer_product(Vec (&sums)[R][V], Factor factor, Row row) {
  if constexpr (R < V) {
    Vec factors[R];
    for (int r = 0; r < R; r++) factors[r] = factor(r);
    for (int v = 0; v < V; v++) {
      const Vec x = row(v);
      for (int r = 0; r < R; r++) sums[r][v] = fma(factors[r], x, sums[r][v]);
    }
  } else {
    Vec x[V];
    for (int v = 0; v < V; v++) x[v] = row(v);
    for (int r = 0; r < R; r++) {
      const Vec f = factor(r);
      for (int v = 0; v < V; v++) sums[r][v] = fma(f, x[v], sums[r][v]);
    }
  }
}

// ---- softmax over one row of logits, in place

inline void apply_softcap(float* row, int columns, float softcap) {
  const Vec cap = broadcast(softcap), inverse = broadcast(1.0f / softcap);
  for (int i = 0; i < columns; i += kWidth) store(row + i, cap * tanh_of(load(row + i) * inverse));
}

// Makes row[begin:end] the only finite logits of row[0:columns], columns being a multiple of the vector width.
inline void mask_row(float* row, int begin, int end, int columns) {
  for (int i = 0; i < begin; i++) row[i] = kMinusInfinity;
  for (int i = end; i < columns; i++) row[i] = kMinusInfinity;
}

VERA_INLINE float largest_of_row(const float* row, int columns) {
  Vec top = load(row);
  for (int i = kWidth; i < columns; i += kWidth) top = larger(top, load(row + i));
  return largest(top);
}

// Logits to exp(logit - reference); returns their sum, lane by lane.
VERA_INLINE Vec exp_row(float* row, int columns, float reference) {
  // A row without any logit above -infinity has weights 0, not NaN.
  const Vec offset = broadcast(reference == kMinusInfinity ? 0.0f : reference);
  Vec total = broadcast(0.0f);
  for (int i = 0; i < columns; i += kWidth) {
    const Vec weight = exp_of_nonpositive(load(row + i) - offset);
    store(row + i, weight);
    total = total + weight;
  }
  return total;
}

// What one query head has summed so far.
struct HeadState {
  float* maximum;  // the largest logit
  float* totals;   // [kWidth]: lane by lane, the sums of exp(logit - maximum)
  float* output;   // [dims]: the values weighted by exp(logit - maximum)
};

// Turns the logits row[begin:end] of a page into weights, all others up to `columns` into 0, and brings what was summed before to
// the new largest logit.
VERA_INLINE void online_softmax(float* row, int begin, int end, int columns, float softcap, const HeadState& state, int dims) {
  const int whole_columns = round_up(columns, kWidth);
  if (softcap != 0) apply_softcap(row, whole_columns, softcap);
  mask_row(row, begin, end, whole_columns);
  const float before = *state.maximum, page_top = largest_of_row(row, whole_columns);
  const float top = page_top > before ? page_top : before;
  Vec total = load(state.totals);
  if (top != before) {
    const Vec factor = exp_of_nonpositive(broadcast(before - top));
    for (int c = 0; c < dims; c += kWidth) store(state.output + c, load(state.output + c) * factor);
    total = total * factor;
    *state.maximum = top;
  }
  store(state.totals, total + exp_row(row, whole_columns, top));
}

// ---- decode: one query token, the heads of a group share every load

template <class T>
VERA_INLINE void prefetch_block(const T* p, int count) {
  for (int bytes = 0; bytes < count * int(sizeof(T)); bytes += 64) prefetch(reinterpret_cast<const char*>(p) + bytes);
}

// Logits of `V` vectors of tokens for `H` heads. The same bytes of the next page are prefetched on the way: spread like this
// the memory bus never idles and never chokes.
template <class T, int H, int V>
VERA_INLINE void logits_block(const T* keys, const T* next, const float* query, const Shape& shape, float* logits) {
  Vec sums[H][V];
  for (int h = 0; h < H; h++)
    for (int v = 0; v < V; v++) sums[h][v] = broadcast(0.0f);
  for (int c = 0; c < shape.head_dim; c++) {
    prefetch_block(next, V * kWidth);
    add_outer_product(sums, [&](int h) { return broadcast(query[h]); }, [&](int v) { return load(keys + v * kWidth); });
    keys += shape.page_size;
    next += shape.page_size;
    query += H;
  }
  for (int h = 0; h < H; h++)
    for (int v = 0; v < V; v++) store(logits + h * kMaxPageSize + v * kWidth, sums[h][v]);
}

// Logits of the tokens [token, tokens) of one page; tokens is rounded up to whole vectors. `query` is [head_dim][H].
template <class T, int H, int V>
VERA_INLINE void page_logits(const T* keys, const T* next, const float* query, const Shape& shape, int token, int tokens,
                             float* logits) {
  for (; token + (V - 1) * kWidth < tokens; token += V * kWidth)
    logits_block<T, H, V>(keys + token, next + token, query, shape, logits + token);
  if constexpr (V > 1) page_logits<T, H, V / 2>(keys, next, query, shape, token, tokens, logits);
}

// Adds the weighted values of `tokens` tokens to `V` vectors of dimensions for `H` heads; output rows are `dims` apart.
template <class T, int H, int V, bool kHalfVector>
VERA_INLINE void values_block(const T* values, const T* next, const float* weights, int head_dim, int dims, int tokens,
                              float* output) {
  Vec sums[H][V];
  for (int h = 0; h < H; h++)
    for (int v = 0; v < V; v++) sums[h][v] = load(output + h * dims + v * kWidth);
  for (int t = 0; t < tokens; t++) {
    prefetch_block(next, V * kWidth);
    add_outer_product(
        sums, [&](int h) { return broadcast(weights[h * kMaxPageSize + t]); },
        [&](int v) {
          if constexpr (kHalfVector)
            return load_half_vector(values + v * kWidth);
          else
            return load(values + v * kWidth);
        });
    values += head_dim;
    next += head_dim;
  }
  for (int h = 0; h < H; h++)
    for (int v = 0; v < V; v++) store(output + h * dims + v * kWidth, sums[h][v]);
}

// The same for all dimensions from `dim` on.
template <class T, int H, int V>
VERA_INLINE void page_values(const T* values, const T* next, const float* weights, int head_dim, int dim, int tokens,
                             float* output) {
  const int dims = round_up(head_dim, kWidth);
  for (; dim + V * kWidth <= head_dim; dim += V * kWidth)
    values_block<T, H, V, false>(values + dim, next + dim, weights, head_dim, dims, tokens, output + dim);
  if constexpr (V > 1) {
    page_values<T, H, V / 2>(values, next, weights, head_dim, dim, tokens, output);
  } else if constexpr (kWidth == 16) {
    if (dim < head_dim) values_block<T, H, 1, true>(values + dim, next + dim, weights, head_dim, dims, tokens, output + dim);
  }
}

}  // namespace
}  // namespace VERA_ISA
}  // namespace vera
