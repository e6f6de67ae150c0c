"""The process of a service that is measured: `vera serve` that ends with the benchmark which started it.

The first argument is that process's id, the others are `vera serve`'s.
"""

from __future__ import annotations

import runpy
import sys

from vera.bench.signals import end_with

if __name__ == "__main__":
    end_with(int(sys.argv[1]))
    sys.argv = ["vera", "serve", *sys.argv[2:]]
    runpy.run_module("vera.cli", run_name="__main__")
