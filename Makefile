# Everything runs inside .venv, which the first target that needs it builds from pyproject.toml and the
# pinned constraints.txt. `make help` lists the targets.
PYTHON_BASE ?= python3.11
VENV        := .venv
PYTHON      := $(VENV)/bin/python
READY       := $(VENV)/.ready
PRESET      ?= embedded
ARGS        ?=
TEST        ?= tests
WORKERS     ?= 2

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

test: $(READY) ## all tests, on WORKERS=2 cores; TEST=tests/solvers for a part; real data when CURVLAB_DATA points at it
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -n $(WORKERS) --dist loadfile $(TEST)

clean: ## remove run directories and stored units of work (data and results stay)
	rm -rf outputs multirun .cache .mypy_cache .ruff_cache .pytest_cache

# ---------------------------------------------------------------------------------------- figures
LISSA := lissa-tab1 lissa-tab3 lissa-fig1 lissa-fig2 lissa-fig3 lissa-fig4 lissa-thm1 lissa-lemma1 lissa-appd
RANK1 := rank1-fig1 rank1-fig2 rank1-prop rank1-rate rank1-fisher
BENCH := bench-finite-differences bench-curvature bench-solvers bench-lissa-recipe bench-influence-peers \
         bench-ngd-step bench-llc

NGD   := ngd-fig1 ngd-fig2 ngd-fig3 ngd-fig4 ngd-fig5 ngd-fig6 ngd-fig7 ngd-fig8

.PHONY: figures report lissa ngd rank1 bench $(LISSA) $(NGD) $(RANK1) $(BENCH)
figures: $(LISSA) $(NGD) $(RANK1) report ## every target that exists, then the report
lissa: $(LISSA) ## every target of the LiSSA paper
ngd: $(NGD) ## every target of the NGD paper
rank1: $(RANK1) ## every target of the rank-one slides
bench: $(BENCH) ## every benchmark

# Expected times are on two cores, after set-up.
lissa-tab1: $(READY) ## trace, lambda_max and the hyperparameters they recommend (embedded: 1 min)
	$(PYTHON) -m experiments.lissa.tab1_hyperparameters preset=$(PRESET) $(ARGS)

lissa-tab3: $(READY) ## Frobenius norm, lambda_max by sketches and by Lanczos (embedded: 1 min)
	$(PYTHON) -m experiments.lissa.tab3_second_moments preset=$(PRESET) $(ARGS)

lissa-fig1: $(READY) ## LiSSA against PBRF, 25 training points (embedded: 2 min, laptop: 1 h)
	$(PYTHON) -m experiments.lissa.fig1_pbrf_scatter preset=$(PRESET) $(ARGS)

lissa-fig2: $(READY) ## LiSSA over 1,000 steps at three batch sizes, and where C = 2 diverges (embedded: 2 min)
	$(PYTHON) -m experiments.lissa.fig2_batch_size preset=$(PRESET) $(ARGS)

lissa-fig3: $(READY) ## similarity of sentences by gradients and by influence (embedded: 2 min)
	$(PYTHON) -m experiments.lissa.fig3_sentence_similarity preset=$(PRESET) $(ARGS)

lissa-fig4: $(READY) ## both sides of condition C.1 against the batch size (embedded: 1 min)
	$(PYTHON) -m experiments.lissa.fig4_condition preset=$(PRESET) $(ARGS)

lissa-thm1: $(READY) ## error of LiSSA against Theorem 1 and (10) (embedded: 1 min, laptop: 2 min)
	$(PYTHON) -m experiments.lissa.thm1_error_bound preset=$(PRESET) $(ARGS)

lissa-lemma1: $(READY) ## the mean converges, the second moment diverges (embedded: 1 min, laptop: 3 min)
	$(PYTHON) -m experiments.lissa.lemma1_divergence preset=$(PRESET) $(ARGS)

lissa-appd: $(READY) ## influence in a bag-of-words model is TF-IDF (embedded: 30 s, laptop: 2 min)
	$(PYTHON) -m experiments.lissa.appd_tf_idf preset=$(PRESET) $(ARGS)

ngd-fig1: $(READY) ## LLC of NGD and SGD over widths and depths (embedded: 2 min)
	$(PYTHON) -m experiments.ngd.fig1_llc_width preset=$(PRESET) $(ARGS)

ngd-fig2: $(READY) ## LLC and tr(H) of NGD and SGD over epochs (embedded: 2 min)
	$(PYTHON) -m experiments.ngd.fig2_llc_trace_epochs preset=$(PRESET) $(ARGS)

