// y = x W^T + b for few rows of x: the linear layers of a decode step, which are bound by reading W.
#pragma once

#include <cstddef>
#include <cstdint>

namespace vera {

// How weights are stored. They are widened as they are read, which is exact: a product is the same, bit for bit, as with the
// same weights in float32.
enum class WeightFormat : int { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };

// Outputs [first_output, last_output) of every row.
struct LinearTask {
  const float* x;      // [rows][inputs]
  const void* weight;  // [outputs][inputs], as torch has it
  WeightFormat format;
  const float* bias;   // [outputs] or null
  const float* added;  // [rows][outputs], may be y, or null: the residual
  float* y;            // [rows][outputs]
  int rows, inputs, outputs;
  int first_output, last_output;
  const void* ahead;  // weights that this thread reads afterwards, or null: they are fetched meanwhile
};

// The place of an output's weights.
inline const void* weights_of(const LinearTask& task, int output) {
  const size_t bytes = task.format == WeightFormat::kFloat32 ? 4 : 2;
  return static_cast<const char*>(task.weight) + size_t(output) * size_t(task.inputs) * bytes;
}

// How many outputs a thread takes at a time where there are `outputs` in all.
int outputs_of_piece(int outputs, int num_threads);

// All outputs, on up to `num_threads` threads.
// A row's result is the same sum in the same order whatever `rows` and `num_threads` are.
// Throws std::invalid_argument for sizes that are not positive and an unknown format.
void run_linear(void (*kernel)(const LinearTask&), const LinearTask& whole, int num_threads);

}  // namespace vera
