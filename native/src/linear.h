// y = x W^T + b for few rows of x: the linear layers of a decode step, which are bound by reading W.
#pragma once

#include <cstddef>

namespace vera {

// Outputs [first_output, last_output) of every row.
struct LinearTask {
  const float* x;       // [rows][inputs]
  const float* weight;  // [outputs][inputs], as torch has it
  const float* bias;    // [outputs] or null
  float* y;             // [rows][outputs]
  int rows, inputs, outputs;
  int first_output, last_output;
};

using LinearKernel = void (*)(const LinearTask&);

namespace portable {
void linear(const LinearTask& task);
}
#ifdef VERA_HAS_X86_KERNELS
namespace avx2 {
void linear(const LinearTask& task);
}
namespace avx512 {
void linear(const LinearTask& task);
}
#endif

// All outputs, on up to `num_threads` threads, with the kernel for the instruction set called `isa` (see isa.h).
// A row's result is the same sum in the same order whatever `rows` and `num_threads` are.
void run_linear(const char* isa, const LinearTask& whole, int num_threads);

}  // namespace vera
