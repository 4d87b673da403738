# Two commands on a fresh machine: `make demo` and `make test`. What they need, they install.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMPS := .make
SLURM_PACKAGES := slurmctld slurmd slurm-client munge gcc
CLUSTER := $(STAMPS)/slurm

.PHONY: demo test check format packages slurm-up slurm-down clean help

help:            ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 16

demo: $(STAMPS)/installed  ## a chain of four links on this machine, one killed, one preempted
	@$(BIN)/hpc-ckpt demo

test: $(STAMPS)/installed-dev packages  ## everything: lint, types, tests, the real Slurm
	$(MAKE) --no-print-directory check
	$(BIN)/python -m pytest -m "not slurm" -n 2 --dist loadfile
	$(BIN)/python -m pytest -m slurm

check: $(STAMPS)/installed-dev  ## lint and types only
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMPS)/installed-dev  ## let ruff write what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

packages:        ## Slurm from the system's packages (as root on Debian; else says what to install)
	@PACKAGES="$(SLURM_PACKAGES)" bash tests/install-packages.sh

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

clean:           ## remove what make made
	-@$(PYTHON) slurm/devcluster/devcluster.py down $(CLUSTER) 2>/dev/null
	rm -rf $(VENV) $(STAMPS) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
