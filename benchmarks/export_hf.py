# SPDX-License-Identifier: Apache-2.0
"""Writes a GGUF model as a float32 Hugging Face directory, so that every engine compared reads the same weights.

python benchmarks/export_hf.py smollm2-135m /tmp/smollm2-f32
"""

import argparse
import json
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import save_file

from metrale_jax.checkpoint.gguf_file import open_gguf
from metrale_jax.checkpoint.hub import resolve_model
from metrale_jax.loading import Checkpoint, open_checkpoint
from metrale_jax.models.registry import GGUF_ARCHITECTURES, family_for
from metrale_jax.runtime import default_cache_dir

# What transformers calls the architectures that need nothing beyond the common fields.
CLASSES = {"llama": "LlamaForCausalLM"}


def export(gguf_path: Path, directory: Path) -> None:
    """Nothing; `directory` then holds config.json, model.safetensors and the tokenizer's files."""
    checkpoint = open_checkpoint(gguf_path)
    family = checkpoint.config.family
    if family not in CLASSES:
        raise SystemExit(f"family={family!r} is not one of {', '.join(CLASSES)}; export a model of one of these.")
    directory.mkdir(parents=True, exist_ok=True)
    save_file(_weights(checkpoint), directory / "model.safetensors", metadata={"format": "pt"})
    _write_json(directory / "config.json", _config(gguf_path, family))
    checkpoint.tokenizer().save(directory)
    checkpoint.source.close()


def _weights(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    names = [source.name for spec in jax.tree.leaves(checkpoint.specs) for source in spec.sources]
    return {name: np.ascontiguousarray(checkpoint.source.read(name), np.float32) for name in names}


def _config(gguf_path: Path, family: str) -> dict:
    file = open_gguf(gguf_path)
    values = family_for(file.architecture, GGUF_ARCHITECTURES).gguf.config(file.architecture, file.fields, {})
    known = {key: value for key, value in values.items() if value is not None}
    # Both spellings of the rotary base: older readers look only for the flat one.
    known["rope_theta"] = known["rope_parameters"]["rope_theta"]
    return {"architectures": [CLASSES[family]], "model_type": family, "hidden_act": "silu", "dtype": "float32", **known}


def _write_json(path: Path, values: dict) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Nothing; exports the named model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="alias or path of a GGUF model")
    parser.add_argument("directory", type=Path)
    args = parser.parse_args()
    export(resolve_model(args.model, default_cache_dir()), args.directory)


if __name__ == "__main__":
    main()
