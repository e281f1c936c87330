# SPDX-License-Identifier: Apache-2.0
"""Runs notebooks from a clean kernel and writes their outputs into them: `python notebooks/execute.py [name ...]`."""

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

HERE = Path(__file__).resolve().parent
NAMES = ("forking", "looking_inside", "decoding")
MAX_BYTES = 300_000


def executed(name: str, environment: Mapping[str, str], timeout_s: int = 600) -> NotebookNode:
    """The notebook after all of its cells ran in a new kernel. Raises `CellExecutionError` where one fails."""
    notebook = nbformat.read(HERE / f"{name}.ipynb", as_version=4)
    places = {"metadata": {"path": str(HERE)}}
    client = NotebookClient(notebook, timeout=timeout_s, kernel_name="python3", resources=places)
    search = os.pathsep.join(filter(None, [str(HERE.parent), environment.get("PYTHONPATH", "")]))
    client.execute(env={**environment, "PYTHONPATH": search})
    return notebook


def cleaned(notebook: NotebookNode) -> NotebookNode:
    """The notebook without what differs from run to run or tells of a machine."""
    notebook.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    for number, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{number}", {}
        if cell.cell_type == "code":
            cell.outputs = [one for one in cell.outputs if one.get("name") != "stderr"]
    return notebook


def faults(notebook: NotebookNode) -> list[str]:
    """Why the notebook should not be kept as it is."""
    text = nbformat.writes(notebook)
    outputs = nbformat.writes(nbformat.v4.new_notebook(cells=[c for c in notebook.cells if c.cell_type == "code"]))
    found = [f"{len(text)} bytes are above {MAX_BYTES}"] if len(text) > MAX_BYTES else []
    paths = re.findall(r"(?:/home|/root|/work|/tmp|/usr|/Users)/[\w./-]+", outputs)
    return found + [f"a path of this machine: {path}" for path in sorted(set(paths))]


def main(names: list[str]) -> None:
    """Executes these notebooks, or all, and writes those that are fit to be kept."""
    for name in names or NAMES:
        notebook = cleaned(executed(name, os.environ))
        if wrong := faults(notebook):
            sys.exit(f"{name}: {'; '.join(wrong)}")
        path = HERE / f"{name}.ipynb"
        nbformat.write(notebook, path)
        print(f"{path.name}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
