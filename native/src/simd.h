// One vector of floats, as wide as the instruction set of this compilation has it, and the few operations the kernels need.
// Everything is in an unnamed namespace: the same names mean other code in each of the compilations of kernel.cpp.
#pragma once

#include <cstdint>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace vera {
namespace VERA_ISA {
namespace {

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

#define VERA_INLINE inline __attribute__((always_inline))

#if defined(__AVX512F__)

using Vec = __m512;
constexpr int kWidth = 16;
constexpr int kRegisters = 32;

VERA_INLINE Vec broadcast(float x) { return _mm512_set1_ps(x); }
VERA_INLINE Vec load(const float* p) { return _mm512_loadu_ps(p); }
VERA_INLINE Vec load(const Half* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
VERA_INLINE Vec load(const BFloat16* p) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
// The first half of a vector; the other half is zero.
VERA_INLINE Vec load_half_vector(const float* p) { return _mm512_maskz_loadu_ps(0xff, p); }
VERA_INLINE Vec load_half_vector(const Half* p) {
  return _mm512_cvtph_ps(_mm256_zextsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
VERA_INLINE Vec load_half_vector(const BFloat16* p) {
  const __m256i bits = _mm256_zextsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
VERA_INLINE void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
VERA_INLINE void store(Half* p, Vec x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
VERA_INLINE void store(BFloat16* p, Vec x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  const __m512i result = _mm512_mask_mov_epi32(rounded, is_nan, _mm512_set1_epi32(0x7fc00000));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_srli_epi32(result, 16)));
}
VERA_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
VERA_INLINE Vec larger(Vec a, Vec b) { return _mm512_max_ps(a, b); }
VERA_INLINE Vec select_less(Vec a, Vec b, Vec yes, Vec no) {
  return _mm512_mask_mov_ps(no, _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), yes);
}
VERA_INLINE Vec round(Vec x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
VERA_INLINE Vec times_power_of_two(Vec x, Vec n) { return _mm512_scalef_ps(x, n); }
VERA_INLINE Vec absolute(Vec x) { return _mm512_andnot_ps(_mm512_set1_ps(-0.0f), x); }
VERA_INLINE Vec larger_magnitude(Vec a, Vec b) {
  constexpr int kLargestMagnitude = 0x0b;  // with the sign bit cleared
  return _mm512_range_ps(a, b, kLargestMagnitude);
}
VERA_INLINE float sum(Vec x) { return _mm512_reduce_add_ps(x); }
VERA_INLINE float largest(Vec x) { return _mm512_reduce_max_ps(x); }
// The sums of four vectors' lanes, and their largest ones.
VERA_INLINE void store_sums(float* out, Vec a, Vec b, Vec c, Vec d) {
  const Vec ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const Vec cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  const __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  const Vec lanes = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(lanes), _mm512_extractf32x8_ps(lanes, 1));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
}
VERA_INLINE void store_maxima(float* out, Vec a, Vec b, Vec c, Vec d) {
  const Vec ab = _mm512_max_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const Vec cd = _mm512_max_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  const __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  const Vec lanes = _mm512_max_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
  const __m256 half = _mm256_max_ps(_mm512_castps512_ps256(lanes), _mm512_extractf32x8_ps(lanes, 1));
  _mm_storeu_ps(out, _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
}

#elif defined(__AVX2__)

using Vec = __m256;
constexpr int kWidth = 8;
constexpr int kRegisters = 16;

VERA_INLINE Vec broadcast(float x) { return _mm256_set1_ps(x); }
VERA_INLINE Vec load(const float* p) { return _mm256_loadu_ps(p); }
VERA_INLINE Vec load(const Half* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
VERA_INLINE Vec load(const BFloat16* p) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
VERA_INLINE void store(float* p, Vec x) { _mm256_storeu_ps(p, x); }
VERA_INLINE void store(Half* p, Vec x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
VERA_INLINE void store(BFloat16* p, Vec x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  const __m256i result = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), is_nan);
  const __m256i high = _mm256_srli_epi32(result, 16);
  const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), packed);
}
VERA_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
VERA_INLINE Vec larger(Vec a, Vec b) { return _mm256_max_ps(a, b); }
VERA_INLINE Vec select_less(Vec a, Vec b, Vec yes, Vec no) { return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LT_OQ)); }
VERA_INLINE Vec round(Vec x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
VERA_INLINE Vec times_power_of_two(Vec x, Vec n) {
  const __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(x, _mm256_castsi256_ps(exponent));
}
VERA_INLINE Vec round_down(Vec x) { return _mm256_floor_ps(x); }
// x * 2^n for whole n, unless the exponent leaves its range.
VERA_INLINE Vec add_to_exponent(Vec x, Vec n) {
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23)));
}
VERA_INLINE Vec absolute(Vec x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
// `a` is not negative.
VERA_INLINE Vec larger_magnitude(Vec a, Vec b) { return larger(a, absolute(b)); }
VERA_INLINE float sum(Vec x) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}
VERA_INLINE float largest(Vec x) {
  __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}

