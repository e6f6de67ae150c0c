#include "attention.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <new>
#include <stdexcept>
#include <tuple>

#include "isa.h"
#include "threads.h"

namespace vera {
namespace {

constexpr std::align_val_t kAlignment{64};
// Less work than this is done sooner than other threads are woken.
constexpr int64_t kSerialNanoseconds = 8000;

// A counter that threads take their work from.
class Tickets {
 public:
  int take() { return next_.fetch_add(1, std::memory_order_relaxed); }

 private:
  std::atomic<int> next_{0};
};

}  // namespace

float* FloatBuffer::reserve(size_t count) {
  if (count > size_) {
    data_.reset();
    size_ = 0;
    data_.reset(static_cast<float*>(operator new(count * sizeof(float), kAlignment)));
    size_ = count;
  }
  return data_.get();
}

void FloatBuffer::Free::operator()(float* data) const { operator delete(data, kAlignment); }

Attention::Attention(const std::string& isa) : kernels_(choose_kernels(isa)) {}

// What a row served within bounds leaves for the report.
struct RowResult {
  TieredOutcome outcome;
  int64_t exact, by_sketch, left_out, cold_hits;  // pages
  int64_t bytes_read;
};

// One call of attend, shared by its threads.
class LayerRun {
 public:
  LayerRun(Attention& attention, const Batch& batch, const Plan& plan, const LayerCall& call)
      : attention_(attention),
        batch_(batch),
        plan_(plan),
        call_(call),
        type_(int(batch.tables().page_type)),
        shape_{batch.tables().page_size, batch.tables().head_dim, plan.group},
        partials_(attention.partials_.reserve(plan.partial_floats)),
        row_states_(attention.row_states_.reserve(plan.row_state_floats)),
        probe_stride_(2 * size_t(batch.tables().max_blocks)),
        probes_(attention.probes_.reserve(plan.probes.size() * probe_stride_)),
        unfinished_(plan.runs.size() + plan.rows.size()),
        results_(plan.rows.size()) {
    for (size_t i = 0; i < plan.runs.size(); i++) unfinished_[i].store(plan.runs[i].num_partials, std::memory_order_relaxed);
    for (size_t i = 0; i < plan.rows.size(); i++)
      unfinished_[plan.runs.size() + i].store(plan.rows[i].num_spans, std::memory_order_relaxed);
    if (int(attention.scratch_.size()) < plan.num_threads) attention.scratch_.resize(size_t(plan.num_threads));
    const int max_blocks = batch.tables().max_blocks;
    size_t floats = std::max(kPrefillScratchFloats, decode_scratch_floats(plan.heads_per_item * plan.group, shape_.head_dim));
    if (plan.num_pages > 0) floats = std::max(floats, tiered_scratch_floats(shape_, max_blocks));
    const size_t pages = size_t(plan.heads_per_item) * (kSpanTokens / shape_.page_size) + size_t(max_blocks);
    for (auto& scratch : attention.scratch_) {
      scratch.floats.reserve(floats);
      scratch.row_state.reserve(plan.largest_state_floats);
      if (scratch.pages.size() < pages) scratch.pages.resize(pages);
      if (batch.tiers() != nullptr && scratch.sketches.size() < pages) scratch.sketches.resize(pages);
      scratch.hits.clear();
    }
    if (attention.tiered_pages_.size() < plan.num_pages) attention.tiered_pages_.resize(plan.num_pages);
  }

  void run() {
    if (batch_.tiers() != nullptr) look_up();
    if (!plan_.writes.empty()) parallel(plan_.writes.size(), &LayerRun::write_prefill);
    parallel(plan_.items.size(), &LayerRun::attend);
    if (plan_.split_rows && !plan_.rows.empty()) {
      parallel(plan_.rows.size(), &LayerRun::select);
      parallel(plan_.value_items.size(), &LayerRun::add_values);
    }
    if (!call_.again) report();
  }

  std::vector<Hit> take_hits() {
    std::vector<Hit> hits;
    for (auto& scratch : attention_.scratch_) hits.insert(hits.end(), scratch.hits.begin(), scratch.hits.end());
    const auto place = [](const Hit& hit) { return std::make_tuple(hit.sequence, hit.kv_head, hit.block); };
    std::sort(hits.begin(), hits.end(), [&](const Hit& a, const Hit& b) { return place(a) < place(b); });
    return hits;
  }

  // Keys and values read for rows served within bounds.
  int64_t row_bytes() const {
    int64_t bytes = 0;
    for (const RowResult& result : results_) bytes += result.bytes_read;
    return bytes;
  }

