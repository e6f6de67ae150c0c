// Compiled once per instruction set, like kernel.cpp.
#include "linear.h"

#include "simd.h"

namespace vera {
namespace VERA_ISA {
namespace {

// A tile is kTileRows rows of x times kTileOutputs rows of W, both read along the inputs, with one accumulator a pair: as many
// as leave registers for the operands.
constexpr int kTileRows = 4;
constexpr int kTileOutputs = kRegisters == 32 ? 6 : 3;

// With `ahead`, the same part of the next tile's weights is fetched into the second-level cache meanwhile: the rows of W are
// too short for the hardware to find their pattern.
template <int rows, int outputs, bool ahead>
VERA_INLINE void tile(const LinearTask& task, int row, int output) {
  const size_t inputs = size_t(task.inputs);
  const float* x = task.x + size_t(row) * inputs;
  const float* weight = task.weight + size_t(output) * inputs;
  Vec sums[outputs][kTileRows];
  for (auto& line : sums)
    for (Vec& entry : line) entry = broadcast(0.0f);
  size_t i = 0;
  for (; i + kWidth <= inputs; i += kWidth) {
    Vec columns[rows];
    for (int r = 0; r < rows; ++r) columns[r] = load(x + r * inputs + i);
    for (int o = 0; o < outputs; ++o) {
      const Vec factor = load(weight + o * inputs + i);
      if (ahead) __builtin_prefetch(weight + (o + outputs) * inputs + i, 0, 2);
      for (int r = 0; r < rows; ++r) sums[o][r] = fma(factor, columns[r], sums[o][r]);
    }
  }
  for (int o = 0; o < outputs; ++o) {
    float totals[4];
    store_sums(totals, sums[o][0], sums[o][1], sums[o][2], sums[o][3]);
    const float* factors = weight + o * inputs;
    for (int r = 0; r < rows; ++r) {
      float total = totals[r];
      for (size_t rest = i; rest < inputs; ++rest) total += factors[rest] * x[r * inputs + rest];
      if (task.bias != nullptr) total += task.bias[output + o];
      task.y[size_t(row + r) * size_t(task.outputs) + size_t(output + o)] = total;
    }
  }
}

// All rows against the same rows of W, which stay in the nearest caches meanwhile.
template <int outputs>
void all_rows(const LinearTask& task, int output) {
  switch (task.rows) {
    case 1: return tile<1, outputs, true>(task, 0, output);
    case 2: return tile<2, outputs, true>(task, 0, output);
    case 3: return tile<3, outputs, true>(task, 0, output);
    default: tile<4, outputs, true>(task, 0, output);
  }
  int row = 4;
  for (; row + 4 <= task.rows; row += 4) tile<4, outputs, false>(task, row, output);
  switch (task.rows - row) {
    case 3: return tile<3, outputs, false>(task, row, output);
    case 2: return tile<2, outputs, false>(task, row, output);
    case 1: return tile<1, outputs, false>(task, row, output);
    default: return;
  }
}

}  // namespace

void linear(const LinearTask& task) {
  int output = task.first_output;
  for (; output + kTileOutputs <= task.last_output; output += kTileOutputs) all_rows<kTileOutputs>(task, output);
  for (; output < task.last_output; ++output) all_rows<1>(task, output);
}

}  // namespace VERA_ISA
}  // namespace vera
