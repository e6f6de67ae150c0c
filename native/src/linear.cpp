// Compiled once per instruction set, like kernel.cpp.
#include "linear.h"

#include "decoder.h"
#include "simd.h"

namespace vera {
namespace VERA_ISA {
namespace {

// A tile is kTileRows rows of x times kTileOutputs rows of W, both read along the inputs, with one accumulator a pair: as many
// as leave registers for the operands.
constexpr int kTileRows = 4;
constexpr int kTileOutputs = kRegisters == 32 ? 6 : 3;
constexpr int kLineBytes = 64;

// The first `count` floats of a vector; the others are zero.
template <class T>
VERA_INLINE Vec load_part(const T* p, size_t count) {
  T part[kWidth] = {};
  __builtin_memcpy(part, p, count * sizeof(T));
  return load(part);
}

// Weights that are needed later, fetched line by line into the second-level cache while others are computed with: rows of W are
// too short for the hardware to find their pattern. Evenly, because more at once than memory gives only waits.
struct Ahead {
  const char* next;
  const char* end;
  int lines_per_step;
};

// Adds one vector of inputs to all sums.
template <int rows, int outputs, class Column, class Factor>
VERA_INLINE void add_products(Vec* sums, Column column, Factor factor) {
  Vec columns[rows];
  for (int r = 0; r < rows; ++r) columns[r] = column(r);
  for (int o = 0; o < outputs; ++o) {
    const Vec weights = factor(o);
    for (int r = 0; r < rows; ++r) sums[o * rows + r] = fma(weights, columns[r], sums[o * rows + r]);
  }
}

template <class T, int rows, int outputs>
VERA_INLINE void tile(const LinearTask& task, int row, int output, Ahead& ahead) {
  const size_t inputs = size_t(task.inputs);
  const float* x = task.x + size_t(row) * inputs;
  const T* weight = static_cast<const T*>(weights_of(task, output));
  constexpr int kSums = (rows * outputs + 3) / 4 * 4;  // store_sums takes four
  Vec sums[kSums];
  for (Vec& entry : sums) entry = broadcast(0.0f);
  const int lines = ahead.next < ahead.end ? ahead.lines_per_step : 0;
  size_t i = 0;
  for (; i + kWidth <= inputs; i += kWidth) {
    for (int line = 0; line < lines; ++line, ahead.next += kLineBytes) prefetch(ahead.next);
    add_products<rows, outputs>(
        sums, [&](int r) { return load(x + r * inputs + i); }, [&](int o) { return load(weight + o * inputs + i); });
  }
  if (i < inputs)
    add_products<rows, outputs>(
        sums, [&](int r) { return load_part(x + r * inputs + i, inputs - i); },
        [&](int o) { return load_part(weight + o * inputs + i, inputs - i); });
  float totals[kSums];
  for (int s = 0; s < kSums; s += 4) store_sums(totals + s, sums[s], sums[s + 1], sums[s + 2], sums[s + 3]);
  for (int r = 0; r < rows; ++r) {
    const size_t place = size_t(row + r) * size_t(task.outputs) + size_t(output);
    for (int o = 0; o < outputs; ++o) {
      float total = totals[o * rows + r];
      if (task.bias != nullptr) total += task.bias[output + o];
      if (task.added != nullptr) total += task.added[place + o];
      task.y[place + o] = total;
    }
  }
}

// All rows against the same rows of W, which stay in the nearest caches meanwhile; those at `next` are fetched.
template <class T, int outputs>
void all_rows(const LinearTask& task, int output, const void* next) {
  const size_t bytes = size_t(outputs) * size_t(task.inputs) * sizeof(T);
  const size_t steps = size_t((task.rows + kTileRows - 1) / kTileRows) * size_t((task.inputs + kWidth - 1) / kWidth);
  const size_t lines = (bytes + kLineBytes - 1) / kLineBytes;
  Ahead ahead{};
  if (next != nullptr)
    ahead = {static_cast<const char*>(next), static_cast<const char*>(next) + bytes, int((lines + steps - 1) / steps)};
  for (int row = 0; row < task.rows; row += kTileRows) {
    switch (task.rows - row) {
      case 1: tile<T, 1, outputs>(task, row, output, ahead); break;
      case 2: tile<T, 2, outputs>(task, row, output, ahead); break;
      case 3: tile<T, 3, outputs>(task, row, output, ahead); break;
      default: tile<T, 4, outputs>(task, row, output, ahead);
    }
  }
}

template <class T>
void all_outputs(const LinearTask& task) {
  const int last = task.last_output;
  const auto after = [&](int output) { return output < last ? weights_of(task, output) : task.ahead; };
  int output = task.first_output;
  for (; output + kTileOutputs <= last; output += kTileOutputs)
    all_rows<T, kTileOutputs>(task, output, after(output + kTileOutputs));
  for (; output < last; ++output) all_rows<T, 1>(task, output, after(output + 1));
}

}  // namespace

void linear(const LinearTask& task) {
  switch (task.format) {
    case WeightFormat::kFloat32: return all_outputs<float>(task);
    case WeightFormat::kFloat16: return all_outputs<Half>(task);
    case WeightFormat::kBFloat16: return all_outputs<BFloat16>(task);
  }
}

}  // namespace VERA_ISA
}  // namespace vera