 private:
  struct Phase {
    LayerRun* run;
    void (LayerRun::*work)(Phase& phase, int thread);
    Tickets threads, items;
  };

  void parallel(size_t num_items, void (LayerRun::*work)(Phase& phase, int thread)) {
    Phase phase{this, work, {}, {}};
    // One thread or all of them: OpenMP ends the threads that a smaller team leaves over and starts them anew for the next.
    const bool alone = num_items <= 1 || plan_.cost < kSerialNanoseconds;
    run_parallel(
        alone ? 1 : plan_.num_threads,
        [](void* argument) {
          Phase& shared = *static_cast<Phase*>(argument);
          (shared.run->*shared.work)(shared, shared.threads.take());
        },
        &phase);
  }

  // Throws what is wrong with the first sequence of which anything is, when all have been looked at.
  void look_up() {
    problems_.resize(size_t(batch_.tables().sequences));
    parallel(problems_.size(), &LayerRun::look_up_sequences);
    for (const std::exception_ptr& problem : problems_)
      if (problem) std::rethrow_exception(problem);
  }

  void look_up_sequences(Phase& phase, int) {
    for (int sequence; (sequence = phase.items.take()) < int(problems_.size());) {
      const Service service = plan_.services[size_t(sequence)];
      const bool wanted = service == Service::kBounded || (service == Service::kPrompt && batch_.tiers()->probes[sequence] > 0);
      try {
        batch_.look_up(sequence, call_.layer, plan_.window, service, wanted ? tiered_pages(sequence, 0) : nullptr);
      } catch (...) {
        problems_[size_t(sequence)] = std::current_exception();
      }
    }
  }

  void write_prefill(Phase& phase, int) {
    for (int i; (i = phase.items.take()) < int(plan_.writes.size());) {
      const WriteItem& item = plan_.writes[size_t(i)];
      write(item.sequence, item.kv_head, item.begin, item.end);
    }
  }

  void write(int sequence, int kv_head, int begin, int end) {
    const PageRef page = batch_.page(sequence, begin / shape_.page_size, call_.layer, kv_head);
    const int row = batch_.row(sequence, begin);
    TokenWrite write;
    write.shape = shape_;
    write.keys = const_cast<void*>(page.keys);
    write.values = const_cast<void*>(page.values);
    write.offset = begin % shape_.page_size;
    write.num_tokens = end - begin;
    write.new_keys = call_.key.at(row, kv_head);
    write.key_token_stride = call_.key.token_stride;
    write.new_values = call_.value.at(row, kv_head);
    write.value_token_stride = call_.value.token_stride;
    attention_.kernels_.exact.write_tokens[type_](write);
  }

  // Takes the next item before working on one: its first page is fetched while the last one of this item is worked on.
  void attend(Phase& phase, int thread) {
    Attention::ThreadScratch& scratch = attention_.scratch_[size_t(thread)];
    const int count = int(plan_.items.size());
    for (int index = phase.items.take(); index < count;) {
      const int next = phase.items.take();
      const WorkItem& item = plan_.items[size_t(index)];
      const WorkItem* next_item = next < count ? &plan_.items[size_t(next)] : nullptr;
      switch (item.kind) {
        case WorkItem::Kind::kDecode:
          decode(item, next_item != nullptr ? first_page(*next_item) : PageRef{}, scratch);
          break;
        case WorkItem::Kind::kPrefill:
          prefill(item, scratch);
          break;
        case WorkItem::Kind::kRow:
          attend_row(item, next_item, scratch);
          break;
        case WorkItem::Kind::kLogits:
          logits(item, scratch);
          break;
        case WorkItem::Kind::kProbe:
          if (!call_.again) probe(item, scratch);
          break;
      }
      index = next;
    }
  }

  PageRef first_page(const WorkItem& item) const {
    const int position = item.kind == WorkItem::Kind::kPrefill ? first_position(item) : item.begin;
    return batch_.page(item.sequence, position / shape_.page_size, call_.layer, item.first_head);
  }

  // The first position that a prefill item reads.
  int first_position(const WorkItem& item) const { return plan_.window == 0 ? 0 : std::max(0, item.begin + 1 - plan_.window); }

  // Fills scratch.pages with those of the positions [begin, end), [blocks][heads], and returns the number of blocks.
  int find_pages(const WorkItem& item, int begin, int end, Attention::ThreadScratch& scratch) const {
    const int first = begin / shape_.page_size, last = (end - 1) / shape_.page_size;
    PageRef* page = scratch.pages.data();
    for (int block = first; block <= last; block++)
      for (int head = 0; head < item.num_heads; head++)
        *page++ = batch_.page(item.sequence, block, call_.layer, item.first_head + head);
    return last + 1 - first;
  }

