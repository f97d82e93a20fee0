# make train   train the adult-income example on this machine
# make test    everything that must hold before a change is done
# make system  install what tests use of Debian, as root
# make chaos  jobs whose processes are killed again and again
# make fuzz   inputs that nobody has meant, 100,000 for each port and file format
# make soak   one job for an hour, which must grow by nothing
# make cluster  jobs on Slurm, in Kubernetes and on several hosts
# make coverage    the lines of the package that no test runs
#
# All start from nothing: they make .venv with what the machine needs. torch comes
# first and alone, because fbgemm has to fit it; torchrec's own metadata asks for the
# CUDA build of fbgemm, so that its needs are installed by name.

PYTHON ?= python3
VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
STAMP := $(VENV)/installed
COVERAGE := $(CURDIR)/build/coverage
SCHEMAS := build/schemas/installed

# What components/Dockerfile says by itself: make install DEVICE=cuda EXTRAS=examples
DEVICE := $(if $(shell nvidia-smi >/dev/null 2>&1 && echo yes),cuda,cpu)
EXTRAS := dev
$(if $(filter cpu cuda,$(DEVICE)),,$(error DEVICE must be cpu or cuda. Received: $(DEVICE)))

PIP := $(BIN)/python -m pip -qq --disable-pip-version-check install
TORCH := torch==2.13.0
FBGEMM := $(if $(filter cuda,$(DEVICE)),fbgemm-gpu,fbgemm-gpu-cpu)==1.8.0
TORCHREC := torchrec==1.8.0
TORCHREC_NEEDS := tensordict torchmetrics==1.0.3 tqdm pyre-extensions

# What tests use of Debian: a Slurm, and network namespaces.
SYSTEM := slurmctld slurmd slurm-client iproute2
APT := DEBIAN_FRONTEND=noninteractive timeout 300 apt-get -qq -y --no-install-recommends \
	-o Acquire::Retries=1 -o Acquire::http::Timeout=20 -o DPkg::Lock::Timeout=60
LACKING = $$(for one in $(SYSTEM); do dpkg-query -W -f '$${Status}' $$one 2>/dev/null \
	| grep -q 'ok installed' || echo $$one; done)

# The census data of the example, where it lies beside the checkout.
ADULT := ../shared/datasets/adult
ifneq ($(wildcard $(ADULT)),)
export PERSIA_DATA_DIR ?= $(abspath $(ADULT))
endif

# Why the job has failed that began last, after what torchx says at its end.
CAUSE = find runs -path '*/coordinator/0/combined.log' -newer $(VENV)/began -exec tail -n 1 {} +

.PHONY: help install train system test lint unit chaos fuzz soak cluster coverage clean
.NOTPARALLEL:

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-9s %s\n", $$1, $$2}' Makefile

install: $(STAMP)  ## make .venv

$(STAMP): Makefile pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Python 3.11 or newer is needed. $(PYTHON) is $$($(PYTHON) --version 2>&1)." \
			"Name another: make PYTHON=python3.12" >&2; exit 1; }
	@echo "installing into $(VENV), with $(FBGEMM)"
	$(PYTHON) -m venv $(VENV)
	$(PIP) '$(TORCH)'
	$(PIP) '$(FBGEMM)' $(TORCHREC_NEEDS)
	$(PIP) --no-deps '$(TORCHREC)'
	$(PIP) --editable '.[$(EXTRAS)]'
	@touch $(STAMP)

train: $(STAMP)  ## train the example; ARGS="--embedding_servers 3" overrides
	@touch $(VENV)/began
	PATH="$(BIN):$$PATH" TORCHXCONFIG=.torchxconfig $(BIN)/torchx run $(if $(ARGS),-- $(ARGS)) || { $(CAUSE); exit 1; }

system:  ## install what tests use of Debian, as root; says what it could not
	@lacking="$(LACKING)"; \
	if [ -n "$$lacking" ] && [ "$$(id -u)" = 0 ]; then \
		said=$$({ $(APT) update; $(APT) install $$lacking || \
			for one in $$lacking; do $(APT) install $$one; done; } 2>&1); \
		lacking="$(LACKING)"; \
	fi; \
	[ -z "$$lacking" ] || { echo "$$said" | grep '^[EW]:' | sort -u; \
		echo "not installed, so that tests skip:" $$lacking; \
			echo "make system installs it, as root of a Debian with a package index."; }

test: lint unit  ## check everything

lint: $(STAMP)  ## format, lint, types, import rules
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/mypy --no-error-summary
	$(BIN)/lint-imports --no-logo

unit: $(STAMP)  ## the tests, benchmarks included; ARGS="-k wire" chooses
	PATH="$(BIN):$$PATH" $(BIN)/python -m pytest --numprocesses logical --dist loadfile --no-loadscope-reorder $(ARGS)

chaos: $(STAMP)  ## jobs whose processes are killed again and again; not part of test
	PATH="$(BIN):$$PATH" $(BIN)/python -m pytest tests/chaos --timeout 3600 $(ARGS)

# The schemas of Kubernetes, 108 MB, in an environment of their own.
$(SCHEMAS): Makefile
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip -qq --disable-pip-version-check install kubernetes-validate==1.37.0 \
		&& touch $@ || echo "not installed, so that its test skips: kubernetes-validate"

cluster: $(STAMP) $(SCHEMAS)  ## jobs on Slurm, in Kubernetes and on several hosts; not part of test
	PATH="$(BIN):$$PATH" $(BIN)/python -m pytest tests/cluster --timeout 3600 $(ARGS)

fuzz: $(STAMP)  ## inputs that nobody has meant; ARGS="-k shard --inputs 5000" chooses
	PATH="$(BIN):$$PATH" $(BIN)/python -m pytest tests/fuzz --timeout 7200 --inputs 100000 $(ARGS)

soak: $(STAMP)  ## one job for an hour; ARGS="--minutes 10" for less
	PATH="$(BIN):$$PATH" $(BIN)/python -m pytest tests/soak --timeout 90000 --minutes 60 $(ARGS)

coverage: $(STAMP)  ## lines that no test runs, in any process; ARGS="tests/wire" chooses
	rm -rf $(COVERAGE)
	mkdir -p $(COVERAGE)
	PATH="$(BIN):$$PATH" COVERAGE_FILE=$(COVERAGE)/data $(BIN)/python -m coverage run -m pytest --numprocesses logical --dist loadfile --no-loadscope-reorder $(ARGS)
	COVERAGE_FILE=$(COVERAGE)/data $(BIN)/python -m coverage combine --quiet $(COVERAGE)
	COVERAGE_FILE=$(COVERAGE)/data $(BIN)/python -m coverage report

clean:  ## remove all that the other targets made
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	rm -rf .hypothesis *.egg-info build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
