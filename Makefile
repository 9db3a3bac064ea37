# `make test`, `make demo` and `make bench` do all their own set-up (tools/setup.sh).
.PHONY: test lint unit demo bench setup clean
.DEFAULT_GOAL := test
SHELL := /bin/bash
BIN := .venv/bin
export PYTHONUNBUFFERED := 1

setup:
	tools/setup.sh test

lint: setup
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Mount tests mostly wait: two at a time. More would starve each other on a small machine.
test: lint
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --durations=25

# Without a mount: seconds.
unit: setup
	$(BIN)/python -m pytest -q tests/unit tests/model

demo:
	tools/setup.sh run
	$(BIN)/python demo/demo.py $(ARGS)

bench: setup
	$(BIN)/python -m tests.bench.run $(ARGS)

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis tierfs.egg-info
