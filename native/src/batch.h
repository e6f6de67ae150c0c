// One step's batch: validated once, then read by every layer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
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

// The tensors of vera.attention.protocol.Tiers and of its report. Their contents may change between calls.
struct TierTables {
  const uint8_t* arena;
  int64_t arena_bytes;
  int sketch_bits;
  const int64_t* sketch_keys;    // [num_blocks]
  const int64_t* sketch_values;  // [num_blocks]
  int64_t sketch_stride;
  const int64_t* warm;  // [num_blocks][windows]
  int windows, window_layers;
  const float* tolerances;  // [sequences]
  float skip_share;
  const int32_t* probes;       // [sequences]
  const int32_t* report_rows;  // [sequences]
  float* masses;               // [num_report_rows][layers][kv_heads][report_blocks]
  float* frequencies;          // the same
  int64_t num_report_rows;
  int report_blocks;
  double* errors;       // [sequences][3]
  int64_t* pages_read;  // [4]
};

// How a sequence is served in one layer.
enum class Service : uint8_t {
  kIdle,     // it has no new tokens
  kExact,    // every page it needs has a slot or a warm address
  kBounded,  // one new token, by sketches under error control
  kPrompt,   // several new tokens; only cold pages are read by their sketch
};

// A piece of a layer's work for one thread.
struct WorkItem {
  enum class Kind {
    kDecode,   // exact, some tokens of a sequence
    kPrefill,  // a tile of query tokens
    kRow,      // a row served within bounds, from logits to output
    kLogits,   // the logits of some of its tokens
    kProbe,    // some query tokens of a prompt, for the report alone
  } kind;
  int sequence;
  int first_head, num_heads;  // KV heads; all but kDecode: one
  int begin, end;             // kDecode, kLogits: positions of the tokens read; kPrefill, kProbe: of the query tokens
  int run;                    // kDecode: index in Plan::runs; kRow, kLogits: in Plan::rows
  int partial;                // kDecode: index of the partial result in its run; kProbe: of the probe in the plan
  int64_t cost;               // roughly in nanoseconds
};

// A decode row of one KV head that is served within bounds.
struct RowPlan {
  int sequence, kv_head;
  size_t state;   // where its state begins, in floats, if several threads work on it
  int num_spans;
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
  std::vector<Service> services;  // of the sequences; empty without tiers
  std::vector<WriteItem> writes;
  std::vector<WorkItem> items;  // most expensive first
  std::vector<DecodeRun> runs;
  size_t partial_floats = 0;
  std::vector<RowPlan> rows;
  // Too few rows for one thread each: `items` holds their logits only, and these the spans of their values (begin: the span).
  bool split_rows = false;
  std::vector<WorkItem> value_items;
  size_t row_state_floats = 0;       // of all rows together, if split
  size_t largest_state_floats = 0;   // of any row or probe
  std::vector<size_t> first_pages;   // of each sequence, where its pages begin that are looked up for rows and probes
  size_t num_pages = 0;              // of all sequences
  std::vector<WorkItem> probes;      // the items that are probes, in a fixed order
  int heads_per_item = 1;  // most KV heads of a decode item; does not change results
  int64_t cost = 0;
  int64_t decode_bytes = 0;  // keys and values that decode items read
};

class Batch {
 public:
  // Throws std::invalid_argument for inconsistent lengths or sizes out of range, std::out_of_range for ids that point nowhere.
  explicit Batch(const BatchTables& tables, const std::optional<TierTables>& tiers = std::nullopt);

  const BatchTables& tables() const { return tables_; }
  const TierTables* tiers() const { return tiers_ ? &*tiers_ : nullptr; }
  int tokens() const { return tables_.query_starts[tables_.sequences]; }
  int new_tokens(int sequence) const { return tables_.query_starts[sequence + 1] - tables_.query_starts[sequence]; }
  int context(int sequence) const { return tables_.context_lens[sequence]; }
  // Row of the flattened batch that holds the new token at `position`.
  int row(int sequence, int position) const { return tables_.query_starts[sequence + 1] - (context(sequence) - position); }

