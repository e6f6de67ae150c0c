// The Python module vera._native. Tensors come as addresses and strides: vera.attention.cpu checks their types and shapes and
// keeps them alive, and a call for each layer is too frequent for anything dearer.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>

#include "attention.h"
#include "decoder.h"
#include "isa.h"
#include "pages_parallel.h"
#include "threads.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace vera {
namespace {

template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

using RowsArgument = std::tuple<uintptr_t, int64_t, int64_t>;  // address, token stride, head stride

Rows rows(const RowsArgument& argument) {
  return {pointer<const float>(std::get<0>(argument)), std::get<1>(argument), std::get<2>(argument)};
}

Projection projection(uintptr_t weight, uintptr_t bias) { return {pointer<const void>(weight), pointer<const float>(bias)}; }

BeforeAttention before_attention(uintptr_t hidden, uintptr_t norm_weight, float eps, uintptr_t q_weight, uintptr_t k_weight,
                                 uintptr_t v_weight, uintptr_t q_bias, uintptr_t k_bias, uintptr_t v_bias, uintptr_t q_norm,
                                 uintptr_t k_norm, float qk_norm_eps, uintptr_t cos, uintptr_t sin, uintptr_t query,
                                 uintptr_t key, uintptr_t value, int weight_format, int rows, int hidden_size, int query_heads,
                                 int kv_heads, int head_dim) {
  BeforeAttention layer{};
  layer.hidden = pointer<const float>(hidden);
  layer.norm = {pointer<const float>(norm_weight), eps};
  layer.q = projection(q_weight, q_bias);
  layer.k = projection(k_weight, k_bias);
  layer.v = projection(v_weight, v_bias);
  layer.q_norm = {pointer<const float>(q_norm), qk_norm_eps};
  layer.k_norm = {pointer<const float>(k_norm), qk_norm_eps};
  layer.cos = pointer<const float>(cos);
  layer.sin = pointer<const float>(sin);
  layer.query = pointer<float>(query);
  layer.key = pointer<float>(key);
  layer.value = pointer<float>(value);
  layer.format = WeightFormat(weight_format);
  layer.rows = rows;
  layer.hidden_size = hidden_size;
  layer.query_heads = query_heads;
  layer.kv_heads = kv_heads;
  layer.head_dim = head_dim;
  return layer;
}

AfterAttention after_attention(uintptr_t attended, uintptr_t o_weight, uintptr_t o_bias, uintptr_t hidden, uintptr_t norm_weight,
                               float eps, uintptr_t gate_weight, uintptr_t up_weight, uintptr_t down_weight, uintptr_t gate_bias,
                               uintptr_t up_bias, uintptr_t down_bias, uintptr_t output, int weight_format, int rows,
                               int hidden_size, int query_size, int intermediate_size) {
  AfterAttention layer{};
  layer.attended = pointer<const float>(attended);
  layer.o = projection(o_weight, o_bias);
  layer.hidden = pointer<const float>(hidden);
  layer.norm = {pointer<const float>(norm_weight), eps};
  layer.gate = projection(gate_weight, gate_bias);
  layer.up = projection(up_weight, up_bias);
  layer.down = projection(down_weight, down_bias);
  layer.output = pointer<float>(output);
  layer.format = WeightFormat(weight_format);
  layer.rows = rows;
  layer.hidden_size = hidden_size;
  layer.query_size = query_size;
  layer.intermediate_size = intermediate_size;
  return layer;
}

constexpr size_t kPiece = size_t(1) << 20;  // bytes that a thread sums at a time

uint64_t plain_sum(uintptr_t address, size_t bytes, int num_threads) {
  struct Shared {
    const char* data;
    size_t bytes;
    uint64_t (*sum)(const void*, size_t);
    std::atomic<size_t> next{0};
    std::atomic<uint64_t> total{0};
  } shared{pointer<const char>(address), bytes, choose_kernels("").exact.sum_words};
  const nb::gil_scoped_release release;
  run_parallel(
      num_threads,
      [](void* argument) {
        Shared& all = *static_cast<Shared*>(argument);
        uint64_t total = 0;
        for (size_t begin; (begin = all.next.fetch_add(kPiece)) < all.bytes;)
          total += all.sum(all.data + begin, std::min(kPiece, all.bytes - begin));
        all.total += total;
      },
      &shared);
  return shared.total;
}

bool advise_hugepages(uintptr_t address, size_t bytes) {
#ifdef MADV_HUGEPAGE
  const auto page = uintptr_t(sysconf(_SC_PAGESIZE));
  const uintptr_t begin = (address + page - 1) / page * page, end = (address + bytes) / page * page;
  return begin < end && madvise(pointer<void>(begin), end - begin, MADV_HUGEPAGE) == 0;
#else
  return false;
#endif
}

}  // namespace
}  // namespace vera

