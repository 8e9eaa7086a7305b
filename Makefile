# Spark's commands for a clone. Each makes the virtual environment first (infra/dev/bootstrap.py), which takes minutes
# once and a moment afterwards. Set-up talks on stderr only: stdout belongs to the command itself.

PYTHON ?= python3
# The same rule as in bootstrap.py: SPARKMOE_VENV puts the environment elsewhere.
VENV := $(or $(SPARKMOE_VENV),.venv)
RUN := "$(VENV)/bin/python"
ARGS ?=
PYTEST_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo test check format generate lock clean

help: ## show this help
	@echo 'usage: make COMMAND [ARGS=...] [PYTEST_ARGS=...] [PYTHON=python3.12]'
	@sed -n 's/^\([a-z]*\):[^#]*## \(.*\)/  \1\t\2/p' Makefile | expand -t 12

setup: ## make or refresh the virtual environment
	@command -v "$(PYTHON)" >/dev/null || { \
	    echo 'error: $(PYTHON) was not found' >&2; \
	    echo 'hint: apt-get install python3 python3-venv, or name another: make PYTHON=...' >&2; exit 1; }
	@exec "$(PYTHON)" infra/dev/bootstrap.py

demo: setup ## record, upload, build and judge a routing profile of the demo model
	@$(RUN) -m spark_agent.demo

test: setup ## run the tests (PYTEST_ARGS=...)
	@$(RUN) -m pytest -n auto -m "not gpu" $(PYTEST_ARGS)

check: setup ## all that a change must pass: format, lint, types, import contracts, generated files, tests
	@$(RUN) -m ruff format --check .
	@$(RUN) -m ruff check .
	@$(RUN) -m mypy
	@$(RUN) -m mypy infra/dev/*.py
	@"$(VENV)/bin/lint-imports"
	@for script in infra/dev/generate_*.py; do \
	    test ! -e "$$script" || $(RUN) "$$script" --check || exit 1; done
	@$(RUN) -m pytest -n auto -m "not gpu" $(PYTEST_ARGS)

format: setup ## format the code and mend what ruff can mend
	@$(RUN) -m ruff format .
	@$(RUN) -m ruff check --fix .

generate: setup ## write the generated files anew
	@for script in infra/dev/generate_*.py; do \
	    test ! -e "$$script" || $(RUN) "$$script" || exit 1; done

lock: ## resolve the locked dependencies anew (ARGS=--upgrade for newer releases)
	@"$(PYTHON)" infra/dev/relock.py $(ARGS)

clean: ## remove .venv and the tools' caches from the clone; built wheels stay in the user's cache
	@rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
	@find schemas runtime agent service tests infra -type d -name __pycache__ -prune -exec rm -rf {} +
