#include <algorithm>
#include <memory>
#include <new>

#include "checks.h"
#include "decoder.h"
#include "phases.h"

namespace vera {
namespace {

void check(const BeforeAttention& layer) {
  check_format(layer.format);
  check_positive("rows", layer.rows);
  check_positive("hidden_size", layer.hidden_size);
  check_positive("query_heads", layer.query_heads);
  check_positive("kv_heads", layer.kv_heads);
  refuse_unless(layer.head_dim > 0 && layer.head_dim % 2 == 0, "head_dim", layer.head_dim, "even and at least 2");
}

void check(const AfterAttention& layer) {
  check_format(layer.format);
  check_positive("rows", layer.rows);
  check_positive("hidden_size", layer.hidden_size);
  check_positive("query_size", layer.query_size);
  check_positive("intermediate_size", layer.intermediate_size);
}

// Memory that a thread keeps between calls: the most that it has ever needed.
class Scratch {
 public:
  float* at_least(size_t floats) {
    if (floats > capacity_) {
      capacity_ = 0;
      memory_.reset(static_cast<float*>(::operator new[](floats * sizeof(float), kAlignment)));
      capacity_ = floats;
    }
    return memory_.get();
  }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Delete {
    void operator()(float* p) const { ::operator delete[](p, kAlignment); }
  };
  std::unique_ptr<float[], Delete> memory_;
  size_t capacity_ = 0;
};

// All rows after RMSNorm. Each thread has them of its own: sooner computed again than waited for and read from another core.
class NormedRows {
 public:
  NormedRows(const DecoderKernels& kernels, const float* x, const Norm& norm, int rows, int size)
      : kernels_(kernels), x_(x), norm_(norm), rows_(rows), size_(size) {}

  // Computed in the first call.
  const float* get() {
    if (normed_ == nullptr) {
      thread_local Scratch scratch;
      normed_ = scratch.at_least(size_t(rows_) * size_t(size_));
      kernels_.rms_norm(x_, norm_.weight, norm_.eps, normed_, rows_, size_);
    }
    return normed_;
  }

 private:
  const DecoderKernels& kernels_;
  const float* x_;
  Norm norm_;
  int rows_, size_;
  float* normed_ = nullptr;
};

// `total` things in pieces of `size`.
struct Cut {
  int total, size;

  int pieces() const { return (total + size - 1) / size; }
  int begin(int piece) const { return piece * size; }
  int end(int piece) const { return std::min(total, (piece + 1) * size); }
};

// Rows of which little is asked: a piece for each thread.
Cut cut_rows(int rows, int num_threads) {
  const int threads = std::max(1, num_threads);
  return {rows, (rows + threads - 1) / threads};
}

LinearTask product(const Projection& projection, WeightFormat format, float* y, int rows, int inputs, int outputs) {
  LinearTask task{};
  task.weight = projection.weight;
  task.bias = projection.bias;
  task.format = format;
  task.y = y;
  task.rows = rows;
  task.inputs = inputs;
  task.outputs = outputs;
  return task;
}

LinearTask piece_of(LinearTask task, const float* x, const Cut& cut, int piece, const void* ahead) {
  task.x = x;
  task.first_output = cut.begin(piece);
  task.last_output = cut.end(piece);
  task.ahead = ahead;
  return task;
}

const void* weights_of_piece(const LinearTask& task, const Cut& cut, int piece) { return weights_of(task, cut.begin(piece)); }

// What comes before a layer's attention, in phases.
class WorkBefore {
 public:
  enum Phase { kProject, kRotate, kPhases };

  WorkBefore(const DecoderKernels& kernels, const BeforeAttention& layer, int num_threads)
      : kernels_(kernels),
        layer_(layer),
        query_size_(layer.query_heads * layer.head_dim),
        kv_size_(layer.kv_heads * layer.head_dim),
        q_(product(layer.q, layer.format, layer.query, layer.rows, layer.hidden_size, query_size_)),
        k_(product(layer.k, layer.format, layer.key, layer.rows, layer.hidden_size, kv_size_)),
        v_(product(layer.v, layer.format, layer.value, layer.rows, layer.hidden_size, kv_size_)) {
    const int size = outputs_of_piece(query_size_ + 2 * kv_size_, num_threads);
    q_cut_ = {query_size_, size};
    kv_cut_ = {kv_size_, size};
    row_cut_ = cut_rows(layer.rows, num_threads);
  }

