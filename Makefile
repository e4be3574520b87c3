# make demo   generate one function call with the real SmolLM2-135M under a PASK policy, and write run.html
# make test   every test, of large matrices a sample     make lint   ruff, formatting, types
# make test-all     every test with all of the kernel matrix
# make test-matrix  the tests of ops and kernels on each supported release of JAX (.venv-matrix)
# make aot    compile every kernel for CUDA without a GPU, and hold it against the baseline (.venv-aot)
# PYTHON=...  the interpreter that the virtual environments are made from (3.11 or 3.12)

PYTHON ?= $(shell for name in python3.11 python3 python3.12; do \
  $$name -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null && echo $$name && break; done)
BIN := .venv/bin
STAMP := .venv/.installed
AOT_BIN := .venv-aot/bin
AOT_STAMP := .venv-aot/.installed
# The compiler's numbers are those of one release.
AOT_JAX := $(shell sed -n 's/^ *"jax": "\(.*\)",$$/\1/p' tests/kernels/compile_baseline.json 2>/dev/null)

.DELETE_ON_ERROR:
.PHONY: demo test test-all test-matrix aot lint venv

demo: $(STAMP)
	$(BIN)/python scripts/generate.py --tools examples/tools.json --messages examples/messages.json \
	  --policy structural-prior --html run.html --run-json run.json

test: $(STAMP)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-all: $(STAMP)
	$(BIN)/python -m pytest -m '' $(PYTEST_ARGS)

test-matrix:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or 3.12 is needed; give it as PYTHON=/path/to/python" >&2; exit 1; }
	"$(PYTHON)" scripts/test_matrix.py $(PYTEST_ARGS)

aot: $(AOT_STAMP)
	$(AOT_BIN)/python scripts/compile_kernels.py $(AOT_ARGS)
	$(AOT_BIN)/python -m pytest -m aot tests/kernels

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

# Apart from .venv, whose JAX must never see a CUDA plugin. The plugin is of the baseline's JAX, which replaces the pins.
$(AOT_STAMP): pyproject.toml constraints.txt $(wildcard tests/kernels/compile_baseline.json)
	@test -n "$(PYTHON)" || { echo "Python 3.11 or 3.12 is needed; give it as PYTHON=/path/to/python" >&2; exit 1; }
	test -x $(AOT_BIN)/python || "$(PYTHON)" -m venv .venv-aot
	grep -vE '^jax(lib|-cuda12-[a-z]+)?[=<>]' constraints.txt > .venv-aot/constraints.txt
	$(AOT_BIN)/python -m pip install --quiet --disable-pip-version-check -c .venv-aot/constraints.txt jax==$(AOT_JAX) \
	  jax-cuda12-plugin==$(AOT_JAX) jax-cuda12-pjrt==$(AOT_JAX) nvidia-cuda-nvcc-cu12 \
	  jaxtyping beartype pytest hypothesis rich tyro
	$(AOT_BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@
