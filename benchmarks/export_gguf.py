# SPDX-License-Identifier: Apache-2.0
"""Writes a GGUF model again with its weights in another number format, for llama.cpp.

python benchmarks/export_gguf.py smollm2-135m /tmp/smollm2-f32.gguf --format f32
"""

import argparse
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
from gguf.quants import dequantize, quantize

from metrale_jax.checkpoint.hub import resolve_model
from metrale_jax.runtime import default_cache_dir

FORMATS = {
    "f32": (GGMLQuantizationType.F32, LlamaFileType.ALL_F32),
    "q8_0": (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
}
WRITTEN_BY_WRITER = ("general.architecture", "general.file_type")


def export(source: Path, target: Path, number_format: str) -> None:
    """Nothing; `target` holds the metadata and the dequantised tensors of `source`, matrices in `number_format`."""
    tensor_type, file_type = FORMATS[number_format]
    reader = GGUFReader(source)
    writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in WRITTEN_BY_WRITER:
            continue
        inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)
    writer.add_file_type(file_type)
    for tensor in reader.tensors:
        values = np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
        chosen = tensor_type if values.ndim > 1 else GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, quantize(values, chosen), raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """Nothing; exports the named model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="alias or path of a GGUF model")
    parser.add_argument("target", type=Path)
    parser.add_argument("--format", choices=sorted(FORMATS), default="f32")
    args = parser.parse_args()
    export(resolve_model(args.model, default_cache_dir()), args.target, args.format)


if __name__ == "__main__":
    main()
