# SPDX-License-Identifier: LGPL-2.1-or-later

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
SOURCES := msatools commands fixtures packaging tests setup.py
PYTEST := $(BIN)/python -m pytest
# Tests start hundreds of processes: byte code is kept, whatever the environment says.
export PYTHONDONTWRITEBYTECODE :=
# A module stays with one process, which keeps what it has read of a dump.
SPREAD := -n auto --dist loadfile --no-loadscope-reorder
# Disk space of the dumps that `make test` needs, in GiB.
TEST_GIB := 8

.PHONY: demo test test-fast test-live test-long test-matrix in-drgn golden schema docs mutants \
	lint dist deb test-dist bench fuzz clean

# What there is to say of a real dump, which is small enough to be kept here.
demo: $(INSTALLED)
	$(BIN)/msa-report --types btf fixtures/demo/linux-6.12.kdump
	@echo
	$(BIN)/msa-memstat --types btf fixtures/demo/linux-6.12.kdump

# What is pure, the demo cores, and dumps of real kernels.
test: lint
	$(BIN)/python -m fixtures.lab room $(TEST_GIB)
	$(PYTEST) $(SPREAD)

# What of it needs no guests and no dumps of them, and is quick.
test-fast: lint
	$(PYTEST) $(SPREAD) --fast

# What needs a guest that runs.
test-live: lint
	$(BIN)/python -m tests.support.twice

# Every kernel, soaks and wide matrices.
test-long: lint
	$(PYTEST) $(SPREAD) --all-kernels
	$(PYTEST) -m long --all-kernels

# All facts on every kernel and machine, for docs/kernels.md, and docs/in-drgn.md; or on
# one: CELL=nokaslr-6.12.
test-matrix: $(INSTALLED)
	$(BIN)/python -m tests.truth.matrix $(CELL)
	$(if $(CELL),,$(MAKE) in-drgn)

# What of drgn works without debug info, for docs/in-drgn.md; of corelens, too, with
# DRGN_TOOLS=DIRECTORY, the source of drgn-tools.
in-drgn: $(INSTALLED)
	$(BIN)/python -m tests.indrgn $(DRGN_TOOLS:%=--drgn-tools %)

# Record the rendered text that tests compare with; read what changed before a commit.
golden: $(INSTALLED)
	$(PYTEST) --record-golden

# The schemas of all JSON, which tests hold the output against.
schema: $(INSTALLED)
	$(BIN)/python -m msatools.derived.schemas docs/schema

# The outputs that the documentation shows, and its index; read what changed.
docs: $(INSTALLED)
	$(BIN)/python -m tests.docs

lint: $(INSTALLED)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy

# Faults in the product, chosen at random, that the tests have to notice.
mutants: $(INSTALLED)
	$(BIN)/python -m tests.support.mutants

# Damaged and hostile dumps: make fuzz N=1000 SEED=2, or one again: CASE=2:17.
# With LAB=cpus-6.1 an ELF dump of the lab instead of the demo cores.
fuzz: $(INSTALLED)
	$(BIN)/python -m tests.fuzz $(if $(N),-n $(N)) $(if $(SEED),--seed $(SEED)) \
		$(if $(CASE),--case $(CASE)) $(LAB:%=--lab %)

# The sdist and the wheel, in dist/.
dist: $(INSTALLED)
	rm -rf build dist
	$(BIN)/python -m build

# Both, installed where there is no compiler, by pip and by pipx; the Debian package;
# the plugin of sos.
test-dist: $(INSTALLED)
	$(PYTEST) -m long tests/test_dist.py tests/test_deb.py tests/test_sos.py

# A Debian package with all that msatools needs, in dist/.
deb:
	packaging/deb.sh

bench: $(INSTALLED)
	$(BIN)/python -m tests.bench

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml setup.py $(wildcard msatools/*/*.c)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "make: $(PYTHON) is older than 3.10: name another, PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
		|| { echo "make: $(PYTHON) has no venv: install it (Debian: python3-venv)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable '.[test]'
	touch $@
