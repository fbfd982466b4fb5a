# make demo    creates the virtual environment, installs and runs the demo
# make test    creates the virtual environment, installs and runs the linter and the fast tests
# Both take VENV (default .venv) and PYTHON (default python3, 3.11 or newer). pip uses the index it is
# configured for.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: demo test test-slow lint clean

demo: $(VENV)/.installed-demo
	$(BIN)/packload demo

test: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/python -m pytest -q

test-slow: $(VENV)/.installed-test
	$(BIN)/python -m pytest -q -m slow

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/mypy

clean:
	rm -rf .venv build *.egg-info

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "packload needs Python 3.11 or newer: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.installed-%: pyproject.toml | $(VENV)/.created
	$(PIP) install -e '.[$*]'
	touch $@
