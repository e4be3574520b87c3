# make demo   generate one function call with the real SmolLM2-135M under a PASK policy, and write run.html
# make test   every test                    make lint   ruff, formatting, types
# PYTHON=...  the interpreter that the virtual environment is made from (3.11 or 3.12)

PYTHON ?= $(shell for name in python3.11 python3 python3.12; do \
  $$name -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null && echo $$name && break; done)
BIN := .venv/bin
STAMP := .venv/.installed

.DELETE_ON_ERROR:
.PHONY: demo test lint venv

demo: $(STAMP)
	$(BIN)/python scripts/generate.py --tools examples/tools.json --messages examples/messages.json \
	  --policy structural-prior --html run.html --run-json run.json

test: $(STAMP)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

venv: $(STAMP)

# torch comes first and alone, so that the resolver never considers another release of it for what depends on it.
# bfcl-eval brings data and a checker; its own dependencies pin an old numpy and are not needed for either.
$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or 3.12 is needed; give it as PYTHON=/path/to/python" >&2; exit 1; }
	test -x $(BIN)/python || "$(PYTHON)" -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps bfcl-eval==2026.3.23
	@touch $@
