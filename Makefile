# Everything runs inside .venv, which the first target that needs it builds from pyproject.toml and the
# pinned constraints.txt. `make help` lists the targets.
PYTHON_BASE ?= python3.11
VENV        := .venv
PYTHON      := $(VENV)/bin/python
READY       := $(VENV)/.ready
PRESET      ?= embedded
ARGS        ?=
TEST        ?= tests

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

$(READY): pyproject.toml constraints.txt
	$(PYTHON_BASE) -m venv $(VENV)
	$(PYTHON) -m pip install --quiet -c constraints.txt -e ".[dev]"
	@touch $@

.PHONY: help setup lint test clean
help: ## this list
	@echo "usage: make TARGET [PRESET=smoke|embedded|laptop|paper] [ARGS=\"key=value ...\"]"
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## /{printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## build .venv (every other target does this by itself, once)

lint: $(READY) ## ruff (style, docstrings, complexity) and mypy
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

test: $(READY) ## all tests; TEST=tests/solvers for a part; real data when CURVLAB_DATA points at it
	$(PYTHON) -m pytest $(TEST)

clean: ## remove run directories and stored units of work (data and results stay)
	rm -rf outputs multirun .cache .mypy_cache .ruff_cache .pytest_cache

# ---------------------------------------------------------------------------------------- figures
LISSA := lissa-fig1

.PHONY: figures report lissa $(LISSA)
figures: $(LISSA) report ## every target that exists, then the report
lissa: $(LISSA) ## every target of the LiSSA paper

lissa-fig1: $(READY) ## LiSSA against PBRF, 25 training points (embedded: 1-2 min, laptop: 45 min)
	$(PYTHON) -m experiments.lissa.fig1_pbrf_scatter preset=$(PRESET) $(ARGS)

report: $(READY) ## results/index.html and results/scoreboard.csv from what is under results/
	$(PYTHON) -m curvlab.reporting.report
