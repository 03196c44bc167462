# make setup   a virtual environment in .venv with all that demo and test need
# make demo    train the digits recipe on 2 local processes
# make test    lint, types, and all tests
# make every   the long cases that `make test` leaves out
# make mutants plants known mistakes in a copy of the tree, one at a time, and names those that no test notices
# make fuzz    damaged inputs for every format that is read: FUZZ=10000 a format (docs/fuzzing.md)
# make bench   all benchmarks; installs the peers that some compare with

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: setup demo test every fuzz lint collect mutants bench launchers

# Tests start many processes: none of them should compile what another one has.
unexport PYTHONDONTWRITEBYTECODE

setup: .venv/ready
	@:

.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "meshrun needs Python 3.11 or newer: make PYTHON=python3.11")'
	@echo "setting up .venv (about a minute the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(PIP) --no-compile -e '.[tensorboard,dev]'
	@touch $@

demo: setup
	@$(BIN)/meshrun run digits --procs 2

# What does not need each other is done at once, on two cores.
test:
	@$(MAKE) --no-print-directory -j 2 setup launchers
	@$(MAKE) --no-print-directory -j 2 lint collect
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

every: setup launchers
	$(BIN)/python -m pytest -n 2 --dist loadfile -m every

# FORMATS="tokens hdf5" takes some formats only, SEED=2 draws other inputs.
FUZZ ?= 10000
SEED ?= 1
fuzz: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz $(FORMATS) --inputs $(FUZZ) --seed $(SEED)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Compiles what tests import, and tests themselves: else each worker would do so, since all begin at once.
collect: setup
	@$(BIN)/python -m pytest --collect-only -qq >/dev/null || true

# Some of them: make mutants MUTANTS="state saver-size", rooms or ids of tests/mutants/*.toml.
mutants: setup
	$(BIN)/python -m tests.mutants $(MUTANTS)

bench: setup
	@$(PIP) -e '.[peers]'
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/axes.py
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/communication.py
	$(BIN)/python benchmarks/pipeline.py
	$(BIN)/python benchmarks/checkpoint.py
	$(BIN)/python benchmarks/restart.py
	$(BIN)/python benchmarks/links.py
	$(BIN)/python benchmarks/data.py

# The tests also run under the real Slurm, Open MPI and MPICH. Where these cannot be installed, tests say so and are skipped.
# Nothing may start by itself: the tests start their own daemons, on virtual nodes.
OF_LAUNCHERS := mpirun.openmpi=openmpi-bin mpiexec.hydra=mpich slurmctld=slurmctld slurmd=slurmd sbatch=slurm-client \
	munged=munge ip=iproute2 shellcheck=shellcheck
DO_NOT_START := /usr/sbin/policy-rc.d

launchers:
	@missing=; for each in $(OF_LAUNCHERS); do \
		command -v "$${each%=*}" >/dev/null || missing="$$missing $${each#*=}"; done; \
	if [ -z "$$missing" ]; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "installing$$missing"; \
		[ -e $(DO_NOT_START) ] || { trap 'rm -f $(DO_NOT_START)' EXIT; \
			printf '#!/bin/sh\nexit 101\n' >$(DO_NOT_START) && chmod +x $(DO_NOT_START); }; \
		(apt-get update -qq && DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 \
			apt-get install -y -qq --no-install-recommends $$missing) >/dev/null 2>&1 \
			|| echo "could not be installed:$$missing; tests that need them will be skipped"; \
	else echo "not here, and no right to install them:$$missing; tests that need them will be skipped"; fi
