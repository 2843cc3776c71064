# `make demo` and `make test` each work on a machine that has nothing yet, and can be repeated.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test lint model gemma clean

demo: $(READY) model
	$(BIN)/python examples/demo.py

test: $(READY) model
	$(BIN)/python -m pytest

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

model: $(READY)
	$(BIN)/python -m kvfix.engine.fetch demo

# an optional second model for studies, under the Gemma Terms of Use (https://ai.google.dev/gemma/terms)
gemma: $(READY)
	$(BIN)/python -m kvfix.engine.fetch gemma

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("kvfix needs Python 3.10 or newer, not " + sys.version.split()[0] if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv $(VENV) || { echo "python3-venv is missing: apt-get install python3-venv" >&2; exit 1; }
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(READY)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
