# What a person types. Every target first sets up .venv, which takes no time when there is nothing to do.
SEED ?= 0
BIN := .venv/bin

.PHONY: help setup demo test lint style imports types docs clean

help:
	@echo "make demo [SEED=n]   a small model learns to use a calculator, on this machine"
	@echo "make test            linters, then all tests"
	@echo "make lint            linters alone"
	@echo "make docs            docs/configuration.md anew"
	@echo "make clean           removes .venv, caches and runs/"

setup:
	@command -v python3 >/dev/null || { echo "setup: there is no python3; install Python 3.11" >&2; exit 1; }
	@python3 scripts/setup.py

demo: setup
	@$(BIN)/python examples/calculator/demo.py --seed $(SEED)

lint: setup
	@$(MAKE) --no-print-directory -j2 --output-sync=target types style imports

style:
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check

imports:
	@$(BIN)/lint-imports

types:
	@$(BIN)/pyright

test: lint
	@$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

docs: setup
	@$(BIN)/python -c "from slipstream.configfile import configuration_page as page; print(page(), end='')" > docs/configuration.md

clean:
	rm -rf .venv .cache runs build dist *.egg-info .pytest_cache .ruff_cache .import_linter_cache .hypothesis
