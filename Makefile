# Thin: each target sets up once, then calls the hybridlab command, which holds all the logic.
PY ?= $(firstword $(foreach v,python3.11 python3.12 python3.13 python3,$(shell command -v $(v) 2>/dev/null)))
VENV ?= .venv
BIN := $(VENV)/bin
# CPU: torch==2.13.0 (where PyPI would serve a CUDA build, add TORCH_INDEX=https://download.pytorch.org/whl/cpu)
# NPU, inside a CANN image: make lab TORCH="torch==2.13.0 torch_npu==2.13.0"
TORCH ?= torch==2.13.0
TORCH_INDEX ?=

.PHONY: setup lab test docs nbs clean
setup: $(VENV)/.ready

$(VENV)/.ready: settings.ini setup.py pyproject.toml
	$(PY) -m venv $(VENV)
	$(BIN)/python -m pip install -q -U pip
	$(BIN)/python -m pip install -q $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(foreach p,$(TORCH),'$(p)')
	$(BIN)/python -m pip install -q -e '.[dev]'
	touch $@

lab: setup
	$(BIN)/hybridlab lab

test: setup
	$(BIN)/hybridlab test

docs: setup
	$(BIN)/hybridlab docs

nbs: setup
	$(BIN)/hybridlab run

clean:
	rm -rf _docs _proc build dist *.egg-info .pytest_cache .hypothesis
