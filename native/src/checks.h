// Refusals of what a caller may get wrong; they arrive in Python as ValueError.
#pragma once

#include <stdexcept>
#include <string>

#include "linear.h"

namespace vera {

inline void refuse_unless(bool fits, const char* name, int value, const char* wanted) {
  if (!fits) throw std::invalid_argument(std::string(name) + "=" + std::to_string(value) + ": it must be " + wanted);
}

inline void check_positive(const char* name, int value) { refuse_unless(value > 0, name, value, "at least 1"); }

inline void check_format(WeightFormat format) {
  refuse_unless(format >= WeightFormat::kFloat32 && format <= WeightFormat::kBFloat16, "weight_format", int(format),
                "0 (float32), 1 (float16) or 2 (bfloat16)");
}

}  // namespace vera