  // The same pages' sketches to scratch.sketches.
  void find_sketches(const WorkItem& item, int begin, int end, Attention::ThreadScratch& scratch) const {
    SketchRef* sketch = scratch.sketches.data();
    for (int block = begin / shape_.page_size; block <= (end - 1) / shape_.page_size; block++)
      *sketch++ = batch_.sketch(item.sequence, block, call_.layer, item.first_head);
  }

  void decode(const WorkItem& item, PageRef next, Attention::ThreadScratch& scratch) {
    const int context = batch_.context(item.sequence);
    if (item.end == context)
      for (int head = 0; head < item.num_heads; head++) write(item.sequence, item.first_head + head, context - 1, context);
    const int row = batch_.row(item.sequence, context - 1), first_query = item.first_head * shape_.group;
    const int skipped = item.begin / shape_.page_size * shape_.page_size;
    const DecodeRun& run = plan_.runs[size_t(item.run)];
    const int query_heads = run.num_heads * shape_.group;
    float* partials = partials_ + run.partials;
    find_pages(item, item.begin, item.end, scratch);
    DecodeSpan span;
    span.shape = shape_;
    span.options = call_.options;
    span.kv_heads = item.num_heads;
    span.pages = scratch.pages.data();
    span.begin = item.begin - skipped;
    span.end = item.end - skipped;
    span.next = next;
    span.query = call_.query.at(row, first_query);
    span.head_stride = call_.query.head_stride;
    span.scratch = scratch.floats.data();
    span.partial = partials + size_t(item.partial) * partial_floats(query_heads, shape_.head_dim);
    attention_.kernels_.exact.decode_span[type_](span);

    // acquire and release: the last one sees the partial results of all the others.
    if (unfinished_[size_t(item.run)].fetch_sub(1, std::memory_order_acq_rel) == 1) {
      DecodeMerge merge;
      merge.query_heads = query_heads;
      merge.head_dim = shape_.head_dim;
      merge.partials = partials;
      merge.num_partials = run.num_partials;
      merge.sinks = sinks(first_query);
      merge.output = output(row, first_query);
      attention_.kernels_.exact.merge_decode(merge);
    }
  }

  void prefill(const WorkItem& item, Attention::ThreadScratch& scratch) {
    const int row = batch_.row(item.sequence, item.begin), first_query = item.first_head * shape_.group;
    const int begin = first_position(item);
    PrefillTile tile;
    tile.shape = shape_;
    tile.options = call_.options;
    tile.pages = scratch.pages.data();
    tile.num_pages = find_pages(item, begin, item.end, scratch);
    tile.sketches = batch_.tiers() != nullptr ? scratch.sketches.data() : nullptr;
    tile.sketch_bits = batch_.tiers() != nullptr ? batch_.tiers()->sketch_bits : 0;
    if (tile.sketches != nullptr) find_sketches(item, begin, item.end, scratch);
    tile.first_position = begin / shape_.page_size * shape_.page_size;
    tile.query_position = item.begin;
    tile.num_tokens = item.end - item.begin;
    tile.window = plan_.window;
    tile.sinks = sinks(first_query);
    tile.query = call_.query.at(row, first_query);
    tile.token_stride = call_.query.token_stride;
    tile.head_stride = call_.query.head_stride;
    tile.scratch = scratch.floats.data();
    tile.output = output(row, first_query);
    tile.output_token_stride = ptrdiff_t(call_.query_heads) * shape_.head_dim;
    attention_.kernels_.exact.prefill_tile[type_](tile);
  }

  // ---- rows served within bounds

  TieredPage* tiered_pages(int sequence, int kv_head) const {
    return attention_.tiered_pages_.data() + plan_.first_pages[size_t(sequence)] + kv_head;
  }

  // The row of the query at `position`.
  TieredRow make_row(int sequence, int kv_head, int position, float* state, Attention::ThreadScratch& scratch) const {
    const TierTables& tiers = *batch_.tiers();
    const int token = batch_.row(sequence, position), first_query = kv_head * shape_.group;
    TieredRow row{};
    row.shape = shape_;
    row.options = call_.options;
    row.sketch_bits = tiers.sketch_bits;
    row.pages = tiered_pages(sequence, kv_head);
    row.page_stride = batch_.tables().kv_heads;
    row.tokens = position + 1;
    row.num_pages = position / shape_.page_size + 1;
    row.tolerance = tiers.tolerances[sequence];
    row.skip_share = tiers.skip_share;
    row.query = call_.query.at(token, first_query);
    row.head_stride = call_.query.head_stride;
    row.sinks = sinks(first_query);
    row.scratch = scratch.floats.data();
    row.state = tiered_state(shape_, row.num_pages, state);
    row.output = output(token, first_query);
    return row;
  }

