# SPDX-License-Identifier: Apache-2.0
"""From a model's name to its description, weights and tokenizer: where families, checkpoints and text meet."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metrale_jax.checkpoint.gguf_file import GgufFile, open_gguf
from metrale_jax.checkpoint.gguf_source import GgufSource, gguf_names
from metrale_jax.checkpoint.orbax_source import OrbaxSource, is_store, stored_specs
from metrale_jax.checkpoint.safetensors_source import SafetensorsSource
from metrale_jax.checkpoint.source import AbstractTensorSource
from metrale_jax.core.config import ModelConfig
from metrale_jax.core.errors import CheckpointError, ConfigError
from metrale_jax.models.decoder import DecoderParams
from metrale_jax.models.family import Family, described
from metrale_jax.models.hf_config import RawConfig
from metrale_jax.models.registry import ARCHITECTURES, GGUF_ARCHITECTURES, class_of, family_for
from metrale_jax.text.tokenizer import Tokenizer

HEAD = "lm_head.weight"
STORED_HEAD = "head"  # the leaf of `DecoderParams`, by which a store of finished params names it
# Small tensors of a GGUF that are configuration: they carry factors of rotary embeddings.
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint opened and understood, its weights not yet read.

    `tokenizer()` makes the tokenizer, or raises TextError where the files hold none. `values` are the fields of a
    config.json that describes the model, its class under `architectures` included.
    """

    path: Path
    config: ModelConfig
    specs: DecoderParams
    source: AbstractTensorSource
    ignored: tuple[str, ...]
    tokenizer: Callable[[], Tokenizer]
    values: Mapping[str, Any]


def open_checkpoint(path: Path) -> Checkpoint:
    """A Hugging Face directory, one that `convert` wrote, or a .gguf file. Raises `MetraleError`s naming the fault."""
    if path.is_file() and path.suffix == ".gguf":
        return _open_gguf(path)
    if path.is_dir() and not (path / "config.json").exists():
        files = sorted(path.glob("*.gguf"))
        if len(files) == 1:
            return _open_gguf(files[0])
    return _open_directory(path)


def has_weights(directory: Path) -> bool:
    """Whether a directory holds weights in any format that is read, beside its config."""
    return is_store(directory) or any(any(directory.glob(kind)) for kind in ("*.safetensors*", "*.gguf"))


def read_config(path: Path) -> tuple[Family, RawConfig]:
    """Family and raw config of a directory, or of a config.json.

    An answer ends at any id that config.json or generation_config.json names as `eos_token_id`, not only at the
    latter's as in transformers: a tuned model's directory often has its base's file for one of the two.
    """
    directory = path if path.is_dir() else path.parent
    file = path if path.suffix == ".json" else directory / "config.json"
    values = _read_json(file)
    names = values.get("architectures") or []
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise ConfigError(
            f"architectures={names!r} (model_type={values.get('model_type')!r}) in {file} "
            "does not name one model class; correct it."
        )
    family = family_for(names[0], ARCHITECTURES)
    _refuse_quantised(values, family, file)
    generation = directory / "generation_config.json"
    raw = RawConfig(values | (values.get(family.text_config) or {}), family.defaults, str(file))
    extra = RawConfig(_read_json(generation) if generation.exists() else {}, {}, str(generation))
    vocab_size = raw.positive("vocab_size")
    stops = [stop for each in (raw, extra) for stop in each.token_ids("eos_token_id", vocab_size)]
    if stops:
        raw.values["eos_token_id"] = list(dict.fromkeys(stops))
    return family, raw


def _refuse_quantised(values: Mapping[str, Any], family: Family, file: Path) -> None:
    quantised = values.get("quantization_config")
    method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
    if quantised and method not in family.quantised:
        way_out = f"; of this model quant_method={' or '.join(family.quantised)} is read" if family.quantised else ""
        raise ConfigError(
            f"quantization_config with quant_method={method!r} in {file} is not supported; use the model's checkpoint "
            f"of plain weights, or a .gguf file{way_out}."
        )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} does not exist; point at a directory with a config.json, or at a .gguf file."
        ) from None
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}); check that it is a file and its permissions."
        ) from None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON ({error}); download it again.") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds a {type(values).__name__}, expected a JSON object; download it again.")
    return values


def _open_directory(path: Path) -> Checkpoint:
    family, raw = read_config(path)
    stored = is_store(path)
    source = OrbaxSource(path) if stored else SafetensorsSource(path)
    _tie_as_the_file_says(raw, (STORED_HEAD if stored else HEAD) in source.tensors())
    description = described(family, raw)
    return Checkpoint(
        path=path,
        config=description.config,
        specs=stored_specs(description.specs) if stored else description.specs,
        source=source,
        ignored=(*family.ignored, *description.ignored),
        tokenizer=lambda: Tokenizer.from_directory(path if path.is_dir() else path.parent),
        values=raw.values,
    )


def _tie_as_the_file_says(raw: RawConfig, has_head: bool) -> None:
    # A file that holds a head of its own means it, whatever its config claims; one that holds none and does not claim
    # to be tied is reported as lacking its head.
    if has_head:
        raw.values["tie_word_embeddings"] = False


def _open_gguf(path: Path) -> Checkpoint:
    from metrale_jax.text.gguf_tokenizer import tokenizer_from_gguf

    file = open_gguf(path)
    family = family_for(file.architecture, GGUF_ARCHITECTURES)
    small = {name: _small_tensor(file, name) for name in ROPE_TENSORS if name in file.tensors}
    values = family.gguf.config(file.architecture, file.fields, small)
    if "token_embd.weight" in file.tensors:
        values["vocab_size"] = file.tensors["token_embd.weight"].shape[0]
    # What a header does not hold is absent, which is not what null says in a config.json.
    raw = RawConfig({key: value for key, value in values.items() if value is not None}, family.defaults, str(path))
    _tie_as_the_file_says(raw, "output.weight" in file.tensors)
    description = described(family, raw)
    source = _gguf_source(file, family, description)
    ignored = (*family.ignored, *(re.escape(name) for name in small))
    model_class = class_of(GGUF_ARCHITECTURES[file.architecture])
    return Checkpoint(
        path=path,
        config=description.config,
        specs=description.specs,
        source=source,
        ignored=ignored,
        tokenizer=lambda: tokenizer_from_gguf(file.fields),
        values={**raw.values, "architectures": [model_class]},
    )


def _small_tensor(file: GgufFile, name: str):
    return GgufSource(file, {}, {}).read(name)


def _gguf_source(file: GgufFile, family: Family, description) -> GgufSource:
    import jax

    wanted = [source.name for spec in jax.tree.leaves(description.specs) for source in spec.sources]
    names = gguf_names(wanted, file.architecture, len(description.config.layers))
    rules = family.gguf.undo(description.config)
    return GgufSource(file, names, _undo_by_name(wanted, rules))


def _undo_by_name(wanted: list[str], rules: Mapping[str, Callable]) -> dict[str, Callable]:
    return {name: undo for name in wanted for suffix, undo in rules.items() if name.endswith(suffix)}
