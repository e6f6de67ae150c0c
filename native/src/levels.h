// Products of bytes with the packed low-bit levels of a sketch; vera.attention.sketch says how levels are packed.
//
// A packed vector holds four levels that are summed over, for each of kWidth neighbouring tokens (keys) or channels (values), times
// the number of planes that share their bytes. The factors, one signed byte for each level, are the same for all lanes.
// Like simd.h everything is in an unnamed namespace, so that each compilation has its own.
#pragma once

#include "kernel.h"
#include "page_products.h"
#include "simd.h"

namespace vera {
namespace VERA_ISA {
namespace {

constexpr int kPackedBytes = 4 * kWidth;  // of one vector

// kWidth integers of 32 bits, or four times as many bytes.
#if defined(__AVX512F__)

using Int = __m512i;

VERA_INLINE Int no_ints() { return _mm512_setzero_si512(); }
VERA_INLINE Int load_packed(const uint8_t* p) { return _mm512_loadu_si512(p); }
VERA_INLINE Int broadcast_four(const int8_t* p) {
  int32_t four;
  __builtin_memcpy(&four, p, sizeof four);
  return _mm512_set1_epi32(four);
}
VERA_INLINE Int add(Int a, Int b) { return _mm512_add_epi32(a, b); }
VERA_INLINE Vec to_float(Int x) { return _mm512_cvtepi32_ps(x); }
VERA_INLINE Int to_int(Vec x) { return _mm512_cvtps_epi32(x); }
// x / 2^7 to the nearest, and the rest.
VERA_INLINE Int upper_byte(Int x) { return _mm512_srai_epi32(_mm512_add_epi32(x, _mm512_set1_epi32(64)), 7); }
VERA_INLINE Int lower_byte(Int x, Int upper) { return _mm512_sub_epi32(x, _mm512_slli_epi32(upper, 7)); }
VERA_INLINE void store_bytes(int8_t* p, Int x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x));
}
template <int kBits, int kPlane>
VERA_INLINE Int unpack(Int packed) {
  if constexpr (kBits == 8) return packed;
  const Int mask = _mm512_set1_epi8((1 << kBits) - 1);
  if constexpr (kPlane == 0) return _mm512_and_si512(packed, mask);
  return _mm512_and_si512(_mm512_srli_epi16(packed, kBits * kPlane), mask);
}

VERA_INLINE void store_packed(uint8_t* p, Int x) { _mm512_storeu_si512(p, x); }
VERA_INLINE Int put_bits(Int x, Int bits, int shift) { return _mm512_or_si512(x, _mm512_sll_epi32(bits, _mm_cvtsi32_si128(shift))); }
VERA_INLINE Int bits_at(Int x, int shift, int bits) {
  return _mm512_and_si512(_mm512_srl_epi32(x, _mm_cvtsi32_si128(shift)), _mm512_set1_epi32((1 << bits) - 1));
}

#elif defined(__AVX2__)

using Int = __m256i;

VERA_INLINE Int no_ints() { return _mm256_setzero_si256(); }
VERA_INLINE Int load_packed(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
VERA_INLINE Int broadcast_four(const int8_t* p) {
  int32_t four;
  __builtin_memcpy(&four, p, sizeof four);
  return _mm256_set1_epi32(four);
}
VERA_INLINE Int add(Int a, Int b) { return _mm256_add_epi32(a, b); }
VERA_INLINE Vec to_float(Int x) { return _mm256_cvtepi32_ps(x); }
VERA_INLINE Int to_int(Vec x) { return _mm256_cvtps_epi32(x); }
VERA_INLINE Int upper_byte(Int x) { return _mm256_srai_epi32(_mm256_add_epi32(x, _mm256_set1_epi32(64)), 7); }
VERA_INLINE Int lower_byte(Int x, Int upper) { return _mm256_sub_epi32(x, _mm256_slli_epi32(upper, 7)); }
VERA_INLINE void store_bytes(int8_t* p, Int x) {
  const __m128i shorts = _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(shorts, shorts));
}
template <int kBits, int kPlane>
VERA_INLINE Int unpack(Int packed) {
  if constexpr (kBits == 8) return packed;
  const Int mask = _mm256_set1_epi8((1 << kBits) - 1);
  if constexpr (kPlane == 0) return _mm256_and_si256(packed, mask);
  return _mm256_and_si256(_mm256_srli_epi16(packed, kBits * kPlane), mask);
}

VERA_INLINE void store_packed(uint8_t* p, Int x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x); }
VERA_INLINE Int put_bits(Int x, Int bits, int shift) { return _mm256_or_si256(x, _mm256_sll_epi32(bits, _mm_cvtsi32_si128(shift))); }
VERA_INLINE Int bits_at(Int x, int shift, int bits) {
  return _mm256_and_si256(_mm256_srl_epi32(x, _mm_cvtsi32_si128(shift)), _mm256_set1_epi32((1 << bits) - 1));
}

