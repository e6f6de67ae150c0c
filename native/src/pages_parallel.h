// Work on many pages by their addresses, spread over the threads.
#pragma once

#include <cstdint>

#include "kernel.h"

namespace vera {

// The pages of vera.attention.cpu.sketch_pages: addresses, [count] each.
struct SketchJob {
  const int64_t* pages;
  const int64_t* key_parts;
  const int64_t* value_parts;
  int64_t count;
  PageType page_type;
  int page_size, head_dim, bits;
};

// Writes all sketches and returns how many of them hold a number that is not finite. Throws std::invalid_argument for sizes that
// cannot be sketched.
int64_t make_sketches(const KernelTable& kernels, const SketchJob& job, int num_threads);

// Copies `bytes` bytes from each source to its target.
void copy_all(const int64_t* sources, const int64_t* targets, int64_t count, int64_t bytes, int num_threads);

}  // namespace vera
