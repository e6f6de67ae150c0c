// Attention within bounds over tiered pages: steps 1 to 4 of vera.attention.protocol.Tiers, for one query token and the heads of
// one group at a time. Compiled once per instruction set, like kernel.cpp.
//
// A page read by its sketch costs products of bytes: the query times the steps of the page's channels, or the weights times the
// steps of its tokens, are rounded to signed bytes relative to the largest of them. Levels count from 0, so the products are
// brought to levels around 0 afterwards; what was lost in rounding then meets numbers that are small and of either sign.
//
// Each page has weights relative to its own largest logit. So no page waits for another one, and a page that is hit is simply done
// again.
#include <type_traits>

#include "kernel.h"
#include "levels.h"
#include "page_products.h"

namespace vera {
namespace VERA_ISA {
namespace {

constexpr float kLog2E = 1.44269504f;
constexpr ptrdiff_t kFactorStride = kMaxHeadDim;  // bytes from one head's factors to the next
constexpr int kPagesAhead = 4;                 // from the sketch that is worked on to the one that is fetched
constexpr int kPassHeads = 8;                     // most heads that share one read of a page
// Bytes from one page's factors to the next: not a power of two, which would put them into the same sets of the L1 cache.
constexpr ptrdiff_t kFoldedStride = 2 * kPassHeads * kFactorStride + 64;
// Values that are not zero are at least so large that dividing by them gives a number.
constexpr float kSmallest = 1e-30f;

// The factors of one page for the heads of a pass, as bytes.
struct Folded {
  int8_t* bytes;   // [kPassHeads][kFactorStride]; for levels of 8 bits twice, with the lower bytes of the factors
  float* scales;   // [kPassHeads]: what the products are to be multiplied with; before rounding, the largest factors
  float* offsets;  // [kPassHeads]: and what is to be added
};

// A thread's memory while it works on a row.
struct Memory {
  int* by_sketch;     // [pages]: list of the pages read by their sketch
  int* exact;         // [pages]: list of the others
  int num_by_sketch, num_exact;
  const uint8_t* upcoming[kPagesAhead];  // what is read after the pages of by_sketch, a sketch's part each, or null
  float* query;       // [group][head_dim], scaled
  float* packed;      // the same in passes of [head_dim][heads]
  float* weights;     // [kPassHeads][kMaxPageSize]
  int8_t* bytes;      // [kFoldedPages] of Folded::bytes
  float* scales;      // [kFoldedPages][kPassHeads]
  float* offsets;     // the same
  float* maxima;      // the same: the largest logits

