# SPDX-License-Identifier: LGPL-2.1-or-later

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
SOURCES := msatools commands fixtures tests setup.py

.PHONY: demo test test-fast test-long lint bench clean

# msa-memstat's table of a real dump, which is small enough to be kept here.
demo: $(INSTALLED)
	$(BIN)/msa-memstat --types btf fixtures/demo/linux-6.12.kdump

test: lint
	$(BIN)/python -m pytest

# What needs no guests: a minute, on any machine.
test-fast: lint
	$(BIN)/python -m pytest --no-lab

test-long: lint
	$(BIN)/python -m pytest -m long

lint: $(INSTALLED)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy

bench: $(INSTALLED)
	$(BIN)/python -m tests.bench

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml setup.py msatools/memory/_classify.c
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "make: $(PYTHON) is older than 3.10: name another, PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
		|| { echo "make: $(PYTHON) has no venv: install it (Debian: python3-venv)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable '.[test]'
	touch $@
