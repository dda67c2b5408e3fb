# make demo: install, then compare the two styles. make test: install, then
# the tests. Everything lives in .venv; remove it to start afresh.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-slow test-shapes test-all lint clean

demo: .venv/installed
	$(BIN)/gpt-duet compare

test: .venv/installed
	$(BIN)/pytest -n auto -m "not slow" $(FLAGS)

test-slow: .venv/installed
	$(BIN)/pytest -n auto -m slow $(FLAGS)

# The shape annotations of every call, checked at run time.
test-shapes: .venv/installed
	$(BIN)/pytest -n auto -m "not slow" --check-shapes

test-all: test test-slow test-shapes

lint: .venv/linters
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "gpt-duet needs Python 3.11 or newer")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test]"
	touch $@

.venv/linters: .venv/installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[lint]"
	touch $@

clean:
	rm -rf .venv
