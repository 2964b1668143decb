# The one door to Stepdial. `make` alone lists the targets.
#
# Installs are stamped inside the virtual environment, so that a second run starts at once; editing
# pyproject.toml makes the stamps stale.

# Set on the command line (make demo PORT=9000), never by a variable of the same name that happens
# to be in the environment.
VENV := .venv
# Two at a time, since timing is part of what is tested. Each module in one process, so that its
# fixtures are made once; in the order of tests/conftest.py.
PARALLEL := -n 2 --dist loadscope --no-loadscope-reorder
# None (TYPE_WORKERS=) where other work comes first: they must be started within seconds.
TYPE_WORKERS := --num-workers 2
HOST := 127.0.0.1
PORT := 8000
RUNTIME := cpu
IMAGE := stepdial:$(RUNTIME)
FUZZ := http
SECONDS := 60
ARGS :=

# The first interpreter that is new enough; `make PYTHON=/path/to/python ...` overrides it.
PYTHON ?= $(shell for candidate in python3 python3.14 python3.13 python3.12 python3.11 python; do \
	$$candidate -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& { echo $$candidate; break; }; done)

PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
SOURCES := stepdial.py $(wildcard train export serve loadtest benchmarks deploy docs tests)

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all check lint types audit e2e fuzz lock bench load image clean

help:
	@echo 'make demo    serve the zoo on http://$(HOST):$(PORT) (installs only what serving needs)'
	@echo 'make test    run all tests but the long ones (installs the development extras first)'
	@echo 'make test-all  run every test, as .ci/run does'
	@echo 'make check   ruff, mypy --strict and the import rules'
	@echo 'make audit   look up known vulnerabilities of what is installed (needs a network)'
	@echo 'make e2e     only the tests that start the real server'
	@echo 'make fuzz    look for inputs that break a rule (needs a network once; FUZZ=bodies SECONDS=3600)'
	@echo 'make load    30 seconds of mixed load against http://$(HOST):$(PORT)'
	@echo 'make bench   measure RESULTS.md again; the README: python -m benchmarks.readme --measure'
	@echo 'make image   build the Docker image $(IMAGE) (RUNTIME=gpu for NVIDIA)'
	@echo 'make lock    write locks/ again: exact releases for the image and CI (needs a network)'
	@echo 'make setup   create $(VENV) with everything for development, and the pre-commit hook'
	@echo 'make clean   remove $(VENV) and caches'
	@echo
	@echo 'Variables: PYTHON=$(or $(PYTHON),none found) VENV=$(VENV) HOST=$(HOST) PORT=$(PORT) ARGS=...'

$(VENV)/.created:
	@if [ -z "$(PYTHON)" ]; then \
		echo 'Stepdial needs Python 3.11 or newer; none was found on the PATH'; \
		echo '(python3 is: '"$$(python3 --version 2>&1 || echo missing)"').'; \
		echo 'Install one, or name it: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)'; \
		exit 1; \
	fi
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo 'Stepdial needs Python 3.11 or newer; $(PYTHON) is' \
			"$$($(PYTHON) --version 2>&1 || echo missing)."; \
		echo 'Name a newer one: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)'; \
		exit 1; \
	}
	@$(PYTHON) -m venv $(VENV) || { \
		echo 'Creating a virtual environment failed. On Debian and Ubuntu: apt install python3-venv'; \
		exit 1; \
	}
	@# The pip that comes with Python may be years old: a new one needs half the time.
	@$(PIP) install --quiet --upgrade pip || echo 'pip could not be renewed: the old one is used.'
	@touch $@

# The development extras contain the serving ones: with them installed, serving needs no install.
$(VENV)/.installed-serve: pyproject.toml $(VENV)/.created
	@echo 'Installing what serving needs into $(VENV); this happens once.'
	$(PIP) install --editable '.[serve]'
	@touch $@

