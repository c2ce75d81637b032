# make demo, make test: each sets itself up in .venv first.
# PYTHON=python3.11 chooses the interpreter; PIP_ARGS="..." is passed to every pip install.
PYTHON ?= python3
PIP_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
# The pins were made for Python 3.11; other versions take what the ranges in pyproject.toml allow.
PINS = $(shell $(PYTHON) -c 'import sys; print("-c requirements/dev.txt" * (sys.version_info[:2] == (3, 11)))')

.PHONY: demo test test-quick test-long lint docs clean

demo: $(READY)
	$(BIN)/evt demo

# Two test processes with threads of their own would fight for the cores of a small machine.
test test-long: export OMP_NUM_THREADS = 1

test: $(READY)
	$(BIN)/pytest -q -n 2 --dist worksteal -m "not slow"

test-quick: $(READY)
	$(BIN)/pytest -q tests/test_tiny.py

test-long: $(READY)
	$(BIN)/pytest -q -n 2 --dist worksteal

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(READY)
	$(BIN)/python docs/generate.py

$(READY): pyproject.toml requirements/dev.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install $(PIP_ARGS) torch==2.13.0
	$(BIN)/pip install $(PIP_ARGS) $(PINS) --no-build-isolation -e ".[dev]"
	touch $(READY)

clean:
	rm -rf $(VENV)
