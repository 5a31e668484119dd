# One command for each thing a person does here. Every target sets up what it needs in .venv, once, and needs nothing
# beforehand but python3, git and make. PYTHON=python3.12 chooses the interpreter.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory
SHELL := /bin/sh

VENV  := .venv
READY := $(VENV)/.ready
DEMO_READY := $(VENV)/.demo
TORCH_READY := $(VENV)/.torch
HUB_READY := $(VENV)/hub/.ready
PY    := $(VENV)/bin/python
# One process of tests for each core, four at least: on two cores they wait for other things half of the time.
JOBS  ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n > 4 ? n : 4)))
TESTS ?=
SEEDS ?= 1000000
FROM  ?= 50

export PYTHON TORCH TORCH_INDEX

.PHONY: help setup demo test lint types fmt wheel check soak mutants load bench test-gpu bench-gpu lock clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY) ## set up .venv (every other target does it by itself)

$(READY): requirements.lock pyproject.toml tools/setup.sh
	@sh tools/setup.sh

# Half of the packages, and a twelfth of the bytes: what a newcomer waits for. `make test` adds the rest.
$(DEMO_READY): requirements-demo.lock pyproject.toml tools/setup.sh
	@sh tools/setup.sh demo

# PyTorch stands outside the lock: its builds for CPU and CUDA differ in their hashes, and by gigabytes.
$(TORCH_READY): $(READY) tools/torch.sh
	@sh tools/torch.sh

# What tests with a JupyterHub need beside Python. Without npm there is nothing to be made, and they are left out.
$(HUB_READY): $(READY) tools/hub_proxy.sh tools/hub/package-lock.json
	@sh tools/hub_proxy.sh

ifdef RIG
demo: $(READY)
	@$(PY) -m tests.rig.show $(RIG)
else
demo: $(DEMO_READY) ## see it work, in half a minute: a cell loses its GPU and goes on; RIG=4xH100 on pretended cards
	@$(VENV)/bin/sublet demo
endif

# Compiled beforehand, since hundreds of processes start in the suite and some of them may not write here. The tests of a
# new checkout too, which pytest compiles in its own way: else each of its processes would compile all of them at once.
test: export PYTHONDONTWRITEBYTECODE =
test: export SUBLET_AGAIN = 1
test: $(READY) $(TORCH_READY) $(HUB_READY) ## the whole suite; TESTS=tests/unit for a part, JOBS=8 for so many at a time
	@$(PY) -m compileall -q -j 0 src
	@[ -d tests/unit/__pycache__ ] || $(PY) -m pytest --collect-only -q $(TESTS) >/dev/null || true
	@$(PY) -m pytest --numprocesses=$(JOBS) --dist=loadgroup --timeout=300 --durations=20 --durations-min=2 $(TESTS)

lint: $(READY) ## style: ruff, formatting, and lock files without addresses
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@sh tools/check_lock.sh

types: $(READY) ## strict types: mypy
	@$(VENV)/bin/mypy

fmt: $(READY) ## put the code into its form
	@$(VENV)/bin/ruff format .
	@$(VENV)/bin/ruff check --fix .

wheel: $(READY) ## build the wheel, install it where the source is not, run it there; the other ways to install
	@sh tools/check_wheel.sh

check: lint types test wheel ## all that CI does

