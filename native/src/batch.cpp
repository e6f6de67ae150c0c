#include "batch.h"

#include <algorithm>
#include <initializer_list>
#include <stdexcept>
#include <string>

namespace vera {
namespace {

constexpr int64_t kItemBytes[] = {2, 2, 4};  // by PageType
// Most that a decode item reads, if that leaves work for all threads. KV heads are put together up to here: their pages of a
// block often lie side by side, and long reads are the fast ones.
constexpr int64_t kDecodeItemBytes = 512 * 1024;
constexpr int64_t kItemsPerThread = 4;
// What one core does in a nanosecond, for balancing only.
constexpr int64_t kBytesReadPerNanosecond = 20;
constexpr int64_t kFlopsPerNanosecond = 80;

[[noreturn]] void refuse(const std::string& message) { throw std::invalid_argument(message); }

std::string text(int64_t number) { return std::to_string(number); }

// First token that the query at `position` sees.
int first_visible(int position, int window) { return window == 0 ? 0 : std::max(0, position + 1 - window); }

}  // namespace

Batch::Batch(const BatchTables& tables)
    : tables_(tables),
      half_page_bytes_(int64_t(tables.page_size) * tables.head_dim * kItemBytes[int(tables.page_type)]),
      token_bytes_(2 * int64_t(tables.head_dim) * kItemBytes[int(tables.page_type)]),
      layer_has_gaps_(size_t(tables.layers)) {
  check_sizes();
  check_lengths();
  check_ids();
}

void Batch::check_sizes() const {
  const int head_dim = tables_.head_dim, page_size = tables_.page_size;
  if (head_dim < 8 || head_dim > kMaxHeadDim || head_dim % 8 != 0)
    refuse("head_dim=" + text(head_dim) + ": the cpu backend needs a multiple of 8 up to " + text(kMaxHeadDim) +
           "; use attention_backend='reference' for this model");
  if (page_size != 16 && page_size != 32 && page_size != 64 && page_size != 128)
    refuse("page_size=" + text(page_size) + " is not one of 16, 32, 64, 128");
}

void Batch::check_lengths() const {
  if (tables_.query_starts[0] != 0) refuse("query_starts[0]=" + text(tables_.query_starts[0]) + " must be 0");
  for (int sequence = 0; sequence < tables_.sequences; sequence++) {
    const int count = new_tokens(sequence), length = context(sequence);
    const std::string where = "sequence " + text(sequence);
    if (count < 0) refuse(where + ": query_starts falls by " + text(-int64_t(count)) + "; it must ascend");
    if (length < count) refuse(where + ": context_lens=" + text(length) + " is below its " + text(count) + " new tokens");
    if (length > int64_t(tables_.max_blocks) * tables_.page_size)
      refuse(where + ": context_lens=" + text(length) + " exceeds the " + text(tables_.max_blocks) + " blocks of " +
             text(tables_.page_size) + " tokens in block_tables");
  }
}

void Batch::check_ids() {
  const int64_t heads = tables_.kv_heads, row = tables_.layers * heads;
  for (int sequence = 0; sequence < tables_.sequences; sequence++) {
    const int blocks = (context(sequence) + tables_.page_size - 1) / tables_.page_size;
    for (int block = 0; block < blocks; block++) {
      const int64_t id = tables_.block_tables[int64_t(sequence) * tables_.max_blocks + block];
      if (id < 0 || id >= tables_.num_blocks)
        throw std::out_of_range("sequence " + text(sequence) + ": block_tables[" + text(block) + "]=" + text(id) +
                                " is outside the " + text(tables_.num_blocks) + " blocks of page_table");
      const int32_t* slots = tables_.page_table + id * row;
      int32_t lowest = 0, highest = 0;
      for (int64_t i = 0; i < row; i++) {
        lowest = std::min(lowest, slots[i]);
        highest = std::max(highest, slots[i]);
      }
      if (lowest < -1 || highest >= tables_.num_pages)
        throw std::out_of_range("page_table[" + text(id) + "] holds " + text(lowest < -1 ? lowest : highest) + ", outside the " +
                                text(tables_.num_pages) + " pages of the pool");
      if (lowest < 0)
        for (int64_t i = 0; i < row; i++) layer_has_gaps_[size_t(i / heads)] |= slots[i] < 0;
    }
  }
}

void Batch::check_present(int layer, int window) const {
  if (!layer_has_gaps_[size_t(layer)]) return;
  for (int sequence = 0; sequence < tables_.sequences; sequence++) {
    if (new_tokens(sequence) == 0) continue;
    const int first = first_visible(context(sequence) - new_tokens(sequence), window);
    for (int block = first / tables_.page_size; block * tables_.page_size < context(sequence); block++) {
      const int64_t id = tables_.block_tables[int64_t(sequence) * tables_.max_blocks + block];
      for (int head = 0; head < tables_.kv_heads; head++)
        if (tables_.page_table[(id * tables_.layers + layer) * tables_.kv_heads + head] < 0)
          throw std::out_of_range("page_table[" + text(id) + ", " + text(layer) + ", " + text(head) +
                                  "] is NO_PAGE, but sequence " + text(sequence) + " needs that block");
    }
  }
}

const Plan& Batch::plan(int group, int window, int num_threads) {
  for (const Plan& plan : plans_)
    if (plan.group == group && plan.window == window && plan.num_threads == num_threads) return plan;
  return plans_.emplace_back(make_plan(group, window, num_threads));
}

Plan Batch::make_plan(int group, int window, int num_threads) const {
  Plan plan;
  plan.group = group;
  plan.window = window;
  plan.num_threads = num_threads;
  plan.heads_per_item = choose_heads_per_item(plan);
  for (int sequence = 0; sequence < tables_.sequences; sequence++) {
    if (new_tokens(sequence) == 1) plan_decode(plan, sequence);
    if (new_tokens(sequence) > 1) plan_prefill(plan, sequence);
  }
  for (const WorkItem& item : plan.items) plan.cost += item.cost;
  std::stable_sort(plan.items.begin(), plan.items.end(), [](const WorkItem& a, const WorkItem& b) { return a.cost > b.cost; });
  return plan;
}

int Batch::choose_heads_per_item(const Plan& plan) const {
  int64_t spans = 0;
  for (int sequence = 0; sequence < tables_.sequences; sequence++) {
    const int end = context(sequence);
    if (new_tokens(sequence) == 1) spans += (end - 1) / kSpanTokens + 1 - first_visible(end - 1, plan.window) / kSpanTokens;
  }
  const int64_t span_bytes = kSpanTokens * token_bytes_;
  const int64_t fit = kDecodeItemBytes / span_bytes, balanced = spans * tables_.kv_heads / (kItemsPerThread * plan.num_threads);
  return int(std::clamp(std::min(fit, balanced), int64_t(1), int64_t(tables_.kv_heads)));
}

void Batch::plan_decode(Plan& plan, int sequence) const {
  const int end = context(sequence), begin = first_visible(end - 1, plan.window);
  for (int head = 0; head < tables_.kv_heads; head += plan.heads_per_item) {
    DecodeRun run{sequence, head, std::min(plan.heads_per_item, tables_.kv_heads - head), plan.partial_floats, 0};
    for (int span = begin / kSpanTokens; span * kSpanTokens < end; span++) {
      WorkItem item{};
      item.kind = WorkItem::Kind::kDecode;
      item.sequence = sequence;
      item.first_head = head;
      item.num_heads = run.num_heads;
      item.begin = std::max(begin, span * kSpanTokens);
      item.end = std::min(end, (span + 1) * kSpanTokens);
      item.run = int(plan.runs.size());
      item.partial = run.num_partials++;
      item.cost = (item.end - item.begin) * run.num_heads * token_bytes_ / kBytesReadPerNanosecond;
      plan.items.push_back(item);
    }
    plan.runs.push_back(run);
    plan.partial_floats += run.num_partials * partial_floats(run.num_heads * plan.group, tables_.head_dim);
  }
  plan.decode_bytes += int64_t(end - begin) * tables_.kv_heads * token_bytes_;
}

void Batch::plan_prefill(Plan& plan, int sequence) const {
  const int end = context(sequence), begin = end - new_tokens(sequence);
  const int tile_tokens = std::max(1, kTileRows / plan.group);
  for (int head = 0; head < tables_.kv_heads; head++) {
    for (int position = begin; position < end;) {
      const int page_end = std::min(end, (position / tables_.page_size + 1) * tables_.page_size);
      plan.writes.push_back({sequence, head, position, page_end});
      position = page_end;
    }
    for (int position = begin; position < end; position += tile_tokens) {
      WorkItem item{};
      item.kind = WorkItem::Kind::kPrefill;
      item.sequence = sequence;
      item.first_head = head;
      item.num_heads = 1;
      item.begin = position;
      item.end = std::min(end, position + tile_tokens);
      const int64_t seen = item.end - first_visible(item.begin, plan.window);
      item.cost = 4 * seen * (item.end - item.begin) * plan.group * tables_.head_dim / kFlopsPerNanosecond;
      plan.items.push_back(item);
    }
  }
}

}  // namespace vera