  int num_blocks(int sequence) const { return (context(sequence) + tables_.page_size - 1) / tables_.page_size; }
  int64_t half_page_bytes() const { return half_page_bytes_; }

  // Where an exact page is: in its slot, else at its warm address, else nowhere (null).
  PageRef page(int sequence, int block, int layer, int kv_head) const { return page_of(block_id(sequence, block), layer, kv_head); }
  SketchRef sketch(int sequence, int block, int layer, int kv_head) const {
    return sketch_of(block_id(sequence, block), layer, kv_head);
  }

  // How each sequence is served, judged by what the tables hold now; empty without tiers. `window` 0: none.
  std::vector<Service> services(int window) const;

  // Without tiers. Throws std::out_of_range if a page that `layer` reads or writes is NO_PAGE. `window` 0: none.
  void check_present(int layer, int window) const;
  // With tiers: looks all pages of a sequence up, for `layer`, into [blocks][kv_heads] (null: only looks). Throws
  // std::out_of_range for a page that is needed but not there, and for numbers that point nowhere.
  void look_up(int sequence, int layer, int window, Service service, TieredPage* pages) const;

  const Plan& plan(int group, int window, int num_threads);

 private:
  int64_t block_id(int sequence, int block) const { return tables_.block_tables[int64_t(sequence) * tables_.max_blocks + block]; }
  int32_t slot_of(int64_t id, int layer, int kv_head) const {
    return tables_.page_table[(id * tables_.layers + layer) * tables_.kv_heads + kv_head];
  }
  PageRef page_of(int64_t id, int layer, int kv_head) const {
    const int64_t slot = slot_of(id, layer, kv_head);
    std::byte* keys = tables_.pages + slot * 2 * half_page_bytes_;
    if (slot < 0) {
      if (!tiers_) return {nullptr, nullptr};
      keys = reinterpret_cast<std::byte*>(tiers_->warm[id * tiers_->windows + layer / tiers_->window_layers]);
      if (keys == nullptr) return {nullptr, nullptr};
      keys += (layer % tiers_->window_layers * tables_.kv_heads + kv_head) * 2 * half_page_bytes_;
    }
    return {keys, keys + half_page_bytes_};
  }
  SketchRef sketch_of(int64_t id, int layer, int kv_head) const {
    if (!tiers_ || tiers_->sketch_keys[id] < 0) return {nullptr, nullptr};
    const uint8_t* start = tiers_->arena + (int64_t(layer) * tables_.kv_heads + kv_head) * tiers_->sketch_stride;
    return {start + tiers_->sketch_keys[id], start + tiers_->sketch_values[id]};
  }
  // Bytes of the arena from which the last KV head's sketch of a block may begin, counted as tables do.
  int64_t sketch_room(int layer) const;
  // Throws what is wrong with a block.
  [[noreturn]] void explain(int sequence, int block, int layer, Service service, bool written) const;
  void check_sizes() const;
  void check_lengths() const;
  void check_ids();
  void check_tiers() const;
  Plan make_plan(int group, int window, int num_threads, std::vector<Service> services) const;
  int choose_heads_per_item(const Plan& plan) const;
  void plan_decode(Plan& plan, int sequence) const;
  void plan_prefill(Plan& plan, int sequence) const;
  void plan_rows(Plan& plan, int sequence) const;
  void plan_probes(Plan& plan, int sequence) const;
  void finish_rows(Plan& plan) const;

  BatchTables tables_;
  std::optional<TierTables> tiers_;
  int64_t half_page_bytes_;           // the keys of a page, or its values
  int64_t token_bytes_;               // keys and values of a token in one KV head
  std::vector<char> layer_has_gaps_;  // some page of the layer is NO_PAGE
  std::vector<Plan> plans_;
};

}  // namespace vera
