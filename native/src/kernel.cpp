// The attention kernels, written once in terms of simd.h and compiled once per instruction set (see CMakeLists.txt).
//
// Keys are channel-major, so logits of neighbouring tokens fill a vector and no product needs a sum across lanes; values are
// token-major, so the dimensions of the output do. Slots of a page that were never written take part in nothing: their logits
// are overwritten and their values not read, so stale bytes (NaN included) do no harm. Written tokens that a row of a prefill
// tile may not see get the weight 0.
//
// No templates or inline functions of the standard library here: the linker would share them with code for older CPUs.
#include "kernel.h"

#include "levels.h"
#include "page_products.h"

namespace vera {
namespace VERA_ISA {
namespace {

// ---- writing

template <class T>
void write_tokens(const TokenWrite& write) {
  const int head_dim = write.shape.head_dim, page_size = write.shape.page_size;
  T row[kMaxHeadDim];
  for (int t = 0; t < write.num_tokens; t++) {
    const float* new_key = write.new_keys + t * write.key_token_stride;
    const float* new_value = write.new_values + t * write.value_token_stride;
    T* key = static_cast<T*>(write.keys) + write.offset + t;
    T* value = static_cast<T*>(write.values) + ptrdiff_t(write.offset + t) * head_dim;
    // Rows are converted in a buffer, because a vector may be wider than what is left of a row.
    float buffer[kMaxHeadDim + kWidth];
    for (int c = 0; c < head_dim; c++) buffer[c] = new_key[c];
    for (int c = head_dim; c < round_up(head_dim, kWidth); c++) buffer[c] = 0.0f;
    for (int c = 0; c < head_dim; c += kWidth) store(row + c, load(buffer + c));
    for (int c = 0; c < head_dim; c++) key[ptrdiff_t(c) * page_size] = row[c];
    for (int c = 0; c < head_dim; c++) buffer[c] = new_value[c];
    for (int c = 0; c < head_dim; c += kWidth) store(row + c, load(buffer + c));
    for (int c = 0; c < head_dim; c++) value[c] = row[c];
  }
}

// ---- decode

// The part of a page's work that one pass of `H` heads does. `query` is [head_dim][H].
template <class T, int H>
void decode_page(const DecodeSpan& span, PageRef page, PageRef next, int begin, int end, const float* query,
                 const HeadState& first, float* weights) {
  const Shape& shape = span.shape;
  const int dims = round_up(shape.head_dim, kWidth);
  page_logits<T, H, block_vectors(H)>(static_cast<const T*>(page.keys), static_cast<const T*>(next.keys), query, shape, 0, end,
                                      weights);
  for (int h = 0; h < H; h++) {
    const HeadState state{first.maximum + h, first.totals + h * kWidth, first.output + h * dims};
    online_softmax(weights + h * kMaxPageSize, begin, end, end, span.options.softcap, state, dims);
  }
  const T* values = static_cast<const T*>(page.values) + ptrdiff_t(begin) * shape.head_dim;
  page_values<T, H, block_vectors(H)>(values, static_cast<const T*>(next.values), weights + begin, shape.head_dim, 0, end - begin,
                                      first.output);
}

template <class T>
using DecodePage = void (*)(const DecodeSpan&, PageRef, PageRef, int, int, const float*, const HeadState&, float*);

template <class T>
constexpr DecodePage<T> kDecodePage[] = {nullptr,           decode_page<T, 1>, decode_page<T, 2>,
                                         decode_page<T, 3>, decode_page<T, 4>, decode_page<T, 5>,
                                         decode_page<T, 6>, decode_page<T, 7>, decode_page<T, 8>};

// Pages in the order in which they lie in memory if the pool is filled in order: block by block, head by head, keys before
// values.
template <class T>
void decode_span(const DecodeSpan& span) {
  const Shape& shape = span.shape;
  const int group = shape.group, head_dim = shape.head_dim, page_size = shape.page_size;
  const int query_heads = span.kv_heads * group, dims = round_up(head_dim, kWidth);
  // More than 8 heads of a group go in passes of nearly equal size; the later ones find the page in the cache.
  const int passes = (group + 7) / 8, pass_heads = (group + passes - 1) / passes;
  float* weights = span.scratch;                   // [8][kMaxPageSize]
  float* query = weights + 8 * kMaxPageSize;       // passes of [head_dim][heads]
  float* output = query + query_heads * head_dim;  // [query_heads][dims]
  float* totals = output + query_heads * dims;     // [query_heads][kWidth]
  float* maxima = totals + query_heads * kWidth;   // [query_heads]

  for (int i = 0; i < query_heads * dims; i++) output[i] = 0.0f;
  for (int i = 0; i < query_heads * kWidth; i++) totals[i] = 0.0f;
  for (int head = 0; head < query_heads; head++) {
    maxima[head] = kMinusInfinity;
    const int in_group = head % group, first = head - in_group % pass_heads;
    const int heads = least(pass_heads, group - (first % group));
    const float* source = span.query + head * span.head_stride;
    float* packed = query + ptrdiff_t(first) * head_dim + (head - first);
    for (int c = 0; c < head_dim; c++) packed[c * heads] = source[c] * span.options.scale;
  }

  const int blocks = (span.end + page_size - 1) / page_size;
  for (int block = 0; block < blocks; block++) {
    const int begin = most(0, span.begin - block * page_size), end = least(page_size, span.end - block * page_size);
    for (int kv_head = 0; kv_head < span.kv_heads; kv_head++) {
      const int index = block * span.kv_heads + kv_head;
      const PageRef page = span.pages[index];
      PageRef next = index + 1 < blocks * span.kv_heads ? span.pages[index + 1] : span.next;
      if (next.keys == nullptr) next = page;
      for (int in_group = 0; in_group < group; in_group += pass_heads) {
        const int head = kv_head * group + in_group;
        const HeadState first{maxima + head, totals + head * kWidth, output + head * dims};
        kDecodePage<T>[least(pass_heads, group - in_group)](span, page, next, begin, end, query + head * head_dim, first, weights);
      }
    }
  }

  for (int head = 0; head < query_heads; head++) {
    span.partial[head] = maxima[head];
    span.partial[query_heads + head] = sum(load(totals + head * kWidth));
    float* values = span.partial + 2 * query_heads + ptrdiff_t(head) * head_dim;
    for (int c = 0; c < head_dim; c++) values[c] = output[head * dims + c];
  }
}

void merge_decode(const DecodeMerge& merge) {
  const int query_heads = merge.query_heads, head_dim = merge.head_dim;
  const size_t stride = partial_floats(query_heads, head_dim);
  for (int h = 0; h < query_heads; h++) {
    float top = merge.sinks != nullptr ? merge.sinks[h] : kMinusInfinity;
    for (int i = 0; i < merge.num_partials; i++) {
      const float partial_top = merge.partials[i * stride + h];
      top = partial_top > top ? partial_top : top;
    }
    float total = merge.sinks != nullptr ? exp_of_nonpositive(merge.sinks[h] - top) : 0.0f;
    float* output = merge.output + ptrdiff_t(h) * head_dim;
    for (int c = 0; c < head_dim; c++) output[c] = 0.0f;
    for (int i = 0; i < merge.num_partials; i++) {
      const float* partial = merge.partials + i * stride;
      const float* values = partial + 2 * query_heads + ptrdiff_t(h) * head_dim;
      const float factor = exp_of_nonpositive(partial[h] - top);
      total += factor * partial[query_heads + h];
      for (int c = 0; c < head_dim; c++) output[c] += factor * values[c];
    }
    for (int c = 0; c < head_dim; c++) output[c] /= total;
  }
}

// ---- prefill: a tile of query rows, as two matrix products per page around an online softmax

constexpr int kBlockRows = 6;
constexpr int kBlockVectors = block_vectors(kBlockRows);
// Rows of weights lie a bit more than a page apart, so that the rows of a block do not fall into the same sets of the L1 cache.
constexpr int kWeightStride = kMaxPageSize + 16;
static_assert(kTileRows % kBlockRows == 0);

// c[kBlockRows][V vectors] (+)= a[kBlockRows][depth] * b[depth][V vectors]
template <int V, bool kAdd>
VERA_INLINE void product_block(const float* a, ptrdiff_t a_row, ptrdiff_t a_column, const float* b, ptrdiff_t b_row, int depth,
                               float* c, ptrdiff_t c_row) {
  Vec sums[kBlockRows][V];
  for (int r = 0; r < kBlockRows; r++)
    for (int v = 0; v < V; v++) sums[r][v] = kAdd ? load(c + r * c_row + v * kWidth) : broadcast(0.0f);
  for (int k = 0; k < depth; k++) {
    add_outer_product(sums, [&](int r) { return broadcast(a[r * a_row]); }, [&](int v) { return load(b + v * kWidth); });
    a += a_column;
    b += b_row;
  }
  for (int r = 0; r < kBlockRows; r++)
    for (int v = 0; v < V; v++) store(c + r * c_row + v * kWidth, sums[r][v]);
}

// c[kBlockRows][column:columns] (+)= a * b, columns being rounded up to whole vectors.
template <int V, bool kAdd>
VERA_INLINE void product(const float* a, ptrdiff_t a_row, ptrdiff_t a_column, const float* b, ptrdiff_t b_row, int depth,
                         float* c, ptrdiff_t c_row, int column, int columns) {
  for (; column + (V - 1) * kWidth < columns; column += V * kWidth)
    product_block<V, kAdd>(a, a_row, a_column, b + column, b_row, depth, c + column, c_row);
  if constexpr (V > 1) product<V / 2, kAdd>(a, a_row, a_column, b, b_row, depth, c, c_row, column, columns);
}

// One tile's state over its pages.
struct TileState {
  float* query;    // [blocks][head_dim][kBlockRows], scaled
  float* weights;  // [rows][kWeightStride]
  float* output;   // [rows][output_stride], not normalised
  float* maxima;   // [rows]
  float* totals;   // [rows][kWidth]: lane by lane
  float* keys;     // [head_dim][page_size]
  float* values;   // [page_size][output_stride]
  int rows;        // tokens * group
  int blocks;      // of kBlockRows
  int output_stride;
};

TileState begin_tile(const PrefillTile& tile) {
  const int group = tile.shape.group, head_dim = tile.shape.head_dim;
  TileState state;
  state.rows = tile.num_tokens * group;
  state.blocks = (state.rows + kBlockRows - 1) / kBlockRows;
  state.output_stride = round_up(head_dim, kWidth);
  state.query = tile.scratch;
  state.weights = state.query + kTileRows * kMaxHeadDim;
  state.output = state.weights + kTileRows * kWeightStride;
  state.totals = state.output + kTileRows * kMaxHeadDim;
  state.maxima = state.totals + kTileRows * 16;
  state.keys = state.maxima + kTileRows;
  state.values = state.keys + kMaxPageSize * kMaxHeadDim;

  for (int i = 0; i < state.blocks * kBlockRows * head_dim; i++) state.query[i] = 0.0f;
  for (int i = 0; i < state.blocks * kBlockRows * state.output_stride; i++) state.output[i] = 0.0f;
  for (int row = 0; row < state.rows; row++) {
    const int head = row % group;
    const float* query = tile.query + (row / group) * tile.token_stride + head * tile.head_stride;
    float* packed = state.query + ptrdiff_t(row / kBlockRows) * head_dim * kBlockRows + row % kBlockRows;
    for (int c = 0; c < head_dim; c++) packed[c * kBlockRows] = query[c] * tile.options.scale;
    // A sink is a token that has been seen already: it has a logit, and its value is zero.
    state.maxima[row] = tile.sinks != nullptr ? tile.sinks[head] : kMinusInfinity;
    for (int lane = 0; lane < kWidth; lane++) state.totals[row * kWidth + lane] = 0.0f;
    if (tile.sinks != nullptr) state.totals[row * kWidth] = 1.0f;
  }
  return state;
}

template <class T>
VERA_INLINE void load_keys(const T* keys, const Shape& shape, float* target) {
  for (int i = 0; i < shape.head_dim * shape.page_size; i += kWidth) store(target + i, load(keys + i));
}

template <class T>
VERA_INLINE void load_values(const T* values, int tokens, int head_dim, float* target, int stride) {
  for (int t = 0; t < tokens; t++) {
    int c = 0;
    for (; c + kWidth <= head_dim; c += kWidth) store(target + c, load(values + c));
    if constexpr (kWidth == 16) {
      if (c < head_dim) store(target + c, load_half_vector(values + c));
    }
    values += head_dim;
    target += stride;
  }
}

VERA_INLINE void weigh_row(const PrefillTile& tile, TileState& state, int row, int page_position, int columns) {
  const int position = tile.query_position + row / tile.shape.group;
  const int end = most(0, least(columns, position + 1 - page_position));
  const int begin = tile.window == 0 ? 0 : most(0, least(columns, position + 1 - tile.window - page_position));
  const HeadState head{state.maxima + row, state.totals + row * kWidth, state.output + ptrdiff_t(row) * state.output_stride};
  online_softmax(state.weights + ptrdiff_t(row) * kWeightStride, begin, end, columns, tile.options.softcap, head,
                 state.output_stride);
}

template <class T>
void prefill_tile(const PrefillTile& tile) {
  const Shape& shape = tile.shape;
  TileState state = begin_tile(tile);
  const int end_position = tile.query_position + tile.num_tokens;
  for (int i = 0; i < tile.num_pages; i++) {
    const int page_position = tile.first_position + i * shape.page_size;
    const int columns = least(shape.page_size, end_position - page_position);
    const bool cold = tile.pages[i].keys == nullptr;
    if (cold)
      read_key_part(tile.sketches[i].keys, shape, tile.sketch_bits, state.keys);
    else
      load_keys(static_cast<const T*>(tile.pages[i].keys), shape, state.keys);
    for (int block = 0; block < state.blocks; block++) {
      const int first_row = block * kBlockRows;
      product<kBlockVectors, false>(state.query + ptrdiff_t(first_row) * shape.head_dim, 1, kBlockRows, state.keys,
                                    shape.page_size, shape.head_dim, state.weights + ptrdiff_t(first_row) * kWeightStride,
                                    kWeightStride, 0, columns);
      for (int row = first_row; row < least(first_row + kBlockRows, state.rows); row++)
        weigh_row(tile, state, row, page_position, columns);
    }
    if (cold)
      read_value_part(tile.sketches[i].values, shape, tile.sketch_bits, state.values, state.output_stride);
    else
      load_values(static_cast<const T*>(tile.pages[i].values), columns, shape.head_dim, state.values, state.output_stride);
    for (int block = 0; block < state.blocks; block++) {
      const int first_row = block * kBlockRows;
      product<kBlockVectors, true>(state.weights + ptrdiff_t(first_row) * kWeightStride, kWeightStride, 1, state.values,
                                   state.output_stride, columns, state.output + ptrdiff_t(first_row) * state.output_stride,
                                   state.output_stride, 0, state.output_stride);
    }
  }
  for (int row = 0; row < state.rows; row++) {
    const float inverse = 1.0f / sum(load(state.totals + row * kWidth));
    const float* values = state.output + ptrdiff_t(row) * state.output_stride;
    float* output = tile.output + (row / shape.group) * tile.output_token_stride + ptrdiff_t(row % shape.group) * shape.head_dim;
    for (int c = 0; c < shape.head_dim; c++) output[c] = values[c] * inverse;
  }
}

// ---- the bandwidth yardstick

uint64_t sum_words(const void* data, size_t bytes) {
  const char* p = static_cast<const char*>(data);
  const size_t words = bytes / sizeof(uint64_t);
  uint64_t total = 0;
  for (size_t i = 0; i < words; i++) {
    uint64_t word;
    __builtin_memcpy(&word, p + i * sizeof word, sizeof word);
    total += word;
  }
  return total;
}

constexpr ExactKernels kExact = {
    {write_tokens<Half>, write_tokens<BFloat16>, write_tokens<float>},
    {decode_span<Half>, decode_span<BFloat16>, decode_span<float>},
    merge_decode,
    {prefill_tile<Half>, prefill_tile<BFloat16>, prefill_tile<float>},
    sum_words,
};

}  // namespace

const ExactKernels& exact_kernels() { return kExact; }

}  // namespace VERA_ISA
}  // namespace vera
