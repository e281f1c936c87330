# SPDX-License-Identifier: Apache-2.0
"""The notebooks run from a clean kernel, hold what they assert, and stand on public names alone."""

import ast
import os
import warnings

import jax
import nbformat
import pytest

from notebooks.execute import HERE, NAMES, executed, faults

# The functional interface, as README and docstrings have it.
PUBLIC = {
    "metrale_jax",
    "metrale_jax.core.errors",
    "metrale_jax.evaluation",
    "metrale_jax.forking",
    "metrale_jax.generate",
    "metrale_jax.probing",
    "metrale_jax.training.options",
    "metrale_jax.training.train",
}
OTHERS = {"math", "time", "tempfile", "collections", "dataclasses", "heapq", "pathlib", "jax", "numpy", "matplotlib"}


def stored(name):
    return nbformat.read(HERE / f"{name}.ipynb", as_version=4)


def trees(notebook):
    return [ast.parse(cell.source) for cell in notebook.cells if cell.cell_type == "code"]


def test_every_notebook_is_listed():
    assert sorted(path.stem for path in HERE.glob("*.ipynb")) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_notebooks_use_public_names_alone(name):
    nodes = [node for tree in trees(stored(name)) for node in ast.walk(tree)]
    for node in nodes:
        if isinstance(node, ast.Import):
            assert {alias.name.split(".")[0] for alias in node.names} <= OTHERS
        elif isinstance(node, ast.ImportFrom):
            assert node.module in PUBLIC or node.module.split(".")[0] in OTHERS, node.module
            assert not any(alias.name.startswith("_") for alias in node.names)
        elif isinstance(node, ast.Attribute):
            assert not node.attr.startswith("_"), f"{node.attr} is private"
    assert sum(isinstance(node, ast.Assert) for node in nodes) >= 4


@pytest.mark.parametrize("name", NAMES)
def test_notebooks_run_from_a_clean_kernel(name):
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.3",
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the client's own
        notebook = executed(name, environment, timeout_s=300)
    before = stored(name)
    assert not faults(before), "what is kept is small, and tells of no machine"
    for kept, cell in zip(before.cells, notebook.cells, strict=True):
        if cell.cell_type == "code":
            kinds = [[one.output_type for one in each.outputs if one.get("name") != "stderr"] for each in (kept, cell)]
            assert kinds[0] == kinds[1], f"outputs are stale; run notebooks/execute.py {name}"
