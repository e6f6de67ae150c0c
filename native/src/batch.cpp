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

// Rows for each thread from which on every row is done by one thread, so that its weights stay in that core's cache.
constexpr int kRowsPerThread = 3;
// Query tokens of a probe item.
constexpr int kProbeTokens = 8;
// A page read by its sketch costs about this share of the time that it costs exactly.
constexpr int64_t kSketchSpeedup = 3;

// First token that the query at `position` sees.
int first_visible(int position, int window) { return window == 0 ? 0 : std::max(0, position + 1 - window); }

}  // namespace

Batch::Batch(const BatchTables& tables, const std::optional<TierTables>& tiers)
    : tables_(tables),
      tiers_(tiers),
      half_page_bytes_(int64_t(tables.page_size) * tables.head_dim * kItemBytes[int(tables.page_type)]),
      token_bytes_(2 * int64_t(tables.head_dim) * kItemBytes[int(tables.page_type)]),
      layer_has_gaps_(size_t(tables.layers)) {
  check_sizes();
  if (tiers_) check_tiers();
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

void Batch::check_tiers() const {
  const int bits = tiers_->sketch_bits, head_dim = tables_.head_dim;
  if (bits != 2 && bits != 4 && bits != 8) refuse("sketch_bits=" + text(bits) + " is not one of 2, 4, 8");
  if (head_dim % 16 != 0) refuse("head_dim=" + text(head_dim) + " cannot be sketched: it must be a multiple of 16");
  if (tiers_->window_layers < 1) refuse("window_layers=" + text(tiers_->window_layers) + " must be at least 1");
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
      if (tiers_) continue;  // slots may change: they are looked at in each call
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

std::vector<Service> Batch::services(int window) const {
  std::vector<Service> services;
  if (!tiers_) return services;
  services.resize(size_t(tables_.sequences), Service::kIdle);
  for (int sequence = 0; sequence < tables_.sequences; sequence++) {
    if (new_tokens(sequence) == 0) continue;
    bool bounded = false;
    if (window == 0 && tiers_->tolerances[sequence] >= 0)
      for (int block = 0; block < num_blocks(sequence) && !bounded; block++)
        bounded = tiers_->sketch_keys[block_id(sequence, block)] >= 0;
    services[size_t(sequence)] = !bounded                      ? Service::kExact
                                 : new_tokens(sequence) == 1 ? Service::kBounded
                                                             : Service::kPrompt;
  }
  return services;
}

int64_t Batch::sketch_room(int layer) const {
  return tiers_->arena_bytes - (int64_t(layer) * tables_.kv_heads + tables_.kv_heads - 1) * tiers_->sketch_stride;
}

void Batch::explain(int sequence, int block, int layer, Service service, bool written) const {
  const int64_t id = block_id(sequence, block);
  const std::string where = "sequence " + text(sequence) + ", layer " + text(layer) + ", block " + text(block);
  for (int head = 0; head < tables_.kv_heads; head++) {
    const int32_t slot = slot_of(id, layer, head);
    if (slot >= 0 && slot < tables_.num_pages) continue;
    if (slot != -1)
      throw std::out_of_range(where + ": page_table holds " + text(slot) + ", outside the " + text(tables_.num_pages) +
                              " pages of the pool");
    const std::string missing = where + ", KV head " + text(head) + " is NO_PAGE in page_table";
    if (written) throw std::out_of_range(missing + ", but the block is written to");
    if (page_of(id, layer, head).keys != nullptr) continue;
    if (service == Service::kExact)
      throw std::out_of_range(missing + " and cold, but it is to be read exactly; restore it first");
    if (tiers_->sketch_keys[id] < 0) throw std::out_of_range(missing + " and has neither a warm address nor a sketch");
  }
  throw std::out_of_range(where + ": its sketch at " + text(tiers_->sketch_keys[id]) + " and " + text(tiers_->sketch_values[id]) +
                          " lies outside the arena of " + text(tiers_->arena_bytes) + " bytes");
}

void Batch::look_up(int sequence, int layer, int window, Service service, TieredPage* pages) const {
  if (service == Service::kIdle) return;
  const bool reported = service == Service::kBounded || service == Service::kPrompt;
  if (reported && (tiers_->report_rows[sequence] < 0 || tiers_->report_rows[sequence] >= tiers_->num_report_rows ||
                   num_blocks(sequence) > tiers_->report_blocks))
    throw std::out_of_range("sequence " + text(sequence) + ": report_rows=" + text(tiers_->report_rows[sequence]) + " with " +
                            text(num_blocks(sequence)) + " blocks does not fit the report's " + text(tiers_->num_report_rows) +
                            " rows of " + text(tiers_->report_blocks));
  const int first_new = context(sequence) - new_tokens(sequence), first_written = first_new / tables_.page_size;
  const int64_t room = sketch_room(layer);
  const int64_t last_key_start = room - key_part_bytes(tables_.page_size, tables_.head_dim, tiers_->sketch_bits);
  const int64_t last_value_start = room - value_part_bytes(tables_.page_size, tables_.head_dim, tiers_->sketch_bits);
  // This runs for every page of every layer, so it does little: what is wrong is found out only when something is.
  const int heads = tables_.kv_heads;
  const int64_t page_bytes = 2 * half_page_bytes_, sketch_place = int64_t(layer) * heads * tiers_->sketch_stride;
  const int64_t warm_place = int64_t(layer % tiers_->window_layers) * heads * page_bytes;
  const int64_t* warm = tiers_->warm + layer / tiers_->window_layers;
  for (int block = first_visible(first_new, window) / tables_.page_size; block < num_blocks(sequence); block++) {
    const int64_t id = block_id(sequence, block);
    const int64_t key_start = tiers_->sketch_keys[id], value_start = tiers_->sketch_values[id];
    const int64_t warm_start = warm[id * tiers_->windows];
    const int32_t* slots = tables_.page_table + (id * tables_.layers + layer) * heads;
    const bool written = block >= first_written;
    const bool readable = !written && (warm_start != 0 || (service != Service::kExact && key_start >= 0));
    bool fine = key_start >= -1 && key_start <= last_key_start && value_start <= last_value_start &&
                (value_start < 0) == (key_start < 0);
    for (int head = 0; head < heads; head++)
      fine &= slots[head] >= 0 ? slots[head] < tables_.num_pages : readable && slots[head] == -1;
    if (!fine) explain(sequence, block, layer, service, written);
    if (pages == nullptr) continue;
    const uint8_t* sketch = tiers_->arena + sketch_place;
    auto* warm_page = warm_start == 0 ? nullptr : reinterpret_cast<std::byte*>(warm_start) + warm_place;
    for (int head = 0; head < heads; head++) {
      TieredPage& page = pages[block * heads + head];
      std::byte* exact = slots[head] >= 0 ? tables_.pages + slots[head] * page_bytes : warm_page;
      page.exact = {exact, exact == nullptr ? nullptr : exact + half_page_bytes_};
      page.sketch = key_start < 0 ? SketchRef{nullptr, nullptr} : SketchRef{sketch + key_start, sketch + value_start};
      page.has_slot = slots[head] >= 0;
      sketch += tiers_->sketch_stride;
      if (warm_page != nullptr) warm_page += page_bytes;
    }
  }
}

const Plan& Batch::plan(int group, int window, int num_threads) {
  std::vector<Service> now = services(window);
  for (const Plan& plan : plans_)
    if (plan.group == group && plan.window == window && plan.num_threads == num_threads && plan.services == now) return plan;
  return plans_.emplace_back(make_plan(group, window, num_threads, std::move(now)));
}

Plan Batch::make_plan(int group, int window, int num_threads, std::vector<Service> services) const {
  Plan plan;
  plan.group = group;
  plan.window = window;
  plan.num_threads = num_threads;
  plan.services = std::move(services);
  plan.heads_per_item = choose_heads_per_item(plan);
  plan.first_pages.resize(size_t(tables_.sequences));
  for (int sequence = 0; sequence < tables_.sequences; sequence++) {
    const bool bounded = !plan.services.empty() && plan.services[size_t(sequence)] == Service::kBounded;
    if (bounded)
      plan_rows(plan, sequence);
    else if (new_tokens(sequence) == 1)
      plan_decode(plan, sequence);
    else if (new_tokens(sequence) > 1)
      plan_prefill(plan, sequence);
  }
  finish_rows(plan);
  for (const WorkItem& item : plan.items) plan.cost += item.cost;
  std::stable_sort(plan.items.begin(), plan.items.end(), [](const WorkItem& a, const WorkItem& b) { return a.cost > b.cost; });
  return plan;
}

int Batch::choose_heads_per_item(const Plan& plan) const {
  int64_t spans = 0;
  for (int sequence = 0; sequence < tables_.sequences; sequence++) {
    const int end = context(sequence);
    const bool bounded = !plan.services.empty() && plan.services[size_t(sequence)] == Service::kBounded;
    if (new_tokens(sequence) == 1 && !bounded) spans += (end - 1) / kSpanTokens + 1 - first_visible(end - 1, plan.window) / kSpanTokens;
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
  if (!plan.services.empty() && plan.services[size_t(sequence)] == Service::kPrompt) plan_probes(plan, sequence);
}

void Batch::plan_rows(Plan& plan, int sequence) const {
  const int end = context(sequence);
  plan.first_pages[size_t(sequence)] = plan.num_pages;
  plan.num_pages += size_t(num_blocks(sequence)) * size_t(tables_.kv_heads);
  for (int head = 0; head < tables_.kv_heads; head++)
    plan.rows.push_back({sequence, head, 0, (end + kSpanTokens - 1) / kSpanTokens});
}

void Batch::plan_probes(Plan& plan, int sequence) const {
  const int end = context(sequence), begin = end - std::min(new_tokens(sequence), int(tiers_->probes[sequence]));
  if (begin >= end) return;
  plan.first_pages[size_t(sequence)] = plan.num_pages;
  plan.num_pages += size_t(num_blocks(sequence)) * size_t(tables_.kv_heads);
  for (int head = 0; head < tables_.kv_heads; head++)
    for (int position = begin; position < end; position += kProbeTokens) {
      WorkItem item{};
      item.kind = WorkItem::Kind::kProbe;
      item.sequence = sequence;
      item.first_head = head;
      item.num_heads = 1;
      item.begin = position;
      item.end = std::min(end, position + kProbeTokens);
      item.partial = int(plan.probes.size());
      item.cost = (item.end - item.begin) * item.end * token_bytes_ / kBytesReadPerNanosecond / kSketchSpeedup;
      plan.probes.push_back(item);
      plan.items.push_back(item);
    }
}

// Decides whether rows are split, and makes their items.
void Batch::finish_rows(Plan& plan) const {
  const Shape shape{tables_.page_size, tables_.head_dim, plan.group};
  plan.split_rows = plan.num_threads > 1 && int(plan.rows.size()) < kRowsPerThread * plan.num_threads;
  size_t largest = 0, all = 0;
  for (size_t index = 0; index < plan.rows.size(); index++) {
    RowPlan& row = plan.rows[index];
    const size_t floats = tiered_state_floats(shape, num_blocks(row.sequence));
    row.state = all;
    all += floats;
    largest = std::max(largest, floats);
    WorkItem item{};
    item.kind = plan.split_rows ? WorkItem::Kind::kLogits : WorkItem::Kind::kRow;
    item.sequence = row.sequence;
    item.first_head = row.kv_head;
    item.num_heads = 1;
    item.run = int(index);
    const int end = context(row.sequence);
    const int pieces = plan.split_rows ? row.num_spans : 1;
    for (int piece = 0; piece < pieces; piece++) {
      item.begin = piece * kSpanTokens;
      item.end = piece + 1 < pieces ? item.begin + kSpanTokens : end;
      item.cost = (item.end - item.begin) * token_bytes_ / kBytesReadPerNanosecond / kSketchSpeedup;
      plan.items.push_back(item);
      if (plan.split_rows) plan.value_items.push_back(item);
    }
  }
  for (const WorkItem& probe : plan.probes) largest = std::max(largest, tiered_state_floats(shape, num_blocks(probe.sequence)));
  plan.row_state_floats = plan.split_rows ? all : 0;
  plan.largest_state_floats = largest;
}

}  // namespace vera
