#include "attention.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <new>
#include <stdexcept>

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
        unfinished_(plan.runs.size()) {
    for (size_t i = 0; i < plan.runs.size(); i++) unfinished_[i].store(plan.runs[i].num_partials, std::memory_order_relaxed);
    if (int(attention.scratch_.size()) < plan.num_threads) attention.scratch_.resize(size_t(plan.num_threads));
    const size_t decode_floats = decode_scratch_floats(plan.heads_per_item * plan.group, shape_.head_dim);
    const size_t pages = size_t(plan.heads_per_item) * (kSpanTokens / shape_.page_size) + size_t(batch.tables().max_blocks);
    for (auto& scratch : attention.scratch_) {
      scratch.floats.reserve(std::max(kPrefillScratchFloats, decode_floats));
      if (scratch.pages.size() < pages) scratch.pages.resize(pages);
    }
  }

  void run() {
    if (!plan_.writes.empty()) parallel(plan_.writes.size(), &LayerRun::write_prefill);
    parallel(plan_.items.size(), &LayerRun::attend);
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
    attention_.kernels_.write_tokens[type_](write);
  }

  // Takes the next item before working on one: its first page is fetched while the last one of this item is worked on.
  void attend(Phase& phase, int thread) {
    Attention::ThreadScratch& scratch = attention_.scratch_[size_t(thread)];
    const int count = int(plan_.items.size());
    for (int index = phase.items.take(); index < count;) {
      const int next = phase.items.take();
      const WorkItem& item = plan_.items[size_t(index)];
      if (item.kind == WorkItem::Kind::kDecode)
        decode(item, next < count ? first_page(plan_.items[size_t(next)]) : PageRef{}, scratch);
      else
        prefill(item, scratch);
      index = next;
    }
  }

  PageRef first_page(const WorkItem& item) const {
    const int position = item.kind == WorkItem::Kind::kDecode ? item.begin : first_position(item);
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
    attention_.kernels_.decode_span[type_](span);

    // acquire and release: the last one sees the partial results of all the others.
    if (unfinished_[size_t(item.run)].fetch_sub(1, std::memory_order_acq_rel) == 1) {
      DecodeMerge merge;
      merge.query_heads = query_heads;
      merge.head_dim = shape_.head_dim;
      merge.partials = partials;
      merge.num_partials = run.num_partials;
      merge.sinks = sinks(first_query);
      merge.output = output(row, first_query);
      attention_.kernels_.merge_decode(merge);
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
    attention_.kernels_.prefill_tile[type_](tile);
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
  std::vector<std::atomic<int>> unfinished_;  // items, by run
};

void Attention::attend(Batch& batch, const LayerCall& call) {
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
  batch.check_present(call.layer, call.window);
  const Plan& plan = batch.plan(group, call.window, std::max(1, call.num_threads));
  if (plan.items.empty()) return;
  LayerRun(*this, batch, plan, call).run();

  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  counters_.seconds += seconds;
  if (plan.writes.empty()) {
    counters_.decode_seconds += seconds;
    counters_.decode_bytes_read += plan.decode_bytes;
  }
}

}  // namespace vera
