// Runs a layer's attention: writes the new keys and values, then spreads the plan's items over the threads.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "batch.h"

namespace vera {

// Rows [token][head] of head_dim floats each.
struct Rows {
  const float* data;
  int64_t token_stride, head_stride;

  const float* at(int64_t token, int64_t head) const { return data + token * token_stride + head * head_stride; }
};

// One layer of one step; the arguments of vera.attention.protocol.AttentionBackend.attend.
struct LayerCall {
  int layer;
  int query_heads;
  Rows query, key, value;
  float* output;  // [tokens][query_heads][head_dim], contiguous
  LogitOptions options;
  int window;          // 0: none
  const float* sinks;  // [query_heads] or null
  int num_threads;
  bool again;  // nothing is recorded in the report
};

// A page of a sequence that was hit; `cold` is 0 or 1.
struct Hit {
  int32_t sequence, layer, kv_head, block, cold;
};

// What was done since construction.
struct Counters {
  double seconds = 0;             // in attend
  double decode_seconds = 0;      // in those calls of it that only decoded
  int64_t decode_bytes_read = 0;  // keys and values read in those calls
};

// Memory that grows and is never initialised.
class FloatBuffer {
 public:
  // Room for `count` floats; what was there is lost if it has to grow.
  float* reserve(size_t count);
  float* data() const { return data_.get(); }

 private:
  struct Free {
    void operator()(float* data) const;
  };
  std::unique_ptr<float, Free> data_;
  size_t size_ = 0;
};

class Attention {
 public:
  // See choose_kernels for `isa`.
  explicit Attention(const std::string& isa);

  const char* isa() const { return kernels_.name; }
  const Counters& counters() const { return counters_; }

  // Returns the pages that decode rows hit, in order of sequence, KV head and block; none with `again`. Throws
  // std::invalid_argument or std::out_of_range before anything is written. Calls from several threads wait for each other.
  std::vector<Hit> attend(Batch& batch, const LayerCall& call);

 private:
  friend class LayerRun;

  struct ThreadScratch {
    FloatBuffer floats;
    std::vector<PageRef> pages;
    std::vector<SketchRef> sketches;
    FloatBuffer row_state;
    std::vector<Hit> hits;
  };

  const KernelTable& kernels_;
  Counters counters_;
  std::mutex mutex_;
  std::vector<ThreadScratch> scratch_;  // a thread each
  FloatBuffer partials_, row_states_, probes_;
  std::vector<TieredPage> tiered_pages_;
};

}  // namespace vera
