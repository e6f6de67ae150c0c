// Work in phases, on one team of threads.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <thread>

#include "threads.h"

namespace vera {

struct Piece {
  int phase, index;
};

// The pieces of all phases in one row, the earliest first.
template <size_t kPhases, class MakeWorker>
class PhasedWork {
 public:
  PhasedWork(const std::array<int, kPhases>& pieces, const MakeWorker& make_worker) : make_worker_(make_worker) {
    for (size_t phase = 0; phase < kPhases; ++phase) begins_[phase + 1] = begins_[phase] + pieces[phase];
  }

  // What each thread does. It waits only for pieces before its own; the earliest unfinished one is always being run by somebody,
  // so it does not matter how many threads have come, or when.
  void work() {
    auto worker = make_worker_();
    int current = take();
    while (current < begins_[kPhases]) {
      const int next = take();
      const Piece piece = piece_at(current);
      await(begins_[piece.phase]);
      worker(piece, piece_at(next));
      finished_.fetch_add(1, std::memory_order_acq_rel);
      current = next;
    }
  }

 private:
  int take() { return next_.fetch_add(1, std::memory_order_relaxed); }

  Piece piece_at(int position) const {
    int phase = 0;
    while (phase < int(kPhases) && position >= begins_[phase + 1]) ++phase;
    return {phase, position - begins_[phase]};
  }

  void await(int pieces) const {
    constexpr int kSpins = 512;  // some 10 microseconds: then this core may be what another thread is waiting for
    for (int spins = 0; finished_.load(std::memory_order_acquire) < pieces; ++spins) {
      if (spins >= kSpins) std::this_thread::yield();
#if defined(__x86_64__) || defined(__i386__)
      __builtin_ia32_pause();
#endif
    }
  }

  const MakeWorker& make_worker_;
  std::array<int, kPhases + 1> begins_{};
  alignas(64) std::atomic<int> next_{0};
  alignas(64) std::atomic<int> finished_{0};
};

// Runs all pieces of the first phase, then of the second, and so on, in one parallel region. Each thread makes itself a worker, for
// what it keeps from piece to piece, and calls worker(piece, next): `next` is what it takes afterwards, of phase kPhases if
// nothing, for fetching ahead. A phase begins when the work of those before it is done.
template <size_t kPhases, class MakeWorker>
void run_phases(int num_threads, const std::array<int, kPhases>& pieces, const MakeWorker& make_worker) {
  using Work = PhasedWork<kPhases, MakeWorker>;
  Work work(pieces, make_worker);
  run_parallel(
      num_threads, [](void* argument) { static_cast<Work*>(argument)->work(); }, &work);
}

}  // namespace vera
