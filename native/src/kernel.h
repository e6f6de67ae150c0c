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

// static, so that no compilation shares its copy of these functions with another.
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
  const PageRef* pages;
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

// The kernels of one instruction set, by PageType where they touch pages.
struct KernelTable {
  const char* name;
  void (*write_tokens[3])(const TokenWrite&);
  void (*decode_span[3])(const DecodeSpan&);
  void (*merge_decode)(const DecodeMerge&);
  void (*prefill_tile[3])(const PrefillTile&);
  // Sum of the buffer as 64-bit words, modulo 2^64; bytes past the last whole word are left out.
  uint64_t (*sum_words)(const void* data, size_t bytes);
};

namespace portable {
const KernelTable& kernels();
}
#ifdef VERA_HAS_X86_KERNELS
namespace avx2 {
const KernelTable& kernels();
}
namespace avx512 {
const KernelTable& kernels();
}
#endif

}  // namespace vera
