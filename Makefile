# Framesieve. `make help` lists what there is; every target sets up what it needs.

PYTHON ?= python3
BIN := .venv/bin
PROTOS := $(wildcard protos/framesieve/v1/*.proto)
PYTEST := $(BIN)/python -m pytest
# Two workers, each on its own core. tests/conftest.py groups the tests that share services and sorts the groups.
SIDE_BY_SIDE := -n 2 --dist loadgroup --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help setup protos demo test test-deep test-gpu lint format bench bench-engine bench-gpu bench-media fuzz fuzz-rpc soak demo-model demo-eval up down clean

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  \033[1m%-12s\033[0m %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: .venv/.installed framesieve/v1/.generated  ## Make .venv with everything and generate the protos' code

# torch first and pinned. Where pip's build for this platform carries CUDA (gigabytes) and that is not wanted, point
# PIP_EXTRA_INDEX_URL at PyTorch's own CPU index. With a GPU: make setup TORCH=torch
TORCH ?= torch==2.13.0
.venv/.installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check "$(TORCH)"
	@mkdir -p framesieve/v1  # so that the editable install knows the package that is generated next
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

protos: framesieve/v1/.generated  ## Generate Python code from protos/

framesieve/v1/.generated: $(PROTOS) .venv/.installed
	$(BIN)/python -m grpc_tools.protoc -I protos --python_out=. --pyi_out=. --grpc_python_out=. $(PROTOS)
	@touch framesieve/v1/__init__.py $@

demo: setup  ## Ask the embedded model about a real clip, at rate 0 and 0.75, through three processes
	@$(BIN)/python -m demo.run

test: setup  ## Run the tests
	$(PYTEST) $(SIDE_BY_SIDE)

test-deep: setup  ## Run the slow variations that `make test` leaves out
	$(PYTEST) -m deep

test-gpu: setup  ## Run the checks that need a CUDA device
	$(PYTEST) tests/gpu

lint: setup  ## Check style, types, who imports whom, and the protos
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint
	$(BIN)/buf format --diff --exit-code

format: setup  ## Put the code into the house's format
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/buf format --write

bench: setup  ## Measure against transformers' generate, and what the split into processes costs
	$(BIN)/python -m benchmarks.run

bench-engine: setup  ## Measure the engine against transformers' generate, and pruning against none
	$(BIN)/python -m benchmarks.engine

bench-gpu: setup  ## Measure tower, pruning and engine on a CUDA device, against what it can do at the best
	$(BIN)/python -m benchmarks.gpu

bench-media: setup  ## Measure the path from a file to pruned embeddings against other ways to do the same
	$(BIN)/python -m benchmarks.media

fuzz-rpc: setup  ## Put ten thousand mutated calls, and answers of bent peers, through the three services
	$(BIN)/python -m tests.fuzz.rpc

soak: setup  ## Ten minutes of mixed load in which callers leave, services are killed and requests are bad
	$(BIN)/python -m tests.soak.run

fuzz: setup  ## Put thousands of broken media files through planning and decoding
	$(BIN)/python -m tests.fuzz.run

demo-model: setup  ## Train the embedded model again (under two hours on two cores)
	$(BIN)/python -m demo.train

demo-eval: setup  ## Accuracy of the embedded model on unseen clips, by pruning rate and method
	$(BIN)/python -m demo.evaluate

up:  ## Start the stack in containers, with Prometheus and Grafana
	docker compose --profile dashboard up --build --detach --wait

down:  ## Stop the containers
	docker compose --profile dashboard down

clean:  ## Remove what was generated
	rm -rf .venv framesieve/v1 .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis *.egg-info
