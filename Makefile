# Every target does its own set-up: the virtual environment is made once, and again only when its requirements change.
PYTHON ?= python3
VENV ?= .venv
STAMP = $(VENV)/.installed
BIN = $(VENV)/bin
PIP = $(BIN)/python -m pip install --quiet --progress-bar off
REQUIREMENTS = --constraint constraints.txt --editable '.[dev]'

.PHONY: help setup lock demo docs test cluster cluster-test container-test pages-test wheel-test lowest-test quick check format screenshots same-bytes benchmarks speed gpu letters workflows-check release-check clean

help:  ## Show the targets.
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

# uv installs in a fraction of pip's time; pip does it where uv cannot be had or fails.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info < (3, 15) else "imagepivot needs Python 3.11 to 3.14; name one with: make PYTHON=python3.12 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --constraint constraints.txt uv && $(BIN)/uv pip install --quiet --python $(BIN)/python $(REQUIREMENTS) || $(PIP) $(REQUIREMENTS)
	touch $@

setup: $(STAMP)  ## Create the virtual environment (about a minute, 7 GB with torch's CUDA libraries).

lock: $(STAMP)  ## Pin the whole closure of the requirements in constraints.txt and docker/; versions that still fit stay.
	$(BIN)/uv pip compile --quiet --universal --no-emit-index-url --no-annotate --custom-compile-command 'make lock' --extra dev pyproject.toml --output-file constraints.txt
	PATH="$(CURDIR)/$(BIN):$$PATH" docker/lock.sh

demo: $(STAMP)  ## Train on drawn scenes, and draw what the model finds for a query in four languages.
	$(BIN)/imagepivot demo build/demo

docs: $(STAMP)  ## Build the documentation as a site in build/docs; a broken link or anchor is an error.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

test: check  ## Run all checks and all tests but those of the targets cluster, cluster-test and container-test.
	$(BIN)/python -m pytest -n 2 --dist loadfile -m 'not cluster and not engines and not containers and not packaging' --durations=10

# A store that speaks S3, by another maker than the emulator's: the tests of stores use it, or skip with the reason.
build/stores/versitygw:
	-GOBIN=$(CURDIR)/build/stores go install github.com/versity/versitygw/cmd/versitygw@v1.8.0

cluster: $(STAMP) build/stores/versitygw  ## Run the long tests: stores, full disks, damage, many or killed processes, array jobs, other runners, snippets, presets.
	$(BIN)/python -m pytest -n 2 --dist loadfile -m cluster --durations=10

cluster-test: $(STAMP)  ## Run every pipeline command on Flink, Spark and Prism, which Maven and Go fetch into build/engines; without them it skips.
	$(BIN)/python -m pytest -p no:xdist tests/cluster --durations=30

container-test: $(STAMP)  ## Build the images of docker/ and run them, as root; docs/how-to/containers.md names what it needs.
	$(BIN)/python -m pytest tests/containers --durations=10

pages-test: $(STAMP)  ## Open the pages in Debian's Chromium, and check their accessibility with axe-core, which npm fetches.
	mkdir -p build/axe && cd build/axe && rm -f *.tgz && npm pack --silent axe-core@4 && tar -xzf axe-core-*.tgz
	IMAGEPIVOT_AXE=$(CURDIR)/build/axe/package/axe.min.js $(BIN)/python -m pytest -p no:xdist tests/integration/test_pages_in_a_browser.py

wheel-test: $(STAMP)  ## Build the wheel, and try it in empty environments with the lowest and newest dependencies; EXTRAS=1 takes all extras.
	$(BIN)/python -m pytest -p no:xdist tests/packaging --durations=5

lowest-test: $(STAMP)  ## Install the lowest versions of every extra, one after another, and run the quick tests of its folders.
	LOWEST=all $(BIN)/python -m pytest -p no:xdist tests/packaging/test_lowest.py --durations=0

quick: $(STAMP)  ## Run the tests that take a fifth of a second or less: two minutes on two idle cores.
	$(BIN)/python -m pytest -n 2 --dist loadfile -m 'not slow and not packaging'

check: $(STAMP) docs  ## Run linter, formatter, type checker and licence checker, count modules and lines, and build the documentation.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m tests.sizes
	$(BIN)/reuse lint --quiet

format: $(STAMP)  ## Format the code.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

screenshots: demo  ## Draw the pictures of docs/images again, with Debian's Chromium.
	$(BIN)/python -m tests.screenshots build/demo

same-bytes: $(STAMP)  ## Compare datasets and a short training with those of another commit: make same-bytes BASE=COMMIT; some five minutes.
	$(BIN)/python -m tests.same_bytes '$(BASE)'

benchmarks: $(STAMP)  ## Measure the ratios of speed and memory; takes an hour on two cores, and an idle machine.
	for script in tests/benchmarks/bench_*.py; do $(BIN)/python $$script || exit 1; done

gpu: $(STAMP)  ## Measure what only a GPU can tell, in at most an hour; without a GPU it fails and says so.
	$(BIN)/python -m tests.benchmarks.gpu

speed: $(STAMP)  ## Measure every extractor on this processor for the table of docs/internals/performance.md, on an idle machine.
	$(BIN)/python tests/benchmarks/bench_speed.py --write docs/internals/performance.md

letters:  ## Write pipelines/text/letters.toml again; needs Perl 5.36, which has Unicode 14.0.
	perl pipelines/text/letters.pl

workflows-check:  ## Check .github/workflows with actionlint, which Go fetches.
	cd .github/workflows && go run github.com/rhysd/actionlint/cmd/actionlint@v1.7.12 *.yml

release-check: $(STAMP)  ## Fail while addresses are placeholders, or versions and dates differ.
	$(BIN)/python -m tests.release

clean:  ## Remove what was built; the virtual environment too.
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