  TieredRow make_row(const WorkItem& item, float* state, Attention::ThreadScratch& scratch) {
    TieredRow row = make_row(item.sequence, item.first_head, batch_.context(item.sequence) - 1, state, scratch);
    row.outcome = &results_[size_t(item.run)].outcome;
    return row;
  }

  float* state_of(const WorkItem& item) const { return row_states_ + plan_.rows[size_t(item.run)].state; }

  void write_new_token(const WorkItem& item) {
    const int context = batch_.context(item.sequence);
    if (item.end == context) write(item.sequence, item.first_head, context - 1, context);
  }

  void attend_row(const WorkItem& item, const WorkItem* next, Attention::ThreadScratch& scratch) {
    write_new_token(item);
    TieredRow row = make_row(item, scratch.row_state.data(), scratch);
    if (next != nullptr && next->kind == WorkItem::Kind::kRow) {
      row.next_pages = tiered_pages(next->sequence, next->first_head);
      row.num_next_pages = batch_.num_blocks(next->sequence);
    }
    const TieredKernels& kernels = attention_.kernels_.tiered;
    kernels.logits[type_](row, 0, row.num_pages);
    kernels.select[type_](row);
    kernels.values[type_](row, 0, plan_.rows[size_t(item.run)].num_spans);
    kernels.merge(row);
    record_row(item, row, scratch);
  }

  void logits(const WorkItem& item, Attention::ThreadScratch& scratch) {
    write_new_token(item);
    const TieredRow row = make_row(item, state_of(item), scratch);
    attention_.kernels_.tiered.logits[type_](row, item.begin / shape_.page_size, (item.end - 1) / shape_.page_size + 1);
  }

  void select(Phase& phase, int thread) {
    Attention::ThreadScratch& scratch = attention_.scratch_[size_t(thread)];
    for (int i; (i = phase.items.take()) < int(plan_.rows.size());) {
      WorkItem item{};
      item.sequence = plan_.rows[size_t(i)].sequence;
      item.first_head = plan_.rows[size_t(i)].kv_head;
      item.run = i;
      const TieredRow row = make_row(item, state_of(item), scratch);
      attention_.kernels_.tiered.select[type_](row);
      record_row(item, row, scratch);
    }
  }

  void add_values(Phase& phase, int thread) {
    Attention::ThreadScratch& scratch = attention_.scratch_[size_t(thread)];
    for (int i; (i = phase.items.take()) < int(plan_.value_items.size());) {
      const WorkItem& item = plan_.value_items[size_t(i)];
      const TieredRow row = make_row(item, state_of(item), scratch);
      attention_.kernels_.tiered.values[type_](row, item.begin / kSpanTokens, item.begin / kSpanTokens + 1);
      if (unfinished_[plan_.runs.size() + size_t(item.run)].fetch_sub(1, std::memory_order_acq_rel) == 1)
        attention_.kernels_.tiered.merge(row);
    }
  }

  // Keeps what the report needs of a row whose values are chosen.
  void record_row(const WorkItem& item, const TieredRow& row, Attention::ThreadScratch& scratch) {
    RowResult& result = results_[size_t(item.run)];
    int64_t read_exactly = 0, read_by_sketch = 0;
    for (int block = 0; block < row.num_pages; block++) {
      const PageService service = row.state.service[block];
      result.by_sketch += service.by_sketch;
      result.left_out += service.left_out;
      read_by_sketch += service.by_sketch & !service.left_out;
      read_exactly += !service.by_sketch & !service.left_out;
      if (!service.hit) continue;
      result.cold_hits += service.by_sketch;
      if (!call_.again) scratch.hits.push_back({item.sequence, call_.layer, item.first_head, block, service.by_sketch ? 1 : 0});
    }
    result.exact = row.num_pages - result.by_sketch;
    result.bytes_read = (result.exact + read_exactly) * batch_.half_page_bytes() +
                        result.by_sketch * key_part_bytes(shape_.page_size, shape_.head_dim, row.sketch_bits) +
                        read_by_sketch * value_part_bytes(shape_.page_size, shape_.head_dim, row.sketch_bits);
    if (call_.again) return;
    const size_t at = report_place(item.sequence, item.first_head);
    for (int block = 0; block < row.num_pages; block++) {
      batch_.tiers()->masses[at + size_t(block)] += row.state.peaks[block];
      if (row.state.service[block].hit || row.state.needed[block] > 0.0f)
        batch_.tiers()->frequencies[at + size_t(block)] += 1.0f;
    }
  }

