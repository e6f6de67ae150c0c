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

}  // namespace

void run_before_attention(const DecoderKernels& kernels, const BeforeAttention& layer, int num_threads) {
  check(layer);
  const int rows = layer.rows, hidden_size = layer.hidden_size, head_dim = layer.head_dim;
  const int query_size = layer.query_heads * head_dim, kv_size = layer.kv_heads * head_dim;
  const LinearTask q = product(layer.q, layer.format, layer.query, rows, hidden_size, query_size);
  const LinearTask k = product(layer.k, layer.format, layer.key, rows, hidden_size, kv_size);
  const LinearTask v = product(layer.v, layer.format, layer.value, rows, hidden_size, kv_size);

  const int size = outputs_of_piece(query_size + 2 * kv_size, num_threads);
  const Cut q_cut{query_size, size}, kv_cut{kv_size, size}, row_cut = cut_rows(rows, num_threads);
  const int k_begin = q_cut.pieces(), v_begin = k_begin + kv_cut.pieces(), projections = v_begin + kv_cut.pieces();
  // Calls use(product, cut, piece of it) for a piece of all three.
  const auto with_projection = [&](int piece, const auto& use) {
    if (piece < k_begin) return use(q, q_cut, piece);
    if (piece < v_begin) return use(k, kv_cut, piece - k_begin);
    return use(v, kv_cut, piece - v_begin);
  };
  const auto project = [&](const float* normed, int piece, const void* ahead) {
    with_projection(piece, [&](const LinearTask& task, const Cut& cut, int part) {
      kernels.linear(piece_of(task, normed, cut, part, ahead));
    });
  };
  const auto rotate_heads = [&](float* heads, int num_heads, const Norm& norm, int row) {
    heads += size_t(row) * size_t(num_heads) * size_t(head_dim);
    const size_t position = size_t(row) * size_t(head_dim);
    if (norm.weight != nullptr) kernels.rms_norm(heads, norm.weight, norm.eps, heads, num_heads, head_dim);
    kernels.rotate(heads, layer.cos + position, layer.sin + position, num_heads, head_dim);
  };
  const auto rotate = [&](int piece) {
    for (int row = row_cut.begin(piece); row < row_cut.end(piece); ++row) {
      rotate_heads(layer.query, layer.query_heads, layer.q_norm, row);
      rotate_heads(layer.key, layer.kv_heads, layer.k_norm, row);
    }
  };

  enum Phase { kProject, kRotate };
  run_phases<2>(num_threads, {projections, row_cut.pieces()}, [&] {
    return [&, normed = NormedRows(kernels, layer.hidden, layer.norm, rows, hidden_size)](Piece piece, Piece next) mutable {
      if (piece.phase == kRotate) return rotate(piece.index);
      project(normed.get(), piece.index, next.phase == kProject ? with_projection(next.index, weights_of_piece) : nullptr);
    };
  });
}

void run_after_attention(const DecoderKernels& kernels, const AfterAttention& layer, int num_threads) {
  check(layer);
  const int rows = layer.rows, hidden_size = layer.hidden_size, intermediate_size = layer.intermediate_size;
  const size_t intermediate_floats = size_t(rows) * size_t(intermediate_size);
  thread_local Scratch scratch;
  float* gates = scratch.at_least(2 * intermediate_floats);
  float* ups = gates + intermediate_floats;
  LinearTask o = product(layer.o, layer.format, layer.output, rows, layer.query_size, hidden_size);
  o.added = layer.hidden;
  const LinearTask gate = product(layer.gate, layer.format, gates, rows, hidden_size, intermediate_size);
  const LinearTask up = product(layer.up, layer.format, ups, rows, hidden_size, intermediate_size);
  LinearTask down = product(layer.down, layer.format, layer.output, rows, intermediate_size, hidden_size);
  down.added = layer.output;

  const Cut hidden_cut{hidden_size, outputs_of_piece(hidden_size, num_threads)};
  const Cut gate_cut{intermediate_size, outputs_of_piece(intermediate_size, num_threads)};
  const auto gate_and_up = [&](const float* normed, int piece, const void* ahead) {
    kernels.linear(piece_of(gate, normed, gate_cut, piece, weights_of_piece(up, gate_cut, piece)));
    kernels.linear(piece_of(up, normed, gate_cut, piece, ahead));
    kernels.gate(gates, ups, rows, intermediate_size, gate_cut.begin(piece), gate_cut.end(piece));
  };

  enum Phase { kProject, kGate, kDown };
  const auto weights_ahead = [&](Piece next) -> const void* {
    switch (next.phase) {
      case kProject: return weights_of_piece(o, hidden_cut, next.index);
      case kGate: return weights_of_piece(gate, gate_cut, next.index);
      case kDown: return weights_of_piece(down, hidden_cut, next.index);
      default: return nullptr;
    }
  };
  run_phases<3>(num_threads, {hidden_cut.pieces(), gate_cut.pieces(), hidden_cut.pieces()}, [&] {
    return [&, normed = NormedRows(kernels, layer.output, layer.norm, rows, hidden_size)](Piece piece, Piece next) mutable {
      const void* ahead = weights_ahead(next);
      switch (piece.phase) {
        case kProject: return kernels.linear(piece_of(o, layer.attended, hidden_cut, piece.index, ahead));
        case kGate: return gate_and_up(normed.get(), piece.index, ahead);
        default: return kernels.linear(piece_of(down, gates, hidden_cut, piece.index, ahead));
      }
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