  std::array<int, kPhases> pieces() const { return {q_cut_.pieces() + 2 * kv_cut_.pieces(), row_cut_.pieces()}; }

  // The weights that a piece begins with; null if it has none.
  const void* weights(Piece piece) const {
    if (piece.phase != kProject) return nullptr;
    const Part part = part_at(piece.index);
    return weights_of_piece(part.task, part.cut, part.piece);
  }

  // What a thread keeps from piece to piece.
  NormedRows normed() const { return {kernels_, layer_.hidden, layer_.norm, layer_.rows, layer_.hidden_size}; }

  // `ahead` are the weights that this thread reads next, or null.
  void run(Piece piece, NormedRows& normed, const void* ahead) const {
    if (piece.phase == kRotate) {
      for (int row = row_cut_.begin(piece.index); row < row_cut_.end(piece.index); ++row) {
        rotate(layer_.query, layer_.query_heads, layer_.q_norm, row);
        rotate(layer_.key, layer_.kv_heads, layer_.k_norm, row);
      }
      return;
    }
    const Part part = part_at(piece.index);
    kernels_.linear(piece_of(part.task, normed.get(), part.cut, part.piece, ahead));
  }

 private:
  // A piece of one of the three products.
  struct Part {
    const LinearTask& task;
    const Cut& cut;
    int piece;
  };

  Part part_at(int piece) const {
    const int k_begin = q_cut_.pieces(), v_begin = k_begin + kv_cut_.pieces();
    if (piece < k_begin) return {q_, q_cut_, piece};
    if (piece < v_begin) return {k_, kv_cut_, piece - k_begin};
    return {v_, kv_cut_, piece - v_begin};
  }

  void rotate(float* heads, int num_heads, const Norm& norm, int row) const {
    const int head_dim = layer_.head_dim;
    heads += size_t(row) * size_t(num_heads) * size_t(head_dim);
    const size_t position = size_t(row) * size_t(head_dim);
    if (norm.weight != nullptr) kernels_.rms_norm(heads, norm.weight, norm.eps, heads, num_heads, head_dim);
    kernels_.rotate(heads, layer_.cos + position, layer_.sin + position, num_heads, head_dim);
  }

  const DecoderKernels& kernels_;
  const BeforeAttention& layer_;
  int query_size_, kv_size_;
  LinearTask q_, k_, v_;
  Cut q_cut_{}, kv_cut_{}, row_cut_{};
};

// What comes after a layer's attention, in phases.
class WorkAfter {
 public:
  enum Phase { kProject, kGate, kDown, kPhases };

  WorkAfter(const DecoderKernels& kernels, const AfterAttention& layer, int num_threads) : kernels_(kernels), layer_(layer) {
    const int rows = layer.rows, hidden_size = layer.hidden_size, intermediate_size = layer.intermediate_size;
    const size_t intermediate_floats = size_t(rows) * size_t(intermediate_size);
    thread_local Scratch scratch;
    gates_ = scratch.at_least(2 * intermediate_floats);
    ups_ = gates_ + intermediate_floats;
    o_ = product(layer.o, layer.format, layer.output, rows, layer.query_size, hidden_size);
    o_.added = layer.hidden;
    gate_ = product(layer.gate, layer.format, gates_, rows, hidden_size, intermediate_size);
    up_ = product(layer.up, layer.format, ups_, rows, hidden_size, intermediate_size);
    down_ = product(layer.down, layer.format, layer.output, rows, intermediate_size, hidden_size);
    down_.added = layer.output;
    hidden_cut_ = {hidden_size, outputs_of_piece(hidden_size, num_threads)};
    gate_cut_ = {intermediate_size, outputs_of_piece(intermediate_size, num_threads)};
  }

  std::array<int, kPhases> pieces() const { return {hidden_cut_.pieces(), gate_cut_.pieces(), hidden_cut_.pieces()}; }