# Where there is a lock for this platform: exactly what it names, found by its hash. What is left then
# is torch, whose builds differ by index and machine, and the check that the lock is enough.
$(VENV)/.installed-dev: pyproject.toml $(wildcard locks/dev-*) $(VENV)/.created
	@echo 'Installing what development needs into $(VENV); this happens once, and takes minutes.'
	@lock="locks/dev-$$($(PY) -c 'import platform, sys; print("py%d%d-%s-%s" % ( \
		*sys.version_info[:2], sys.platform, platform.machine()))').txt"; \
	if [ -f "$$lock" ]; then \
		$(PIP) install --require-hashes --no-deps --requirement "$$lock"; \
	else \
		echo "There is no $$lock: the newest releases within pyproject.toml are installed."; \
	fi
	$(PIP) install --editable '.[dev]'
	@touch $(VENV)/.installed-serve $@

setup: $(VENV)/.installed-dev
	@if [ "$$(git rev-parse --show-toplevel 2>/dev/null)" = "$(CURDIR)" ]; then \
		$(PY) -m pre_commit install || echo 'The pre-commit hook was not installed; run `make check` by hand.'; \
	else \
		echo 'Not a git work tree: the pre-commit hook was left out.'; \
	fi

demo: $(VENV)/.installed-serve
	@echo 'Starting the server: it says its address and what to try when it answers, in a few seconds.'
	$(PY) -m stepdial demo --host $(HOST) --port $(PORT) $(ARGS)

check: lint types

# Of `check`, what takes seconds, and what takes a minute or more.
lint: $(VENV)/.installed-dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(VENV)/bin/lint-imports

types: $(VENV)/.installed-dev
	$(PY) -m mypy --strict $(TYPE_WORKERS) $(SOURCES)

audit: $(VENV)/.installed-dev
	@PYTHON=$(PY) .ci/audit $(ARGS)

# What one runs between two edits: nine of ten tests. Before a change is merged, .ci/run runs them all.
test: $(VENV)/.installed-dev
	$(PY) -m pytest $(PARALLEL) -m 'not long' $(ARGS)

test-all: $(VENV)/.installed-dev
	$(PY) -m pytest $(PARALLEL) $(ARGS)

e2e: $(VENV)/.installed-dev
	$(PY) -m pytest $(wildcard tests/e2e tests/faults) $(ARGS)

# Beside what is installed already: the fuzzer comes for few systems and versions of Python.
$(VENV)/.installed-fuzz: $(VENV)/.installed-dev
	$(PIP) install 'atheris>=3.0'
	@touch $@

# New inputs go to .fuzz, those that break a rule to .fuzz/broken; the corpus of the tests is read.
fuzz: $(VENV)/.installed-fuzz
	@mkdir -p .fuzz/$(FUZZ) .fuzz/broken
	$(PY) -m tests.fuzz.run $(FUZZ) .fuzz/$(FUZZ) tests/fuzz/corpus/$(FUZZ) \
		-max_total_time=$(SECONDS) -artifact_prefix=.fuzz/broken/$(FUZZ)- $(ARGS)

lock: $(VENV)/.installed-dev
	$(PIP) install --quiet 'uv>=0.9'
	$(PY) .ci/lock.py

bench: $(VENV)/.installed-dev
	$(PY) benchmarks/run.py $(ARGS)

load: $(VENV)/.installed-serve
	@$(PY) -c "import locust, matplotlib" 2>/dev/null || $(PY) -m pip install -q -e ".[loadtest]"
	$(PY) -m stepdial loadtest --url http://$(HOST):$(PORT) --duration 30s $(ARGS)

image:
	@command -v docker >/dev/null || { \
		echo 'make image needs Docker, and there is no docker command on the PATH.'; exit 1; }
	@docker info >/dev/null 2>&1 || { \
		echo 'make image needs a running Docker engine: `docker info` cannot reach one.'; \
		echo 'Start it (for example: systemctl start docker) and try again.'; exit 1; }
	docker build --build-arg RUNTIME=$(RUNTIME) --tag $(IMAGE) .

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist
