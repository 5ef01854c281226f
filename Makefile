# The same few verbs for people and for CI. Each sets up what it needs in .venv first;
# nothing is written outside this checkout except pip's cache.
#
#   make demo     train, break things, recover, compare bit for bit   (DEMO_ARGS="--json out.json")
#   make test     the whole test suite                                (TEST_ARGS="tests/unit -k frames" TEST_WORKERS=0)
#   make check    formatting, lint, types, import rules, spelling
#   make bench    the benchmarks                                      (BENCH_ARGS="--help")
#   make docs     every link and path named in the documentation exists
#   make clean    remove what the verbs above made
#
# PIP_ARGS is passed to every pip install, for instance an index of CPU-only torch builds.

PYTHON ?= python3
PIP_ARGS ?=
DEMO_ARGS ?=
TEST_ARGS ?= tests
TEST_WORKERS ?= 2
BENCH_ARGS ?=

SHELL := /bin/sh
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --quiet --constraint constraints.txt $(PIP_ARGS)
EXTRAS := worker,services,dashboard,deepspeed,aws,planning,local,dev

export DS_ACCELERATOR ?= cpu
export DS_BUILD_OPS := 0
export PIP_ROOT_USER_ACTION := ignore

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test check bench docs clean

help:
	@sed -n 's/^#   make/make/p' Makefile

demo: $(VENV)/installed
	@$(BIN)/gemini-ft demo $(DEMO_ARGS)

test: $(VENV)/installed
	@$(BIN)/python -m pytest --numprocesses $(TEST_WORKERS) --dist loadfile $(TEST_ARGS)

check: $(VENV)/installed
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy --strict
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/codespell
	@echo "check: all passed"

bench: $(VENV)/installed
	@$(BIN)/python -m benchmarks $(BENCH_ARGS)

docs: $(VENV)/installed
	@$(BIN)/python docs/check_links.py

clean:
	rm -rf $(VENV) build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Each stamp is written after its step has succeeded, so an interrupted installation resumes where it stopped.
$(VENV)/created:
	@echo "[1/4] creating $(VENV)"
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit(f"Gemini-FT needs Python 3.11 or newer, and $(PYTHON) is {v[0]}.{v[1]}: make PYTHON=python3.12")'
	@rm -rf $(VENV)
	@$(PYTHON) -m venv $(VENV) >/dev/null 2>&1 || { \
	  $(PYTHON) -m venv --without-pip --clear $(VENV) && \
	  $(PYTHON) -m pip --python $(VENV)/bin/python install --quiet pip; }
	@touch $@

$(VENV)/torch: constraints.txt | $(VENV)/created
	@echo "[2/4] installing torch (the largest download; see README.md for CPU-only builds)"
	@$(INSTALL) torch numpy
	@touch $@

# DeepSpeed imports torch while it is being built, hence no build isolation.
$(VENV)/deepspeed: $(VENV)/torch
	@echo "[3/4] installing DeepSpeed"
	@$(INSTALL) setuptools wheel ninja py-cpuinfo psutil
	@$(INSTALL) --no-build-isolation deepspeed
	@touch $@

$(VENV)/installed: pyproject.toml constraints.txt $(VENV)/deepspeed
	@echo "[4/4] installing Gemini-FT and its tools"
	@$(INSTALL) --editable '.[$(EXTRAS)]'
	@touch $@