NB_MODULE(_native, module) {
  using namespace vera;
  // An engine that lives until the interpreter ends is nothing to warn about.
  nb::set_leak_warnings(false);
  module.doc() = "Vera's native CPU kernels; use vera.attention, not this.";

  nb::class_<TierTables>(module, "Tiers", "Addresses and sizes of a vera.attention.protocol.Tiers and its report.")
      .def(
          "__init__",
          [](TierTables* self, uintptr_t arena, int64_t arena_bytes, int sketch_bits, uintptr_t sketch_keys,
             uintptr_t sketch_values, int64_t sketch_stride, uintptr_t warm, int windows, int window_layers, uintptr_t tolerances,
             float skip_share, uintptr_t probes, uintptr_t report_rows, uintptr_t masses, uintptr_t frequencies,
             int64_t num_report_rows, int report_blocks, uintptr_t errors, uintptr_t pages_read) {
            TierTables tiers;
            tiers.arena = pointer<const uint8_t>(arena);
            tiers.arena_bytes = arena_bytes;
            tiers.sketch_bits = sketch_bits;
            tiers.sketch_keys = pointer<const int64_t>(sketch_keys);
            tiers.sketch_values = pointer<const int64_t>(sketch_values);
            tiers.sketch_stride = sketch_stride;
            tiers.warm = pointer<const int64_t>(warm);
            tiers.windows = windows;
            tiers.window_layers = window_layers;
            tiers.tolerances = pointer<const float>(tolerances);
            tiers.skip_share = skip_share;
            tiers.probes = pointer<const int32_t>(probes);
            tiers.report_rows = pointer<const int32_t>(report_rows);
            tiers.masses = pointer<float>(masses);
            tiers.frequencies = pointer<float>(frequencies);
            tiers.num_report_rows = num_report_rows;
            tiers.report_blocks = report_blocks;
            tiers.errors = pointer<double>(errors);
            tiers.pages_read = pointer<int64_t>(pages_read);
            new (self) TierTables(tiers);
          },
          nb::kw_only(), "arena"_a, "arena_bytes"_a, "sketch_bits"_a, "sketch_keys"_a, "sketch_values"_a, "sketch_stride"_a,
          "warm"_a, "windows"_a, "window_layers"_a, "tolerances"_a, "skip_share"_a, "probes"_a, "report_rows"_a, "masses"_a,
          "frequencies"_a, "num_report_rows"_a, "report_blocks"_a, "errors"_a, "pages_read"_a);

  nb::class_<Batch>(module, "Batch", "A validated vera.attention.protocol.PagedBatch. Does not keep the tensors alive.")
      .def(
          "__init__",
          [](Batch* self, uintptr_t pages, int64_t num_pages, int page_type, uintptr_t page_table, int64_t num_blocks, int layers,
             int kv_heads, uintptr_t block_tables, int sequences, int max_blocks, uintptr_t query_starts, uintptr_t context_lens,
             int page_size, int head_dim, const std::optional<TierTables>& tiers) {
            BatchTables tables;
            tables.pages = pointer<std::byte>(pages);
            tables.num_pages = num_pages;
            tables.page_type = PageType(page_type);
            tables.page_table = pointer<const int32_t>(page_table);
            tables.num_blocks = num_blocks;
            tables.layers = layers;
            tables.kv_heads = kv_heads;
            tables.block_tables = pointer<const int32_t>(block_tables);
            tables.sequences = sequences;
            tables.max_blocks = max_blocks;
            tables.query_starts = pointer<const int32_t>(query_starts);
            tables.context_lens = pointer<const int32_t>(context_lens);
            tables.page_size = page_size;
            tables.head_dim = head_dim;
            new (self) Batch(tables, tiers);
          },
          nb::kw_only(), "pages"_a, "num_pages"_a, "page_type"_a, "page_table"_a, "num_blocks"_a, "layers"_a, "kv_heads"_a,
          "block_tables"_a, "sequences"_a, "max_blocks"_a, "query_starts"_a, "context_lens"_a, "page_size"_a, "head_dim"_a,
          "tiers"_a = nb::none(),
          "Checks all lengths and ids. page_type: 0 float16, 1 bfloat16, 2 float32.");

  nb::class_<Attention>(module, "Attention", "Kernels of one instruction set, with their scratch memory and counters.")
      .def(nb::init<const std::string&>(), "isa"_a = "", "An empty name: what VERA_CPU_ISA asks for, else the best one.")
      .def_prop_ro("isa", &Attention::isa)
      .def_prop_ro(
          "seconds", [](const Attention& self) { return self.counters().seconds; }, "Spent in attend.")
      .def_prop_ro(
          "decode_seconds", [](const Attention& self) { return self.counters().decode_seconds; },
          "Spent in those calls of attend that only decoded.")
      .def_prop_ro(
          "decode_bytes_read", [](const Attention& self) { return self.counters().decode_bytes_read; },
          "Bytes of keys and values read in those calls.")
      .def(
          "attend",
          [](Attention& self, Batch& batch, int layer, int query_heads, const RowsArgument& query, const RowsArgument& key,
             const RowsArgument& value, uintptr_t output, float scale, int window, float softcap, uintptr_t sinks,
             int num_threads, bool again) {
            LayerCall call;
            call.layer = layer;
            call.query_heads = query_heads;
            call.query = rows(query);
            call.key = rows(key);
            call.value = rows(value);
            call.output = pointer<float>(output);
            call.options = {scale, softcap};
            call.window = window;
            call.sinks = pointer<const float>(sinks);
            call.num_threads = num_threads;
            call.again = again;
            std::vector<Hit> hits;
            {
              const nb::gil_scoped_release release;
              hits = self.attend(batch, call);
            }
            std::vector<std::array<int32_t, 5>> rows;
            for (const Hit& hit : hits) rows.push_back({hit.sequence, hit.layer, hit.kv_head, hit.block, hit.cold});
            return rows;
          },
          "batch"_a, "layer"_a, "query_heads"_a, "query"_a, "key"_a, "value"_a, "output"_a, "scale"_a, "window"_a, "softcap"_a,
          "sinks"_a, "num_threads"_a, "again"_a = false,
          "One layer. query, key and value: (address, token stride, head stride); 0 for no window, softcap or sinks. Returns the "
          "rows of TierReport.hits.");

  module.def(
      "linear",
      [](uintptr_t x, uintptr_t weight, uintptr_t bias, uintptr_t y, int rows, int inputs, int outputs, int num_threads,
         int weight_format) {
        LinearTask task{};
        task.x = pointer<const float>(x);
        task.weight = pointer<const void>(weight);
        task.format = WeightFormat(weight_format);
        task.bias = pointer<const float>(bias);
        task.y = pointer<float>(y);
        task.rows = rows;
        task.inputs = inputs;
        task.outputs = outputs;
        const DecoderKernels& kernels = choose_kernels("").decoder;
        const nb::gil_scoped_release release;
        run_linear(kernels.linear, task, num_threads);
      },
      "x"_a, "weight"_a, "bias"_a, "y"_a, "rows"_a, "inputs"_a, "outputs"_a, "num_threads"_a, "weight_format"_a = 0,
      "y [rows, outputs] = x [rows, inputs] times weight [outputs, inputs] transposed, plus bias (0: none); addresses of "
      "contiguous float32, but for the weights: weight_format 0 float32, 1 float16, 2 bfloat16.");
  module.def(
      "before_attention",
      [](uintptr_t hidden, uintptr_t norm_weight, float eps, uintptr_t q_weight, uintptr_t k_weight, uintptr_t v_weight,
         uintptr_t q_bias, uintptr_t k_bias, uintptr_t v_bias, uintptr_t q_norm, uintptr_t k_norm, float qk_norm_eps,
         uintptr_t cos, uintptr_t sin, uintptr_t query, uintptr_t key, uintptr_t value, int weight_format, int rows,
         int hidden_size, int query_heads, int kv_heads, int head_dim, int num_threads) {
        const BeforeAttention layer = before_attention(
            hidden, norm_weight, eps, q_weight, k_weight, v_weight, q_bias, k_bias, v_bias, q_norm, k_norm, qk_norm_eps, cos, sin,
            query, key, value, weight_format, rows, hidden_size, query_heads, kv_heads, head_dim);
        const DecoderKernels& kernels = choose_kernels("").decoder;
        const nb::gil_scoped_release release;
        run_before_attention(kernels, layer, num_threads);
      },
      "hidden"_a, "norm_weight"_a, "eps"_a, "q_weight"_a, "k_weight"_a, "v_weight"_a, "q_bias"_a, "k_bias"_a, "v_bias"_a,
      "q_norm"_a, "k_norm"_a, "qk_norm_eps"_a, "cos"_a, "sin"_a, "query"_a, "key"_a, "value"_a, "weight_format"_a, "rows"_a,
      "hidden_size"_a, "query_heads"_a, "kv_heads"_a, "head_dim"_a, "num_threads"_a,
      "A Llama-like decoder layer up to its attention: RMSNorm, q, k and v, their norm (0: none), rotary positions.");
  module.def(
      "after_attention",
      [](uintptr_t attended, uintptr_t o_weight, uintptr_t o_bias, uintptr_t hidden, uintptr_t norm_weight, float eps,
         uintptr_t gate_weight, uintptr_t up_weight, uintptr_t down_weight, uintptr_t gate_bias, uintptr_t up_bias,
         uintptr_t down_bias, uintptr_t output, int weight_format, int rows, int hidden_size, int query_size,
         int intermediate_size, int num_threads) {
        const AfterAttention layer = after_attention(attended, o_weight, o_bias, hidden, norm_weight, eps, gate_weight, up_weight,
                                                     down_weight, gate_bias, up_bias, down_bias, output, weight_format, rows,
                                                     hidden_size, query_size, intermediate_size);
        const DecoderKernels& kernels = choose_kernels("").decoder;
        const nb::gil_scoped_release release;
        run_after_attention(kernels, layer, num_threads);
      },
      "attended"_a, "o_weight"_a, "o_bias"_a, "hidden"_a, "norm_weight"_a, "eps"_a, "gate_weight"_a, "up_weight"_a,
      "down_weight"_a, "gate_bias"_a, "up_bias"_a, "down_bias"_a, "output"_a, "weight_format"_a, "rows"_a, "hidden_size"_a,
      "query_size"_a, "intermediate_size"_a, "num_threads"_a,
      "The same layer from its attention on: o, residual, RMSNorm, silu(gate) * up, down, residual.");
  module.def(
      "between_attention",
      [](uintptr_t attended, uintptr_t o_weight, uintptr_t o_bias, uintptr_t hidden, uintptr_t norm_weight, float eps,
         uintptr_t gate_weight, uintptr_t up_weight, uintptr_t down_weight, uintptr_t gate_bias, uintptr_t up_bias,
         uintptr_t down_bias, uintptr_t output, int weight_format, uintptr_t next_norm_weight, float next_eps, uintptr_t q_weight,
         uintptr_t k_weight, uintptr_t v_weight, uintptr_t q_bias, uintptr_t k_bias, uintptr_t v_bias, uintptr_t q_norm,
         uintptr_t k_norm, float qk_norm_eps, uintptr_t cos, uintptr_t sin, uintptr_t query, uintptr_t key, uintptr_t value,
         int next_weight_format, int rows, int hidden_size, int intermediate_size, int query_heads, int kv_heads, int head_dim,
         int num_threads) {
        const AfterAttention layer = after_attention(attended, o_weight, o_bias, hidden, norm_weight, eps, gate_weight, up_weight,
                                                     down_weight, gate_bias, up_bias, down_bias, output, weight_format, rows,
                                                     hidden_size, query_heads * head_dim, intermediate_size);
        const BeforeAttention next_layer = before_attention(
            output, next_norm_weight, next_eps, q_weight, k_weight, v_weight, q_bias, k_bias, v_bias, q_norm, k_norm, qk_norm_eps,
            cos, sin, query, key, value, next_weight_format, rows, hidden_size, query_heads, kv_heads, head_dim);
        const DecoderKernels& kernels = choose_kernels("").decoder;
        const nb::gil_scoped_release release;
        run_between_attention(kernels, layer, next_layer, num_threads);
      },
      "attended"_a, "o_weight"_a, "o_bias"_a, "hidden"_a, "norm_weight"_a, "eps"_a, "gate_weight"_a, "up_weight"_a,
      "down_weight"_a, "gate_bias"_a, "up_bias"_a, "down_bias"_a, "output"_a, "weight_format"_a, "next_norm_weight"_a,
      "next_eps"_a, "q_weight"_a, "k_weight"_a, "v_weight"_a, "q_bias"_a, "k_bias"_a, "v_bias"_a, "q_norm"_a, "k_norm"_a,
      "qk_norm_eps"_a, "cos"_a, "sin"_a, "query"_a, "key"_a, "value"_a, "next_weight_format"_a, "rows"_a, "hidden_size"_a,
      "intermediate_size"_a, "query_heads"_a, "kv_heads"_a, "head_dim"_a, "num_threads"_a,
      "after_attention of one layer, then before_attention of the next, of the same sizes.");
  module.def(
      "rms_norm",
      [](uintptr_t x, uintptr_t weight, float eps, uintptr_t y, int rows, int size, int num_threads) {
        const DecoderKernels& kernels = choose_kernels("").decoder;
        const nb::gil_scoped_release release;
        run_rms_norm(kernels, pointer<const float>(x), {pointer<const float>(weight), eps}, pointer<float>(y), rows, size,
                     num_threads);
      },
      "x"_a, "weight"_a, "eps"_a, "y"_a, "rows"_a, "size"_a, "num_threads"_a,
      "y [rows, size] = weight * x / sqrt(mean(x^2) + eps); y may be x.");

  module.def(
      "sketch_pages",
      [](uintptr_t pages, uintptr_t key_parts, uintptr_t value_parts, int64_t count, int page_type, int page_size, int head_dim,
         int bits, int num_threads, const std::string& isa) {
        const SketchJob job{pointer<const int64_t>(pages),
                            pointer<const int64_t>(key_parts),
                            pointer<const int64_t>(value_parts),
                            count,
                            PageType(page_type),
                            page_size,
                            head_dim,
                            bits};
        const KernelTable& kernels = choose_kernels(isa);
        const nb::gil_scoped_release release;
        return make_sketches(kernels, job, num_threads);
      },
      "pages"_a, "key_parts"_a, "value_parts"_a, "count"_a, "page_type"_a, "page_size"_a, "head_dim"_a, "bits"_a, "num_threads"_a,
      "isa"_a = "", "Writes sketches of exact pages; addresses of int64 arrays of addresses. Returns how many are of no use.");
  module.def(
      "copy_bytes",
      [](uintptr_t sources, uintptr_t targets, int64_t count, int64_t bytes, int num_threads) {
        const nb::gil_scoped_release release;
        copy_all(pointer<const int64_t>(sources), pointer<const int64_t>(targets), count, bytes, num_threads);
      },
      "sources"_a, "targets"_a, "count"_a, "bytes"_a, "num_threads"_a, "Addresses of int64 arrays of addresses.");

  module.def("plain_sum", &plain_sum, "address"_a, "bytes"_a, "num_threads"_a,
             "Sum of the buffer's 64-bit words: reads it as fast as this machine can, the yardstick for memory bandwidth.");
  module.def("isa", [] { return std::string(choose_kernels("").name); }, "The instruction set that Attention() uses.");
  module.def("available_isas", &available_isas, "Those that this build has and this CPU runs, best first.");
  module.def("threads_runtime", &threads_runtime, "The library whose threads are used, or 'std::thread'.");
  module.def("advise_hugepages", &advise_hugepages, "address"_a, "bytes"_a,
             "Asks the kernel to back the buffer with huge pages; returns whether it took the advice.");
}