soak: $(READY) $(TORCH_READY) ## the big numbers: SEEDS=1000000 simulations, every crash point; hours, not minutes
	@$(PY) -m tests.simulation --seeds $(SEEDS) --from $(FROM)
	@$(PY) -m tests.simulation --seeds 20000 --from 2000000
	@$(PY) -m tests.simulation.registers --seeds $(SEEDS) --from $(FROM)
	@$(PY) -m tests.simulation.bursts --seeds $(SEEDS) --from $(FROM)
	@$(PY) -m tests.simulation.people_world --seeds 10000 --from $(FROM)
	@SUBLET_CRASH_ALL=1 $(PY) -m pytest tests/crash
	@SUBLET_CRASH_ALL=1 $(PY) -m pytest --timeout 3600 \
		tests/simulation/test_preemption_graphs.py tests/simulation/test_replica_disk.py tests/simulation/test_people.py
	@SUBLET_SEQUENCES=6000 $(PY) -m pytest --timeout 3600 tests/unit/office/ledger/test_model.py \
		tests/unit/office/ledger/test_taking_model.py tests/unit/office/ledger/test_properties.py
	@$(PY) -m pytest -m soak tests/unit tests/notebook
	@$(PY) -m pytest -m soak -s --timeout 900 tests/integration/test_planned_office.py
	@SUBLET_CRASH_ALL=1 $(PY) -m pytest tests/unit/state/replicated/test_folder.py
	@SUBLET_CRASH_ALL=1 $(PY) -m pytest tests/unit/training tests/integration/test_training.py tests/integration/test_trainer_kills.py
	@SUBLET_CRASH_ALL=1 $(PY) -m pytest --timeout 900 tests/notebook/test_batch_runs.py tests/notebook/test_kinds.py \
		tests/integration/test_demo.py tests/integration/test_course.py
	@SUBLET_RACE_ROUNDS=10000 $(PY) -m pytest tests/integration/test_revoke_race.py
	@SUBLET_KILL_ROUNDS=2000 $(PY) -m pytest tests/integration/test_kill_rounds.py
	@SUBLET_ORDINARY_ROUNDS=100 $(PY) -m pytest --timeout 3600 tests/integration/test_ordinary_users.py
	@SUBLET_STDIO_GUESTS=200 SUBLET_BLOCK_LEASES=100 $(PY) -m pytest tests/integration/test_stdio.py tests/integration/test_blocks.py
	@SUBLET_BURST_KILLS=2000 $(PY) -m pytest --timeout 36000 tests/integration/test_burst_kills.py
	@SUBLET_STUDIO_KILLS=500 $(PY) -m pytest --timeout 36000 tests/integration/test_studio_kills.py
	@SUBLET_HUB_STOPS=50 $(PY) -m pytest --timeout 3600 tests/browser/test_studio.py
	@SUBLET_NOTEBOOK_KILLS=1000 SUBLET_EVERY_STEP=1 $(PY) -m pytest --timeout 3600 tests/notebook/test_kills.py tests/notebook/test_stages.py
	@SUBLET_PREEMPTIONS=20 $(PY) -m pytest tests/integration/test_client_examples.py
	@SUBLET_CORPUS=all $(PY) -m pytest tests/notebook/test_corpus.py
	@HYPOTHESIS_PROFILE=soak $(PY) -m pytest --timeout 3600 tests/notebook/test_namespace_sync.py tests/notebook/test_worlds.py \
		tests/notebook/test_lodging.py tests/notebook/test_reading.py tests/notebook/test_in_place.py
	@HYPOTHESIS_PROFILE=soak $(PY) -m pytest --timeout 3600 $$(grep -rlE --include='*.py' '^ *@given' tests/unit)
	@SUBLET_SCARCE_ROUNDS=2000 $(PY) -m pytest --timeout 36000 tests/integration/test_running_out.py
	@SUBLET_SUSPENDS=500 $(PY) -m pytest --timeout 900 tests/integration/test_suspend.py
	@SUBLET_MACHINES=all $(PY) -m pytest --timeout 3600 tests/rig/test_machines.py tests/rig/test_show.py
	@SUBLET_RIG_ROUNDS=500 $(PY) -m pytest --timeout 36000 tests/rig/test_rounds.py
	@SUBLET_RIG_SEEDS=20000 $(PY) -m pytest --timeout 3600 tests/rig/test_schedules.py
	@SUBLET_FRAMES=100000 SUBLET_TOKENS=20000 SUBLET_RACE_S=60 SUBLET_CANARY=20000 SUBLET_FULL_DISK_REQUESTS=1000 SUBLET_FOLLOWERS=20 \
		$(PY) -m pytest --timeout 7200 tests/security tests/unit/wire/test_frames.py tests/unit/wire/test_codec.py
	@SUBLET_INTERRUPTS=2000 $(PY) -m pytest --timeout 3600 tests/unit/client/test_interrupts.py tests/unit/client/test_cancels.py tests/integration/test_ctrl_c.py

mutants: $(READY) $(TORCH_READY) ## small mistakes planted, and which no test notices; NUMBER=20 of each group, MORE="--files 'client/*'"
	@$(PY) tools/mutants.py $(if $(NUMBER),--number $(NUMBER)) $(if $(SEED),--seed $(SEED)) $(MORE)

load: $(READY) $(TORCH_READY) ## the whole suite beside a load of 8, until it is green ten times in a row; hours
	@$(PY) tools/under_load.py $(MORE)

bench: $(READY) $(TORCH_READY) ## the benchmarks, each beside its peer in the same run
	@if [ -f benchmarks/__main__.py ]; then $(PY) -m benchmarks; else echo "There are no benchmarks yet."; fi

test-gpu: $(READY) ## the tests that need a real GPU
	@sh tools/run_part.sh tests -m gpu

bench-gpu: $(READY) $(TORCH_READY) ## the figures that need one, each beside its peer
	@$(PY) -m benchmarks.gpu

lock: $(READY) ## remake requirements.lock from pyproject.toml; UPGRADE=1 takes the newest
	@sh tools/lock.sh
	@sh tools/setup.sh

clean: ## remove the environment, builds and caches
	@rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
