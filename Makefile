# Gridsieve. `make help` lists the targets; each sets up what it needs.

PYTHON ?= python3
BIN := .venv/bin
PROTOS := $(wildcard protos/gridsieve/v1/*.proto)
PYTEST := $(BIN)/python -m pytest
PIP_FLAGS ?=
# With pip's progress where the output is a terminal.
PIP_INSTALL = $(BIN)/pip install $(if $(MAKE_TERMOUT),,--quiet) --disable-pip-version-check $(PIP_FLAGS)

.DEFAULT_GOAL := help
.PHONY: help setup protos tree demo test test-deep test-gpu coverage lint site format bench bench-ceiling bench-gateway bench-gpu bench-live bench-media bench-moments bench-peers bench-sharegpt fuzz fuzz-http fuzz-rpc gpu-bundle soak soak-live demo-model demo-draft demo-embedder demo-moments demo-moments-eval demo-mtp demo-retrieval demo-tones demo-eval up down clean

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  \033[1m%-12s\033[0m %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: .venv/.installed gridsieve/v1/.generated  ## Create .venv with all dependencies and generate code from protos/

# torch is installed first and pinned. With a GPU: make setup TORCH=torch EXTRAS=dev,cuda
TORCH ?= torch==2.13.0
EXTRAS ?= dev
.venv/.installed: pyproject.toml
	@echo "setup, 1 of 3: a virtual environment, .venv"
	@$(PYTHON) -m venv .venv
	@echo "setup, 2 of 3: $(TORCH): 200 MB from PyTorch's CPU index, if PIP_EXTRA_INDEX_URL names it; 6 GB with CUDA"
	@$(PIP_INSTALL) "$(TORCH)"
	@echo "setup, 3 of 3: the other packages, about 500 MB to download, and the code of protos/ (1 to 3 minutes)"
	@$(PIP_INSTALL) --editable '.[$(EXTRAS)]'
	@touch $@ gridsieve/v1/.generated

protos: gridsieve/v1/.generated  ## Generate Python code from protos/

gridsieve/v1/.generated: $(PROTOS) | .venv/.installed
	@echo "generating code from protos/"
	@$(PIP_INSTALL) --no-deps --editable .  # see protos/build_backend.py
	@touch $@

tree:  ## List every Python file with the first line of its docstring
	@git ls-files '*.py' | sed 's|[^/]*$$| &|' | LC_ALL=C sort | tr -d ' ' | xargs awk 'FNR == 1 && sub(/^r?"""/, "") { \
	  name = folder = FILENAME; sub(/.*\//, "", name); sub(/[^\/]*$$/, "", folder); sub(/"""$$/, ""); \
	  if (folder != last) { print "\n" folder; last = folder } printf "  %-26s %s\n", name, $$0 }'

demo: setup  ## Ask the embedded model about a clip, at rates 0 and 0.75, and show what that saves a larger model
	@$(BIN)/python -m demo.run

test: setup  ## Run the tests (about 7 minutes on two cores)
	$(PYTEST) -n 2

test-deep: setup  ## Run the slow variations of tests, the fuzzers and the soaks (about 30 minutes)
	$(PYTEST) -n 2 -m deep
	$(BIN)/python -m tests.fuzz.rpc
	$(BIN)/python -m tests.fuzz.http
	$(BIN)/python -m tests.fuzz.run
	$(BIN)/python -m tests.soak.run
	$(BIN)/python -m tests.soak.live --cameras 0

# Where the bundle is unpacked, packages come from it and torch from $(PYTHON); nothing is installed, compiled or fetched.
# Elsewhere without an index: make test-gpu GPU_SETUP= GPU_PYTHON=python3
ifeq ($(wildcard .gpu),)
GPU_SETUP := setup
GPU_PYTHON := $(BIN)/python
else
GPU_SETUP :=
GPU_PYTHON := PYTHONPATH=$(CURDIR)/.gpu FLASHINFER_DISABLE_JIT=1 $(PYTHON)
endif

# A process a file: an error of a kernel makes the device unusable for its process.
test-gpu: $(GPU_SETUP)  ## Run the checks that need a CUDA device
	@failed=0; for file in tests/gpu/test_*.py; do $(GPU_PYTHON) -m pytest $$file || failed=1; done; exit $$failed

coverage: setup  ## Run the tests and report which lines their own process does not reach, in .coverage-html/
	$(PYTEST) -n 2 --cov --cov-report term:skip-covered --cov-report html

gpu-bundle: setup  ## Pack all that test-gpu and bench-gpu need on a machine without an index (hours the first time)
	$(BIN)/python -m benchmarks.gpu.bundle

lint: setup site  ## Check style, types, import layers, protos and the links of pages
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint
	$(BIN)/buf format --diff --exit-code

site: setup  ## Build the pages as a site, in build/site
	@rm -rf build/pages && mkdir -p build/pages
	@git ls-files -z --cached --others --exclude-standard ':!tests' ':!*.safetensors' \
	  | xargs -0 sh -c 'for name; do [ ! -e "$$name" ] || cp --parents -P "$$name" build/pages; done' _
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

format: setup  ## Format the code
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/buf format --write

bench: setup  ## Measure against transformers' generate, and the cost of three processes
	$(BIN)/python -m benchmarks.run

bench-ceiling: setup  ## Measure the Python of a decode step, with a model that takes no time
	$(BIN)/python -m benchmarks.ceiling

bench-peers: setup  ## Measure against vLLM, in an environment of its own, and transformers' generate (about an hour)
	$(BIN)/python -m benchmarks.peers

bench-gateway: setup  ## Measure what the HTTP gateway costs over gRPC, and its memory
	$(BIN)/python -m benchmarks.gateway

bench-gpu: $(GPU_SETUP)  ## Measure a CUDA device in two calls of at most 8 minutes: engine, tower
	$(GPU_PYTHON) -m benchmarks.gpu $(CALL)

bench-live: setup  ## Measure live sessions: a question against Generate, an old session, sessions and cameras at once (35 minutes)
	$(BIN)/python -m benchmarks.live

bench-media: setup  ## Measure the path from a file to pruned embeddings against other implementations
	$(BIN)/python -m benchmarks.media

EMBEDDER ?= demo/gridsieve-demo-embedder
bench-moments: setup  ## Index an hour of film, find the events in it and ask about them, with EMBEDDER=checkpoint
	$(BIN)/python -m benchmarks.moments --embedder $(EMBEDDER)

bench-sharegpt: setup  ## Measure rates 0 to 0.75 at one request a second over a ShareGPT file (5 minutes)
	$(BIN)/python -m benchmarks.sharegpt

fuzz-http: setup  ## Send two thousand mutated requests to the gateway (about a minute)
	$(BIN)/python -m tests.fuzz.http

fuzz-rpc: setup  ## Send ten thousand mutated calls and answers to the three services (about 4 minutes)
	$(BIN)/python -m tests.fuzz.rpc

soak: setup  ## Run a mixed load with disconnects, killed services and bad requests (10 minutes)
	$(BIN)/python -m tests.soak.run

soak-live: setup  ## Run an hour of a live session in minutes, watch 30 cameras for an hour, then end a thousand sessions in every way
	$(BIN)/python -m tests.soak.live

fuzz: setup  ## Plan and decode two thousand broken media files (about 2 minutes)
	$(BIN)/python -m tests.fuzz.run

demo-model: setup  ## Train the embedded model (under two hours on two cores)
	$(BIN)/python -m demo.train

demo-draft: setup  ## Train the head that drafts tokens for the embedded model (under an hour on two cores)
	$(BIN)/python -m demo.draft

demo-embedder: setup  ## Train the embedded embedder, which finds clips by texts (45 minutes on one core)
	$(BIN)/python -m demo.embedder

demo-moments: setup  ## Train a model of the embedded one's line that tells when things move (an hour on one core)
	$(BIN)/python -m demo.moments

demo-moments-eval: setup  ## Measure how right its moments are, with their grammar and without
	$(BIN)/python -m demo.moments_accuracy

demo-mtp: setup  ## Train a small model in the layout of Qwen3.5 with multi-token prediction (an hour on one core)
	$(BIN)/python -m demo.mtp

demo-tones: setup  ## Train a small model that hears tones, in the layout of Qwen2.5-Omni (half an hour on one core)
	$(BIN)/python -m demo.tones

demo-retrieval: setup  ## Measure what a pruning rate costs the embedded embedder in retrieval
	$(BIN)/python -m demo.retrieval

demo-eval: setup  ## Measure the accuracy of the embedded model by pruning rate and method
	$(BIN)/python -m demo.evaluate --picture docs/pruning.png --time-picture docs/pruning-time.png

up:  ## Start the stack in containers, with Prometheus and Grafana
	docker compose --profile dashboard up --build --detach --wait

down:  ## Stop the containers
	docker compose --profile dashboard down

clean:  ## Remove generated files
	rm -rf .venv .gpu build gridsieve/v1 .coverage* .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis *.egg-info
