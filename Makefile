# The commands of this project, the same on a laptop and in CI. `make demo` and `make test` set up what they need.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Environments with other releases of JAX: keys must be stable against another jaxlib, and the JAX adapter work on all.
OTHERS := .venv-other .venv-jax-0.4.30 .venv-jax-0.6.2

DEMO_TPU ?= 1
DEMO_FULL ?= 0
SHORT ?= 0

PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo test check lint types layers fuzz drills bench figures nginx clean help

help:  ## Show these commands.
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

demo: $(VENV)/demo-$(if $(filter 0,$(DEMO_TPU)),cpu,tpu).stamp  ## Two machines and a service on this one: every program compiled once.
	@DEMO_TPU=$(DEMO_TPU) DEMO_FULL=$(DEMO_FULL) $(BIN)/torchtpu-cache demo

test: lint types layers $(OTHERS:%=%/stamp) nginx  ## Everything: lint, types, layers, unit, contract, integration, short drills.
	$(BIN)/python -m pytest

check: lint types layers  ## The part of `test` that takes less than five minutes.
	$(BIN)/python -m pytest -m "not slow and not tpu" tests/unit tests/contract

lint: $(VENV)/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/test.stamp
	$(BIN)/mypy
	$(BIN)/pyright

layers: $(VENV)/test.stamp
	$(BIN)/lint-imports

fuzz: $(VENV)/test.stamp  ## The fuzzers, long: SECONDS=600 each.
	for target in tests/fuzz/fuzz_*.py; do $(BIN)/python $$target -max_total_time=$(or $(SECONDS),600) || exit 1; done

# `make drills` and `make bench`. The short form is that of `make test`; its figures are kept apart, as they mean little.
FORM := $(if $(filter-out 0,$(SHORT)),-short)
CAMPAIGN := PYTHONPATH=tests $(BIN)/python -m support.campaign
CHOICE = --only $(ONLY) $(if $(FORM),--short)

drills: $(VENV)/test.stamp $(if $(filter pairs,$(or $(ONLY),pairs)),$(OTHERS:%=%/stamp))  ## The fault campaign in full, one JSON line per figure; ONLY=name for one, SHORT=1.
	@mkdir -p .bench
	@$(CAMPAIGN) drills $(CHOICE) --out .bench/drills$(FORM).jsonl

bench: $(VENV)/test.stamp $(if $(ONLY),$(if $(filter blob_get,$(ONLY)),nginx),nginx)  ## The benchmarks in full, one JSON line per figure; ONLY=name for one, SHORT=1.
	@mkdir -p .bench
	@$(CAMPAIGN) bench $(CHOICE) --out .bench/bench$(FORM).jsonl

figures:  ## Fill the tables of docs/reliability.md and docs/benchmarks.md with what .bench has.
	@code=0; found=; \
	for each in drills:reliability bench:benchmarks; do \
	  lines=.bench/$${each%:*}.jsonl; \
	  if [ -f $$lines ]; then found=1; $(PYTHON) scripts/figures_table.py $$lines --into docs/$${each#*:}.md || code=1; fi; \
	done; \
	if [ -z "$$found" ]; then echo "there are no figures yet; make drills or make bench first (short forms do not count)" >&2; code=1; fi; \
	exit $$code

# What the service is measured against; without it the benchmark says what to install.
nginx:
	@scripts/nginx.sh .bench/nginx

clean:  ## Remove environments and caches.
	rm -rf .venv .venv-* .bench .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "torchtpu-cache needs Python 3.11 or newer; name one with make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	  { echo "python3 has no venv module; install it with: apt-get install python3-venv" >&2; exit 1; }

$(VENV)/demo-cpu.stamp: $(BIN)/python pyproject.toml
	@echo "installing torchtpu-cache and XLA for the CPU into $(VENV) ..."
	@$(PIP) -e '.[server,agent,workers]'
	@touch $@

$(VENV)/demo-tpu.stamp: $(BIN)/python pyproject.toml
	@echo "installing torchtpu-cache, XLA for the CPU and libtpu (137 MB) into $(VENV) ..."
	@$(PIP) -e '.[server,agent,workers,tpu]'
	@touch $@

$(VENV)/test.stamp: $(BIN)/python pyproject.toml
	@echo "installing torchtpu-cache with everything its tests need into $(VENV) ..."
	@$(PIP) -e '.[server,agent,workers,tpu,test]'
	@touch $@

# Absent where no interpreter for it is found: the tests that need it then say so (and fail with CI=true).
$(OTHERS:%=%/stamp): $(BIN)/python scripts/jax_environment.py pyproject.toml
	@$(BIN)/python scripts/jax_environment.py $(@D)
