# make demo: install the core, then compare the two styles. make test: add what
# the tests need, then run them. Everything is in .venv; delete it to start over.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# Tests of one group share a browser, so they run in one worker.
WORKERS := -n auto --dist loadgroup

.PHONY: demo test test-slow test-shapes test-all lint wheel page docs site clean

demo: .venv/core
	$(BIN)/gpt-duet compare
	@echo; echo "The command is $(BIN)/gpt-duet; '. $(BIN)/activate' puts it on your path."

test: .venv/installed
	$(BIN)/pytest $(WORKERS) -m "not slow" $(FLAGS)

test-slow: .venv/installed
	$(BIN)/pytest $(WORKERS) -m slow $(FLAGS)

# The shape annotations of every call, checked at run time. These two tests have
# 400 models, whose calls are those of other tests.
test-shapes: .venv/installed
	$(BIN)/pytest $(WORKERS) -m "not slow" --check-shapes \
	    -k "not broken_model_is_caught and not leak_past_a_rule" $(FLAGS)

test-all: test test-slow test-shapes

# The last lines: inside shared imports are relative, since its folder differs
# between a checkout and an install; the others import it as gpt_duet, the only
# name that a module has. The styles and the benchmarks import no command.
lint: .venv/linters
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	! grep -rnE "^ *(from|import) (shared|gpt_duet)\b" shared --include=*.py \
	    --exclude=__init__.py
	! grep -rnE "^ *(from|import) (shared\b|gpt_duet\.(cli|annotated|mingpt_style|benchmarks)\b)" \
	    annotated mingpt_style benchmarks --include=*.py
	! grep -rnE "^ *(from|import) (shared|annotated|mingpt_style|benchmarks)\b" tests

# dist/ holds the wheel; page/ the side-by-side page, as a site's index.
wheel: .venv/core
	rm -rf build
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

page: .venv/core
	mkdir -p page
	$(BIN)/gpt-duet compare --html page/index.html

# site/ holds the guide, as a site. A warning is an error.
docs: .venv/guide
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Both, as one site: the guide at its root, the page in page/.
site: docs page
	cp -r page site/

.venv/core: pyproject.toml setup.py constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "gpt-duet needs Python 3.11 or newer")'
	$(PYTHON) -m venv .venv
	@echo "Installing torch and a few small packages: minutes, most of it the download."
	@start=$$(date +%s) && $(PIP) "pip>=25.1" && $(PIP) -e . && \
	    echo "Installed in $$(($$(date +%s) - start)) s; $$(du -sh .venv | cut -f1) in .venv."
	@touch $@

.venv/installed: .venv/core
	$(PIP) -e ".[peers]" --group test
	touch $@

.venv/linters: .venv/installed
	$(PIP) --group lint
	touch $@

.venv/guide: .venv/core
	$(PIP) --group docs
	touch $@

clean:
	rm -rf .venv