VERA_INLINE void store_sums(float* out, Vec a, Vec b, Vec c, Vec d) {
  const Vec lanes = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps(lanes, 1)));
}
VERA_INLINE void store_maxima(float* out, Vec a, Vec b, Vec c, Vec d) {
  const Vec ab = _mm256_max_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
  const Vec cd = _mm256_max_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
  const __m256d low = _mm256_unpacklo_pd(_mm256_castps_pd(ab), _mm256_castps_pd(cd));
  const __m256d high = _mm256_unpackhi_pd(_mm256_castps_pd(ab), _mm256_castps_pd(cd));
  const Vec lanes = _mm256_max_ps(_mm256_castpd_ps(low), _mm256_castpd_ps(high));
  _mm_storeu_ps(out, _mm_max_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps(lanes, 1)));
}

#else  // portable: four floats by the compiler's own vector types, which every target has

typedef float Vec __attribute__((vector_size(16)));
typedef int32_t IntVec __attribute__((vector_size(16)));
typedef uint32_t BitVec __attribute__((vector_size(16)));
typedef uint16_t ShortVec __attribute__((vector_size(8)));
constexpr int kWidth = 4;
constexpr int kRegisters = 16;

VERA_INLINE BitVec bits_of(Vec x) { return reinterpret_cast<BitVec>(x); }
VERA_INLINE Vec of_bits(BitVec x) { return reinterpret_cast<Vec>(x); }
VERA_INLINE BitVec all(uint32_t x) { return BitVec{x, x, x, x}; }
VERA_INLINE BitVec choose(BitVec mask, BitVec yes, BitVec no) { return (mask & yes) | (~mask & no); }

VERA_INLINE Vec broadcast(float x) { return Vec{x, x, x, x}; }
VERA_INLINE Vec load(const float* p) {
  Vec x;
  __builtin_memcpy(&x, p, sizeof x);
  return x;
}
VERA_INLINE BitVec load_shorts(const void* p) {
  ShortVec x;
  __builtin_memcpy(&x, p, sizeof x);
  return __builtin_convertvector(x, BitVec);
}
VERA_INLINE Vec load(const Half* p) {
  const BitVec half = load_shorts(p);
  const BitVec magnitude = (half & 0x7fffu) << 13;
  // Moving the exponent by a product makes denormals right as well; infinity and NaN need their exponent set.
  const BitVec finite = bits_of(of_bits(magnitude) * broadcast(0x1p112f));
  const BitVec special = magnitude | 0x7f800000u;
  const BitVec is_special = reinterpret_cast<BitVec>(magnitude >= all(0x0f800000u));
  return of_bits(choose(is_special, special, finite) | ((half & 0x8000u) << 16));
}
VERA_INLINE Vec load(const BFloat16* p) { return of_bits(load_shorts(p) << 16); }
VERA_INLINE void store(float* p, Vec x) { __builtin_memcpy(p, &x, sizeof x); }
VERA_INLINE void store_shorts(void* p, BitVec x) {
  const ShortVec shorts = __builtin_convertvector(x, ShortVec);
  __builtin_memcpy(p, &shorts, sizeof shorts);
}
VERA_INLINE void store(Half* p, Vec x) {
  const BitVec sign = (bits_of(x) >> 16) & 0x8000u;
  const BitVec magnitude = bits_of(x) & 0x7fffffffu;
  // Normal results: round to nearest even at bit 13, then move the exponent. A carry into the exponent is what is wanted.
  const BitVec normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13;
  // Denormal results: adding 0.5 lets the float adder do the rounding at the right bit.
  const BitVec tiny = bits_of(of_bits(magnitude) + broadcast(0.5f)) - 0x3f000000u;
  const BitVec is_tiny = reinterpret_cast<BitVec>(magnitude < all(0x38800000u));
  const BitVec is_too_large = reinterpret_cast<BitVec>(magnitude >= all(0x477ff000u));
  const BitVec is_nan = reinterpret_cast<BitVec>(magnitude > all(0x7f800000u));
  BitVec half = choose(is_tiny, tiny, normal);
  half = choose(is_too_large, all(0x7c00u), half);
  half = choose(is_nan, all(0x7e00u), half);
  store_shorts(p, half | sign);
}
VERA_INLINE void store(BFloat16* p, Vec x) {
  const BitVec bits = bits_of(x);
  const BitVec rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  const BitVec is_nan = reinterpret_cast<BitVec>(x != x);
  store_shorts(p, choose(is_nan, all(0x7fc00000u), rounded) >> 16);
}
VERA_INLINE Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
// b where either is NaN, as the instruction of x86 has it.
VERA_INLINE Vec larger(Vec a, Vec b) { return a > b ? a : b; }
VERA_INLINE Vec select_less(Vec a, Vec b, Vec yes, Vec no) { return a < b ? yes : no; }
VERA_INLINE Vec round(Vec x) {
  // Right for |x| < 2^22, which is all that exp asks for.
  const Vec magic = broadcast(0x1.8p23f);
  return (x + magic) - magic;
}
VERA_INLINE Vec times_power_of_two(Vec x, Vec n) {
  const IntVec exponent = (__builtin_convertvector(n, IntVec) + 127) << 23;
  return x * reinterpret_cast<Vec>(exponent);
}
// Right for |x| < 2^22.
VERA_INLINE Vec round_down(Vec x) {
  const Vec nearest = round(x);
  return select_less(x, nearest, nearest - broadcast(1.0f), nearest);
}
// NaN has no defined conversion.
VERA_INLINE Vec add_to_exponent(Vec x, Vec n) {
  const BitVec shift = reinterpret_cast<BitVec>(__builtin_convertvector(n, IntVec)) << 23;
  return select_less(n, broadcast(1e30f), of_bits(bits_of(x) + shift), x);
}
VERA_INLINE Vec absolute(Vec x) { return of_bits(bits_of(x) & 0x7fffffffu); }
VERA_INLINE Vec larger_magnitude(Vec a, Vec b) { return larger(a, absolute(b)); }
VERA_INLINE float sum(Vec x) { return (x[0] + x[2]) + (x[1] + x[3]); }
VERA_INLINE float largest(Vec x) {
  const float a = x[0] > x[2] ? x[0] : x[2];
  const float b = x[1] > x[3] ? x[1] : x[3];
  return a > b ? a : b;
}

