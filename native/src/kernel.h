// What the scheduling code and the kernels share. Plain data, strides in floats. kernel.cpp is compiled once per instruction set:
// an inline function with external linkage here could end up with instructions that the running CPU lacks.
#pragma once

#include <cstddef>
#include <cstdint>

namespace vera {

constexpr int kMaxHeadDim = 256;
constexpr int kMaxPageSize = 128;
constexpr int kMaxGroup = 64;
// Decode work is cut at multiples of this many tokens, whatever the batch and the number of threads: a sequence's result
// is always the same sum in the same order.
constexpr int kSpanTokens = 512;
// Query rows (tokens x query heads of a group) that share one pass over the pages in prefill.
constexpr int kTileRows = 96;

enum class PageType : int { kFloat16 = 0, kBFloat16 = 1, kFloat32 = 2 };

// Where one exact page lies.
struct PageRef {
  const void* keys;    // [head_dim][page_size]
  const void* values;  // [page_size][head_dim]
};

// Where the two parts of a page's sketch lie; null: it has none. The format is that of vera.attention.sketch.
struct SketchRef {
  const uint8_t* keys;
  const uint8_t* values;
};

constexpr int kSketchHeaderBytes = 64;  // nu and var_V in float32, then zeros

// static, so that no compilation shares its copy of these functions with another.
static constexpr int64_t level_bytes(int page_size, int head_dim, int bits) { return int64_t(page_size) * head_dim * bits / 8; }
static constexpr int64_t key_part_bytes(int page_size, int head_dim, int bits) {
  return kSketchHeaderBytes + 4 * int64_t(head_dim) + level_bytes(page_size, head_dim, bits);
}
static constexpr int64_t value_part_bytes(int page_size, int head_dim, int bits) {
  return 4 * int64_t(page_size) + level_bytes(page_size, head_dim, bits);
}

struct Shape {
  int page_size;
  int head_dim;
  int group;  // query heads that share a KV head
};

struct LogitOptions {
  float scale;
  float softcap;  // 0: none
};

// One query token against some neighbouring blocks of its sequence, for some neighbouring KV heads.
struct DecodeSpan {
  Shape shape;
  LogitOptions options;
  int kv_heads;
  const PageRef* pages;  // [blocks][kv_heads]
  int begin, end;        // the tokens that take part, counted from the start of the first block
  PageRef next;          // read after this span, to be prefetched; null pointers: none
  const float* query;    // [kv_heads * group] rows
  ptrdiff_t head_stride;
  float* scratch;  // decode_scratch_floats
  float* partial;  // out, see partial_floats
};

static constexpr size_t decode_scratch_floats(int query_heads, int head_dim) {
  const size_t padded_dim = size_t(head_dim) + 16;
  return size_t(query_heads) * (2 * padded_dim + 16 + 1)  // queries, output, sums, maxima
         + 8 * size_t(kMaxPageSize) + 64;                 // weights of one page
}

// A softmax over part of the tokens: per head the largest logit, the sum of exp(logit - largest), and the values weighted so.
// Laid out as maxima [query_heads], sums [query_heads], values [query_heads][head_dim].
static constexpr size_t partial_floats(int query_heads, int head_dim) { return size_t(query_heads) * (2 + size_t(head_dim)); }

// The partial results of one query token, in token order, to its output.
struct DecodeMerge {
  int query_heads, head_dim;
  const float* partials;  // num_partials of them, one after another
  int num_partials;
  const float* sinks;  // [query_heads] or null
  float* output;       // [query_heads][head_dim]
};

// Some neighbouring query tokens of a sequence, all heads of one group, against all their pages.
struct PrefillTile {
  Shape shape;
  LogitOptions options;
  const PageRef* pages;      // null keys: cold, to be read by its sketch
  const SketchRef* sketches;  // of the same pages; null: no page is cold
  int sketch_bits;
  int num_pages;
  int first_position;  // of the first token of pages[0]
  int query_position;  // of the first query token
  int num_tokens;      // num_tokens * group <= kTileRows, or num_tokens is 1
  int window;          // 0: none
  const float* sinks;  // [group] or null
  const float* query;  // [num_tokens][group] rows
  ptrdiff_t token_stride, head_stride;
  float* scratch;  // kPrefillScratchFloats
  float* output;   // [num_tokens] of [group][head_dim]
  ptrdiff_t output_token_stride;
};

constexpr size_t kPrefillScratchFloats =
    size_t(kTileRows) * (2 * kMaxHeadDim + kMaxPageSize + 16 + 18)  // queries, output, weights, sums
    + 2 * size_t(kMaxPageSize) * kMaxHeadDim                        // keys and values in float32
    + 256;

// New tokens on their way to one page.
struct TokenWrite {
  Shape shape;
  void* keys;
  void* values;
  int offset;  // of the first token in the page
  int num_tokens;
  const float* new_keys;
  ptrdiff_t key_token_stride;
  const float* new_values;
  ptrdiff_t value_token_stride;
};

// A page of a row that is served within bounds.
struct TieredPage {
  PageRef exact;  // in its slot or at its warm address; null: cold
  SketchRef sketch;
  bool has_slot;
};

// How a page of such a row is read.
struct PageService {
  bool by_sketch;
  bool chosen;    // to be hit, once all heads have chosen
  bool hit;       // if still read by its sketch: it is cold
  bool left_out;  // its values are
};

// The errors E / N of the heads of one row.
struct TieredOutcome {
  double error_sum, largest_error;
};

// The memory of one row while it is worked on. A row's numbers by head and page lie [group][page_stride], in vectors of pages.
struct TieredState {
  int page_stride;
  float* weights;   // [pages][group][page_size]: logits, then exp(logit - the page's largest)
  float* maxima;    // largest logit of each page
  float* sums;      // of the page's weights
  float* squares;   // of the page's weights, squared
  float* variance;  // var_K nu^2 + var_V of pages read by sketch; the same, negative, of hot pages that have one; else 0
  float* masses;    // the page's sum of p
  float* factors;   // exp(the page's largest logit - the row's)
  float* errors;    // e
  float* nu;        // [page_stride]; 0 where there is no sketch
  float* peaks;     // [page_stride]: the largest of the heads' masses
  float* needed;    // [page_stride]: above 0 for hot pages that would have been hit, had they been read by sketch
  float* costs;     // [page_stride]: the largest of the heads' masses, times nu; infinite where there is no sketch
  float* totals;    // [group]: sum of exp(logit - largest)
  float* partials;  // [spans] of tiered_partial_floats
  PageService* service;  // [pages]
};

static constexpr int tiered_page_stride(int pages) { return (pages + 15) / 16 * 16; }
static constexpr size_t tiered_partial_floats(const Shape& shape) { return size_t(shape.group) * (size_t(shape.head_dim) + 1); }
static constexpr size_t tiered_state_floats(const Shape& shape, int pages) {
  const size_t stride = size_t(tiered_page_stride(pages)), group = size_t(shape.group);
  const size_t spans = (size_t(pages) * size_t(shape.page_size) + kSpanTokens - 1) / kSpanTokens;
  return stride * group * size_t(shape.page_size)  // weights
         + (7 * group + 4) * stride                // numbers by head and page, and by page
         + (group + 15) / 16 * 16                  // totals
         + (spans * tiered_partial_floats(shape) + 15) / 16 * 16
         + stride;                                 // service
}
// `memory` is aligned to 64 bytes.
static inline TieredState tiered_state(const Shape& shape, int pages, float* memory) {
  TieredState state;
  const int stride = state.page_stride = tiered_page_stride(pages);
  const size_t by_head = size_t(shape.group) * size_t(stride);
  const size_t spans = (size_t(pages) * size_t(shape.page_size) + kSpanTokens - 1) / kSpanTokens;
  const auto take = [&memory](size_t count) {
    float* taken = memory;
    memory += (count + 15) / 16 * 16;
    return taken;
  };
  state.weights = take(by_head * size_t(shape.page_size));
  state.maxima = take(by_head);
  state.sums = take(by_head);
  state.squares = take(by_head);
  state.variance = take(by_head);
  state.masses = take(by_head);
  state.factors = take(by_head);
  state.errors = take(by_head);
  state.nu = take(size_t(stride));
  state.peaks = take(size_t(stride));
  state.needed = take(size_t(stride));
  state.costs = take(size_t(stride));
  state.totals = take(size_t(shape.group));
  state.partials = take(spans * tiered_partial_floats(shape));
  static_assert(sizeof(PageService) <= sizeof(float));
  state.service = reinterpret_cast<PageService*>(take(size_t(stride)));
  return state;
}

// One query token, the heads of one group, against all pages of its sequence: steps 1 to 4 of vera.attention.protocol.Tiers.
// Four functions do it: `logits` and `values` may be called for parts of the pages, by several threads.
struct TieredRow {
  Shape shape;
  LogitOptions options;
  int sketch_bits;
  const TieredPage* pages;
  ptrdiff_t page_stride;  // from one block to the next, in pages
  int num_pages;
  int tokens;  // that the query sees, the last one of the sequence being the last of them
  bool probe;  // read by sketch whatever has one, and no values
  float tolerance, skip_share;
  const float* query;  // [group] rows
  ptrdiff_t head_stride;
  const float* sinks;  // [group] or null
  const TieredPage* next_pages;  // of the row that is worked on after this one, to be prefetched
  int num_next_pages;
  float* scratch;         // tiered_scratch_floats, of this thread
  TieredState state;
  TieredOutcome* outcome;  // out
  float* output;           // [group][head_dim]
};

// Pages whose queries or weights are rounded to bytes together. With more, the bus idles while they are rounded, and chokes
// afterwards.
constexpr int kFoldedPages = 2;
static constexpr size_t tiered_scratch_floats(const Shape& shape, int pages) {
  return 2 * size_t(tiered_page_stride(pages))              // lists of pages
         + 2 * size_t(shape.group) * size_t(shape.head_dim)  // queries, in two orders
         + 8 * size_t(kMaxPageSize)                         // weights of one page
         + kFoldedPages * (16 * size_t(kMaxHeadDim) + 64) / 4  // factors as bytes
         + kFoldedPages * 8 * 3;                            // their scales and offsets, and largest logits
}

struct TieredKernels {
  // Logits and weights of the pages [first, end).
  void (*logits[3])(const TieredRow& row, int first, int end);
  // From all pages' weights to masses, hits, and which values are left out. Fills all but the values.
  void (*select[3])(const TieredRow& row);
  // Weighted values of the spans [first, end).
  void (*values[3])(const TieredRow& row, int first, int end);
  // From all spans' values to the output.
  void (*merge)(const TieredRow& row);
};

// Sketches of exact pages; see vera.attention.sketch.
struct SketchTask {
  int page_size, head_dim, bits;
  const void* page;
  uint8_t* key_part;
  uint8_t* value_part;
};

// By PageType. Returns false if some number of the sketch is not finite: it is of no use then.
using SketchMaker = bool (*)(const SketchTask&);

// What works on exact pages, by PageType where it touches them.
struct ExactKernels {
  void (*write_tokens[3])(const TokenWrite&);
  void (*decode_span[3])(const DecodeSpan&);
  void (*merge_decode)(const DecodeMerge&);
  void (*prefill_tile[3])(const PrefillTile&);
  // Sum of the buffer as 64-bit words, modulo 2^64; bytes past the last whole word are left out.
  uint64_t (*sum_words)(const void* data, size_t bytes);
};

struct DecoderKernels;  // decoder.h

// The kernels of one instruction set.
struct KernelTable {
  const char* name;
  const ExactKernels& exact;
  const TieredKernels& tiered;
  const SketchMaker* make_sketch;
  const DecoderKernels& decoder;
};

namespace portable {
const ExactKernels& exact_kernels();
const TieredKernels& tiered_kernels();
const SketchMaker* sketch_makers();
}  // namespace portable
#ifdef VERA_HAS_X86_KERNELS
namespace avx2 {
const ExactKernels& exact_kernels();
const TieredKernels& tiered_kernels();
const SketchMaker* sketch_makers();
}  // namespace avx2
namespace avx512 {
const ExactKernels& exact_kernels();
const TieredKernels& tiered_kernels();
const SketchMaker* sketch_makers();
}  // namespace avx512
// AVX-512 with products of bytes; all else is that of avx512.
namespace avx512vnni {
const TieredKernels& tiered_kernels();
}
#endif

}  // namespace vera
