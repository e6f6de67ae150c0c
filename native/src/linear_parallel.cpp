#include <algorithm>

#include "checks.h"
#include "linear.h"
#include "phases.h"

namespace vera {

int outputs_of_piece(int outputs, int num_threads) {
  constexpr int kPiecesPerThread = 4;  // so that threads end together
  constexpr int kLeast = 12;           // a multiple of every kernel's tile
  constexpr int kMost = 48;            // enough work to outweigh the taking
  const int share = outputs / (kPiecesPerThread * std::max(1, num_threads));
  return std::clamp((share + kLeast - 1) / kLeast * kLeast, kLeast, kMost);
}

void run_linear(void (*kernel)(const LinearTask&), const LinearTask& whole, int num_threads) {
  check_format(whole.format);
  check_positive("rows", whole.rows);
  check_positive("inputs", whole.inputs);
  check_positive("outputs", whole.outputs);
  const int size = outputs_of_piece(whole.outputs, num_threads);
  const int pieces = (whole.outputs + size - 1) / size;
  // One thread or all of them: OpenMP ends the threads that a smaller team leaves over and starts them anew for the next.
  run_phases<1>(pieces <= 1 ? 1 : num_threads, {pieces}, [&] {
    return [&](Piece piece, Piece next) {
      LinearTask task = whole;
      task.first_output = piece.index * size;
      task.last_output = std::min(task.first_output + size, whole.outputs);
      task.ahead = next.phase == 0 ? weights_of(whole, next.index * size) : nullptr;
      kernel(task);
    };
  });
}

}  // namespace vera
