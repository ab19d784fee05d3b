# `make` alone lists the targets. Everything is made inside this folder: the
# environment in .venv, all else in _build.
PYTHON ?= python3
VENV ?= .venv
JOBS ?= $(shell nproc)
PORT ?= 8000
export CMAKE_BUILD_PARALLEL_LEVEL = $(JOBS)
export CXX
export PIP_DISABLE_PIP_VERSION_CHECK = 1
# torch is imported hundreds of times: its bytecode must be kept.
unexport PYTHONDONTWRITEBYTECODE

bin := $(VENV)/bin
python := $(bin)/python
# Bytecode is made at the first import, for what is imported.
pip := $(python) -m pip install -qq --no-compile -c $(VENV)/constraints.txt
sphinx := $(python) -m sphinx -j $(JOBS) -W --keep-going -n -b html \
	-d _build/doctrees . _build/html
torch = $(shell sed -n 's/.*"\(torch>=[^"]*\)".*/\1/p' pyproject.toml)
cpp = $(shell find openreg tests -name '*.cpp' -o -name '*.h')
# Names too, so that a file that is gone counts as a change.
sources := $(shell find openreg openreg_autoload torch_openreg cmake \
	-name __pycache__ -prune -o -type f -print | LC_ALL=C sort)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install guide serve test ecosystem sweep notebooks lint bench sanitize clean
.PHONY: ecosystem prerequisites sweep FORCE

help:
	@echo 'make install    make .venv, build the backend and install it there'
	@echo 'make guide      build everything, run every page, write _build/html'
	@echo 'make serve      serve the guide on this machine, PORT=$(PORT)'
	@echo 'make test       everything that must hold'
	@echo 'make ecosystem  install accelerate, Lightning and others, run them on the device'
	@echo 'make sweep      run PyTorch'\''s operator database, write the table of verdicts'
	@echo 'make notebooks  write notebooks/ from chapters/'
	@echo 'make lint       check style and types of the Python and C++ sources'
	@echo 'make bench      compare the speed with the CPU device'
	@echo 'make sanitize   run driver and allocator under the thread and address sanitizers'
	@echo 'make clean      remove _build; rm -r $(VENV) removes the environment'
	@echo
	@echo 'Settings: PYTHON=$(PYTHON) VENV=$(VENV) JOBS=$(JOBS)'

install: $(VENV)/.installed

guide: $(VENV)/.installed
	@echo 'Building every state and running every page ...'
	@$(python) chapters/stages.py build
	@$(sphinx)
	@echo "The guide is ready: open $(CURDIR)/_build/html/index.html"
	@echo 'or run make serve.'

serve:
	@test -f _build/html/index.html || { echo 'Run make guide first.'; exit 1; }
	@echo 'The guide is at http://127.0.0.1:$(PORT)/ until you press Ctrl+C.'
	@$(PYTHON) -m http.server $(PORT) --bind 127.0.0.1 --directory _build/html

test: $(VENV)/.installed
	@$(python) -m pytest -n $(JOBS) --dist worksteal

ecosystem: $(VENV)/.ecosystem
	@$(python) -m pytest -n $(JOBS) --dist worksteal tests/test_ecosystem.py

# SWEEP='add nn.Linear' runs these alone; SWEEP=--help says what else there is.
sweep: $(VENV)/.installed
	@PYTHONPATH=tests $(python) -m sweep --jobs $(JOBS) --update $(SWEEP)

notebooks: $(VENV)/.installed
	@$(python) docs/_ext/notebooks.py

bench: $(VENV)/.installed
	@$(python) benchmarks/run.py

lint: $(VENV)/.lint $(VENV)/.tools
	@$(bin)/ruff check --quiet .
	@$(bin)/ruff format --check --quiet .
	@$(bin)/clang-format --dry-run --Werror $(cpp)
	@$(bin)/mypy --no-error-summary

# The memory of the device and the sanitizers' shadow both need fixed places:
# setarch -R keeps the kernel from moving them where it is allowed to.
sanitize: $(VENV)/.tools | prerequisites
	@for kind in thread address,undefined; do \
	  echo "Running driver and allocator under -fsanitize=$$kind ..."; \
	  $(bin)/cmake -G Ninja -S . -B _build/sanitize/$$kind \
	    --log-level=ERROR -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(bin)/ninja \
	    -DCMAKE_BUILD_TYPE=Release -DOPENREG_SANITIZE=$$kind >/dev/null && \
	  $(bin)/cmake --build _build/sanitize/$$kind -- --quiet && \
	  for program in driver_stress allocator_stress; do \
	    $$(setarch -R true 2>/dev/null && echo setarch -R) \
	      _build/sanitize/$$kind/$$program || exit 1; \
	  done || exit 1; \
	done

clean:
	rm -rf _build

# ---------------------------------------------------------------- environment

# One line for each thing that is missing: $(call need,TEST,WHAT TO DO)
need = $(1) >/dev/null 2>&1 || { echo "OpenReg needs $(strip $(2))" >&2; missing=1; }
include_dir = "$$($(PYTHON) -c \
	'import sysconfig; print(sysconfig.get_path("include"))')"
cxx20 = echo '\#include <source_location>' | \
	$(CXX) -std=c++20 -fsyntax-only -x c++ -

prerequisites:
	@missing=; \
	if $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	    >/dev/null 2>&1; then \
	  $(call need,$(PYTHON) -c 'import ensurepip$(comma) venv',\
	    the venv module: apt install python3-venv); \
	  $(call need,test -f $(include_dir)/Python.h,\
	    the headers of Python: apt install python3-dev); \
	else \
	  $(call need,false,Python 3.10 or newer: apt install python3$(comma) \
	    or name one with make PYTHON=...); \
	fi; \
	$(call need,$(cxx20),g++ 11 or newer$(comma) for C++20: apt install g++); \
	test -z "$$missing"

comma := ,

$(python): | prerequisites
	@echo 'Creating $(VENV) ...'
	@$(PYTHON) -m venv $(VENV)

# A torch that is there already stays, if it is one that the sources support.
$(VENV)/constraints.txt: constraints.txt | $(python)
	@if $(python) -m pip show -q torch 2>/dev/null; \
	then sed '/^torch==/d' $< > $@; else cp $< $@; fi

$(VENV)/.lint: $(VENV)/constraints.txt
	@echo 'Installing the formatters ...'
	@$(pip) ruff clang-format mypy
	@touch $@

$(VENV)/.tools: $(VENV)/constraints.txt
	@echo 'Installing torch and the build tools (about 2 minutes) ...'
	@$(pip) '$(torch)' cmake ninja pyyaml scikit-build-core
	@touch $@

$(VENV)/.sources: FORCE | $(python)
	@echo '$(sources)' | cmp -s - $@ || echo '$(sources)' > $@

$(VENV)/.installed: $(VENV)/.tools $(VENV)/.sources $(sources) \
		CMakeLists.txt pyproject.toml | prerequisites
	@echo 'Building openreg, installing what the guide needs (a minute) ...'
	@$(pip) --no-build-isolation -e '.[test,guide,export,quantization]'
	@touch $@

# The package is there: only what its extra names is fetched.
$(VENV)/.ecosystem: $(VENV)/.installed
	@echo 'Installing accelerate, Lightning, safetensors and transformers ...'
	@$(pip) 'torch-openreg[ecosystem]'
	@$(python) -c 'import accelerate, lightning, safetensors, transformers'
	@touch $@
