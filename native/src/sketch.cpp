// Makes sketches of exact pages: the format and the arithmetic of vera.attention.sketch. Compiled once per instruction set, like
// kernel.cpp.
#include "kernel.h"
#include "levels.h"
#include "page_products.h"

namespace vera {
namespace VERA_ISA {
namespace {

// Lines are what shares a step and a mid: a channel of keys, or a token of values.
struct LineNumbers {
  float low[kMaxHeadDim], high[kMaxHeadDim], step[kMaxHeadDim], mid[kMaxHeadDim];
};

constexpr int kFour = 4;

// The extremes of each line. `poison` becomes NaN if a number is not finite.
template <class T>
VERA_INLINE void find_extremes(const T* lines, int count, int length, LineNumbers& numbers, Vec& poison) {
  for (int line = 0; line < count; line += kFour) {
    Vec highest[kFour], lowest[kFour];
    for (int j = 0; j < kFour; j++) {
      const T* p = lines + ptrdiff_t(line + j) * length;
      highest[j] = load(p);
      lowest[j] = broadcast(0.0f) - highest[j];
      for (int i = 0; i < length; i += kWidth) {
        const Vec x = load(p + i);
        highest[j] = larger(highest[j], x);
        lowest[j] = larger(lowest[j], broadcast(0.0f) - x);
        poison = fma(x, broadcast(0.0f), poison);
      }
    }
    store_maxima(numbers.high + line, highest[0], highest[1], highest[2], highest[3]);
    store_maxima(numbers.low + line, lowest[0], lowest[1], lowest[2], lowest[3]);
  }
  for (int line = 0; line < count; line += kWidth) store(numbers.low + line, broadcast(0.0f) - load(numbers.low + line));
}

// Steps and mids as they are stored, and read back. The step spans what lies farthest from the rounded mid.
VERA_INLINE void find_steps(int count, int bits, LineNumbers& numbers, Half* steps, Half* mids, Vec& poison) {
  const Vec share = broadcast(2.0f / float((1 << bits) - 1));
  for (int line = 0; line < count; line += kWidth) {
    const Vec low = load(numbers.low + line), high = load(numbers.high + line);
    store(mids + line, (low + high) * broadcast(0.5f));
    const Vec mid = load(mids + line);
    store(steps + line, larger(high - mid, mid - low) * share);
    const Vec step = load(steps + line);
    store(numbers.mid + line, mid);
    store(numbers.step + line, step);
    poison = fma(mid, broadcast(0.0f), fma(step, broadcast(0.0f), poison));
  }
}

// Packed levels of all lines; the levels of one line are the lanes of a vector.
template <class T>
VERA_INLINE void pack_levels(const T* lines, int count, int length, int bits, const LineNumbers& numbers, uint8_t* levels) {
  const int lines_of_row = 4 * 8 / bits;
  const Vec top = broadcast(float((1 << bits) - 1)), centre = broadcast(float((1 << bits) - 1) / 2);
  for (int first = 0; first < count; first += lines_of_row)
    for (int i = 0; i < length; i += kWidth) {
      Int packed = no_ints();
      for (int k = 0; k < lines_of_row; k++) {
        const int line = first + k;
        if (!(numbers.step[line] > 0.0f)) continue;
        const Vec x = load(lines + ptrdiff_t(line) * length + i);
        const Vec level = round((x - broadcast(numbers.mid[line])) / broadcast(numbers.step[line]) + centre);
        const Vec above = larger(level, broadcast(0.0f));
        packed = put_bits(packed, to_int(select_less(above, top, above, top)), 8 * (k % 4) + bits * (k / 4));
      }
      store_packed(levels + 4 * (ptrdiff_t(first) / lines_of_row * length + i), packed);
    }
}

template <class T>
VERA_INLINE float largest_norm(const T* values, int tokens, int head_dim) {
  float top = 0.0f;
  for (int t = 0; t < tokens; t += kFour) {
    Vec squares[kFour];
    float sums[kFour];
    for (int j = 0; j < kFour; j++) {
      squares[j] = broadcast(0.0f);
      for (int c = 0; c < head_dim; c += kWidth) {
        const Vec x = load(values + ptrdiff_t(t + j) * head_dim + c);
        squares[j] = fma(x, x, squares[j]);
      }
    }
    store_sums(sums, squares[0], squares[1], squares[2], squares[3]);
    for (float sum : sums) top = sum > top ? sum : top;
  }
  return __builtin_sqrtf(top);
}

template <class T>
bool make_sketch(const SketchTask& task) {
  const int page_size = task.page_size, head_dim = task.head_dim;
  const T* keys = static_cast<const T*>(task.page);
  const T* values = keys + ptrdiff_t(page_size) * head_dim;
  Half* key_steps = reinterpret_cast<Half*>(task.key_part + kSketchHeaderBytes);
  Half* value_steps = reinterpret_cast<Half*>(task.value_part);
  Vec poison = broadcast(0.0f);
  LineNumbers numbers;

  find_extremes(keys, head_dim, page_size, numbers, poison);
  find_steps(head_dim, task.bits, numbers, key_steps, key_steps + head_dim, poison);
  pack_levels(keys, head_dim, page_size, task.bits, numbers, task.key_part + kSketchHeaderBytes + 4 * ptrdiff_t(head_dim));

  find_extremes(values, page_size, head_dim, numbers, poison);
  find_steps(page_size, task.bits, numbers, value_steps, value_steps + page_size, poison);
  pack_levels(values, page_size, head_dim, task.bits, numbers, task.value_part + 4 * ptrdiff_t(page_size));

  Vec squares = broadcast(0.0f);
  for (int t = 0; t < page_size; t += kWidth) squares = fma(load(numbers.step + t), load(numbers.step + t), squares);
  const float nu = largest_norm(values, page_size, head_dim);
  const float var_v = float(head_dim) * (sum(squares) / float(page_size)) / 12.0f;
  for (int i = 0; i < kSketchHeaderBytes; i++) task.key_part[i] = 0;
  __builtin_memcpy(task.key_part, &nu, sizeof nu);
  __builtin_memcpy(task.key_part + sizeof nu, &var_v, sizeof var_v);
  return sum(poison) + nu * 0.0f + var_v * 0.0f == 0.0f;
}

constexpr SketchMaker kMakers[] = {make_sketch<Half>, make_sketch<BFloat16>, make_sketch<float>};

}  // namespace

const SketchMaker* sketch_makers() { return kMakers; }

}  // namespace VERA_ISA
}  // namespace vera