  const void* weights(Piece piece) const {
    switch (piece.phase) {
      case kProject: return weights_of_piece(o_, hidden_cut_, piece.index);
      case kGate: return weights_of_piece(gate_, gate_cut_, piece.index);
      case kDown: return weights_of_piece(down_, hidden_cut_, piece.index);
      default: return nullptr;
    }
  }

  NormedRows normed() const { return {kernels_, layer_.output, layer_.norm, layer_.rows, layer_.hidden_size}; }

  void run(Piece piece, NormedRows& normed, const void* ahead) const {
    switch (piece.phase) {
      case kProject: return kernels_.linear(piece_of(o_, layer_.attended, hidden_cut_, piece.index, ahead));
      case kGate: return gate_and_up(normed.get(), piece.index, ahead);
      default: return kernels_.linear(piece_of(down_, gates_, hidden_cut_, piece.index, ahead));
    }
  }

 private:
  void gate_and_up(const float* x, int piece, const void* ahead) const {
    kernels_.linear(piece_of(gate_, x, gate_cut_, piece, weights_of_piece(up_, gate_cut_, piece)));
    kernels_.linear(piece_of(up_, x, gate_cut_, piece, ahead));
    kernels_.gate(gates_, ups_, layer_.rows, layer_.intermediate_size, gate_cut_.begin(piece), gate_cut_.end(piece));
  }

  const DecoderKernels& kernels_;
  const AfterAttention& layer_;
  float *gates_, *ups_;
  LinearTask o_{}, gate_{}, up_{}, down_{};
  Cut hidden_cut_{}, gate_cut_{};
};

template <class Work>
void run_alone(const Work& work, int num_threads) {
  run_phases<Work::kPhases>(num_threads, work.pieces(), [&] {
    return [&work, normed = work.normed()](Piece piece, Piece next) mutable { work.run(piece, normed, work.weights(next)); };
  });
}

}  // namespace

void run_before_attention(const DecoderKernels& kernels, const BeforeAttention& layer, int num_threads) {
  check(layer);
  run_alone(WorkBefore(kernels, layer, num_threads), num_threads);
}

void run_after_attention(const DecoderKernels& kernels, const AfterAttention& layer, int num_threads) {
  check(layer);
  run_alone(WorkAfter(kernels, layer, num_threads), num_threads);
}

void run_between_attention(const DecoderKernels& kernels, const AfterAttention& layer, const BeforeAttention& next_layer,
                           int num_threads) {
  check(layer);
  check(next_layer);
  const WorkAfter after(kernels, layer, num_threads);
  const WorkBefore before(kernels, next_layer, num_threads);
  constexpr int kFirst = WorkAfter::kPhases;  // of the phases before the next attention
  const auto of_before = [](Piece piece) { return Piece{piece.phase - kFirst, piece.index}; };
  const auto [project, gate, down] = after.pieces();
  const auto [next_project, rotate] = before.pieces();
  run_phases<kFirst + WorkBefore::kPhases>(num_threads, {project, gate, down, next_project, rotate}, [&] {
    return [&, normed = after.normed(), next_normed = before.normed()](Piece piece, Piece next) mutable {
      const void* ahead = next.phase < kFirst ? after.weights(next) : before.weights(of_before(next));
      if (piece.phase < kFirst) return after.run(piece, normed, ahead);
      before.run(of_before(piece), next_normed, ahead);
    };
  });
}

void run_rms_norm(const DecoderKernels& kernels, const float* x, const Norm& norm, float* y, int rows, int size,
                  int num_threads) {
  check_positive("rows", rows);
  check_positive("size", size);
  constexpr size_t kFewFloats = 1 << 16;  // sooner done than other threads are woken
  const int threads = size_t(rows) * size_t(size) < kFewFloats ? 1 : num_threads;
  const Cut cut = cut_rows(rows, threads);
  run_phases<1>(threads, {cut.pieces()}, [&] {
    return [&](Piece piece, Piece) {
      const int row = cut.begin(piece.index);
      const size_t place = size_t(row) * size_t(size);
      kernels.rms_norm(x + place, norm.weight, norm.eps, y + place, cut.end(piece.index) - row, size);
    };
  });
}

}  // namespace vera