  size_t report_place(int sequence, int kv_head) const {
    const TierTables& tiers = *batch_.tiers();
    const int64_t row = int64_t(tiers.report_rows[sequence]) * batch_.tables().layers + call_.layer;
    return size_t((row * batch_.tables().kv_heads + kv_head) * tiers.report_blocks);
  }

  // The sums of several queries' masses, then of their hits, to memory of the item's own.
  void probe(const WorkItem& item, Attention::ThreadScratch& scratch) {
    float* masses = probes_ + size_t(item.partial) * probe_stride_;
    float* hits = masses + batch_.tables().max_blocks;
    std::fill_n(masses, probe_stride_, 0.0f);
    for (int position = item.begin; position < item.end; position++) {
      TieredRow row = make_row(item.sequence, item.first_head, position, scratch.row_state.data(), scratch);
      row.probe = true;
      attention_.kernels_.tiered.logits[type_](row, 0, row.num_pages);
      attention_.kernels_.tiered.select[type_](row);
      for (int block = 0; block < row.num_pages; block++) {
        masses[block] += row.state.peaks[block];
        hits[block] += float(row.state.service[block].hit);
      }
    }
  }

  // What threads may not add at once, and in the same order whatever their number.
  void report() {
    for (const WorkItem& item : plan_.probes) {
      const float* masses = probes_ + size_t(item.partial) * probe_stride_;
      const float* hits = masses + batch_.tables().max_blocks;
      const size_t at = report_place(item.sequence, item.first_head);
      for (int block = 0; block < (item.end - 1) / shape_.page_size + 1; block++) {
        batch_.tiers()->masses[at + size_t(block)] += masses[block];
        batch_.tiers()->frequencies[at + size_t(block)] += hits[block];
      }
    }
    for (size_t i = 0; i < plan_.rows.size(); i++) {
      const RowResult& result = results_[i];
      double* errors = batch_.tiers()->errors + 3 * plan_.rows[i].sequence;
      errors[0] += result.outcome.error_sum;
      errors[1] = std::max(errors[1], result.outcome.largest_error);
      errors[2] += shape_.group;
      int64_t* pages_read = batch_.tiers()->pages_read;
      pages_read[0] += result.exact;
      pages_read[1] += result.by_sketch;
      pages_read[2] += result.left_out;
      pages_read[3] += result.cold_hits;
    }
  }

  const float* sinks(int head) const { return call_.sinks == nullptr ? nullptr : call_.sinks + head; }
  float* output(int row, int head) const { return call_.output + (int64_t(row) * call_.query_heads + head) * shape_.head_dim; }

  Attention& attention_;
  const Batch& batch_;
  const Plan& plan_;
  const LayerCall& call_;
  const int type_;
  const Shape shape_;
  float* const partials_;
  float* const row_states_;
  const size_t probe_stride_;  // floats of a probe item
  float* const probes_;
  std::vector<std::atomic<int>> unfinished_;  // items, by run, then spans of values, by row
  std::vector<RowResult> results_;            // by row
  std::vector<std::exception_ptr> problems_;  // by sequence
};

std::vector<Hit> Attention::attend(Batch& batch, const LayerCall& call) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto start = std::chrono::steady_clock::now();
  const BatchTables& tables = batch.tables();
  if (call.layer < 0 || call.layer >= tables.layers)
    throw std::out_of_range("layer=" + std::to_string(call.layer) + " is outside the " + std::to_string(tables.layers) +
                            " layers of page_table");
  const int group = call.query_heads / tables.kv_heads;
  if (group * tables.kv_heads != call.query_heads || group < 1 || group > kMaxGroup)
    throw std::invalid_argument(std::to_string(call.query_heads) + " query heads for " + std::to_string(tables.kv_heads) +
                                " KV heads: the cpu backend needs a whole multiple of at most " + std::to_string(kMaxGroup));
  if (batch.tiers() == nullptr) batch.check_present(call.layer, call.window);
  const Plan& plan = batch.plan(group, call.window, std::max(1, call.num_threads));
  if (plan.items.empty()) return {};
  LayerRun run(*this, batch, plan, call);
  run.run();

  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  counters_.seconds += seconds;
  if (plan.writes.empty()) {
    counters_.decode_seconds += seconds;
    counters_.decode_bytes_read += plan.decode_bytes + run.row_bytes();
  }
  return run.take_hits();
}

}  // namespace vera
