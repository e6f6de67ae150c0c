// Which kernels this CPU can run.
#pragma once

#include <string>
#include <vector>

#include "kernel.h"

namespace vera {

// Names of the instruction sets that this build has and this CPU runs, best first.
std::vector<std::string> available_isas();

// The kernels called `name`; with an empty name those that the environment variable VERA_CPU_ISA asks for, else the best ones.
// Throws std::invalid_argument for a name that is unknown or that this CPU cannot run.
const KernelTable& choose_kernels(const std::string& name);

}  // namespace vera
