// One step's batch: validated once, then read by every layer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernel.h"

namespace vera {

// The tensors of vera.attention.protocol.PagedBatch; all contiguous. The caller keeps them alive and unchanged.
struct BatchTables {
  std::byte* pages;
  int64_t num_pages;
  PageType page_type;
  const int32_t* page_table;  // [num_blocks][layers][kv_heads]
  int64_t num_blocks;
  int layers, kv_heads;
  const int32_t* block_tables;  // [sequences][max_blocks]
  int sequences, max_blocks;
  const int32_t* query_starts;  // [sequences + 1]
  const int32_t* context_lens;  // [sequences]
  int page_size, head_dim;
};

// A piece of a layer's work for one thread.
struct WorkItem {
  enum class Kind { kDecode, kPrefill } kind;
  int sequence;
  int first_head, num_heads;  // KV heads; prefill: one
  int begin, end;             // decode: positions of the tokens read; prefill: positions of the query tokens
  int run;                    // decode: index in Plan::runs
  int partial;                // decode: index of the partial result in its run
  int64_t cost;               // roughly in nanoseconds
};

// The decode items of one (sequence, some KV heads): whoever finishes the last of them merges their results.
struct DecodeRun {
  int sequence, first_head, num_heads;
  size_t partials;  // where the partial results begin, in floats
  int num_partials;
};

// New tokens of a prefill that fall into one page; those of a decode are written by its last item.
struct WriteItem {
  int sequence, kv_head;
  int begin, end;  // positions, within one page
};

// What is to be done for a layer; the same for all layers of a model with the same window.
struct Plan {
  int group, window, num_threads;
  std::vector<WriteItem> writes;
  std::vector<WorkItem> items;  // most expensive first
  std::vector<DecodeRun> runs;
  size_t partial_floats = 0;
  int heads_per_item = 1;  // most KV heads of a decode item; does not change results
  int64_t cost = 0;
  int64_t decode_bytes = 0;  // keys and values that decode items read
};

class Batch {
 public:
  // Throws std::invalid_argument for inconsistent lengths or sizes out of range, std::out_of_range for ids that point nowhere.
  explicit Batch(const BatchTables& tables);

  const BatchTables& tables() const { return tables_; }
  int tokens() const { return tables_.query_starts[tables_.sequences]; }
  int new_tokens(int sequence) const { return tables_.query_starts[sequence + 1] - tables_.query_starts[sequence]; }
  int context(int sequence) const { return tables_.context_lens[sequence]; }
  // Row of the flattened batch that holds the new token at `position`.
  int row(int sequence, int position) const { return tables_.query_starts[sequence + 1] - (context(sequence) - position); }

  // Where a page is served from. The one place that knows.
  PageRef page(int sequence, int block, int layer, int kv_head) const {
    const int64_t block_id = tables_.block_tables[int64_t(sequence) * tables_.max_blocks + block];
    const int64_t slot = tables_.page_table[(block_id * tables_.layers + layer) * tables_.kv_heads + kv_head];
    std::byte* keys = tables_.pages + slot * 2 * half_page_bytes_;
    return {keys, keys + half_page_bytes_};
  }

  // Throws std::out_of_range if a page that `layer` reads or writes is NO_PAGE. `window` 0: none.
  void check_present(int layer, int window) const;

  const Plan& plan(int group, int window, int num_threads);

 private:
  void check_sizes() const;
  void check_lengths() const;
  void check_ids();
  Plan make_plan(int group, int window, int num_threads) const;
  int choose_heads_per_item(const Plan& plan) const;
  void plan_decode(Plan& plan, int sequence) const;
  void plan_prefill(Plan& plan, int sequence) const;

  BatchTables tables_;
  int64_t half_page_bytes_;           // the keys of a page, or its values
  int64_t token_bytes_;               // keys and values of a token in one KV head
  std::vector<char> layer_has_gaps_;  // some page of the layer is NO_PAGE
  std::vector<Plan> plans_;
};

}  // namespace vera
