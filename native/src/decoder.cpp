// Compiled once per instruction set, like kernel.cpp.
#include "decoder.h"

#include "simd.h"

namespace vera {
namespace VERA_ISA {

void linear(const LinearTask& task);  // linear.cpp

namespace {

// The first `count` floats of a vector; the others are zero.
VERA_INLINE Vec load_part(const float* p, int count) {
  float part[kWidth] = {};
  __builtin_memcpy(part, p, size_t(count) * sizeof(float));
  return load(part);
}

VERA_INLINE void store_part(float* p, Vec x, int count) {
  float part[kWidth];
  store(part, x);
  __builtin_memcpy(p, part, size_t(count) * sizeof(float));
}

void rms_norm(const float* x, const float* weight, float eps, float* y, int rows, int size) {
  const int whole = size / kWidth * kWidth, rest = size - whole;
  for (int row = 0; row < rows; ++row, x += size, y += size) {
    Vec squares = broadcast(0.0f);
    for (int i = 0; i < whole; i += kWidth) squares = fma(load(x + i), load(x + i), squares);
    if (rest > 0) {
      const Vec last = load_part(x + whole, rest);
      squares = fma(last, last, squares);
    }
    const Vec scale = broadcast(1.0f / __builtin_sqrtf(sum(squares) / float(size) + eps));
    for (int i = 0; i < whole; i += kWidth) store(y + i, load(weight + i) * (load(x + i) * scale));
    if (rest > 0) store_part(y + whole, load_part(weight + whole, rest) * (load_part(x + whole, rest) * scale), rest);
  }
}

void rotate(float* heads, const float* cos, const float* sin, int num_heads, int head_dim) {
  const int half = head_dim / 2, whole = half / kWidth * kWidth, rest = half - whole;
  for (int head = 0; head < num_heads; ++head) {
    float* first = heads + size_t(head) * size_t(head_dim);
    float* second = first + half;
    const auto turn = [&](int i, auto load_some, auto store_some) {
      const Vec a = load_some(first + i), b = load_some(second + i);
      store_some(first + i, a * load_some(cos + i) - b * load_some(sin + i));
      store_some(second + i, b * load_some(cos + half + i) + a * load_some(sin + half + i));
    };
    for (int i = 0; i < whole; i += kWidth)
      turn(i, [](const float* p) { return load(p); }, [](float* p, Vec v) { store(p, v); });
    if (rest > 0)
      turn(whole, [=](const float* p) { return load_part(p, rest); }, [=](float* p, Vec v) { store_part(p, v, rest); });
  }
}

VERA_INLINE Vec silu(Vec x) {
  // 1 / (1 + exp(-x)), by an exponential that cannot overflow.
  const Vec one = broadcast(1.0f), e = exp_of_nonpositive(broadcast(0.0f) - absolute(x));
  return x * (select_less(x, broadcast(0.0f), e, one) / (one + e));
}

void gate(float* gates, const float* ups, int rows, int columns, int begin, int end) {
  for (int row = 0; row < rows; ++row, gates += columns, ups += columns) {
    int c = begin;
    for (; c + kWidth <= end; c += kWidth) store(gates + c, silu(load(gates + c)) * load(ups + c));
    if (c < end) store_part(gates + c, silu(load_part(gates + c, end - c)) * load_part(ups + c, end - c), end - c);
  }
}

constexpr DecoderKernels kKernels{linear, rms_norm, rotate, gate};

}  // namespace

const DecoderKernels& decoder_kernels() { return kKernels; }

}  // namespace VERA_ISA
}  // namespace vera
