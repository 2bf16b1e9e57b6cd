# Everything runs inside .venv, which the first target that needs it builds from pyproject.toml and the
# pinned constraints.txt. `make help` lists the targets.
# The first Python of 3.11 to 3.13 that there is; asked for only when it is needed.
FITS        := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
PYTHON_BASE ?= $(or $(shell for each in python3.11 python3.12 python3.13 python3; do \
    $$each -c '$(FITS)' 2>/dev/null && echo $$each && break; done),$(error no Python 3.11 to 3.13 found))
VENV        := .venv
PYTHON      := $(VENV)/bin/python
READY       := $(VENV)/.ready
PRESET      ?= embedded
ARGS        ?=
TEST        ?= tests
WORKERS     ?= 2

.DEFAULT_GOAL := help
ABOUT := $(if $(filter help,$(MAKECMDGOALS)),$(filter-out help,$(MAKECMDGOALS)))# what `make help` is asked about
.DELETE_ON_ERROR:

$(READY): pyproject.toml constraints.txt
	$(PYTHON_BASE) -m venv $(VENV)
	$(PYTHON) -m pip install --quiet -c constraints.txt -e ".[dev]"
	@touch $@

.PHONY: help setup lint test clean
help: ## this list; `make help lissa-fig1` says what a target computes
	@$(if $(ABOUT),:,echo "usage: make TARGET [PRESET=smoke|embedded|laptop|paper] [ARGS=\"key=value ...\"] [RANKS=processes]")
	@$(if $(ABOUT),:,awk -F ':.*## ' '/^[a-z0-9-]+:.*## /{printf "  %-24s %s\n", $$1, $$2}' $(MAKEFILE_LIST))
	@PYTHONPATH= $(PYTHON_BASE) -m experiments help $(ABOUT)

setup: $(READY) ## build .venv (every other target does this by itself, once)

lint: $(READY) ## ruff (style, docstrings, complexity) and mypy
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

test: $(READY) ## all tests, on WORKERS=2 cores; TEST=tests/solvers for a part; real data when CURVLAB_DATA points at it
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(PYTHON) -m pytest -n $(WORKERS) --dist loadfile $(TEST)

clean: ## remove run directories and stored units of work (data and results stay)
	rm -rf outputs multirun .cache .mypy_cache .ruff_cache .pytest_cache

# ---------------------------------------------------------------------------------------- figures
# Every experiments/<paper>/<item>.py (or <item>/__init__.py) with a TARGET is a target <paper>-<item>; benchmarks
# are bench-<item>.
KEYS    := $(sort $(patsubst experiments/%,%,$(patsubst %/__init__.py,%,$(patsubst %.py,%,$(patsubst %/__init__.py,%.py,$(shell grep -ls '^TARGET = ' experiments/*/*.py experiments/*/*/__init__.py))))))
TARGETS := $(subst _,-,$(subst /,-,$(patsubst benchmarks/%,bench/%,$(KEYS))))
PAPERS  := $(sort $(filter-out benchmarks,$(foreach key,$(KEYS),$(firstword $(subst /, ,$(key)))))) bench
RUN     := $(PYTHON) -m experiments
REPORT  := $(PYTHON) -m curvlab.lab.reporting.report
# RANKS=4: one target on as many processes, which share its data (and the parameters, where a task says so).
LAUNCH  := $(if $(RANKS),-m torch.distributed.run --standalone --nproc-per-node=$(RANKS))

SITED   := $(VENV)/.site

.PHONY: bank score figures report site site-test notebooks judge draw stale verify dashboard sync $(PAPERS) $(TARGETS)
ifneq ($(ABOUT),)
$(ABOUT): # `make help lissa-fig1` runs nothing
	@:
else
$(PAPERS) $(TARGETS): $(READY)
	@$(PYTHON) $(LAUNCH) -m experiments run $@ preset=$(PRESET) $(ARGS)

figures: $(READY) ## every table and figure, as many side by side as there are cores, then the report
	@status=0; $(RUN) run figures preset=$(PRESET) $(ARGS) || status=$$?; $(REPORT); exit $$status

report: $(READY) ## results/README.md, a page for each paper, REPRODUCE.md and the tables of README.md, from results/
	@$(REPORT)

$(SITED): $(READY)
	$(PYTHON) -m pip install --quiet -c constraints.txt -e ".[site]"
	@touch $@

site: $(SITED) ## README, results, docs, notebooks and reference as one site: outputs/site/index.html
	@PYTHONPATH=src $(PYTHON) -m sphinx -q -W --keep-going -c docs -b html -d .cache/site . outputs/site
	@echo outputs/site/index.html

site-test: $(SITED) ## the site, built and looked at in a Chromium (apt-get install chromium)
	@OMP_NUM_THREADS=1 $(PYTHON) -m pytest -p no:xdist tests/test_site.py

notebooks: $(READY) ## run the notebooks in place; ARGS="lissa pbrf" for some
	@$(PYTHON) notebooks/run.py $(ARGS)

judge: $(READY) ## claims again, from the tables alone; ARGS="lissa-fig1 ..." for some
	@$(RUN) judge $(ARGS)

draw: $(READY) ## figures again, from the tables alone; ARGS="lissa-fig1 ..." for some
	@$(RUN) draw $(ARGS)

bank: $(READY) ## banks of retrainings from their recipes, BANK="digits mnist", and how far they are from the committed
	@$(PYTHON) -m experiments.benchmarks.board bank $(BANK)

score: $(READY) ## your scores of examples among the board's, BANK=digits SCORES=mine.npy (docs/enter.md)
	@$(PYTHON) -m experiments.benchmarks.board score $(BANK) $(SCORES)

stale: $(READY) ## published results of which a file that they are made by has changed since
	@$(RUN) stale

verify: $(READY) ## results computed again into a temporary folder, and what differs; ARGS="lissa-fig1 ..." for some
	@$(RUN) verify preset=$(PRESET) $(ARGS)

dashboard: $(READY) ## W&B's workspace and report of each paper as JSON; ARGS="entity=TEAM" saves them there
	@$(PYTHON) -m curvlab.lab.reporting.dashboard $(ARGS)

sync: $(READY) ## send the runs that were recorded offline to W&B, after `wandb login`
	@ls -d outputs/wandb/offline-run-* >/dev/null 2>&1 || \
	    { echo "error: outputs/wandb holds no run that was recorded offline; make a target first: make rank1-fig1" >&2; exit 1; }
	@$(VENV)/bin/wandb sync $(ARGS) outputs/wandb/offline-run-*

endif

.DEFAULT: # no such target: the nearest, without a package
	@PYTHONPATH= $(PYTHON_BASE) -m experiments help $@
