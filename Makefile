# Two commands need nothing but this: `make demo` and `make test`. Each makes .venv when it is not there and reuses it when it is.
VENV ?= .venv
WEBUI_VENV ?= .venv-webui
PYTHON ?=
PY := $(VENV)/bin/python
ENGINE ?= vllm
SEED ?= 0
PYTEST_ARGS ?=
# Test files that run at once; PYTEST_ARGS='-n 0' is one after the other in one process (for --pdb).
JOBS ?= 2

# One thread a rank: two ranks on two cores otherwise take turns. Nothing here talks to a model hub.
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1
export USE_HF ?= 1
export MODELSCOPE_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: help env demo test test-quick test-server test-webui benchmark lint format clean

help:
	@echo 'make demo        learn two-digit sums with GRPO on two CPU processes (ENGINE=vllm|transformers, SEED=0)'
	@echo 'make test        the whole test suite (JOBS=2 files at once; PYTEST_ARGS="-k name" for a part)'
	@echo 'make test-quick  light tests, a few minutes'
	@echo 'make test-webui  swift web-ui in a real browser (needs chromium)'
	@echo 'make test-server only the tests of rollout servers'
	@echo 'make benchmark   what packing and the passes cost, as ratios'
	@echo 'make lint        ruff and mypy'
	@echo 'make env         only make $(VENV) (PYTHON=python3.11 to choose the interpreter)'
	@echo 'make clean       remove outputs and caches; make clean-env removes $(VENV) and $(WEBUI_VENV) too'

env:
	@requirements/install.sh '$(VENV)' '$(PYTHON)'

demo: env
	@PATH="$(abspath $(VENV))/bin:$$PATH" $(PY) -m examples.demo --engine $(ENGINE) --seed $(SEED)

test: env
	$(PY) -m pytest tests -n $(JOBS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

test-quick: env
	$(PY) -m pytest tests -m 'not slow and not heavy' -n $(JOBS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

test-server: env
	$(PY) -m pytest tests/rollouts/test_rollout_server.py tests/rollouts/test_server_*.py $(PYTEST_ARGS)

test-webui: env
	@requirements/install-webui.sh '$(WEBUI_VENV)' '$(VENV)'
	$(WEBUI_VENV)/bin/python -m pytest tests/web_ui $(PYTEST_ARGS)

benchmark: env
	$(PY) -m tests.benchmark

lint: env
	$(PY) -m ruff check .
	$(PY) -m mypy

format: env
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean:
	rm -rf build dist *.egg-info demo_output output megatron_output .pytest_cache .mypy_cache .ruff_cache
	find . -path './$(VENV)*' -prune -o -name __pycache__ -type d -exec rm -rf {} +

.PHONY: clean-env
clean-env: clean
	rm -rf '$(VENV)' '$(WEBUI_VENV)'
