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

// What passes from one phase to the next. A thread keeps the most that it has ever needed.
float* intermediate_results(size_t floats) {
  constexpr size_t kAlignment = 64;
  struct Deleter {
    void operator()(float* p) const { ::operator delete[](p, std::align_val_t(kAlignment)); }
  };
  thread_local std::unique_ptr<float[], Deleter> buffer;
  thread_local size_t capacity = 0;
  if (floats > capacity) {
    capacity = 0;
    buffer.reset(static_cast<float*>(::operator new[](floats * sizeof(float), std::align_val_t(kAlignment))));
    capacity = floats;
  }
  return buffer.get();
}

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

LinearTask product(const float* x, const Projection& projection, WeightFormat format, float* y, int rows, int inputs,
                   int outputs) {
  LinearTask task{};
  task.x = x;
  task.weight = projection.weight;
  task.bias = projection.bias;
  task.format = format;
  task.y = y;
  task.rows = rows;
  task.inputs = inputs;
  task.outputs = outputs;
  return task;
}

LinearTask piece_of(LinearTask task, const Cut& cut, int piece, const void* ahead) {
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
  float* normed = intermediate_results(size_t(rows) * size_t(hidden_size));
  const LinearTask q = product(normed, layer.q, layer.format, layer.query, rows, hidden_size, query_size);
  const LinearTask k = product(normed, layer.k, layer.format, layer.key, rows, hidden_size, kv_size);
  const LinearTask v = product(normed, layer.v, layer.format, layer.value, rows, hidden_size, kv_size);

  const int size = outputs_of_piece(query_size + 2 * kv_size, num_threads);
  const Cut by_row = cut_rows(rows, num_threads), q_cut{query_size, size}, kv_cut{kv_size, size};
  const int k_begin = q_cut.pieces(), v_begin = k_begin + kv_cut.pieces(), projections = v_begin + kv_cut.pieces();
  // Calls use(product, cut, piece) for a piece of the second phase.
  const auto with_projection = [&](int piece, const auto& use) {
    if (piece < k_begin) return use(q, q_cut, piece);
    if (piece < v_begin) return use(k, kv_cut, piece - k_begin);
    return use(v, kv_cut, piece - v_begin);
  };

  const auto normalise = [&](int piece) {
    const int row = by_row.begin(piece);
    const size_t place = size_t(row) * size_t(hidden_size);
    kernels.rms_norm(layer.hidden + place, layer.norm.weight, layer.norm.eps, normed + place, by_row.end(piece) - row,
                     hidden_size);
  };
  const auto project = [&](int piece, Piece next) {
    const void* ahead = next.phase == 1 ? with_projection(next.index, weights_of_piece) : nullptr;
    with_projection(piece, [&](const LinearTask& task, const Cut& cut, int part) {
      kernels.linear(piece_of(task, cut, part, ahead));
    });
  };
  const auto rotate_heads = [&](float* heads, int num_heads, const Norm& norm, int row) {
    heads += size_t(row) * size_t(num_heads) * size_t(head_dim);
    const size_t position = size_t(row) * size_t(head_dim);
    if (norm.weight != nullptr) kernels.rms_norm(heads, norm.weight, norm.eps, heads, num_heads, head_dim);
    kernels.rotate(heads, layer.cos + position, layer.sin + position, num_heads, head_dim);
  };
  const auto rotate = [&](int piece) {
    for (int row = by_row.begin(piece); row < by_row.end(piece); ++row) {
      rotate_heads(layer.query, layer.query_heads, layer.q_norm, row);
      rotate_heads(layer.key, layer.kv_heads, layer.k_norm, row);
    }
  };
  run_phases<3>(num_threads, {by_row.pieces(), projections, by_row.pieces()}, [&](Piece piece, Piece next) {
    switch (piece.phase) {
      case 0: return normalise(piece.index);
      case 1: return project(piece.index, next);
      default: return rotate(piece.index);
    }
  });
}

void run_after_attention(const DecoderKernels& kernels, const AfterAttention& layer, int num_threads) {
  check(layer);
  const int rows = layer.rows, hidden_size = layer.hidden_size, intermediate_size = layer.intermediate_size;
  float* normed = intermediate_results(size_t(rows) * (size_t(hidden_size) + 2 * size_t(intermediate_size)));
  float* gates = normed + size_t(rows) * size_t(hidden_size);
  float* ups = gates + size_t(rows) * size_t(intermediate_size);
  LinearTask o = product(layer.attended, layer.o, layer.format, layer.output, rows, layer.query_size, hidden_size);
  o.added = layer.hidden;
  const LinearTask gate = product(normed, layer.gate, layer.format, gates, rows, hidden_size, intermediate_size);
  const LinearTask up = product(normed, layer.up, layer.format, ups, rows, hidden_size, intermediate_size);
  LinearTask down = product(gates, layer.down, layer.format, layer.output, rows, intermediate_size, hidden_size);
  down.added = layer.output;

  const Cut by_row = cut_rows(rows, num_threads);
  const Cut hidden_cut{hidden_size, outputs_of_piece(hidden_size, num_threads)};
  const Cut gate_cut{intermediate_size, outputs_of_piece(intermediate_size, num_threads)};
  enum Phase { kProject, kNormalise, kGate, kDown };
  const auto weights_ahead = [&](Piece next) -> const void* {
    switch (next.phase) {
      case kProject: return weights_of_piece(o, hidden_cut, next.index);
      case kGate: return weights_of_piece(gate, gate_cut, next.index);
      case kDown: return weights_of_piece(down, hidden_cut, next.index);
      default: return nullptr;
    }
  };
  const auto normalise = [&](int piece) {
    const int row = by_row.begin(piece);
    const size_t place = size_t(row) * size_t(hidden_size);
    kernels.rms_norm(layer.output + place, layer.norm.weight, layer.norm.eps, normed + place, by_row.end(piece) - row,
                     hidden_size);
  };
  const auto gate_and_up = [&](int piece, const void* ahead) {
    kernels.linear(piece_of(gate, gate_cut, piece, weights_of_piece(up, gate_cut, piece)));
    kernels.linear(piece_of(up, gate_cut, piece, ahead));
    kernels.gate(gates, ups, rows, intermediate_size, gate_cut.begin(piece), gate_cut.end(piece));
  };
  run_phases<4>(num_threads, {hidden_cut.pieces(), by_row.pieces(), gate_cut.pieces(), hidden_cut.pieces()},
                [&](Piece piece, Piece next) {
                  const void* ahead = weights_ahead(next);
                  switch (piece.phase) {
                    case kProject: return kernels.linear(piece_of(o, hidden_cut, piece.index, ahead));
                    case kNormalise: return normalise(piece.index);
                    case kGate: return gate_and_up(piece.index, ahead);
                    default: return kernels.linear(piece_of(down, hidden_cut, piece.index, ahead));
                  }
                });
}

void run_rms_norm(const DecoderKernels& kernels, const float* x, const Norm& norm, float* y, int rows, int size,
                  int num_threads) {
  check_positive("rows", rows);
  check_positive("size", size);
  constexpr int kFewFloats = 1 << 16;  // sooner done than other threads are woken
  const int threads = size_t(rows) * size_t(size) < kFewFloats ? 1 : num_threads;
  const Cut cut = cut_rows(rows, threads);
  run_phases<1>(threads, {cut.pieces()}, [&](Piece piece, Piece) {
    const int row = cut.begin(piece.index);
    const size_t place = size_t(row) * size_t(size);
    kernels.rms_norm(x + place, norm.weight, norm.eps, y + place, cut.end(piece.index) - row, size);
  });
}

}  // namespace vera
