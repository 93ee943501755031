# make test PYTHON=python3.12 VENV=.venv312   another interpreter, in an environment of its own
# make test VENV=                             the current environment as it is, nothing is installed
PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?= -n 2

ifeq ($(strip $(VENV)),)
PY := $(PYTHON)
INSTALLED :=
else
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/installed
endif

.PHONY: setup test sweep lint types demo bench

setup: $(INSTALLED)

$(VENV)/installed: pyproject.toml constraints-dev.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet -c constraints-dev.txt -e '.[test,dev,demo]'
	touch $@

test: setup
	$(PY) -m pytest $(PYTEST_ARGS)

sweep: setup
	$(PY) -m pytest -m sweep --timeout 0

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: setup
	$(PY) -m mypy

demo: setup
	$(PY) -m pstar_compile demo

bench: setup
	set -e; for script in benchmarks/*.py; do $(PY) $$script; done
