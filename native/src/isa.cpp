#include "isa.h"

#include <cstdlib>
#include <stdexcept>

#include "decoder.h"

namespace vera {
namespace {

std::vector<const KernelTable*> available_kernels() {
  std::vector<const KernelTable*> tables;
#ifdef VERA_HAS_X86_KERNELS
  static const KernelTable with_vnni{"avx512vnni", avx512::exact_kernels(), avx512vnni::tiered_kernels(), avx512::sketch_makers(),
                                     avx512::decoder_kernels()};
  static const KernelTable with_avx512{"avx512", avx512::exact_kernels(), avx512::tiered_kernels(), avx512::sketch_makers(),
                                       avx512::decoder_kernels()};
  static const KernelTable with_avx2{"avx2", avx2::exact_kernels(), avx2::tiered_kernels(), avx2::sketch_makers(),
                                     avx2::decoder_kernels()};
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (has_avx512 && __builtin_cpu_supports("avx512vnni")) tables.push_back(&with_vnni);
  if (has_avx512) tables.push_back(&with_avx512);
  if (has_avx2) tables.push_back(&with_avx2);
#endif
  static const KernelTable plain{"portable", portable::exact_kernels(), portable::tiered_kernels(), portable::sketch_makers(),
                                 portable::decoder_kernels()};
  tables.push_back(&plain);
  return tables;
}

}  // namespace

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const KernelTable* table : available_kernels()) names.push_back(table->name);
  return names;
}

const KernelTable& choose_kernels(const std::string& name) {
  static const auto tables = available_kernels();
  const char* forced = std::getenv("VERA_CPU_ISA");
  const std::string wanted = !name.empty() ? name : forced != nullptr ? forced : "";
  if (wanted.empty()) return *tables.front();
  std::string known;
  for (const KernelTable* table : tables) {
    if (wanted == table->name) return *table;
    known += (known.empty() ? "" : ", ") + std::string(table->name);
  }
  throw std::invalid_argument((name.empty() ? "VERA_CPU_ISA=" : "isa=") + wanted +
                              " is unknown or not supported by this CPU; it can run " + known);
}

}  // namespace vera
