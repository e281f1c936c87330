# SPDX-License-Identifier: Apache-2.0
"""Makes the stubs: `python -m serving.grpc.protos.generate`. A test holds that what is committed is what this makes."""

import sys
import tempfile
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

HERE = Path(__file__).parent
STUBS = HERE.parent / "stubs"
LICENCE = "# SPDX-License-Identifier: Apache-2.0\n"


def generated() -> dict[str, str]:
    """Text of each stub by its file name. Raises `RuntimeError` for a proto that does not compile."""
    sources = sorted(str(path.relative_to(HERE)) for path in HERE.rglob("*.proto"))
    included = str(resources.files("grpc_tools") / "_proto")
    with tempfile.TemporaryDirectory() as directory:
        out = [f"--{kind}_out={directory}" for kind in ("python", "pyi", "grpc_python")]
        if protoc.main(["protoc", f"-I{HERE}", f"-I{included}", *out, *sources]):
            raise RuntimeError(f"protoc refused {', '.join(sources)}; it says why on stderr.")
        made = sorted(path for path in Path(directory).rglob("*") if path.suffix in (".py", ".pyi"))
        return {path.name: LICENCE + _imported_from_here(path, Path(directory)) for path in made}


def _imported_from_here(path: Path, root: Path) -> str:
    # protoc takes the proto's folders for Python packages; the stubs lie side by side in ours.
    text = path.read_text(encoding="utf-8")
    for other in root.rglob("*_pb2.py"):
        package = ".".join(other.parent.relative_to(root).parts)
        text = text.replace(f"from {package} import {other.stem} as", f"from serving.grpc.stubs import {other.stem} as")
    return text


def main() -> int:
    """Writes the stubs."""
    STUBS.mkdir(exist_ok=True)
    for name, text in generated().items():
        (STUBS / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
