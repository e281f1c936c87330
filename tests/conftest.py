# SPDX-License-Identifier: Apache-2.0
"""What every test runs under: checked shapes, strict dtypes, NaN in memory that nothing may read."""

import gc
import os
from dataclasses import replace
from pathlib import Path

from jaxtyping import install_import_hook

import tests.typecheck  # noqa: F401  (the hook below looks it up by attribute)

SAMPLING = ["transforms", "sample", "accept", "rules", "history"]
CHECKED = ["core", "state", "layers", "models", "steps", "speculative", *(f"sampling.{name}" for name in SAMPLING)]
install_import_hook(["pallas_kernels", *(f"metrale_jax.{name}" for name in CHECKED)], "tests.typecheck.check")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

from metrale_jax.checkpoint.place import load_params  # noqa: E402
from metrale_jax.checkpoint.plan import load_plan  # noqa: E402
from metrale_jax.loading import open_checkpoint  # noqa: E402
from metrale_jax.models.decoder import make_model  # noqa: E402
from metrale_jax.state.formats import StateFormats  # noqa: E402
from metrale_jax.steps.build import Steps  # noqa: E402
from metrale_jax.steps.home import row_major  # noqa: E402

FORMATS = StateFormats("float32", "float32")

GOLDENS = Path(__file__).parent / "goldens"

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "allow")
jax.config.update("jax_platforms", "cpu")


@pytest.fixture(scope="session", autouse=True)
def compiled_once(tmp_path_factory):
    """Many tests run the same small programs: the workers of one run compile each of them once."""
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    jax.config.update("jax_compilation_cache_dir", str(shared / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def nan_fill(spec: jax.ShapeDtypeStruct) -> jax.Array:
    """Storage as it is in tests: whatever is read before it is written shows."""
    whole = jnp.issubdtype(spec.dtype, jnp.integer)
    return jnp.full(spec.shape, jnp.iinfo(spec.dtype).max if whole else jnp.nan, spec.dtype)


class Golden:
    """A stored tiny checkpoint: its steps, params and what transformers computes with it."""

    def __init__(self, name: str, block_size: int = 16):
        self.name = name
        checkpoint = open_checkpoint(GOLDENS / name)
        load_plan(checkpoint.specs, checkpoint.source, checkpoint.ignored)
        self.params = load_params(
            checkpoint.specs, checkpoint.source, np.dtype(np.float32), lambda array, spec: jnp.asarray(array)
        )
        self.specs = checkpoint.specs
        checkpoint.source.close()
        self.config = checkpoint.config
        self.steps = Steps(
            make_model(checkpoint.config, "cpu", block_size, FORMATS),
            row_major(jax.devices()[0]),
        )
        self.layout = self.steps.model.layout
        self.data = dict(np.load(GOLDENS / name / "golden.npz"))
        self.prompt = self.data["prompt"]

    def drafted_by(self, proposer, drafter=(), block_size: int = 16, num_drafts: int = 3):
        """Steps of the same model with a proposer, and params with its weights."""
        formats = replace(FORMATS, num_pending=num_drafts)
        model = make_model(self.config, "cpu", block_size, formats, proposer=proposer, num_drafts=num_drafts)
        return Steps(model, row_major(jax.devices()[0])), self.params.replace(drafter=drafter)


_LOADED: dict[tuple, Golden] = {}
# Compiled programs hold thousands of memory mappings, of which a process may have some 65,000.
MOST_LOADED = 6


@pytest.fixture(scope="session")
def golden():
    """`golden(name)`: a stored checkpoint, loaded and compiled once while it is among the last few of its module."""

    def load(name: str, block_size: int = 16) -> Golden:
        key = (name, block_size)
        _LOADED[key] = _LOADED.pop(key, None) or Golden(name, block_size)
        if len(_LOADED) > MOST_LOADED:
            del _LOADED[next(iter(_LOADED))]
            gc.collect()
        return _LOADED[key]

    return load


@pytest.fixture(scope="module", autouse=True)
def programs_go_with_their_module():
    """What a module compiled is given back at its end."""
    yield
    _LOADED.clear()
    jax.clear_caches()
    gc.collect()


@pytest.fixture(scope="session")
def nan_pool():
    """The `fill` that makes pools of NaN."""
    return nan_fill


def pytest_terminal_summary(terminalreporter):
    """Prints how many cells of the solo matrix passed, model by model and in all."""
    totals: dict[str, list[int]] = {}
    for report in [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]:
        for name, value in report.user_properties if report.when == "call" else ():
            if name == "solo_cells":
                model, *counts = value
                totals[model] = [sum(pair) for pair in zip(totals.get(model, (0, 0)), counts, strict=True)]
    if totals:
        totals = {
            **dict(sorted(totals.items())),
            "all models": [sum(pair) for pair in zip(*totals.values(), strict=True)],
        }
    for model, (passed, wanted) in totals.items():
        terminalreporter.write_line(f"solo matrix, {model}: {passed} of {wanted} cells gave the solo tokens")
