#include "pages_parallel.h"

#include <atomic>
#include <cstring>
#include <stdexcept>
#include <string>

#include "threads.h"

namespace vera {
namespace {

// Pages or copies that a thread takes at a time.
constexpr int64_t kPiece = 8;
// Fewer bytes than this are copied sooner than other threads are woken.
constexpr int64_t kSerialBytes = 64 * 1024;

// Calls work(i) for all i below `count`, on all threads.
template <class Work>
void for_each(int64_t count, int num_threads, const Work& work) {
  struct Shared {
    int64_t count;
    const Work& work;
    std::atomic<int64_t> next{0};
  } shared{count, work};
  run_parallel(
      num_threads,
      [](void* argument) {
        Shared& all = *static_cast<Shared*>(argument);
        for (int64_t first; (first = all.next.fetch_add(kPiece, std::memory_order_relaxed)) < all.count;)
          for (int64_t i = first; i < first + kPiece && i < all.count; i++) all.work(i);
      },
      &shared);
}

template <class T>
T* at(int64_t address) {
  return reinterpret_cast<T*>(uintptr_t(address));
}

void check(const SketchJob& job) {
  const auto refuse = [](const char* name, int value, const std::string& wanted) {
    throw std::invalid_argument(std::string(name) + "=" + std::to_string(value) + " cannot be sketched: it must be " + wanted);
  };
  if (job.bits != 2 && job.bits != 4 && job.bits != 8) refuse("sketch_bits", job.bits, "2, 4 or 8");
  if (job.page_size < 16 || job.page_size > kMaxPageSize || job.page_size % 16 != 0)
    refuse("page_size", job.page_size, "a multiple of 16 up to " + std::to_string(kMaxPageSize));
  if (job.head_dim < 16 || job.head_dim > kMaxHeadDim || job.head_dim % 16 != 0)
    refuse("head_dim", job.head_dim, "a multiple of 16 up to " + std::to_string(kMaxHeadDim));
}

}  // namespace

int64_t make_sketches(const KernelTable& kernels, const SketchJob& job, int num_threads) {
  check(job);
  std::atomic<int64_t> broken{0};
  for_each(job.count, job.count <= kPiece ? 1 : num_threads, [&](int64_t i) {
    SketchTask task;
    task.page_size = job.page_size;
    task.head_dim = job.head_dim;
    task.bits = job.bits;
    task.page = at<const void>(job.pages[i]);
    task.key_part = at<uint8_t>(job.key_parts[i]);
    task.value_part = at<uint8_t>(job.value_parts[i]);
    if (!kernels.make_sketch[int(job.page_type)](task)) broken.fetch_add(1, std::memory_order_relaxed);
  });
  return broken;
}

void copy_all(const int64_t* sources, const int64_t* targets, int64_t count, int64_t bytes, int num_threads) {
  for_each(count, count * bytes < kSerialBytes ? 1 : num_threads,
           [&](int64_t i) { std::memcpy(at<void>(targets[i]), at<const void>(sources[i]), size_t(bytes)); });
}

}  // namespace vera
