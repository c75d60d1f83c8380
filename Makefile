# Everything starts here: `make run` needs only Python 3.11 or 3.12 and does its own set-up. `make help` lists the rest.
SHELL := /bin/bash
.DEFAULT_GOAL := help
BIN := .venv/bin
# More overrides or options: make run ARGS="runner.max_steps=2", make test ARGS="-k channel"
ARGS ?=
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
# Processes that share the tests; each takes up to 2 GB, the simulators' one more. To debug: make test ARGS="-p no:xdist"
WORKERS ?= $(shell n=$$(nproc); echo $$((n < 8 ? n : 8)))
PYTEST = $(TEST_ENV) $(BIN)/python -m pytest $(if $(findstring no:xdist,$(ARGS)),,-n $(WORKERS) --dist loadgroup --no-loadscope-reorder)

.PHONY: help setup run test test-slow test-all lint format bench bench-peers curves check-wheel build docs clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile
	@echo '  ARGS="..." adds overrides or options; PYTHON=/path/to/python3.11 chooses the interpreter.'

setup: ## Make .venv with pinned dependencies; quick when nothing changed
	@bash scripts/setup.sh

run: setup ## Set up, then train a policy on one of LIBERO's long-horizon tasks: before and after
	$(BIN)/python train.py task=embodied env=libero_10 $(ARGS)

test: setup ## Set up, then run the tests on all cores, without the slow ones
	$(PYTEST) -m "not slow" $(ARGS)

test-slow: setup ## The slow tests only
	$(PYTEST) -m slow $(ARGS)

test-all: setup ## All tests
	$(PYTEST) $(ARGS)

lint: setup ## ruff (lint and format) and pyright
	@status=0; for check in "ruff check" "ruff format --check" pyright; do \
	  echo "$$check"; $(BIN)/$$check || status=1; done; exit $$status

format: setup ## Let ruff sort imports and format
	$(BIN)/ruff check --select I --fix
	$(BIN)/ruff format

bench: setup ## Run the benchmarks
	$(BIN)/python -m benchmarks $(ARGS)

bench-peers: setup ## Compare algorithms with published packages (.venv-peers, 1.9 GB)
	@bash benchmarks/peers/setup.sh
	$(BIN)/python -m benchmarks.peers $(ARGS)

curves: setup ## Learning curves over seeds: make curves ARGS="math" (docs/curves.md)
	$(BIN)/python -m benchmarks.curves $(ARGS)

check-wheel: setup ## Prove the wheel: build it, install it elsewhere, run it
	@bash scripts/check_wheel.sh

build: setup ## Build wheel and sdist into dist/
	$(BIN)/python -m build --no-isolation

docs: setup ## Build the pages of docs/ as a site: site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean: ## Remove .venv, caches and build products; results/, runs/ and videos/ stay
	rm -rf .venv build dist site *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -path ./.git -prune -o -type d -name __pycache__ -exec rm -rf {} +
