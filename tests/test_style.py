# SPDX-License-Identifier: Apache-2.0
"""The house rules that a machine can hold."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted(
    path
    for top in ("metrale_jax", "pallas_kernels", "serving")
    for path in ROOT.glob(f"{top}/**/*.py")
    if path.parent.name != "stubs"  # made by protoc
)
IDS = [str(path.relative_to(ROOT)) for path in SOURCES]

# A module imports lower ranks, or its own package. Single files at the top of metrale_jax stand between packages.
RANKS = {
    "pallas_kernels": 0,
    "metrale_jax.core": 1,
    "metrale_jax.sharding": 1.5,
    "metrale_jax.state": 2,
    "metrale_jax.adapters": 2,
    "metrale_jax.layers": 3,
    "metrale_jax.sampling": 3,
    "metrale_jax.models": 4,
    "metrale_jax.checkpoint": 4,
    "metrale_jax.steps": 5,
    "metrale_jax.speculative": 6,
    "metrale_jax.generate": 7,
    "metrale_jax.engine": 7,
    "metrale_jax.text": 7,
    "metrale_jax.aot": 8,
    "metrale_jax.process_memory": 7,
    "metrale_jax.progress": 7,
    "metrale_jax.loading": 8,
    "metrale_jax.drafters": 8.5,
    "metrale_jax.run_options": 8.5,
    "metrale_jax.evaluation": 8,
    "metrale_jax.probing": 8.5,
    "metrale_jax.branches": 7,
    "metrale_jax.forking": 8,
    "metrale_jax.results": 8,
    "metrale_jax.request_log": 8,
    "metrale_jax.rules": 8,
    "metrale_jax.prepared": 8.5,
    "metrale_jax.answers": 9,
    "metrale_jax.saved_answers": 9,
    "metrale_jax.runtime": 9,
    "metrale_jax.llm_config": 9.5,
    "metrale_jax.programs": 9.7,
    "metrale_jax.inspection": 10,
    "metrale_jax.llm": 10,
    "metrale_jax.convert": 10,
    "metrale_jax.devices": 8.5,
    "metrale_jax.plan_command": 10,
    "metrale_jax.flags": 10,
    "metrale_jax.training": 10.5,
    "metrale_jax.cli": 11,
    "metrale_jax": 12,
    "serving.chat": 11.1,
    "serving.core": 11.2,
    "serving.store": 11.42,
    "serving.batch": 11.41,
    "serving.openai_body": 11.3,
    "serving.passed_over": 11.25,
    "serving.openai_answer": 11.3,
    "serving.grpc": 11.4,
    "serving.http": 11.5,
    "serving.client": 11.6,
    "serving": 12,
}
MAX_MODULE_LINES = 300
MAX_FUNCTION_LINES = 60
EXCUSED_MODULES = {
    "metrale_jax/engine/loop.py": "launching, failing, reading and ending of steps share one queue of unread results",
}
# What strangers hang on the engine may raise anything; it is logged and counted.
BROAD_PLACES = {"metrale_jax/engine/hooks.py", "serving/core/engine_thread.py"}
EXCUSED_FUNCTIONS: dict[str, str] = {}
# `outline` makes functions inside a step; nothing is dispatched there.
JIT_PLACES = {"metrale_jax/steps/build.py", "metrale_jax/checkpoint/place.py", "metrale_jax/models/outline.py"}
JIT_PLACES |= {"metrale_jax/training/programs.py"}
# Where the environment may be read.
ENVIRONMENT_READERS = {"serving/serve_command.py"}
# Where devices, the home directory and JAX's settings may be looked at.
COMPOSITION_ROOT = {
    "metrale_jax/devices.py",
    "metrale_jax/runtime.py",
    "metrale_jax/llm.py",
    "metrale_jax/cli.py",
}


def room_of(module: str) -> str:
    return max((name for name in RANKS if module == name or module.startswith(name + ".")), key=len, default="")


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imported(tree: ast.AST):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", SOURCES, ids=IDS)
def test_imports_point_down_the_ranks(path):
    own = room_of(module_name(path))
    assert own, f"{path} is in no ranked room"
    for name in imported(ast.parse(path.read_text())):
        room = room_of(name)
        if room and room != own:
            assert RANKS[room] < RANKS[own], f"{own} (rank {RANKS[own]}) imports {name} (rank {RANKS[room]})"


@pytest.mark.parametrize("path", SOURCES, ids=IDS)
def test_a_module_begins_with_its_licence_and_purpose(path):
    text = path.read_text()
    assert text.startswith("# SPDX-License-Identifier: Apache-2.0\n")
    assert ast.get_docstring(ast.parse(text)), "a module says what lives there"


@pytest.mark.parametrize("path", SOURCES, ids=IDS)
def test_modules_and_functions_can_be_read_at_a_sitting(path):
    name = str(path.relative_to(ROOT))
    tree = ast.parse(path.read_text())
    assert name in EXCUSED_MODULES or len(path.read_text().splitlines()) <= MAX_MODULE_LINES
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            size = node.end_lineno - node.lineno + 1
            assert size <= MAX_FUNCTION_LINES or f"{name}:{node.name}" in EXCUSED_FUNCTIONS, (
                f"{node.name}: {size} lines"
            )


@pytest.mark.parametrize("path", SOURCES, ids=IDS)
def test_public_definitions_say_what_comes_back(path):
    tops = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    classes = [top for top in tops if isinstance(top, ast.ClassDef) and not top.name.startswith("_")]
    # What implements an abstract class is described there.
    own = [top for top in classes if not any("Abstract" in ast.unparse(base) for base in top.bases)]
    methods = [item for top in own for item in top.body if isinstance(item, ast.FunctionDef)]
    for node in [*tops, *methods]:
        if not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{node.name} has no docstring"


@pytest.mark.parametrize("path", SOURCES, ids=IDS)
def test_library_code_has_no_hidden_inputs(path):
    name = str(path.relative_to(ROOT))
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        assert not isinstance(node, ast.Global), "no globals"
        if isinstance(node, ast.ExceptHandler):
            broad = node.type is None or (isinstance(node.type, ast.Name) and node.type.id == "Exception")
            raised = any(isinstance(item, ast.Raise) for item in ast.walk(node))
            assert not broad or raised or name in BROAD_PLACES, "no swallowed exceptions"
        if isinstance(node, ast.Attribute):
            whole = ast.unparse(node)
            if name not in ENVIRONMENT_READERS:
                assert whole not in ("os.environ", "os.getenv"), f"{name} reads the environment"
            if name not in COMPOSITION_ROOT:
                assert whole not in ("jax.devices", "jax.default_backend", "jax.config", "Path.home"), (
                    f"{name}: {whole}"
                )
            if whole == "jax.jit":
                assert name in JIT_PLACES, f"{name} jits"


@pytest.mark.parametrize("path", SOURCES, ids=IDS)
def test_families_and_platforms_are_named_in_their_own_files_only(path):
    name = str(path.relative_to(ROOT))
    families = {"llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "olmo2", "granite"}
    families |= {"qwen3_moe", "mixtral", "gpt_oss", "glm4_moe", "minimax_m2"}
    families |= {"qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid", "kimi_linear"}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.If | ast.IfExp | ast.Compare):
            compared = node if isinstance(node, ast.Compare) else node.test
            values = {item.value for item in ast.walk(compared) if isinstance(item, ast.Constant)}
            assert not values & families, f"{name} branches on a family"


def test_importing_starts_no_backend_and_needs_no_optional_package():
    code = (
        "import sys, metrale_jax, metrale_jax.llm, metrale_jax.cli, jax\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge._backends, 'a backend was started'\n"
        "assert 'torch' not in sys.modules and 'orbax.checkpoint' not in sys.modules, 'slow packages were imported'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", SOURCES, ids=IDS)
def test_no_code_asks_for_a_platform_by_name(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Compare):
            asked = {side.value for side in (node.left, *node.comparators) if isinstance(side, ast.Constant)}
            assert not asked & {"cpu", "cuda", "gpu", "tpu"}, f"{ast.unparse(node)}; a table says what differs"
