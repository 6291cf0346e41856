# One rule: every target works in a fresh clone. Each does its own set-up and installs nothing
# outside $(VENV); a second run finds the stamp and starts at once.

VENV    ?= .venv
PY      := $(VENV)/bin/python
# The first interpreter that is new enough. The exact pins were resolved under 3.11.
PYTHON  ?= $(shell for python in python3.11 python3 python3.12 python3.13; do \
               "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
               && { echo "$$python"; break; }; done)
# Keyed on content, not on time: a checkout gives every file a new time, and a changed pin must
# reinstall even where the clock says otherwise.
STAMP   := $(VENV)/.installed-$(shell cat pyproject.toml constraints.txt moshpitd/_native.c | cksum | tr -c '0-9\n' '-')
PYTEST  := $(PY) -m pytest

# Folders that have tests: pytest refuses a missing path, and finding no test is a failure to it.
with_tests   = $(foreach folder,$(1),$(if $(wildcard $(folder)/test_*.py),$(folder)))
PURE_TESTS  := $(call with_tests,tests/unit tests/fuzz tests/simulation)
REAL_TESTS  := $(call with_tests,tests/integration)
CHAOS_TESTS := $(call with_tests,tests/chaos tests/integration)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo demo-all test check lint types proto proto-check format chaos bench fast sim

help: ## show this list
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## /  make \1|/' | column -t -s '|'

setup: $(STAMP) ## make $(VENV) and install the pinned versions into it

$(STAMP):
	@test -n "$(PYTHON)" || { echo "moshpitd needs Python 3.11 or newer: none found; name one with PYTHON=/path/to/python3" >&2; exit 2; }
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --disable-pip-version-check --quiet -c constraints.txt -e '.[examples,plots,dev]'
	@rm -f $(VENV)/.installed-*
	@touch $@

demo: $(STAMP) ## four daemons train one model on real data, one is killed and comes back
	$(VENV)/bin/moshpitd demo --peers 4 --kill 1 --json out.json

demo-all: $(STAMP) ## the demo of every algorithm, one after the other (about 40 minutes)
	$(PY) scripts/demo_all.py --json out-all.json

test: check ## everything that must pass before a change lands (chaos has its own target)
	$(PYTEST) $(PURE_TESTS) -m "not chaos" --cov --cov-report= -n auto --maxprocesses 4 --dist worksteal
	$(PY) scripts/core_branches.py --at-least 95
ifneq ($(REAL_TESTS),)
	$(PYTEST) $(REAL_TESTS) -m "not chaos"
endif

check: lint types proto-check ## everything that needs no test run

lint: $(STAMP) ## ruff: lint and format
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(STAMP) ## mypy, strict
	$(PY) -m mypy

proto: $(STAMP) ## generate moshpitd/_pb from proto/
	$(PY) scripts/gen_proto.py

proto-check: $(STAMP) ## fail when moshpitd/_pb is not what proto/ generates
	$(PY) scripts/gen_proto.py --check

format: $(STAMP) ## let ruff repair what it can
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

chaos: $(STAMP) ## long tests that kill, freeze and cut things
	$(PYTEST) $(CHAOS_TESTS) -m chaos

bench: $(STAMP) ## figures of this machine beside gloo and hivemind; they belong into DECISIONS.md
	$(VENV)/bin/moshpitd bench codecs
	$(VENV)/bin/moshpitd bench latency
	$(VENV)/bin/moshpitd bench allreduce --params 25e6 --against gloo --against hivemind

fast: $(STAMP) ## compile the simulator (two minutes, a C compiler): `moshpitd sim` is faster, with equal digests
	$(PY) scripts/compile_sim.py

sim: $(STAMP) ## the deterministic world only
	$(PYTEST) tests/simulation
