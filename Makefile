# The two commands of a newcomer: `make demo` and `make test`. Each sets up what it needs first, in .venv.
#
#   make PYTHON=python3.12 test    another interpreter (3.11 or 3.12)
#   make TORCH_INDEX=https://download.pytorch.org/whl/cpu test
#                                  a CPU build of torch where PyPI's is a CUDA build of several GB (Linux)
#   make VENV= PYTHON=python3 test-gpu
#                                  no set-up at all: the interpreter has torch and pytest already (GPU machines)
#   make WORKERS=0 test            tests one after the other; by default two processes share them
#   make demo ARGS="--steps 50"    ARGS goes to the command behind the target
#   make bench-cpu RECORD=1        over the record in benchmarks/results, which git tracks; else into bench/

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
WORKERS ?= 2
ARGS ?=
RECORD ?=

VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)

ifeq ($(strip $(VENV)),)
RUN := PYTHONPATH=src $(PYTHON)
READY := check-python
READY_BENCH := check-python
else
RUN := $(VENV)/bin/python
# The stamps carry the version, so that another PYTHON makes the environment anew.
READY := $(VENV)/.ready-$(VERSION)
READY_BENCH := $(VENV)/.ready-bench-$(VERSION)
endif
CROSSDOCK := $(RUN) -c 'from crossdock.cli import main; main()'
INSTALL := $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: help setup check-python demo test lint format test-cpu test-full test-gpu bench bench-cpu clean
.DEFAULT_GOAL := help

help:
	@echo 'make demo        train a small mixture-of-experts on two ranks of this machine, and prove what came out (1 to 2 min)'
	@echo 'make test        lint, type check and the CPU test suite, pairs of workload values: what CI runs (about 10 min on two cores)'
	@echo 'make test-full   the same over the whole workload grid'
	@echo 'make test-gpu    the tests that need CUDA devices'
	@echo 'make lint        ruff and mypy; make format: let ruff rewrite the sources'
	@echo 'make bench-cpu   all_to_all beside the token exchange of Hugging Face transformers, two CPU ranks; results go to bench/'
	@echo 'make bench       all backends of this machine side by side, beside the floor that its links set'
	@echo 'make setup       only the environment; make clean: remove it and all that the targets wrote'

setup: $(READY)

check-python:
	@case '$(VERSION)' in \
	  3.11|3.12) ;; \
	  '') echo "crossdock needs Python 3.11 or 3.12, but '$(PYTHON)' does not run; name one: make PYTHON=python3.12" >&2; exit 1 ;; \
	  *) echo "crossdock needs Python 3.11 or 3.12, but '$(PYTHON)' is $(VERSION); name one: make PYTHON=python3.12" >&2; exit 1 ;; \
	esac

demo: $(READY)
	$(CROSSDOCK) demo $(ARGS)

test: lint test-cpu

lint: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

format: $(READY)
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

test-cpu: $(READY)
	$(RUN) -m pytest -m 'not gpu' -n $(WORKERS) --dist loadfile $(ARGS)

test-full: lint
	$(RUN) -m pytest -m 'not gpu' --full -n $(WORKERS) --dist loadfile $(ARGS)

test-gpu: $(READY)
	$(RUN) -m pytest -m gpu $(ARGS)

bench: $(READY)
	$(CROSSDOCK) bench $(ARGS)

bench-cpu: $(READY_BENCH)
	$(RUN) benchmarks/cpu_against_transformers.py $(if $(RECORD),--record) $(ARGS)

clean:
	rm -rf .venv build dist demo bench .mypy_cache .pytest_cache .ruff_cache src/crossdock.egg-info
	find src tests examples benchmarks -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

ifneq ($(strip $(VENV)),)
# Debian's python3 comes without ensurepip unless python3-venv is installed; then the interpreter's own pip fills in.
$(READY): pyproject.toml constraints.txt | check-python
	@echo 'Setting up $(VENV) with Python $(VERSION): once, about a minute and the download of torch'
	@test "$$($(VENV)/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = '$(VERSION)' \
	  || $(PYTHON) -m venv --clear $(VENV) 2>/dev/null \
	  || { $(PYTHON) -m venv --clear --without-pip $(VENV) \
	       && $(PYTHON) -m pip --python $(VENV)/bin/python install --quiet --disable-pip-version-check pip; }
	@$(if $(TORCH_INDEX),$(INSTALL) torch --index-url $(TORCH_INDEX))
	@$(INSTALL) --editable '.[demo,dev]'
	@rm -f $(VENV)/.ready-*
	@touch $@

$(READY_BENCH): $(READY)
	@$(INSTALL) --editable '.[demo,dev,bench]'
	@touch $@
endif
