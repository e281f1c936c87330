# SPDX-License-Identifier: Apache-2.0
"""Compiled programs in one file, for a machine that then compiles nothing.

An archive is a zip. `header.json` says what the programs were compiled for and the digest of each; it is plain JSON and
is checked whole before anything else is opened. The programs themselves are what JAX serialises: pickles around machine
code. **Whoever can write an archive can run code where it is loaded**: load your own only.
"""

import hashlib
import importlib.metadata
import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

import pallas_kernels
from metrale_jax import core
from metrale_jax.core.errors import ConfigError
from metrale_jax.engine.settings import EngineConfig
from metrale_jax.models.decoder import DecoderParams
from metrale_jax.steps.build import Steps

FORMAT = 1
HEADER = "header.json"
COMPILERS = {"cpu": "jaxlib", "cuda": "jax-cuda13-plugin", "tpu": "libtpu"}
# Rooms of the package whose sources make programs what they are.
ROOMS = ("core", "sharding", "state", "adapters", "layers", "sampling", "models", "steps")


@dataclass(frozen=True)
class Purpose:
    """What programs are compiled for: tables of plain values, all of which have to agree."""

    versions: Mapping[str, str]
    machine: Mapping[str, Any]
    model: Mapping[str, Any]
    engine: Mapping[str, Any]


def purpose_of(steps: Steps, params: DecoderParams, config: EngineConfig, kind: str) -> Purpose:
    """The purpose of the programs of `steps` for params of these shapes, on devices of that `kind`."""
    model = steps.model
    leaves = [(leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(params)]
    drafting = model.proposer, model.num_drafts, model.acceptance
    described = repr((model.config, model.layout, leaves, drafting, model.edit)).encode()
    return Purpose(
        versions=versions(model.platform),
        machine={"kind": kind, "devices": len(steps.home.devices)},
        model={
            "family": model.config.family,
            "layers": len(model.config.layers),
            "width": model.config.hidden_dim,
            "vocabulary": model.config.vocab_size,
            "dtype": str(params.embed.dtype),
            "keys and values": ", ".join(model.layout.kv_formats),
            "attention": model.attention,
            "digest": hashlib.sha256(described).hexdigest(),
        },
        engine=json.loads(json.dumps(asdict(config))),  # as it is read back
    )


def versions(platform: str) -> dict[str, str]:
    """What compiled programs depend on: JAX, the platform's compiler and the sources that were traced."""
    compiler = COMPILERS[platform]
    return {
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        compiler: importlib.metadata.version(compiler),
        "metrale-jax sources": _sources_digest(),
    }


def write_archive(path: Path, purpose: Purpose, programs: Mapping[str, jax.stages.Compiled]) -> int:
    """Bytes of the archive now at `path`, whole or, if writing it fails, not there. Raises `ConfigError` for a path
    that cannot be written."""
    temporary = path.with_name(f".{path.name}.writing-{os.getpid()}")
    try:
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            listed = {}
            for number, (key, program) in enumerate(programs.items()):
                name, data = f"programs/{number:04}", pickle.dumps(serialize_executable.serialize(program))
                archive.writestr(name, data)
                listed[key] = {"file": name, "sha256": hashlib.sha256(data).hexdigest()}
            header = {"format": FORMAT, **asdict(purpose), "programs": listed}
            archive.writestr(HEADER, json.dumps(header, indent=1))
        os.replace(temporary, path)
        return path.stat().st_size
    except OSError as error:
        raise ConfigError(f"archive {str(path)!r} cannot be written ({error.strerror}); name another file.") from None
    finally:
        temporary.unlink(missing_ok=True)


class Archive:
    """An archive whose header was read, and nothing more. Raises `ConfigError` for a file that is none."""

    def __init__(self, path: Path):
        self.path = path
        try:
            with zipfile.ZipFile(path) as file:
                self._header = json.loads(file.read(HEADER))
            found = self._header["format"]
        except OSError as error:
            raise ConfigError(f"archive {str(path)!r} cannot be read ({error.strerror}); check the path.") from None
        except (zipfile.BadZipFile, KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"archive {str(path)!r} is none that `metrale-jax plan --compile` wrote ({error}); write it again."
            ) from None
        if found != FORMAT:
            raise ConfigError(f"archive {str(path)!r} has format {found}, this version reads {FORMAT}; write it again.")

    def check(self, purpose: Purpose) -> None:
        """Nothing; raises `ConfigError` with the first difference between what was compiled for and `purpose`."""
        for table, wanted in asdict(purpose).items():
            found = self._header.get(table, {})
            for name in (*wanted, *(name for name in found if name not in wanted)):
                if found.get(name) != wanted.get(name):
                    raise ConfigError(
                        f"archive {str(self.path)!r} was compiled for another {_SUBJECTS[table]}: {name} is "
                        f"{found.get(name)!r} there and {wanted.get(name)!r} here; {_WAYS_OUT[table]}."
                    )

    def loader(self, devices: Sequence[jax.Device]) -> Callable[[str], Callable | None]:
        """The function from a program's key to the program on `devices`, or to None. Call `check` first."""
        listed, order = self._header["programs"], list(devices)

        def load(key: str) -> Callable | None:
            if key not in listed:
                return None
            with zipfile.ZipFile(self.path) as file:
                data = file.read(listed[key]["file"])
            if hashlib.sha256(data).hexdigest() != listed[key]["sha256"]:
                raise ConfigError(f"archive {str(self.path)!r} is damaged at {listed[key]['file']}; write it again.")
            payload, inputs, outputs = pickle.load(io.BytesIO(data))
            return serialize_executable.deserialize_and_load(
                payload, inputs, outputs, backend=order[0].client, execution_devices=order
            )

        return load


_SUBJECTS = {"versions": "version", "machine": "machine", "model": "model", "engine": "engine"}
_WAYS_OUT = {
    "versions": "compile it again with the versions that it is to run under",
    "machine": "compile it with `--target` for this machine",
    "model": "compile it from this model's config",
    "engine": "give LLM the options that `plan --compile` printed, or compile it again with these",
}


def _sources_digest() -> str:
    digest = hashlib.sha256()
    package = Path(core.__file__).parent.parent
    files = [file for room in ROOMS for file in sorted((package / room).rglob("*.py"))]
    kernels = Path(pallas_kernels.__file__).parent
    for root, file in [*((package, f) for f in files), *((kernels, f) for f in sorted(kernels.rglob("*.py")))]:
        digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
