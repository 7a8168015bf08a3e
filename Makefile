# Every target does its own set-up: the virtual environment is made once, and again only when its requirements change.
PYTHON ?= python3
VENV ?= .venv
STAMP = $(VENV)/.installed
BIN = $(VENV)/bin

.PHONY: help setup demo test cluster cluster-test container-test quick check format benchmarks speed gpu clean

help:  ## Show the targets.
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if (3, 10) <= sys.version_info < (3, 14) else "imagepivot needs Python 3.10 to 3.13; name one with: make PYTHON=python3.12 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --progress-bar off -c constraints.txt -e '.[dev]'
	touch $@

setup: $(STAMP)  ## Make the virtual environment (a few minutes, about 6 GB with torch's CUDA libraries).

demo: $(STAMP)  ## Run the main job on scenes that are drawn here.
	$(BIN)/imagepivot demo build/demo

test: check  ## Run all checks and all tests but those of the targets cluster, cluster-test and container-test.
	$(BIN)/python -m pytest -n 2 --dist loadfile -m 'not cluster and not engines and not containers' --durations=10

cluster: $(STAMP)  ## Run the long tests: stores, full disks, damage, many or killed processes, array jobs, other runners, snippets, presets.
	$(BIN)/python -m pytest -n 2 --dist loadfile -m cluster --durations=10

cluster-test: $(STAMP)  ## Run every pipeline command on Flink, Spark and Prism, which Maven and Go fetch into build/engines; without them it skips.
	$(BIN)/python -m pytest -p no:xdist tests/cluster --durations=30

container-test: $(STAMP)  ## Build the images of docker/ and run them, as root; docs/containers.md names what it needs.
	$(BIN)/python -m pytest tests/containers --durations=10

quick: $(STAMP)  ## Run the tests that take seconds.
	$(BIN)/python -m pytest -n 2 --dist loadfile -m 'not slow'

check: $(STAMP)  ## Run the linter, the formatter's check and the type checker.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)  ## Format the code.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

benchmarks: $(STAMP)  ## Measure the ratios of speed and memory; takes an hour on two cores, and an idle machine.
	for script in tests/benchmarks/bench_*.py; do $(BIN)/python $$script || exit 1; done

gpu: $(STAMP)  ## Measure what only a GPU can tell, in at most an hour; without a GPU it fails and says so.
	$(BIN)/python -m tests.benchmarks.gpu

speed: $(STAMP)  ## Measure every extractor on this processor for the table of docs/speed.md, on an idle machine.
	$(BIN)/python tests/benchmarks/bench_speed.py --write docs/speed.md

clean:  ## Remove what was built; the virtual environment too.
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
