# Two commands do everything: `make demo` and `make test`.
# Both make .venv first, from pinned and hashed requirements.

PYTHON ?= python3
BIN := .venv/bin

DOCS := build/docs-env/bin

.PHONY: help demo test test-long test-ci papers tutorials check lint types docs-examples docs notebooks wheel install clean

help:
	@echo "make demo   tune small, train big, on real digits: runs/demo/report.html"
	@echo "make test   the tests (make test-long: those that take minutes)"
	@echo "make check  lint, types, docstring examples, wheel and sdist"
	@echo "make papers tests of the papers' claims, tables and figures"
	@echo "make docs   the site, into build/site (make tutorials: run the tutorials;"
	@echo "            make notebooks: store their outputs)"

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

# The tests and examples compile thousands of small programs and run each for a moment, so they
# compile them cheaply. `make test-long` compiles as a user's run does.
CHEAP := JAX_DISABLE_MOST_OPTIMIZATIONS=1 XLA_FLAGS="--xla_cpu_use_fusion_emitters=false \
	--xla_cpu_parallel_codegen_split_count=1"

test: install
	$(CHEAP) $(BIN)/python -m pytest -m "not long" --numprocesses auto --dist loadfile

test-long: install
	$(BIN)/python -m pytest -m long --numprocesses auto --dist loadfile

# Claims about single bits, compiled as a user's run; and of the long tests one kill, one
# mesh and one training of two processes.
test-ci: install
	$(BIN)/python -m pytest -m "ci and not long" --numprocesses auto --dist worksteal
	$(CHEAP) $(BIN)/python -m pytest -m "ci and long" --numprocesses auto --dist worksteal

# The solvers of the limits, and the claims, tables and figures of the papers, also the
# tests that take minutes.
papers: install
	$(CHEAP) $(BIN)/python -m pytest papers --doctest-modules \
		--numprocesses auto --dist worksteal

# Runs every tutorial in a process of its own. `make notebooks` stores their outputs.
tutorials: install
	$(BIN)/python -m pytest tests/test_site_docs.py -k a_tutorial_runs --numprocesses auto --dist load

check: lint types docs-examples wheel

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy and mkdocstrings do not follow the editable install's import hook: give them the
# tree as installed.
build/types/mupax:
	@mkdir -p $@
	@for d in optim zoo experiments configs; do ln -sfn ../../../$$d $@/$$d; done
	@for f in __init__.py __main__.py py.typed; do ln -sfn ../../../mupax/$$f $@/$$f; done

types: install build/types/mupax
	MYPYPATH=build/types $(BIN)/mypy -p mupax -p papers

docs-examples: install
	$(CHEAP) $(BIN)/python -m pytest --doctest-modules optim zoo experiments

# The site's own environment: neither tests nor the library need its packages.
# `uv pip compile --universal --generate-hashes` makes the requirements of
# ipykernel jupytext matplotlib-inline mkdocs mkdocs-jupyter mkdocs-material
# mkdocstrings[python] nbclient ruff.
build/docs-env/.installed: docs/requirements.txt
	$(PYTHON) -m venv build/docs-env
	$(DOCS)/python -m pip install --quiet --require-hashes -r docs/requirements.txt
	@touch $@

# Every warning is an error; so are broken links and anchors (mkdocs.yml).
docs: build/docs-env/.installed build/types/mupax
	NO_MKDOCS_2_WARNING=1 $(DOCS)/mkdocs build --strict --quiet
	$(PYTHON) docs/check_site.py build/site

# Runs the tutorials, and stores them with their outputs. The kernel is that of .venv.
notebooks: install build/docs-env/.installed
	$(DOCS)/python docs/run_notebooks.py --python $(BIN)/python

# Wheel and sdist must install and import, with their dependencies and nothing else,
# where the source is not.
wheel: install
	rm -rf build/wheel && mkdir -p build/wheel
	$(BIN)/python -m build --quiet --no-isolation --outdir build/wheel .
	sed -E '/^ *--hash/d; s/ *\\$$//' requirements.txt > build/wheel/constraints.txt
	@for kind in whl tar.gz; do \
	  $(PYTHON) -m venv --clear build/wheel/env && \
	  build/wheel/env/bin/python -m pip install --quiet --constraint build/wheel/constraints.txt build/wheel/*.$$kind && \
	  (cd build/wheel && env/bin/mupax help > help.txt && env/bin/python -c "import mupax; \
	    mupax.zoo.load_pretrained('resmlp_digits'); print('$$kind: mupax', mupax.__version__, 'imports')") \
	  || exit 1; done

clean:
	rm -rf .venv build *.egg-info
