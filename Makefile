# Two commands on a fresh machine: `make demo` and `make test`. What they need, they install.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VENV_BENCH := .venv-bench
BENCH := $(VENV_BENCH)/bin
STAMPS := .make
TEST_PACKAGES := slurmctld slurmd slurm-client munge gcc e2fsprogs util-linux openmpi-bin \
  slurmdbd mariadb-server slurm-wlm-mysql-plugin gromacs lammps \
  quantum-espresso r-base-core snakemake charliecloud
CLUSTER := $(STAMPS)/slurm
# They wait more than they compute; files in their order, as the one that takes longest has one test.
ON_SLURM := -n 3 --dist loadfile --no-loadscope-reorder
# How links end where srun hears TERM too: it needs a kill wait as long as a real site's.
OTHER_ENDS := $(foreach name,faults strategies,tests/slurm/test_$(name)_on_slurm.py)

.PHONY: demo test soak check format packages criu slurm-up slurm-down bench bench-quick clean help

help:            ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 16

demo: $(STAMPS)/installed  ## a chain of four links on this machine, one killed, one preempted
	@$(BIN)/hpc-ckpt demo

test: $(STAMPS)/installed-dev packages  ## everything: lint, types, tests, the real Slurm
	$(MAKE) --no-print-directory check
	$(BIN)/python -m pytest -m "not slurm" -n 2 --dist loadfile
	$(BIN)/python -m pytest -m slurm $(ON_SLURM)
	DEVCLUSTER_PROCTRACK=linuxproc $(BIN)/python -m pytest -m slurm $(ON_SLURM) $(OTHER_ENDS:%=--ignore=%)
	DEVCLUSTER_PROCTRACK=linuxproc DEVCLUSTER_KILL_WAIT=12 $(BIN)/python -m pytest $(OTHER_ENDS) -n 2 --dist loadfile

soak: $(STAMPS)/installed-dev  ## at least 500 random kills; HPC_CKPT_SOAK and HPC_CKPT_SOAK_SEED change them
	HPC_CKPT_SOAK=$${HPC_CKPT_SOAK:-500} HPC_CKPT_SOAK_SEED=$${HPC_CKPT_SOAK_SEED:-$$RANDOM} \
	  $(BIN)/python -m pytest tests/faults/test_random_kills.py

check: $(STAMPS)/installed-dev  ## lint and types only
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMPS)/installed-dev  ## let ruff write what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMPS)/installed-bench  ## checkpoints beside their peers and the machine's limits (an hour and a half)
	$(BENCH)/python -m benchmarks.checkpoint

bench-quick: $(STAMPS)/installed-bench  ## the same in minutes: shows that it runs, not how fast
	$(BENCH)/python -m benchmarks.checkpoint --quick

packages: criu   ## Slurm and others from the system's packages (as root on Debian; else says what to install)
	@PACKAGES="$(TEST_PACKAGES)" bash tests/install-packages.sh

criu:            ## a CRIU that works on new kernels, unpacked beside the system
	@bash tests/install-criu.sh $(STAMPS)/criu

slurm-up: packages  ## a throw-away real Slurm to look around in
	@$(PYTHON) slurm/devcluster/devcluster.py up $(CLUSTER)

slurm-down:      ## and away with it
	@$(PYTHON) slurm/devcluster/devcluster.py down $(CLUSTER)

$(VENV)/bin/python:
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  PACKAGES="python3-venv" bash tests/install-packages.sh && $(PYTHON) -m venv $(VENV); }

$(STAMPS)/installed: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/installed-dev: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@mkdir -p $(STAMPS) && touch $@ $(STAMPS)/installed

$(VENV_BENCH)/bin/python:
	@$(PYTHON) -m venv $(VENV_BENCH) || { rm -rf $(VENV_BENCH); \
	  PACKAGES="python3-venv" bash tests/install-packages.sh && $(PYTHON) -m venv $(VENV_BENCH); }
	@echo '*' > $(VENV_BENCH)/.gitignore

$(STAMPS)/installed-bench: $(VENV_BENCH)/bin/python pyproject.toml constraints.txt
	$(BENCH)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	@mkdir -p $(STAMPS) && touch $@

clean:           ## remove what make made
	-@$(PYTHON) slurm/devcluster/devcluster.py down $(CLUSTER) 2>/dev/null
	rm -rf $(VENV) $(VENV_BENCH) $(STAMPS) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
