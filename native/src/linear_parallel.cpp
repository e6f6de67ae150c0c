#include <algorithm>
#include <atomic>
#include <cstring>

#include "linear.h"
#include "threads.h"

namespace vera {
namespace {

// Outputs that a thread takes at a time: a multiple of every kernel's tile, and enough work to outweigh the taking.
constexpr int kPiece = 48;

LinearKernel kernel_for([[maybe_unused]] const char* isa) {
#ifdef VERA_HAS_X86_KERNELS
  if (std::strncmp(isa, "avx512", 6) == 0) return &avx512::linear;
  if (std::strcmp(isa, "avx2") == 0) return &avx2::linear;
#endif
  return &portable::linear;
}

}  // namespace

void run_linear(const char* isa, const LinearTask& whole, int num_threads) {
  struct Shared {
    const LinearTask& whole;
    LinearKernel kernel;
    std::atomic<int> next{0};
  } shared{whole, kernel_for(isa)};
  const int pieces = (whole.outputs + kPiece - 1) / kPiece;
  // One thread or all of them: OpenMP ends the threads that a smaller team leaves over and starts them anew for the next.
  run_parallel(
      pieces <= 1 ? 1 : num_threads,
      [](void* argument) {
        Shared& all = *static_cast<Shared*>(argument);
        LinearTask task = all.whole;
        while ((task.first_output = all.next.fetch_add(kPiece, std::memory_order_relaxed)) < all.whole.outputs) {
          task.last_output = std::min(task.first_output + kPiece, all.whole.outputs);
          all.kernel(task);
        }
      },
      &shared);
}

}  // namespace vera
