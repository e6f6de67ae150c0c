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
// Inputs between fetches: a line for a few rows of W, with short vectors too.
constexpr size_t kStride = kRegisters == 32 ? kWidth : 4 * kWidth;
// Inputs of a row that are read at a time: kTileRows times as many take less than half of the first-level cache.
constexpr size_t kPartInputs = 768;
// Outputs that all rows are multiplied with in turn, or fewer where rows of W are so long that more would not stay in the
// second-level cache.
constexpr int kGroupOutputs = 12;
constexpr size_t kGroupBytes = 96 * 1024;
static_assert(kPartInputs % kStride == 0 && kGroupOutputs % kTileOutputs == 0);

VERA_INLINE size_t most(size_t a, size_t b) { return a > b ? a : b; }

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
  int lines_per_stride;

  VERA_INLINE void fetch() {
    if (next >= end) return;
    for (int line = 0; line < lines_per_stride; ++line, next += kLineBytes) prefetch(next);
  }
};

// Adds one vector of inputs to all sums. The side with fewer vectors is held in registers while the other one streams: with four
// rows held beside three outputs, 16 registers do not suffice.
template <int rows, int outputs, class Column, class Factor>
VERA_INLINE void add_products(Vec* sums, Column column, Factor factor) {
  if constexpr (rows <= outputs) {
    Vec columns[rows];
    for (int r = 0; r < rows; ++r) columns[r] = column(r);
    for (int o = 0; o < outputs; ++o) {
      const Vec weights = factor(o);
      for (int r = 0; r < rows; ++r) sums[o * rows + r] = fma(weights, columns[r], sums[o * rows + r]);
    }
  } else {
    Vec weights[outputs];
    for (int o = 0; o < outputs; ++o) weights[o] = factor(o);
    for (int r = 0; r < rows; ++r) {
      const Vec x = column(r);
      for (int o = 0; o < outputs; ++o) sums[o * rows + r] = fma(weights[o], x, sums[o * rows + r]);
    }
  }
}

// Inputs [begin, end) of one tile. Sums that are not complete wait in `carried`.
template <class T, int rows, int outputs>
VERA_INLINE void tile(const LinearTask& task, int row, int output, size_t begin, size_t end, Vec* carried, Ahead& ahead) {
  const size_t inputs = size_t(task.inputs);
  const float* x = task.x + size_t(row) * inputs;
  const T* weight = static_cast<const T*>(weights_of(task, output));
  constexpr int kSums = (rows * outputs + 3) / 4 * 4;  // store_sums takes four
  Vec sums[kSums];
  for (int s = 0; s < kSums; ++s) sums[s] = begin == 0 || s >= rows * outputs ? broadcast(0.0f) : carried[s];
  const auto add = [&](size_t i) {
    add_products<rows, outputs>(
        sums, [&](int r) { return load(x + r * inputs + i); }, [&](int o) { return load(weight + o * inputs + i); });
  };
  size_t i = begin;
  for (; i + kStride <= end; i += kStride) {
    ahead.fetch();
#pragma GCC unroll 4
    for (size_t step = 0; step < kStride; step += kWidth) add(i + step);
  }
  for (; i + kWidth <= end; i += kWidth) add(i);
  if (end < inputs) {
    for (int s = 0; s < rows * outputs; ++s) carried[s] = sums[s];
    return;
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

// Outputs [begin, end) of some rows. Their inputs stay in the first-level cache, part by part, while W comes out of the second.
template <class T, int rows>
void some_rows(const LinearTask& task, int row, int begin, int end, Ahead& ahead) {
  Vec carried[kTileRows * kGroupOutputs];
  const size_t inputs = size_t(task.inputs);
  const size_t part = task.rows <= kTileRows ? inputs : kPartInputs;
  for (size_t first = 0; first < inputs; first += part) {
    const size_t last = first + part < inputs ? first + part : inputs;
    Vec* sums = carried;
    int output = begin;
    for (; output + kTileOutputs <= end; output += kTileOutputs, sums += rows * kTileOutputs)
      tile<T, rows, kTileOutputs>(task, row, output, first, last, sums, ahead);
    for (; output < end; ++output, sums += rows) tile<T, rows, 1>(task, row, output, first, last, sums, ahead);
  }
}

// All rows against the same rows of W; as many bytes at `next` are fetched.
template <class T>
void all_rows(const LinearTask& task, int begin, int end, const void* next) {
  const size_t bytes = size_t(end - begin) * size_t(task.inputs) * sizeof(T);
  const int outputs = end - begin, quads = (task.rows + kTileRows - 1) / kTileRows;
  const size_t tiles = size_t(outputs / kTileOutputs + outputs % kTileOutputs) * size_t(quads);
  const size_t strides = tiles * most(1, size_t(task.inputs) / kStride), lines = (bytes + kLineBytes - 1) / kLineBytes;
  Ahead ahead{};
  if (next != nullptr)
    ahead = {static_cast<const char*>(next), static_cast<const char*>(next) + bytes, int((lines + strides - 1) / strides)};
  for (int row = 0; row < task.rows; row += kTileRows) {
    switch (task.rows - row) {
      case 1: some_rows<T, 1>(task, row, begin, end, ahead); break;
      case 2: some_rows<T, 2>(task, row, begin, end, ahead); break;
      case 3: some_rows<T, 3>(task, row, begin, end, ahead); break;
      default: some_rows<T, 4>(task, row, begin, end, ahead);
    }
  }
}

template <class T>
void all_outputs(const LinearTask& task) {
  // Few rows read W once, so nothing need stay: it is fetched in the smallest steps, which begin soonest.
  const size_t fit = task.rows <= kTileRows ? 0 : kGroupBytes / (size_t(task.inputs) * sizeof(T));
  const int size = fit >= size_t(kGroupOutputs) ? kGroupOutputs : int(most(1, fit / kTileOutputs)) * kTileOutputs;
  for (int begin = task.first_output; begin < task.last_output; begin += size) {
    const int end = begin + size < task.last_output ? begin + size : task.last_output;
    all_rows<T>(task, begin, end, end < task.last_output ? weights_of(task, end) : task.ahead);
  }
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