#else

using Int = IntVec;

VERA_INLINE Int no_ints() { return Int{0, 0, 0, 0}; }
VERA_INLINE Int load_packed(const uint8_t* p) {
  Int x;
  __builtin_memcpy(&x, p, sizeof x);
  return x;
}
VERA_INLINE Int add(Int a, Int b) { return a + b; }
VERA_INLINE Vec to_float(Int x) { return __builtin_convertvector(x, Vec); }
VERA_INLINE Int to_int(Vec x) {
  // What is not a number in range has no defined conversion.
  const Vec bounded = larger(broadcast(-32768.0f), broadcast(0.0f) - larger(broadcast(-32768.0f), broadcast(0.0f) - x));
  return __builtin_convertvector(round(bounded), Int);
}
VERA_INLINE Int upper_byte(Int x) { return (x + 64) >> 7; }
VERA_INLINE Int lower_byte(Int x, Int upper) { return x - (upper << 7); }
VERA_INLINE void store_bytes(int8_t* p, Int x) {
  for (int lane = 0; lane < kWidth; lane++) p[lane] = int8_t(x[lane]);
}
VERA_INLINE void store_packed(uint8_t* p, Int x) { __builtin_memcpy(p, &x, sizeof x); }
// Sets bits of each lane, from bit `shift` on, that are 0 in x.
VERA_INLINE Int put_bits(Int x, Int bits, int shift) { return x | (bits << shift); }
// `bits` bits of each lane, from bit `shift` on.
VERA_INLINE Int bits_at(Int x, int shift, int bits) { return (x >> shift) & ((1 << bits) - 1); }

#endif

template <int kBits>
constexpr int kPlanes = 8 / kBits;  // that share their bytes

// How many vectors one register block of sums spans beside `heads` rows.
constexpr int level_vectors(int heads) {
#if defined(__AVX512VNNI__) || !defined(__AVX2__)
  return block_vectors(heads);
#else
  // Sums of 16 bits beside those of 32.
  int vectors = 1;
  while (2 * vectors * heads <= kRegisters / 4 && 2 * vectors * kWidth <= 64) vectors *= 2;
  return vectors;
#endif
}

#if defined(__AVX2__) && !defined(__AVX512VNNI__)

// Pairs of products summed in 16 bits, then in 32.
#if defined(__AVX512F__)
VERA_INLINE Int pair_products(Int levels, Int factors) { return _mm512_maddubs_epi16(levels, factors); }
VERA_INLINE Int add_pairs(Int a, Int b) { return _mm512_add_epi16(a, b); }
VERA_INLINE Int sum_pairs(Int pairs) { return _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)); }
VERA_INLINE Int times_16(Int x) { return _mm512_slli_epi32(x, 4); }
#else
VERA_INLINE Int pair_products(Int levels, Int factors) { return _mm256_maddubs_epi16(levels, factors); }
VERA_INLINE Int add_pairs(Int a, Int b) { return _mm256_add_epi16(a, b); }
VERA_INLINE Int sum_pairs(Int pairs) { return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)); }
VERA_INLINE Int times_16(Int x) { return _mm256_slli_epi32(x, 4); }
#endif

// Sums of 16 bits can take so many rows: at 4 bits, 8 planes of pairs of products of at most 15 * 127.
constexpr int kRowsBeforeOverflow = 4;

template <int kBits, int kPlane, int H, int V>
VERA_INLINE void add_plane(const Int (&packed)[V], const int8_t* factors, ptrdiff_t factor_stride, Int (&pairs)[H][V]) {
  if constexpr (kPlane < kPlanes<kBits>) {
    Int levels[V];
    for (int v = 0; v < V; v++) levels[v] = unpack<kBits, kPlane>(packed[v]);
    for (int h = 0; h < H; h++) {
      const Int four = broadcast_four(factors + h * factor_stride + 4 * kPlane);
      for (int v = 0; v < V; v++) pairs[h][v] = add_pairs(pairs[h][v], pair_products(levels[v], four));
    }
    add_plane<kBits, kPlane + 1, H, V>(packed, factors, factor_stride, pairs);
  }
}

