# Every target sets itself up: `make test` on a fresh machine needs python3 (3.11 or newer) and pip.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c

PYTHON ?= python3
JOBS ?= 2
VENV   := .venv
PY     := $(VENV)/bin/python
PYTEST_ARGS ?=
DIST ?= dist
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
GPU_PYTHON ?= $(PY)
SUDO := $(if $(filter 0,$(shell id -u)),,sudo)

# bf16 matmul dies of SIGILL on some virtual machines without this; `shardwise doctor` tests it.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_FP16
# Several ranks share this machine: a thread each. One process compared with them uses as many.
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help setup same test test-browser test-slow test-dist dist lint format docs zoo bench bench-checkpoint bench-pipeline bench-quality bench-recompute bench-reality bench-shared-memory bench-unequal differential demo gpu clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(VENV)/.stamp ## Create .venv with torch (CPU), Shardwise and the tools

$(VENV)/.stamp: pyproject.toml constraints.txt
	@echo "setting up $(VENV)"
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@$(PY) -m pip install -q --retries 1 --timeout 15 --extra-index-url $(TORCH_CPU_INDEX) \
		-c constraints.txt torch 'setuptools>=77' 2>&1 | { grep -v "^WARNING" || true; }
	@$(PY) -m pip install -q --no-build-isolation -c constraints.txt -e '.[dev]' \
		2>&1 | { grep -v "^WARNING" || true; }
	@$(PY) -c "import torch, pytest, shardwise"
	@touch $@

$(VENV)/.stamp-docs: $(VENV)/.stamp
	@$(PY) -m pip install -q --no-build-isolation -c constraints.txt -e '.[docs]' \
		2>&1 | { grep -v "^WARNING" || true; }
	@touch $@

test: setup ## Run the everyday tests
	@echo 'pytest -m "not slow and not gpu and not browser", in $(JOBS) processes'
	@$(PY) -m pytest -q -m "not slow and not gpu and not browser" -n $(JOBS) --dist loadgroup $(PYTEST_ARGS)

test-slow: setup ## Run the slow tests
	@echo 'pytest -m "slow and not gpu"'
	@$(PY) -m pytest -q -m "slow and not gpu" --timeout 1800 $(PYTEST_ARGS)

test-browser: $(VENV)/.stamp-browser ## Open reports in chromium (installs it with apt where it is absent)
	@$(PY) -m pytest -q -m browser tests/browser $(PYTEST_ARGS)

$(VENV)/.stamp-browser: $(VENV)/.stamp
	@$(PY) -m pip install -q --no-build-isolation -c constraints.txt -e '.[browser]' \
		2>&1 | { grep -v "^WARNING" || true; }
	@command -v chromium > /dev/null || { $(SUDO) apt-get update -q && $(SUDO) apt-get install -y -q chromium; }
	@touch $@

gpu: $(if $(filter $(PY),$(GPU_PYTHON)),setup) ## Run the GPU tests (GPU_PYTHON=python3 for another interpreter)
	@PYTHONPATH=src $(GPU_PYTHON) -m pytest -q -m gpu tests/gpu --timeout 1800 $(PYTEST_ARGS)

lint: setup ## Check style, language, types and import layers
	@$(PY) -m ruff check
	@$(PY) -m ruff format --check
	@$(PY) -m tests.support.language
	@$(PY) -m mypy
	@$(VENV)/bin/lint-imports --no-logo --no-cache

format: setup ## Format the code and apply safe fixes
	@$(PY) -m ruff check --fix
	@$(PY) -m ruff format

dist: setup ## Build the source archive, and the wheel from it, into dist/
	@rm -rf build $(DIST)
	@$(PY) -c "from setuptools import build_meta; build_meta.build_sdist('$(DIST)')" > /dev/null
	@$(PY) -m pip wheel -q --no-deps --no-build-isolation -w $(DIST) $(DIST)/shardwise-*.tar.gz
	@ls $(DIST)/*

test-dist: setup ## Install the wheel into a clean environment and run the quick start there
	@$(PY) -m pytest -q -m slow tests/docs/test_wheel.py --timeout 1800 $(PYTEST_ARGS)

docs: $(VENV)/.stamp-docs ## Run the documentation's code, and build it into docs/_build/html
	@$(PY) -m pytest -q -m "not slow" tests/docs/test_pages.py $(PYTEST_ARGS)
	@$(PY) -m sphinx -q -W --keep-going -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

demo: setup ## Plan, verify and train a small GPT on 4 processes
	@$(PY) examples/demo.py

zoo: setup ## Run every model of the zoo through every strategy
	@$(PY) -m benchmarks.zoo $(ZOO_ARGS)

bench: setup ## Compare step time and memory with DDP and FSDP2
	@$(PY) -m benchmarks.run $(BENCH_ARGS)

bench-checkpoint: setup ## Measure memory and time of saving and loading 1.1 GB of parameters
	@$(PY) -m benchmarks.checkpoint $(BENCH_ARGS)

bench-recompute: setup ## Compare predicted with measured memory, with and without recomputation
	@$(PY) -m benchmarks.recompute $(BENCH_ARGS)

bench-quality: setup ## Compare automatic plans with a grid of configurations, in simulation
	@$(PY) -m benchmarks.quality $(BENCH_ARGS)

bench-pipeline: setup ## Compare pipelines with torch.distributed.pipelining
	@$(PY) -m benchmarks.pipeline $(BENCH_ARGS)

bench-reality: setup ## Compare automatic plans with DDP, FSDP2 and every strategy
	@$(PY) -m benchmarks.reality $(BENCH_ARGS)

bench-shared-memory: setup ## Compare all-reduce through shared memory with gloo's
	@$(PY) -m benchmarks.shared_memory $(BENCH_ARGS)

bench-unequal: setup ## Compare automatic plans with even shares on ranks of unequal speed
	@$(PY) -m benchmarks.unequal $(BENCH_ARGS)

differential: setup ## Compare 500 random training scripts with plain PyTorch
	@$(PY) -m benchmarks.differential $(BENCH_ARGS)

same: setup ## Compare emitted code, plans, figures and files with the frozen record
	@$(PY) -m benchmarks.same $(SAME_ARGS)

clean: ## Remove build outputs and caches, keep .venv
	@rm -rf build dist docs/_build out zoo-results .shardwise-cache
	@rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