ngd-fig3: $(READY) ## smoothing alpha and epsilon against the LLC of NGD (embedded: 1 min)
	$(PYTHON) -m experiments.ngd.fig3_smoothing preset=$(PRESET) $(ARGS)

ngd-fig4: $(READY) ## one state, then SGD and NGD: update size and LLC (embedded: 2 min)
	$(PYTHON) -m experiments.ngd.fig4_split preset=$(PRESET) $(ARGS)

ngd-fig5: $(READY) ## one state, then NGD at three learning rates (embedded: 2 min)
	$(PYTHON) -m experiments.ngd.fig5_learning_rates preset=$(PRESET) $(ARGS)

ngd-fig6: $(READY) ## one state, then SGD at a raised learning rate (embedded: 1 min)
	$(PYTHON) -m experiments.ngd.fig6_raised_sgd preset=$(PRESET) $(ARGS)

ngd-fig7: $(READY) ## overfitting: LLC and tr(H) of SGD and NGD (embedded: 1 min)
	$(PYTHON) -m experiments.ngd.fig7_overfitting preset=$(PRESET) $(ARGS)

ngd-fig8: $(READY) ## overfitting: WBIC against the validation loss (embedded: 1 min, shared with ngd-fig7)
	$(PYTHON) -m experiments.ngd.fig8_wbic preset=$(PRESET) $(ARGS)

rank1-fig1: $(READY) ## uniform directions on a 1-D function (embedded: 10 s)
	$(PYTHON) -m experiments.rank1.fig1_one_dimension preset=$(PRESET) $(ARGS)

rank1-fig2: $(READY) ## uniform directions on logistic regression (embedded: 1 min, laptop: 3 min)
	$(PYTHON) -m experiments.rank1.fig2_mushrooms preset=$(PRESET) $(ARGS)

rank1-prop: $(READY) ## error of the one-direction estimate against the Proposition (embedded: 20 s)
	$(PYTHON) -m experiments.rank1.prop_estimate_error preset=$(PRESET) $(ARGS)

rank1-rate: $(READY) ## steps to a gradient norm against the bound K(epsilon) (embedded: 1 min)
	$(PYTHON) -m experiments.rank1.rate_steps_bound preset=$(PRESET) $(ARGS)

rank1-fisher: $(READY) ## Fisher preconditioner: bounds on sigma, and rates (embedded: 1 min)
	$(PYTHON) -m experiments.rank1.fisher_preconditioner preset=$(PRESET) $(ARGS)

bench-finite-differences: $(READY) ## error of G v by finite differences against the step (laptop: 5 min)
	$(PYTHON) -m experiments.benchmarks.finite_differences preset=$(PRESET) $(ARGS)

bench-curvature: $(READY) ## products with the Gauss-Newton matrix: seconds and memory beside the peers (laptop: 10 min)
	$(PYTHON) -m experiments.benchmarks.curvature preset=$(PRESET) $(ARGS)

bench-solvers: $(READY) ## error of solvers against products and seconds (laptop: 15 min)
	$(PYTHON) -m experiments.benchmarks.solvers preset=$(PRESET) $(ARGS)

bench-lissa-recipe: $(READY) ## does LiSSA converge with C = 2, and with C measured (laptop: 10 min)
	$(PYTHON) -m experiments.benchmarks.lissa_recipe preset=$(PRESET) $(ARGS)

bench-influence-peers: $(READY) ## influence scores: accuracy and cost beside the peers (laptop: 15 min)
	$(PYTHON) -m experiments.benchmarks.influence_peers preset=$(PRESET) $(ARGS)

bench-llc: $(READY) ## learning coefficients: agreement with devinterp and seconds (laptop: 3 min)
	$(PYTHON) -m experiments.benchmarks.llc preset=$(PRESET) $(ARGS)

bench-ngd-step: $(READY) ## one step of NGD beside Adam's on ResNet-18's parameters (laptop: 1 min)
	$(PYTHON) -m experiments.benchmarks.ngd_step preset=$(PRESET) $(ARGS)

# the names that run.json and the results page give them
ALIASES := $(subst -,_,$(BENCH:bench-%=%))
.PHONY: $(ALIASES:%=benchmarks-%)
$(foreach name,$(ALIASES),$(eval benchmarks-$(name): bench-$(subst _,-,$(name))))

report: $(READY) ## results/index.html and results/scoreboard.csv from what is under results/
	$(PYTHON) -m curvlab.reporting.report