  Folded folded(int i) const {
    return {bytes + i * kFoldedStride, scales + i * kPassHeads, offsets + i * kPassHeads};
  }
  // Adds a page to a list, or to none. Without branches: which page is left out cannot be predicted.
  void list(int page, bool is_by_sketch, bool is_exact) {
    by_sketch[num_by_sketch] = exact[num_exact] = page;
    num_by_sketch += is_by_sketch;
    num_exact += is_exact;
  }
  float* maxima_of(int i) const { return maxima + i * kPassHeads; }
};

Memory divide(const TieredRow& row) {
  const ptrdiff_t stride = row.state.page_stride, query_floats = ptrdiff_t(row.shape.group) * row.shape.head_dim;
  Memory memory{};
  memory.by_sketch = reinterpret_cast<int*>(row.scratch);
  memory.exact = memory.by_sketch + stride;
  memory.query = row.scratch + 2 * stride;
  memory.packed = memory.query + query_floats;
  memory.weights = memory.packed + query_floats;
  memory.bytes = reinterpret_cast<int8_t*>(memory.weights + kPassHeads * kMaxPageSize);
  memory.scales = memory.weights + kPassHeads * kMaxPageSize + kFoldedPages * kFoldedStride / 4;
  memory.offsets = memory.scales + kFoldedPages * kPassHeads;
  memory.maxima = memory.offsets + kFoldedPages * kPassHeads;
  return memory;
}

VERA_INLINE const TieredPage& page_of(const TieredRow& row, int page) { return row.pages[page * row.page_stride]; }
VERA_INLINE float* weights_of(const TieredRow& row, int page, int head) {
  return row.state.weights + (ptrdiff_t(page) * row.shape.group + head) * row.shape.page_size;
}
VERA_INLINE int tokens_of(const TieredRow& row, int page) {
  return least(row.shape.page_size, row.tokens - page * row.shape.page_size);
}
VERA_INLINE bool has_sketch(const TieredPage& page) { return page.sketch.keys != nullptr; }
// At first; a page that is hit is read exactly from then on, if it can be.
VERA_INLINE bool is_read_by_sketch(const TieredPage& page, bool probe) { return has_sketch(page) && (probe || !page.has_slot); }

// Calls work(first head, number of heads) for passes of nearly equal size over the heads of a group.
template <class Work>
VERA_INLINE void for_each_pass(int group, Work work) {
  const int passes = (group + kPassHeads - 1) / kPassHeads, heads = (group + passes - 1) / passes;
  for (int head = 0; head < group; head += heads) work(head, least(heads, group - head));
}

// Calls work(page size), the size being a constant where it is the usual one: short loops over the tokens are unrolled then.
template <class Work>
VERA_INLINE void with_page_size(const Shape& shape, Work work) {
  if (shape.page_size == 64)
    work(std::integral_constant<int, 64>{});
  else
    work(shape.page_size);
}

template <int H>
constexpr int kWholeFours = (H + 3) / 4 * 4;

template <int H>
VERA_INLINE void store_all_sums(const Vec (&x)[H], float* out) {
  for (int h = 0; h < H; h += 4) store_sums(out + h, x[h], x[least(h + 1, H - 1)], x[least(h + 2, H - 1)], x[least(h + 3, H - 1)]);
}
template <int H>
VERA_INLINE void store_all_maxima(const Vec (&x)[H], float* out) {
  for (int h = 0; h < H; h += 4)
    store_maxima(out + h, x[h], x[least(h + 1, H - 1)], x[least(h + 2, H - 1)], x[least(h + 3, H - 1)]);
}

// What is fetched while the sketch of by_sketch[i] is worked on, which lies at `own`: `next` gives the part of a page in the list.
template <class Next>
VERA_INLINE const uint8_t* after(const Memory& memory, int i, const uint8_t* own, Next next) {
  const int later = i + kPagesAhead;
  if (later < memory.num_by_sketch) return next(memory.by_sketch[later]);
  const uint8_t* upcoming = memory.upcoming[later - memory.num_by_sketch];
  return upcoming != nullptr ? upcoming : own;
}

VERA_INLINE void prefetch_bytes(const uint8_t* p, int bytes) {
  for (int i = 0; i < bytes; i += 64) prefetch(p + i);
}

// ---- factors to bytes
//
// In two rounds over some pages: the first one finds the largest factor of each page and head, the second one works the factors
// out again and rounds them. What goes across the lanes of a vector takes long; meanwhile there is the next page to work on.

// Rounds factors to bytes, `vectors` vectors of each head. add_vector(i, factors, offsets) gives the heads' factors of vector i and
// adds to offsets, lane by lane, what is to be added to the products anyway; levels are brought to their centre here.
template <int kBits, int H, class Add>
VERA_INLINE void round_factors(int vectors, const Folded& folded, Add add_vector) {
  // For 8 bits a factor takes two bytes: one alone would lose more than the rounding of the levels.
  constexpr float kLargest = kBits == 8 ? 127.0f * 128.0f : 127.0f;
  constexpr float kCentre = float((1 << kBits) - 1) / 2;
  Vec inverses[H], offsets[H];
  Int totals[H];
  for (int h = 0; h < H; h++) {
    const float largest = folded.scales[h];
    inverses[h] = broadcast(largest > kSmallest ? kLargest / largest : 0.0f);
    folded.scales[h] = largest * (1.0f / kLargest);
    offsets[h] = broadcast(0.0f);
    totals[h] = no_ints();
  }
  for (int i = 0; i < vectors; i++) {
    Vec factors[H];
    add_vector(i, factors, offsets);
#pragma GCC unroll 8
    for (int h = 0; h < H; h++) {
      int8_t* bytes = folded.bytes + h * kFactorStride + i * kWidth;
      const Int factor = to_int(factors[h] * inverses[h]);
      totals[h] = add(totals[h], factor);
      if constexpr (kBits == 8) {
        const Int upper = upper_byte(factor);
        store_bytes(bytes, upper);
        store_bytes(bytes + kPassHeads * kFactorStride, lower_byte(factor, upper));
      } else {
        store_bytes(bytes, factor);
      }
    }
  }
  for (int h = 0; h < H; h++) offsets[h] = fma(to_float(totals[h]), broadcast(-kCentre * folded.scales[h]), offsets[h]);
  store_all_sums(offsets, folded.offsets);
}

// Products of H heads' factors with V vectors of levels, `row_bytes` apart, as they are: neither scaled nor centred.
template <int kBits, int H, int V>
VERA_INLINE void products(const uint8_t* levels, const uint8_t* next, ptrdiff_t row_bytes, int rows, const Folded& folded,
                          Vec (&result)[H][V]) {
  Int sums[H][V];
  for (int h = 0; h < H; h++)
    for (int v = 0; v < V; v++) sums[h][v] = no_ints();
  add_products<kBits, H, V>(levels, next, row_bytes, rows, folded.bytes, kFactorStride, sums);
  for (int h = 0; h < H; h++)
    for (int v = 0; v < V; v++) result[h][v] = to_float(sums[h][v]);
  if constexpr (kBits == 8) {
    for (int h = 0; h < H; h++)
      for (int v = 0; v < V; v++) sums[h][v] = no_ints();
    add_products<kBits, H, V>(levels, next, row_bytes, rows, folded.bytes + kPassHeads * kFactorStride, kFactorStride, sums);
    for (int h = 0; h < H; h++)
      for (int v = 0; v < V; v++) result[h][v] = fma(result[h][v], broadcast(128.0f), to_float(sums[h][v]));
  }
}

// ---- logits and weights of a page

// The largest logits of each head, lane by lane; the heads' logits lie `stride` apart.
template <int H>
VERA_INLINE void find_tops(const float* logits, ptrdiff_t stride, int page_size, Vec (&tops)[H]) {
  for (int h = 0; h < H; h++) {
    tops[h] = load(logits + h * stride);
    for (int t = kWidth; t < page_size; t += kWidth) tops[h] = larger(tops[h], load(logits + h * stride + t));
  }
}

// Caps logits and cuts off those of tokens that the query does not see.
__attribute__((noinline)) void cap_and_cut(float* logits, int page_size, int tokens, float softcap) {
  if (softcap != 0) apply_softcap(logits, page_size, softcap);
  mask_row(logits, 0, tokens, page_size);
}

// The same for the heads' logits, `stride` apart, where it changes anything; `tops` follow.
template <int H>
VERA_INLINE void cap_and_cut(const TieredRow& row, int page, float* logits, ptrdiff_t stride, Vec (&tops)[H]) {
  const int page_size = row.shape.page_size, tokens = tokens_of(row, page);
  if (row.options.softcap == 0 && tokens == page_size) return;
  for (int h = 0; h < H; h++) cap_and_cut(logits + h * stride, page_size, tokens, row.options.softcap);
  find_tops(logits, stride, page_size, tops);
}

// Turns the page's logits, head by head `stride` apart, into weights relative to the largest ones, `maxima`.
template <int H, bool kAccurate>
VERA_INLINE void weigh(const TieredRow& row, int page, int head, int page_size, const float* logits, ptrdiff_t stride,
                       const float* maxima) {
  float* weights = weights_of(row, page, head);
  Vec totals[H], square_totals[H];
#pragma GCC unroll 8
  for (int h = 0; h < H; h++) {
    // Without any logit above -infinity the weights are 0, not NaN.
    const float reference = maxima[h] == kMinusInfinity ? 0.0f : maxima[h];
    const Vec offset = broadcast(kAccurate ? reference : -reference * kLog2E);
    totals[h] = square_totals[h] = broadcast(0.0f);
#pragma GCC unroll 4
    for (int t = 0; t < page_size; t += kWidth) {
      const Vec logit = load(logits + h * stride + t);
      const Vec weight =
          kAccurate ? exp_of_nonpositive(logit - offset) : exp2_of_nonpositive(fma(logit, broadcast(kLog2E), offset));
      store(weights + h * page_size + t, weight);
      totals[h] = totals[h] + weight;
      square_totals[h] = fma(weight, weight, square_totals[h]);
    }
  }
  float sums[kWholeFours<H>], squares[kWholeFours<H>];
  store_all_sums(totals, sums);
  store_all_sums(square_totals, squares);
  for (int h = 0; h < H; h++) {
    const ptrdiff_t at = ptrdiff_t(head + h) * row.state.page_stride + page;
    row.state.maxima[at] = maxima[h];
    row.state.sums[at] = sums[h];
    row.state.squares[at] = squares[h];
  }
}

// The largest of the factors of a page's keys, which are the query times the steps of the channels; and var_K of each head.
template <int H>
VERA_INLINE void find_query_factors(const uint8_t* part, const float* query, int head_dim, const Folded& folded,
                                    float* variances) {
  const Half* steps = halves(part + kSketchHeaderBytes);
  Vec tops[H], squares[H];
  for (int h = 0; h < H; h++) tops[h] = squares[h] = broadcast(0.0f);
  for (int c = 0; c < head_dim; c += kWidth) {
    const Vec step = load(steps + c);
#pragma GCC unroll 8
    for (int h = 0; h < H; h++) {
      const Vec factor = load(query + h * head_dim + c) * step;
      tops[h] = larger_magnitude(tops[h], factor);
      squares[h] = fma(factor, factor, squares[h]);
    }
  }
  store_all_maxima(tops, folded.scales);
  store_all_sums(squares, variances);
  for (int h = 0; h < H; h++) variances[h] *= 1.0f / 12.0f;
}

template <int kBits, int H>
VERA_INLINE void round_query_factors(const uint8_t* part, const float* query, int head_dim, const Folded& folded) {
  const Half* steps = halves(part + kSketchHeaderBytes);
  const Half* mids = steps + head_dim;
  round_factors<kBits, H>(head_dim / kWidth, folded, [=](int i, Vec(&factors)[H], Vec(&offsets)[H]) {
    const Vec step = load(steps + i * kWidth), mid = load(mids + i * kWidth);
#pragma GCC unroll 8
    for (int h = 0; h < H; h++) {
      const Vec q = load(query + h * head_dim + i * kWidth);
      factors[h] = q * step;
      offsets[h] = fma(q, mid, offsets[h]);
    }
  });
}

template <int kBits, int H, int V>
VERA_INLINE void key_products(const uint8_t* levels, const uint8_t* next, const Shape& shape, const Folded& folded, int token,
                              float* logits, Vec (&tops)[H]) {
  const int rows = shape.head_dim * kBits / 32;
  for (; token + V * kWidth <= shape.page_size; token += V * kWidth) {
    Vec sums[H][V];
    products<kBits, H, V>(levels + 4 * token, next + 4 * token, 4 * shape.page_size, rows, folded, sums);
    for (int h = 0; h < H; h++) {
      const Vec scale = broadcast(folded.scales[h]), offset = broadcast(folded.offsets[h]);
      for (int v = 0; v < V; v++) {
        const Vec logit = fma(sums[h][v], scale, offset);
        store(logits + h * shape.page_size + token + v * kWidth, logit);
        tops[h] = larger(tops[h], logit);
      }
    }
  }
  if constexpr (V > 1) key_products<kBits, H, V / 2>(levels, next, shape, folded, token, logits, tops);
}

// Up to kFoldedPages pages of by_sketch, from `begin` on.
template <int kBits, int H>
void logits_by_sketch(const TieredRow& row, const Memory& memory, int begin, int head) {
  const Shape& shape = row.shape;
  const int* list = memory.by_sketch;
  const int end = least(begin + kFoldedPages, memory.num_by_sketch), head_bytes = kSketchHeaderBytes + 4 * shape.head_dim;
  const auto key_part = [&](int page) { return page_of(row, page).sketch.keys; };
  const float* query = memory.query + ptrdiff_t(head) * shape.head_dim;
  for (int i = begin; i < end; i++) {
    const uint8_t* part = key_part(list[i]);
    prefetch_bytes(after(memory, i, part, key_part), head_bytes);
    float header[2], variances[kWholeFours<H>];
    __builtin_memcpy(header, part, sizeof header);
    find_query_factors<H>(part, query, shape.head_dim, memory.folded(i - begin), variances);
    row.state.nu[list[i]] = header[0];
    for (int h = 0; h < H; h++)
      row.state.variance[ptrdiff_t(head + h) * row.state.page_stride + list[i]] = variances[h] * header[0] * header[0] + header[1];
  }
  for (int i = begin; i < end; i++)
    round_query_factors<kBits, H>(key_part(list[i]), query, shape.head_dim, memory.folded(i - begin));
  for (int i = begin; i < end; i++) {
    const uint8_t* part = key_part(list[i]);
    float* logits = weights_of(row, list[i], head);
    Vec tops[H];
    for (int h = 0; h < H; h++) tops[h] = broadcast(kMinusInfinity);
    key_products<kBits, H, level_vectors(H)>(part + head_bytes, after(memory, i, part, key_part) + head_bytes, shape,
                                             memory.folded(i - begin), 0, logits, tops);
    cap_and_cut(row, list[i], logits, shape.page_size, tops);
    store_all_maxima(tops, memory.maxima_of(i - begin));
  }
  for (int i = begin; i < end; i++)
    with_page_size(shape, [&](auto page_size) {
      weigh<H, false>(row, list[i], head, page_size, weights_of(row, list[i], head), page_size, memory.maxima_of(i - begin));
    });
}

template <class T, int H>
void exact_logits(const TieredRow& row, const Memory& memory, int page, const void* next, int head) {
  const Shape& shape = row.shape;
  const TieredPage& tiered = page_of(row, page);
  const int tokens = tokens_of(row, page);
  page_logits<T, H, block_vectors(H)>(static_cast<const T*>(tiered.exact.keys), static_cast<const T*>(next),
                                      memory.packed + ptrdiff_t(head) * shape.head_dim, shape, 0, tokens, memory.weights);
  // Logits of tokens that were never written were not computed.
  for (int h = 0; h < H; h++) mask_row(memory.weights + h * kMaxPageSize, 0, tokens, shape.page_size);
  Vec tops[H];
  find_tops(memory.weights, kMaxPageSize, shape.page_size, tops);
  cap_and_cut(row, page, memory.weights, kMaxPageSize, tops);
  store_all_maxima(tops, memory.maxima);
  weigh<H, true>(row, page, head, shape.page_size, memory.weights, kMaxPageSize, memory.maxima);
}

template <class T>
using ExactLogits = void (*)(const TieredRow&, const Memory&, int page, const void* next, int head);
template <class T>
constexpr ExactLogits<T> kExactLogits[] = {nullptr,
                                           exact_logits<T, 1>,
                                           exact_logits<T, 2>,
                                           exact_logits<T, 3>,
                                           exact_logits<T, 4>,
                                           exact_logits<T, 5>,
                                           exact_logits<T, 6>,
                                           exact_logits<T, 7>,
                                           exact_logits<T, 8>};

// What reading a hot page by its sketch would cost: -(var_K nu^2 + var_V) of each head.
void shadow_variance(const TieredRow& row, const Memory& memory, int page) {
  const uint8_t* part = page_of(row, page).sketch.keys;
  const Half* steps = halves(part + kSketchHeaderBytes);
  float header[2];
  __builtin_memcpy(header, part, sizeof header);
  for (int h = 0; h < row.shape.group; h++) {
    Vec squares = broadcast(0.0f);
    for (int c = 0; c < row.shape.head_dim; c += kWidth) {
      const Vec factor = load(memory.query + ptrdiff_t(h) * row.shape.head_dim + c) * load(steps + c);
      squares = fma(factor, factor, squares);
    }
    row.state.variance[ptrdiff_t(h) * row.state.page_stride + page] =
        -(sum(squares) * (1.0f / 12.0f) * header[0] * header[0] + header[1]);
  }
}

// `next` are the keys or values read after this page.
template <class T>
void exact_page(const TieredRow& row, const Memory& memory, int page, const void* next) {
  for_each_pass(row.shape.group, [&](int head, int heads) { kExactLogits<T>[heads](row, memory, page, next, head); });
  const TieredPage& tiered = page_of(row, page);
  float nu = 0.0f;
  if (has_sketch(tiered)) __builtin_memcpy(&nu, tiered.sketch.keys, sizeof nu);
  row.state.nu[page] = nu;
  for (int h = 0; h < row.shape.group; h++) row.state.variance[ptrdiff_t(h) * row.state.page_stride + page] = 0.0f;
  if (has_sketch(tiered) && tiered.has_slot) shadow_variance(row, memory, page);
}

using SketchWork = void (*)(const TieredRow&, const Memory&, int begin, int head);
constexpr SketchWork kLogitsBySketch[] = {nullptr,
                                          logits_by_sketch<4, 1>,
                                          logits_by_sketch<4, 2>,
                                          logits_by_sketch<4, 3>,
                                          logits_by_sketch<4, 4>,
                                          logits_by_sketch<4, 5>,
                                          logits_by_sketch<4, 6>,
                                          logits_by_sketch<4, 7>,
                                          logits_by_sketch<4, 8>};

// Does the work for all pages of by_sketch and all heads; only 4 bits have kernels for several heads at a time.
VERA_INLINE void for_each_sketch(const TieredRow& row, const Memory& memory, const SketchWork (&four_bits)[9], SketchWork two_bits,
                                 SketchWork eight_bits) {
  for (int begin = 0; begin < memory.num_by_sketch; begin += kFoldedPages) {
    if (row.sketch_bits == 4) {
      for_each_pass(row.shape.group, [&](int head, int heads) { four_bits[heads](row, memory, begin, head); });
    } else {
      for (int head = 0; head < row.shape.group; head++) (row.sketch_bits == 2 ? two_bits : eight_bits)(row, memory, begin, head);
    }
  }
}

void pack_query(const TieredRow& row, const Memory& memory) {
  const int head_dim = row.shape.head_dim;
  for (int head = 0; head < row.shape.group; head++)
    for (int c = 0; c < head_dim; c++)
      memory.query[head * head_dim + c] = row.query[head * row.head_stride + c] * row.options.scale;
  for_each_pass(row.shape.group, [&](int first, int heads) {
    for (int h = 0; h < heads; h++)
      for (int c = 0; c < head_dim; c++)
        memory.packed[first * head_dim + c * heads + h] = memory.query[(first + h) * head_dim + c];
  });
}

template <class T>
void logits(const TieredRow& row, int first, int end) {
  Memory memory = divide(row);
  pack_query(row, memory);
  for (int page = first; page < end; page++) {
    const TieredPage& tiered = page_of(row, page);
    const bool by_sketch = is_read_by_sketch(tiered, row.probe);
    row.state.service[page] = {by_sketch, false, false, false};
    memory.list(page, by_sketch, !by_sketch);
    if (!by_sketch && has_sketch(tiered)) prefetch_bytes(tiered.sketch.keys, kSketchHeaderBytes + 2 * row.shape.head_dim);
  }
  // The first exact page, in pieces of the size of a sketch.
  const ptrdiff_t piece = key_part_bytes(row.shape.page_size, row.shape.head_dim, row.sketch_bits);
  for (int i = 0; i < kPagesAhead && memory.num_exact > 0; i++)
    memory.upcoming[i] = static_cast<const uint8_t*>(page_of(row, memory.exact[0]).exact.keys) + i * piece;
  for_each_sketch(row, memory, kLogitsBySketch, logits_by_sketch<2, 1>, logits_by_sketch<8, 1>);
  for (int i = 0; i < memory.num_exact; i++) {
    const bool last = i + 1 == memory.num_exact;
    const PageRef& next = page_of(row, memory.exact[last ? 0 : i + 1]).exact;
    exact_page<T>(row, memory, memory.exact[i], last ? next.values : next.keys);
  }
}

// ---- from weights to masses, hits and what is left out

VERA_INLINE float sum_over_pages(const float* x, int stride) {
  Vec total = broadcast(0.0f);
  for (int i = 0; i < stride; i += kWidth) total = total + load(x + i);
  return sum(total);
}

// Pages that fill up the last vector take part in nothing.
void pad(const TieredRow& row) {
  const TieredState& state = row.state;
  for (int page = row.num_pages; page < state.page_stride; page++) {
    state.nu[page] = 0.0f;
    for (int h = 0; h < row.shape.group; h++) {
      const int at = h * state.page_stride + page;
      state.maxima[at] = kMinusInfinity;
      state.sums[at] = state.squares[at] = state.variance[at] = 0.0f;
    }
  }
}

// Brings the pages' weights together to one softmax: masses, factors, errors and totals.
void combine(const TieredRow& row) {
  const TieredState& state = row.state;
  const int stride = state.page_stride;
  for (int page = 0; page < stride; page++) state.peaks[page] = 0.0f;
  for (int h = 0; h < row.shape.group; h++) {
    const float* maxima = state.maxima + h * stride;
    const float* sums = state.sums + h * stride;
    float* factors = state.factors + h * stride;
    float* masses = state.masses + h * stride;
    float* errors = state.errors + h * stride;
    Vec tops = load(maxima);
    for (int i = kWidth; i < stride; i += kWidth) tops = larger(tops, load(maxima + i));
    float top = largest(tops), total = 0.0f;
    if (row.sinks != nullptr) {
      top = row.sinks[h] > top ? row.sinks[h] : top;
      total = exp_of_nonpositive(row.sinks[h] - top);
    }
    const Vec reference = broadcast(top == kMinusInfinity ? 0.0f : top);
    Vec totals = broadcast(0.0f);
    for (int i = 0; i < stride; i += kWidth) {
      const Vec factor = exp_of_nonpositive(load(maxima + i) - reference);
      store(factors + i, factor);
      totals = fma(factor, load(sums + i), totals);
    }
    total += sum(totals);
    state.totals[h] = total;
    const Vec inverse = broadcast(1.0f / total);
    for (int i = 0; i < stride; i += kWidth) {
      const Vec share = load(factors + i) * inverse;
      const Vec mass = share * load(sums + i);
      store(masses + i, mass);
      store(state.peaks + i, larger(mass, load(state.peaks + i)));
      const Vec variance = larger(load(state.variance + h * stride + i), broadcast(0.0f));
      store(errors + i, share * share * load(state.squares + h * stride + i) * variance);
    }
  }
}

// The mean of nu over the pages that have a sketch.
float norm_of(const TieredRow& row) {
  int count = 0;
  for (int page = 0; page < row.num_pages; page++) count += has_sketch(page_of(row, page));
  return count == 0 ? 0.0f : sum_over_pages(row.state.nu, row.state.page_stride) / float(count);
}

// Restores the order of a heap of pages below `root`: the largest error at the top, of equal ones the first page.
void sift(const float* errors, int* heap, int count, int root) {
  const auto before = [errors](int a, int b) { return errors[a] > errors[b] || (errors[a] == errors[b] && a < b); };
  for (int child; (child = 2 * root + 1) < count; root = child) {
    if (child + 1 < count && before(heap[child + 1], heap[child])) child++;
    if (!before(heap[child], heap[root])) return;
    const int page = heap[root];
    heap[root] = heap[child];
    heap[child] = page;
  }
}

// Lists the pages with the largest errors of one head, until the sum of the others is at most `rest`: those that may still be hit.
// Returns their number.
int largest_errors(const TieredRow& row, const float* errors, double rest, int* heap, int* chosen) {
  int count = 0, taken = 0;
  double sum = 0;
  for (int page = 0; page < row.num_pages; page++)
    if (row.state.service[page].by_sketch && !row.state.service[page].hit) {
      heap[count++] = page;
      sum += double(errors[page]);
    }
  for (int i = count / 2 - 1; i >= 0; i--) sift(errors, heap, count, i);
  while (count > 0 && sum > rest) {
    chosen[taken++] = heap[0];
    sum -= double(errors[heap[0]]);
    heap[0] = heap[--count];
    sift(errors, heap, count, 0);
  }
  return taken;
}

// Step 3, once: marks the pages that are hit and reads those of them exactly that are not cold. Returns whether there were any.
template <class T>
bool hit(const TieredRow& row, float norm) {
  const TieredState& state = row.state;
  const Memory memory = divide(row);
  const double allowed = double(row.tolerance) * double(norm);
  bool any = false;
  for (int h = 0; h < row.shape.group; h++) {
    const float* errors = state.errors + h * state.page_stride;
    double open = 0;
    float total = sum_over_pages(errors, state.page_stride);
    if (!(double(total) > 0.999 * allowed * allowed)) continue;
    for (int page = 0; page < row.num_pages; page++)
      if (!state.service[page].hit) open += double(errors[page]);
    if (!(open > allowed * allowed)) continue;
    const int count = largest_errors(row, errors, allowed * allowed / 4, memory.by_sketch, memory.exact);
    for (int i = 0; i < count; i++) state.service[memory.exact[i]].chosen = true;
    any = any || count > 0;
  }
  if (!any) return false;
  pack_query(row, memory);  // this thread's scratch may hold another row's
  bool changed = false;
  for (int page = 0; page < row.num_pages; page++) {
    PageService& service = state.service[page];
    if (!service.chosen) continue;
    service.chosen = false;
    service.hit = true;
    const TieredPage& tiered = page_of(row, page);
    if (tiered.exact.keys == nullptr) continue;
    exact_page<T>(row, memory, page, tiered.exact.values);
    service.by_sketch = false;
    changed = true;
  }
  return changed;
}

// Step 4: leaves out values of pages that cost little, as many as the budget allows. The pages' cost is cut at the largest one of
// some hundred geometric steps for which no head spends more than the budget.
void leave_out(const TieredRow& row, float budget) {
  const TieredState& state = row.state;
  const int stride = state.page_stride;
  if (!(budget > 0.0f)) return;
  for (int i = 0; i < stride; i += kWidth) store(state.costs + i, load(state.peaks + i) * load(state.nu + i));
  for (int page = 0; page < row.num_pages; page++)
    if (!has_sketch(page_of(row, page))) state.costs[page] = __builtin_inff();
  for (int page = row.num_pages; page < stride; page++) state.costs[page] = __builtin_inff();
  const Vec zero = broadcast(0.0f);
  const auto fits = [&](float limit) {
    const Vec cut = broadcast(limit);
    for (int h = 0; h < row.shape.group; h++) {
      Vec spent = zero;
      for (int i = 0; i < stride; i += kWidth) {
        const Vec cost = load(state.masses + h * stride + i) * load(state.nu + i);
        spent = spent + select_less(load(state.costs + i), cut, cost, zero);
      }
      if (!(sum(spent) <= budget)) return false;
    }
    return true;
  };
  // Floats above 0 are ordered as their bits.
  const auto as_bits = [](float x) {
    int32_t bits;
    __builtin_memcpy(&bits, &x, sizeof bits);
    return bits;
  };
  const auto as_float = [](int32_t bits) {
    float x;
    __builtin_memcpy(&x, &bits, sizeof x);
    return x;
  };
  float limit = budget;
  if (!fits(limit)) {
    int32_t low = as_bits(budget * 0x1p-20f), high = as_bits(budget);
    if (!fits(as_float(low))) return;
    for (int step = 0; step < 8; step++) {
      const int32_t middle = low + (high - low) / 2;
      (fits(as_float(middle)) ? low : high) = middle;
    }
    limit = as_float(low);
  }
  for (int page = 0; page < row.num_pages; page++) state.service[page].left_out = state.costs[page] < limit;
}

// The heads' errors relative to the norm, values left out counted in.
void sum_up(const TieredRow& row, float norm) {
  const TieredState& state = row.state;
  const int stride = state.page_stride;
  // From here on the costs are the norms of what is left out.
  for (int page = row.num_pages; page < stride; page++) state.costs[page] = 0.0f;
  for (int page = 0; page < row.num_pages; page++) state.costs[page] = state.nu[page] * float(state.service[page].left_out);
  TieredOutcome outcome{};
  for (int h = 0; h < row.shape.group; h++) {
    Vec skipped = broadcast(0.0f), variance = skipped;
    for (int i = 0; i < stride; i += kWidth) {
      skipped = fma(load(state.masses + h * stride + i), load(state.costs + i), skipped);
      variance = variance + load(state.errors + h * stride + i);
    }
    const double error = norm > 0 ? double((__builtin_sqrtf(sum(variance)) + sum(skipped)) / norm) : 0.0;
    outcome.error_sum += error;
    if (!(error <= outcome.largest_error)) outcome.largest_error = error;
  }
  *row.outcome = outcome;
}

// Marks the hot pages that would have been hit if they had been read by sketch, all else being as it is.
void mark_needed(const TieredRow& row, float norm) {
  const TieredState& state = row.state;
  const int stride = state.page_stride;
  const float allowed = row.tolerance * norm;
  for (int i = 0; i < stride; i++) state.needed[i] = 0.0f;
  for (int h = 0; h < row.shape.group; h++) {
    const Vec room = broadcast(allowed * allowed - sum_over_pages(state.errors + h * stride, stride));
    const Vec inverse = broadcast(1.0f / state.totals[h]), zero = broadcast(0.0f);
    for (int i = 0; i < stride; i += kWidth) {
      const Vec variance = load(state.variance + h * stride + i), share = load(state.factors + h * stride + i) * inverse;
      const Vec error = zero - share * share * load(state.squares + h * stride + i) * variance;
      const Vec excess = select_less(variance, zero, error - room, zero);
      store(state.needed + i, larger(excess, load(state.needed + i)));
    }
  }
}

template <class T>
void select(const TieredRow& row) {
  pad(row);
  const float norm = norm_of(row);
  do combine(row);
  while (hit<T>(row, norm));
  if (row.probe) return;
  mark_needed(row, norm);
  leave_out(row, row.skip_share * row.tolerance * norm);
  sum_up(row, norm);
}

// ---- values

VERA_INLINE float* partial_of(const TieredRow& row, int page) {
  const ptrdiff_t span = ptrdiff_t(page) * row.shape.page_size / kSpanTokens;
  return row.state.partials + span * ptrdiff_t(tiered_partial_floats(row.shape));
}

// The largest of the factors of a page's values, which are the weights times the steps of the tokens.
template <int H>
VERA_INLINE void find_weight_factors(const uint8_t* part, const float* weights, int page_size, const Folded& folded) {
  const Half* steps = halves(part);
  Vec tops[H];
  for (int h = 0; h < H; h++) tops[h] = broadcast(0.0f);
  for (int t = 0; t < page_size; t += kWidth) {
    const Vec step = load(steps + t);
    for (int h = 0; h < H; h++) tops[h] = larger(tops[h], load(weights + h * page_size + t) * step);
  }
  store_all_maxima(tops, folded.scales);
}

template <int kBits, int H>
VERA_INLINE void round_weight_factors(const uint8_t* part, const float* weights, int page_size, const Folded& folded) {
  const Half* steps = halves(part);
  const Half* mids = steps + page_size;
  round_factors<kBits, H>(page_size / kWidth, folded, [=](int i, Vec(&factors)[H], Vec(&offsets)[H]) {
    const Vec step = load(steps + i * kWidth), mid = load(mids + i * kWidth);
#pragma GCC unroll 8
    for (int h = 0; h < H; h++) {
      const Vec weight = load(weights + h * page_size + i * kWidth);
      factors[h] = weight * step;
      offsets[h] = fma(weight, mid, offsets[h]);
    }
  });
}

template <int kBits, int H, int V>
VERA_INLINE void value_products(const uint8_t* levels, const uint8_t* next, const Shape& shape, const Folded& folded,
                                const float* scales, int dim, float* output) {
  const int rows = shape.page_size * kBits / 32;
  for (; dim + V * kWidth <= shape.head_dim; dim += V * kWidth) {
    Vec sums[H][V];
    products<kBits, H, V>(levels + 4 * dim, next + 4 * dim, 4 * shape.head_dim, rows, folded, sums);
    for (int h = 0; h < H; h++) {
      const Vec scale = broadcast(scales[h]);
      float* line = output + h * shape.head_dim + dim;
      for (int v = 0; v < V; v++) store(line + v * kWidth, fma(sums[h][v], scale, load(line + v * kWidth)));
    }
  }
  if constexpr (V > 1) value_products<kBits, H, V / 2>(levels, next, shape, folded, scales, dim, output);
}

template <int kBits, int H>
void values_by_sketch(const TieredRow& row, const Memory& memory, int begin, int head) {
  const Shape& shape = row.shape;
  const int* list = memory.by_sketch;
  const int end = least(begin + kFoldedPages, memory.num_by_sketch), head_bytes = 4 * shape.page_size;
  const auto value_part = [&](int page) { return page_of(row, page).sketch.values; };
  for (int i = begin; i < end; i++) {
    const uint8_t* part = value_part(list[i]);
    prefetch_bytes(after(memory, i, part, value_part), head_bytes);
    with_page_size(shape, [&](auto page_size) {
      find_weight_factors<H>(part, weights_of(row, list[i], head), page_size, memory.folded(i - begin));
    });
  }
  for (int i = begin; i < end; i++)
    with_page_size(shape, [&](auto page_size) {
      round_weight_factors<kBits, H>(value_part(list[i]), weights_of(row, list[i], head), page_size, memory.folded(i - begin));
    });
  for (int i = begin; i < end; i++) {
    const uint8_t* part = value_part(list[i]);
    float* partial = partial_of(row, list[i]);
    const Folded folded = memory.folded(i - begin);
    float scales[H];
    for (int h = 0; h < H; h++) {
      const float factor = row.state.factors[ptrdiff_t(head + h) * row.state.page_stride + list[i]];
      scales[h] = folded.scales[h] * factor;
      partial[ptrdiff_t(shape.group) * shape.head_dim + head + h] += folded.offsets[h] * factor;
    }
    value_products<kBits, H, level_vectors(H)>(part + head_bytes, after(memory, i, part, value_part) + head_bytes, shape, folded,
                                               scales, 0, partial + ptrdiff_t(head) * shape.head_dim);
  }
}

template <class T, int H>
void exact_values(const TieredRow& row, const Memory& memory, int page, const void* next, int head) {
  const Shape& shape = row.shape;
  const int tokens = tokens_of(row, page);
  for (int h = 0; h < H; h++) {
    const Vec factor = broadcast(row.state.factors[ptrdiff_t(head + h) * row.state.page_stride + page]);
    const float* weights = weights_of(row, page, head + h);
    for (int t = 0; t < shape.page_size; t += kWidth) store(memory.weights + h * kMaxPageSize + t, load(weights + t) * factor);
  }
  page_values<T, H, block_vectors(H)>(static_cast<const T*>(page_of(row, page).exact.values), static_cast<const T*>(next),
                                      memory.weights, shape.head_dim, 0, tokens,
                                      partial_of(row, page) + ptrdiff_t(head) * shape.head_dim);
}

template <class T>
constexpr ExactLogits<T> kExactValues[] = {nullptr,
                                           exact_values<T, 1>,
                                           exact_values<T, 2>,
                                           exact_values<T, 3>,
                                           exact_values<T, 4>,
                                           exact_values<T, 5>,
                                           exact_values<T, 6>,
                                           exact_values<T, 7>,
                                           exact_values<T, 8>};

constexpr SketchWork kValuesBySketch[] = {nullptr,
                                          values_by_sketch<4, 1>,
                                          values_by_sketch<4, 2>,
                                          values_by_sketch<4, 3>,
                                          values_by_sketch<4, 4>,
                                          values_by_sketch<4, 5>,
                                          values_by_sketch<4, 6>,
                                          values_by_sketch<4, 7>,
                                          values_by_sketch<4, 8>};

template <class T>
void values(const TieredRow& row, int first, int end) {
  Memory memory = divide(row);
  const int pages_of_span = kSpanTokens / row.shape.page_size;
  const ptrdiff_t partial_floats = ptrdiff_t(tiered_partial_floats(row.shape));
  for (ptrdiff_t i = first * partial_floats; i < end * partial_floats; i++) row.state.partials[i] = 0.0f;
  for (int page = first * pages_of_span; page < least(end * pages_of_span, row.num_pages); page++) {
    const PageService& service = row.state.service[page];
    memory.list(page, service.by_sketch & !service.left_out, !service.by_sketch & !service.left_out);
  }
  for (int page = 0, found = 0; page < row.num_next_pages && found < kPagesAhead; page++) {
    const TieredPage& next = row.next_pages[page * row.page_stride];
    if (is_read_by_sketch(next, false)) memory.upcoming[found++] = next.sketch.keys;
  }
  // Which values are read was not known before now: the first ones by sketch are fetched while the exact ones are worked on.
  const int part_bytes = int(value_part_bytes(row.shape.page_size, row.shape.head_dim, row.sketch_bits));
  const int fetched = least(memory.num_by_sketch, kPagesAhead);
  for (int i = 0; i < most(memory.num_exact, fetched); i++) {
    if (i < fetched) prefetch_bytes(page_of(row, memory.by_sketch[i]).sketch.values, part_bytes);
    if (i >= memory.num_exact) continue;
    const int page = memory.exact[i];
    const void* next = page_of(row, memory.exact[least(i + 1, memory.num_exact - 1)]).exact.values;
    for_each_pass(row.shape.group, [&](int head, int heads) { kExactValues<T>[heads](row, memory, page, next, head); });
  }
  for_each_sketch(row, memory, kValuesBySketch, values_by_sketch<2, 1>, values_by_sketch<8, 1>);
}

void merge(const TieredRow& row) {
  const int head_dim = row.shape.head_dim, group = row.shape.group;
  const int spans = (row.num_pages * row.shape.page_size + kSpanTokens - 1) / kSpanTokens;
  const ptrdiff_t partial_floats = ptrdiff_t(tiered_partial_floats(row.shape));
  for (int h = 0; h < group; h++) {
    const float* line = row.state.partials + ptrdiff_t(h) * head_dim;
    const float* offsets = row.state.partials + ptrdiff_t(group) * head_dim + h;
    float offset = 0.0f;
    for (int span = 0; span < spans; span++) offset += offsets[span * partial_floats];
    const Vec inverse = broadcast(1.0f / row.state.totals[h]);
    for (int c = 0; c < head_dim; c += kWidth) {
      Vec total = broadcast(offset);
      for (int span = 0; span < spans; span++) total = total + load(line + span * partial_floats + c);
      store(row.output + ptrdiff_t(h) * head_dim + c, total * inverse);
    }
  }
}

constexpr TieredKernels kTiered = {
    {logits<Half>, logits<BFloat16>, logits<float>},
    {select<Half>, select<BFloat16>, select<float>},
    {values<Half>, values<BFloat16>, values<float>},
    merge,
};

}  // namespace

const TieredKernels& tiered_kernels() { return kTiered; }

}  // namespace VERA_ISA
}  // namespace vera
