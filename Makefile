# make demo   prompts in, tokens out: the same text with and without drafts, on the best device present
# make serve  leave a server running            make test   what CI runs
# make help   all targets
#
# VENV=DIR uses another environment, PYTHON=python3.12 another Python to make it from.
PYTHON ?= python3
VENV ?= .venv
PORT ?= 30000
ARGS ?=
ENGINE ?= docker
DEVICE ?= cuda
RUN = $(VENV)/bin/python
# Threads that spin while they wait make a busy two-core machine ten times slower.
export OMP_WAIT_POLICY ?= passive
SETUP = $(PYTHON) tools/environment.py --venv $(VENV)

.PHONY: help demo serve test test-full docs build wheel image venv clean distclean
.DEFAULT_GOAL := help

help:
	@echo "make demo       set up, then answer prompts with and without drafts and compare (ARGS=--help: options)"
	@echo "make serve      set up, then leave a server running on PORT=$(PORT)"
	@echo "make test       set up, then all tests that CI runs (ARGS: options of pytest)"
	@echo "make test-full  the end-to-end comparison at full size: 64 prompts, 512 tokens each"
	@echo "make docs       set up, then build the documentation into build/site"
	@echo "make build      compile for every GPU architecture that nvcc knows of the supported ones"
	@echo "make wheel      set up, then build source archive and wheel into dist/ (CUDA included if nvcc is found)"
	@echo "make image      container image with ENGINE=docker for DEVICE=cuda or cpu (docker/README.md; ARGS: options of the engine)"
	@echo "make venv       the environment alone ($(VENV), with the pinned SGLang)"
	@echo "make clean      remove what was compiled or written by a run; distclean: the environment too"

venv:
	@$(SETUP) sglang

build:
	@$(SETUP) build

wheel:
	@$(SETUP) sglang
	@$(RUN) tools/wheel.py $(ARGS)

# A shell gives the commit, because the context that is sent holds no .git.
image:
	$(ENGINE) build -f docker/Dockerfile -t treewy-sglang:$(DEVICE) --build-arg DEVICE=$(DEVICE) \
	    --build-arg COMMIT=$$(git rev-parse --short=12 HEAD 2>/dev/null || echo unknown) $(ARGS) .

demo:
	@$(SETUP) patched --arch local
	@$(RUN) -m treewy_sglang.demo run $(ARGS)

serve:
	@$(SETUP) patched --arch local
	@$(RUN) -m treewy_sglang.demo serve --port $(PORT) $(ARGS)

test:
	@$(SETUP) patched --arch local
	@$(RUN) -m pytest tests $(ARGS)

test-full:
	@$(SETUP) patched --arch local
	@$(RUN) -m pytest tests/server --full $(ARGS)

docs:
	@$(SETUP) sglang
	@$(RUN) -m mkdocs build --strict $(ARGS)

clean:
	rm -rf build python/*.egg-info python/treewy_sglang/*.so .pytest_cache .hypothesis .demo $(VENV)/.stamps/build
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -print | xargs rm -rf

distclean: clean
	rm -rf $(VENV)