VERA_INLINE void store_sums(float* out, Vec a, Vec b, Vec c, Vec d) {
  out[0] = sum(a), out[1] = sum(b), out[2] = sum(c), out[3] = sum(d);
}
VERA_INLINE void store_maxima(float* out, Vec a, Vec b, Vec c, Vec d) {
  out[0] = largest(a), out[1] = largest(b), out[2] = largest(c), out[3] = largest(d);
}

#endif

// Into the L2 cache: a core has too few L1 miss buffers to keep the memory bus busy (on Zen 4 this reads twice as fast).
VERA_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

// exp(x) for x <= 0 with a relative error of about 1e-7; exactly 0 below -87.3 (and at -infinity), NaN stays NaN.
// Cephes expf: range reduction by a two-part ln 2, then a polynomial of degree 6.
VERA_INLINE Vec exp_of_nonpositive(Vec x) {
  const Vec lowest = broadcast(-87.33654f);
  const Vec clamped = larger(lowest, x);
  const Vec n = round(clamped * broadcast(1.44269504f));
  Vec r = fma(n, broadcast(-0.693359375f), clamped);
  r = fma(n, broadcast(2.12194440e-4f), r);
  Vec p = broadcast(1.9875691500e-4f);
  p = fma(p, r, broadcast(1.3981999507e-3f));
  p = fma(p, r, broadcast(8.3334519073e-3f));
  p = fma(p, r, broadcast(4.1665795894e-2f));
  p = fma(p, r, broadcast(1.6666665459e-1f));
  p = fma(p, r, broadcast(5.0000001201e-1f));
  p = fma(p, r * r, r + broadcast(1.0f));
  return select_less(x, lowest, broadcast(0.0f), times_power_of_two(p, n));
}

VERA_INLINE float exp_of_nonpositive(float x) { return exp_of_nonpositive(broadcast(x))[0]; }

// 2^x for x <= 0 with a relative error of 3e-6, below -126 an absolute one of 2^-126; exactly 0 at -infinity, NaN stays NaN.
// Minimax polynomial of degree 4 that is exactly 1 at 0.
VERA_INLINE Vec exp2_of_nonpositive(Vec x) {
#if defined(__AVX512F__)
  constexpr int kBelow = 0x09;  // what is left above the next whole number below
  const Vec r = _mm512_reduce_ps(x, kBelow);
#else
  const Vec clamped = larger(broadcast(-127.0f), x);
  const Vec n = round_down(clamped), r = clamped - n;
#endif
  Vec p = broadcast(0.01342669f);
  p = fma(p, r, broadcast(0.05224247f));
  p = fma(p, r, broadcast(0.24128021f));
  p = fma(p, r, broadcast(0.69304484f));
  p = fma(p, r, broadcast(1.0f));
#if defined(__AVX512F__)
  return _mm512_scalef_ps(p, x);
#else
  // At the lowest the exponent becomes 0 and the polynomial is exactly 1, so the result is 0.
  return add_to_exponent(p, n);
#endif
}

// tanh(x), relative error about 1e-7 (Cephes tanhf).
VERA_INLINE Vec tanh_of(Vec x) {
  const Vec z = x * x;
  Vec p = broadcast(-5.70498872745e-3f);
  p = fma(p, z, broadcast(2.06390887954e-2f));
  p = fma(p, z, broadcast(-5.37397155531e-2f));
  p = fma(p, z, broadcast(1.33314422036e-1f));
  p = fma(p, z, broadcast(-3.33332819422e-1f));
  const Vec near_zero = fma(p * z, x, x);
  const Vec magnitude = absolute(x);
  const Vec e = exp_of_nonpositive(magnitude * broadcast(-2.0f));
  const Vec far = (broadcast(1.0f) - e) / (broadcast(1.0f) + e);
  const Vec signed_far = select_less(x, broadcast(0.0f), broadcast(0.0f) - far, far);
  return select_less(magnitude, broadcast(0.625f), near_zero, signed_far);
}

}  // namespace
}  // namespace VERA_ISA
}  // namespace vera