// sums[h][v] += the levels of `rows` packed rows, row_bytes apart, times the factors of head h. The same bytes from `next` on are
// prefetched.
template <int kBits, int H, int V>
VERA_INLINE void add_products(const uint8_t* levels, const uint8_t* next, ptrdiff_t row_bytes, int rows, const int8_t* factors,
                              ptrdiff_t factor_stride, Int (&sums)[H][V]) {
  while (rows > 0) {
    const int some = kBits == 8 ? 1 : least(rows, kRowsBeforeOverflow);
    Int pairs[H][V];
    for (int h = 0; h < H; h++)
      for (int v = 0; v < V; v++) pairs[h][v] = no_ints();
    for (int row = 0; row < some; row++) {
      prefetch_block(next, V * kPackedBytes);
      Int packed[V];
      for (int v = 0; v < V; v++) packed[v] = load_packed(levels + v * kPackedBytes);
      if constexpr (kBits == 8) {
        // Products of whole bytes would not fit: the upper four bits of a level go extra.
        Int upper[V], upper_pairs[H][V];
        for (int v = 0; v < V; v++) upper[v] = unpack<4, 1>(packed[v]), packed[v] = unpack<4, 0>(packed[v]);
        for (int h = 0; h < H; h++) {
          const Int four = broadcast_four(factors + h * factor_stride);
          for (int v = 0; v < V; v++) {
            upper_pairs[h][v] = pair_products(upper[v], four);
            pairs[h][v] = pair_products(packed[v], four);
            sums[h][v] = add(sums[h][v], times_16(sum_pairs(upper_pairs[h][v])));
          }
        }
      } else {
        add_plane<kBits, 0, H, V>(packed, factors, factor_stride, pairs);
      }
      levels += row_bytes;
      next += row_bytes;
      factors += 4 * kPlanes<kBits>;
    }
    for (int h = 0; h < H; h++)
      for (int v = 0; v < V; v++) sums[h][v] = add(sums[h][v], sum_pairs(pairs[h][v]));
    rows -= some;
  }
}

#else

#if defined(__AVX512VNNI__)

template <int kBits, int kPlane, int H, int V>
VERA_INLINE void add_plane(const Int (&packed)[V], const int8_t* factors, ptrdiff_t factor_stride, Int (&sums)[H][V]) {
  if constexpr (kPlane < kPlanes<kBits>) {
    Int levels[V];
    for (int v = 0; v < V; v++) levels[v] = unpack<kBits, kPlane>(packed[v]);
    for (int h = 0; h < H; h++) {
      const Int four = broadcast_four(factors + h * factor_stride + 4 * kPlane);
      for (int v = 0; v < V; v++) sums[h][v] = _mm512_dpbusd_epi32(sums[h][v], levels[v], four);
    }
    add_plane<kBits, kPlane + 1, H, V>(packed, factors, factor_stride, sums);
  }
}

// One row of packed levels. With few heads the factors of both planes are held, and each vector of levels is loaded once.
template <int kBits, int H, int V>
VERA_INLINE void add_row(const uint8_t* levels, const int8_t* factors, ptrdiff_t factor_stride, Int (&sums)[H][V]) {
  if constexpr (kBits == 4 && H <= 4) {
    Int low[H], high[H];
    for (int h = 0; h < H; h++) {
      low[h] = broadcast_four(factors + h * factor_stride);
      high[h] = broadcast_four(factors + h * factor_stride + 4);
    }
    for (int v = 0; v < V; v++) {
      Int packed = load_packed(levels + v * kPackedBytes);
      asm("" : "+v"(packed));  // GCC would load it once more for the other plane
      const Int low_levels = unpack<kBits, 0>(packed), high_levels = unpack<kBits, 1>(packed);
      for (int h = 0; h < H; h++) sums[h][v] = _mm512_dpbusd_epi32(sums[h][v], low_levels, low[h]);
      for (int h = 0; h < H; h++) sums[h][v] = _mm512_dpbusd_epi32(sums[h][v], high_levels, high[h]);
    }
  } else {
    Int packed[V];
    for (int v = 0; v < V; v++) packed[v] = load_packed(levels + v * kPackedBytes);
    add_plane<kBits, 0, H, V>(packed, factors, factor_stride, sums);
  }
}

