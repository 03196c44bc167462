# make setup   a virtual environment in .venv with all that demo and test need
# make demo    train the digits recipe on 2 local processes
# make test    lint, types, and all tests
# make bench   all benchmarks; installs the peers that some compare with

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: setup demo test lint bench launchers

setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "meshrun needs Python 3.11 or newer: make PYTHON=python3.11")'
	@echo "setting up .venv (about a minute the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(PIP) -e '.[tensorboard,dev]'
	@touch $@

demo: setup
	@$(BIN)/meshrun run digits --procs 2

test: setup launchers lint
	$(BIN)/python -m pytest -n 2 --dist loadfile

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup
	@$(PIP) -e '.[peers]'
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/axes.py
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/communication.py
	$(BIN)/python benchmarks/pipeline.py
	$(BIN)/python benchmarks/checkpoint.py
	$(BIN)/python benchmarks/restart.py

# The tests also run under the real Open MPI and MPICH. Where they cannot be installed, those tests say so and are skipped.
launchers:
	@if command -v mpirun.openmpi mpiexec.hydra >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "installing Open MPI and MPICH"; \
		(apt-get update -qq && apt-get install -y -qq --no-install-recommends openmpi-bin mpich) >/dev/null 2>&1 \
			|| echo "Open MPI and MPICH could not be installed; their tests will be skipped"; \
	else echo "no Open MPI and MPICH here, and no right to install them: their tests will be skipped"; fi
