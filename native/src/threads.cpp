#include "threads.h"

#include <dlfcn.h>
#include <link.h>

#include <condition_variable>
#include <cstring>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace vera {
namespace {

// GCC's entry point for a parallel region; the runtimes of Intel and LLVM export it as well.
using GompParallel = void (*)(void (*body)(void*), void* argument, unsigned num_threads, unsigned flags);

struct OpenMp {
  GompParallel parallel = nullptr;
  std::string library;
};

bool file_name_starts_with(const char* path, const char* prefix) {
  const char* slash = std::strrchr(path, '/');
  return std::strncmp(slash != nullptr ? slash + 1 : path, prefix, std::strlen(prefix)) == 0;
}

std::vector<std::string> loaded_libraries() {
  std::vector<std::string> paths;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* result) {
        static_cast<std::vector<std::string>*>(result)->push_back(info->dlpi_name);
        return 0;
      },
      &paths);
  return paths;
}

// Looks in libtorch_cpu first: a lookup there follows its own dependencies, and so finds the runtime that torch itself calls
// even where other packages have loaded theirs.
OpenMp find_openmp() {
  const auto libraries = loaded_libraries();
  for (const char* prefix : {"libtorch_cpu", "libgomp", "libiomp5", "libomp"}) {
    for (const std::string& path : libraries) {
      if (!file_name_starts_with(path.c_str(), prefix)) continue;
      void* library = dlopen(path.c_str(), RTLD_LAZY | RTLD_NOLOAD);
      if (library == nullptr) continue;
      void* symbol = dlsym(library, "GOMP_parallel");
      dlclose(library);
      Dl_info info;
      if (symbol != nullptr && dladdr(symbol, &info) != 0) return {reinterpret_cast<GompParallel>(symbol), info.dli_fname};
    }
  }
  return {};
}

const OpenMp& openmp() {
  static const OpenMp found = find_openmp();
  return found;
}

// A plain pool. The workers live as long as the process.
class Pool {
 public:
  void run(int num_threads, void (*body)(void*), void* argument) {
    const std::lock_guard<std::mutex> one_at_a_time(caller_mutex_);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      while (int(workers_.size()) < num_threads - 1) workers_.emplace_back(&Pool::work, this, int(workers_.size())).detach();
      body_ = body;
      argument_ = argument;
      wanted_ = running_ = num_threads - 1;
      round_++;
    }
    start_.notify_all();
    body(argument);
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return running_ == 0; });
  }

 private:
  void work(int index) {
    long seen = 0;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      start_.wait(lock, [&] { return round_ != seen; });
      seen = round_;
      if (index >= wanted_) continue;
      lock.unlock();
      body_(argument_);
      lock.lock();
      if (--running_ == 0) done_.notify_one();
    }
  }

  std::mutex caller_mutex_, mutex_;
  std::condition_variable start_, done_;
  std::vector<std::thread> workers_;
  void (*body_)(void*) = nullptr;
  void* argument_ = nullptr;
  int wanted_ = 0, running_ = 0;
  long round_ = 0;
};

}  // namespace

void run_parallel(int num_threads, void (*body)(void*), void* argument) {
  if (num_threads <= 1) {
    body(argument);
  } else if (openmp().parallel != nullptr) {
    openmp().parallel(body, argument, unsigned(num_threads), 0);
  } else {
    static Pool& pool = *new Pool;  // never destroyed: its workers may still wait when the process ends
    pool.run(num_threads, body, argument);
  }
}

const char* threads_runtime() { return openmp().parallel != nullptr ? openmp().library.c_str() : "std::thread"; }

}  // namespace vera