#else

template <int kBits, int kPlane, int H, int V>
VERA_INLINE void add_plane(const Int (&packed)[V], const int8_t* factors, ptrdiff_t factor_stride, Int (&sums)[H][V]) {
  if constexpr (kPlane < kPlanes<kBits>) {
    for (int v = 0; v < V; v++)
      for (int j = 0; j < 4; j++) {
        const Int level = (packed[v] >> (8 * j + kBits * kPlane)) & ((1 << kBits) - 1);
        for (int h = 0; h < H; h++) sums[h][v] += level * int32_t(factors[h * factor_stride + 4 * kPlane + j]);
      }
    add_plane<kBits, kPlane + 1, H, V>(packed, factors, factor_stride, sums);
  }
}

template <int kBits, int H, int V>
VERA_INLINE void add_row(const uint8_t* levels, const int8_t* factors, ptrdiff_t factor_stride, Int (&sums)[H][V]) {
  Int packed[V];
  for (int v = 0; v < V; v++) packed[v] = load_packed(levels + v * kPackedBytes);
  add_plane<kBits, 0, H, V>(packed, factors, factor_stride, sums);
}

#endif

// sums[h][v] += the levels of `rows` packed rows, row_bytes apart, times the factors of head h. The same bytes from `next` on are
// prefetched.
template <int kBits, int H, int V>
VERA_INLINE void add_products(const uint8_t* levels, const uint8_t* next, ptrdiff_t row_bytes, int rows, const int8_t* factors,
                              ptrdiff_t factor_stride, Int (&sums)[H][V]) {
  for (int row = 0; row < rows; row++) {
    prefetch_block(next, V * kPackedBytes);
    add_row<kBits, H, V>(levels, factors, factor_stride, sums);
    levels += row_bytes;
    next += row_bytes;
    factors += 4 * kPlanes<kBits>;
  }
}

#endif

// ---- reading a sketch back

VERA_INLINE const Half* halves(const uint8_t* p) { return reinterpret_cast<const Half*>(p); }

// The numbers that packed levels with vectors of `length` stand for, as rows of that length, `stride` apart: rows [0, count) of
// `count` steps and mids.
VERA_INLINE void read_levels(const uint8_t* levels, int bits, const Half* steps, const Half* mids, int count, int length,
                             float* target, ptrdiff_t stride) {
  const Vec centre = broadcast(float((1 << bits) - 1) / 2);
  float step[kMaxHeadDim], mid[kMaxHeadDim];
  for (int n = 0; n < count; n += kWidth) store(step + n, load(steps + n)), store(mid + n, load(mids + n));
  const int planes = 8 / bits;
  for (int n = 0; n < count; n++) {
    const uint8_t* row = levels + ptrdiff_t(n / (4 * planes)) * length * 4;
    const int shift = 8 * (n % 4) + bits * (n / 4 % planes);
    const Vec step_of_row = broadcast(step[n]), mid_of_row = broadcast(mid[n]);
    for (int v = 0; v < length; v += kWidth) {
      const Vec level = to_float(bits_at(load_packed(row + 4 * v), shift, bits));
      store(target + n * stride + v, fma(level - centre, step_of_row, mid_of_row));
    }
  }
}

// Keys as [head_dim][page_size].
VERA_INLINE void read_key_part(const uint8_t* part, const Shape& shape, int bits, float* target) {
  const Half* steps = halves(part + kSketchHeaderBytes);
  read_levels(part + kSketchHeaderBytes + 4 * ptrdiff_t(shape.head_dim), bits, steps, steps + shape.head_dim, shape.head_dim,
              shape.page_size, target, shape.page_size);
}

// Values as rows of head_dim, `stride` apart.
VERA_INLINE void read_value_part(const uint8_t* part, const Shape& shape, int bits, float* target, int stride) {
  const Half* steps = halves(part);
  read_levels(part + 4 * ptrdiff_t(shape.page_size), bits, steps, steps + shape.page_size, shape.page_size, shape.head_dim, target,
              stride);
}

}  // namespace
}  // namespace VERA_ISA
}  // namespace vera
