// A Llama-like decoder layer for few rows: all that comes before attention, and all that comes after it, each in one call,
// or the end of a layer and the beginning of the next in one.
// What is small beside the products is done between them, without waking the threads anew.
#pragma once

#include "linear.h"

namespace vera {

// Kernels of one instruction set. A row's result does not depend on the other rows.
struct DecoderKernels {
  void (*linear)(const LinearTask& task);
  // y = weight * x / sqrt(mean(x^2) + eps), for each of `rows` rows of `size`; y may be x.
  void (*rms_norm)(const float* x, const float* weight, float eps, float* y, int rows, int size);
  // Rotary positions for the heads of one token, in place: x * cos + rotate_half(x) * sin; cos and sin are [head_dim].
  void (*rotate)(float* heads, const float* cos, const float* sin, int num_heads, int head_dim);
  // gates[r][c] = silu(gates[r][c]) * ups[r][c] for the columns [begin, end).
  void (*gate)(float* gates, const float* ups, int rows, int columns, int begin, int end);
};

namespace portable {
const DecoderKernels& decoder_kernels();
}
#ifdef VERA_HAS_X86_KERNELS
namespace avx2 {
const DecoderKernels& decoder_kernels();
}
namespace avx512 {
const DecoderKernels& decoder_kernels();
}
#endif

// A linear layer's parameters.
struct Projection {
  const void* weight;  // [outputs][inputs]
  const float* bias;   // [outputs] or null
};

struct Norm {
  const float* weight;  // [size] or null: no norm
  float eps;
};

struct BeforeAttention {
  const float* hidden;  // [rows][hidden_size]
  Norm norm;
  Projection q, k, v;
  Norm q_norm, k_norm;      // of each head, before the rotation
  const float *cos, *sin;   // [rows][head_dim]
  float* query;             // [rows][query_heads][head_dim]
  float *key, *value;       // [rows][kv_heads][head_dim]
  WeightFormat format;
  int rows, hidden_size, query_heads, kv_heads, head_dim;
};

struct AfterAttention {
  const float* attended;  // [rows][query_size]
  Projection o;
  const float* hidden;  // [rows][hidden_size]: what is added to
  Norm norm;
  Projection gate, up, down;
  float* output;  // [rows][hidden_size], may be hidden
  WeightFormat format;
  int rows, hidden_size, query_size, intermediate_size;
};

// Throw std::invalid_argument for sizes that are not positive, an odd head_dim and an unknown format.
void run_before_attention(const DecoderKernels& kernels, const BeforeAttention& layer, int num_threads);
void run_after_attention(const DecoderKernels& kernels, const AfterAttention& layer, int num_threads);
// The end of a layer and the beginning of the next, whose `hidden` is the `output` of the first.
void run_between_attention(const DecoderKernels& kernels, const AfterAttention& layer, const BeforeAttention& next_layer,
                           int num_threads);

void run_rms_norm(const DecoderKernels& kernels, const float* x, const Norm& norm, float* y, int rows, int size, int num_threads);

}  // namespace vera
