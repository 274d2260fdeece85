# SPDX-License-Identifier: LGPL-2.1-or-later

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
SOURCES := msatools commands fixtures tests

DEMO := memory-6.12
DEMO_PATHS := from fixtures import lab; run = lab.build("$(DEMO)"); \
	print(run.vmlinux, run.elf)

.PHONY: demo test test-long lint bench clean

# msa-memstat's table of a real dump, which the lab makes.
demo: $(INSTALLED)
	$(BIN)/python -m fixtures.lab build $(DEMO)
	@set -- $$($(BIN)/python -c '$(DEMO_PATHS)') && $(BIN)/msa-memstat -s "$$1" "$$2"

test: lint
	$(BIN)/python -m pytest

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

$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "make: $(PYTHON) is older than 3.10: name another, PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
		|| { echo "make: $(PYTHON) has no venv: install it (Debian: python3-venv)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable '.[test]'
	touch $@
