# Two commands do everything: `make demo` and `make test`.
# Both make .venv first, from pinned and hashed requirements.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: help demo test test-long check lint types docs-examples wheel install clean

help:
	@echo "make demo   tune small, train big, on real digits: runs/demo/report.html"
	@echo "make test   the tests (make test-long: those that take minutes)"
	@echo "make check  lint, types, docstring examples, wheel"

install: .venv/.installed

.venv/.installed: requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "mupax needs Python 3.11 or newer; name one with: make PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --require-hashes -r requirements.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

demo: install
	$(BIN)/mupax transfer --config digits_resmlp --workdir runs/demo

# These tests compile thousands of small programs and run each for a moment, so they
# compile them cheaply. The long tests compile as a user's run does.
CHEAP := JAX_DISABLE_MOST_OPTIMIZATIONS=1 XLA_FLAGS=--xla_cpu_use_fusion_emitters=false

test: install
	$(CHEAP) $(BIN)/python -m pytest -m "not long" --numprocesses auto --dist loadfile

test-long: install
	$(BIN)/python -m pytest -m long --numprocesses auto --dist loadfile

check: lint types docs-examples wheel

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy does not follow the editable install's import hook: give it the tree as installed.
types: install
	@mkdir -p build/types/mupax
	@for d in optim zoo experiments configs; do ln -sfn ../../../$$d build/types/mupax/$$d; done
	@for f in __init__.py __main__.py py.typed; do ln -sfn ../../../mupax/$$f build/types/mupax/$$f; done
	MYPYPATH=build/types $(BIN)/mypy -p mupax

docs-examples: install
	$(BIN)/python -m pytest --doctest-modules optim zoo experiments

# The wheel must import, with its dependencies and nothing else, where the source is not.
wheel: install
	rm -rf build/wheel && mkdir -p build/wheel
	$(BIN)/python -m build --quiet --wheel --no-isolation --outdir build/wheel .
	$(PYTHON) -m venv build/wheel/env
	sed -E '/^ *--hash/d; s/ *\\$$//' requirements.txt > build/wheel/constraints.txt
	build/wheel/env/bin/python -m pip install --quiet --constraint build/wheel/constraints.txt build/wheel/*.whl
	cd build/wheel && env/bin/python -c "import mupax; print('mupax', mupax.__version__, 'imports')"

clean:
	rm -rf .venv build *.egg-info
