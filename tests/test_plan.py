# SPDX-License-Identifier: Apache-2.0
"""`metrale-jax plan`, and the archives that it writes: compiled here, loaded in a fresh process."""

import dataclasses
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from metrale_jax import LLM, cli
from metrale_jax.aot.archive import Archive
from metrale_jax.aot.budget import budget_of
from metrale_jax.aot.chips import CHIPS
from metrale_jax.aot.plan import Ask, Plan
from metrale_jax.aot.roofline import decode_work, prefill_work
from metrale_jax.aot.shapes import describe, model_for
from metrale_jax.aot.targets import Target
from metrale_jax.aot.workspace import Workspace
from metrale_jax.core.errors import ConfigError
from metrale_jax.devices import host
from metrale_jax.engine.warmup import abstract_params
from metrale_jax.models.decoder import make_model
from metrale_jax.run_options import BLOCK_TOKENS, chosen_block_size
from metrale_jax.state.formats import StateFormats
from pallas_kernels.dispatch import PLATFORMS
from tests.conftest import GOLDENS

ROOT = Path(__file__).parent.parent
TINY = GOLDENS / "llama-default"
SIZES = ["--max-seqs", "4", "--context", "64", "--prefill-tokens", "32", "--block-size", "8"]


def plan(arguments, capsys):
    status = cli.main(["plan", *arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.fixture(scope="module")
def archived(tmp_path_factory):
    """A plan as data, and the archive beside it."""
    path = tmp_path_factory.mktemp("archive") / "tiny.zip"
    command = [sys.executable, "-m", "metrale_jax", "plan", str(TINY), "--target", "cpu", *SIZES, "--json", "--quiet"]
    done = subprocess.run([*command, "--compile", path], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), path


def answered(archive, options):
    command = [sys.executable, ROOT / "tests" / "plan_script.py", TINY, archive, json.dumps(options)]
    environment = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin", "HOME": "/tmp"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_fresh_process_with_an_archive_compiles_nothing_and_gives_the_same_tokens(archived):
    data, path = archived
    compiled, loaded = answered("", data["options"]), answered(path, data["options"])
    assert compiled["programs"] > 0 and compiled["xla"] > 0
    assert (loaded["programs"], loaded["xla"]) == (0, 0)
    assert loaded["tokens"] == compiled["tokens"]


def test_the_plan_says_what_fits_and_what_it_would_take(archived):
    data, _ = archived
    assert data["fits"] and data["mesh"] == {"data": 1, "expert": 1, "tensor": 1}
    assert data["largest_context"] == 256 and data["largest_batch"] > 1000
    assert data["options"]["max_sequences"] == 4 and data["options"]["max_context_tokens"] == 64
    # Float32: 131 x 36 embedding, then the layers.
    assert 131 * 36 * 4 < data["bytes_per_device"]["weights"] < 10**6
    assert data["bytes_per_device"]["kv_blocks"] == (4 * 9 + 1) * data["kv_block_bytes_per_device"]
    assert data["bytes_per_device"]["workspace"] == max(data["workspace_by_program"].values()) > 0


@pytest.mark.parametrize(
    ("model", "changes", "words"),
    [
        ("qwen3", {}, "another model: family is 'llama' there and 'qwen3' here"),
        ("llama-linear", {}, "another model: digest is"),
        ("llama-default", {"max_sequences": 5}, "another engine: max_sequences is 4 there and 5 here; give LLM the"),
        ("llama-default", {"prefill_tokens": 16}, "another engine: prefill_tokens is 32 there and 16 here"),
        ("llama-default", {"kv_dtype": "int8"}, "another model: keys and values is 'float32' there and 'int8' here"),
        (
            "llama-default",
            {"block_size": None},
            "another model: digest is|another engine: block_size is 8 there and 16",
        ),
        ("llama-default", {"attention": "xla"}, "another model: attention is 'auto' there and 'xla' here"),
        ("llama-default", {"dtype": "bfloat16"}, "another model: dtype is 'float32' there and 'bfloat16' here"),
    ],
)
def test_an_archive_for_something_else_is_refused(archived, model, changes, words):
    data, path = archived
    with pytest.raises(ConfigError, match=words):
        LLM(GOLDENS / model, executables=path, **{**data["options"], **changes})


def rewritten(path, target, change):
    """A copy of an archive with its header, or its programs, changed."""
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            if name == "header.json":
                header = json.loads(data)
                change(header)
                data = json.dumps(header)
            new.writestr(name, data)
    return target


@pytest.mark.parametrize(
    ("table", "name", "words"),
    [
        ("versions", "jaxlib", "another version: jaxlib is 'other' there"),
        ("versions", "metrale-jax sources", "another version: metrale-jax sources is 'other' there"),
        ("machine", "kind", "another machine: kind is 'other' there .*--target"),
    ],
)
def test_an_archive_of_another_version_or_machine_is_refused(archived, tmp_path, table, name, words):
    data, path = archived
    other = rewritten(path, tmp_path / "other.zip", lambda header: header[table].update({name: "other"}))
    with pytest.raises(ConfigError, match=words):
        LLM(TINY, executables=other, **data["options"])


def test_nothing_of_an_archive_is_unpickled_before_its_digest_is_right(archived, tmp_path):
    _, path = archived

    def damage(header):
        for listed in header["programs"].values():
            listed["sha256"] = "0" * 64

    load = Archive(rewritten(path, tmp_path / "damaged.zip", damage)).loader(LLM(TINY).loaded.steps.home.devices)
    [key, *_] = json.loads(zipfile.ZipFile(path).read("header.json"))["programs"]
    with pytest.raises(ConfigError, match="is damaged at programs/0000; write it again"):
        load(key)
    assert load("another key") is None


@pytest.mark.parametrize(
    ("content", "words"), [(b"no zip", "is none that"), (None, "cannot be read"), ("{}", "is none that")]
)
def test_a_file_that_is_no_archive_is_refused_before_anything_loads(content, words, tmp_path):
    path = tmp_path / "file.zip"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("header.json", content)
    with pytest.raises(ConfigError, match=words):
        LLM("no-such-model", executables=path)


def test_a_config_alone_is_enough_in_a_directory_or_as_a_file(tmp_path, capsys):
    shutil.copy(TINY / "config.json", tmp_path / "config.json")
    shutil.copy(TINY / "config.json", tmp_path / "other.json")
    for model in (tmp_path, tmp_path / "config.json", tmp_path / "other.json"):
        status, out, err = plan([str(model), "--target", "cpu", *SIZES, "--quiet"], capsys)
        assert status == 0 and err == ""
        rows = dict(line.split(maxsplit=1) for line in out.splitlines() if not line.startswith(" "))
        assert rows["weights"] == "242.8 kB" and "max_sequences=4" in rows["options"]


def test_progress_is_on_stderr_and_the_answer_on_stdout(capsys):
    status, out, err = plan([str(TINY), "--target", "cpu", *SIZES, "--json"], capsys)
    assert status == 0 and "compile" in err and json.loads(out)["max_seqs"] == 4


@pytest.mark.parametrize(
    ("memory", "words"),
    [(300_000, "no, memory capacity binds"), (100_000, "the weights alone do not fit, so nothing was compiled")],
)
def test_what_does_not_fit_is_told_with_what_would_and_exits_1(memory, words, capsys, monkeypatch):
    def small():
        target, devices = host()
        return Target(dataclasses.replace(target.chip, memory=memory, usable=1.0)), devices

    monkeypatch.setattr("metrale_jax.plan_command.host", small)
    status, out, _ = plan([str(TINY), "--target", "cpu", *SIZES, "--quiet"], capsys)
    assert status == 1 and words in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([str(TINY), "--target", "h300"], "target 'h300' is unknown; use one of ['b200', 'h200'"),
        ([str(TINY), "--target", "cpu", "--max-seqs", "0"], "max_sequences=0"),
        ([str(TINY), "--target", "cpu-2"], "with -2, -4, -8 after it for so many devices, or cpu."),
        ([str(TINY), "--target", "cpu", "--max-seqs", "-3"], "max_sequences=-3"),
        ([str(TINY), "--target", "cpu", "--max-seqs", "9" * 30], f"max_sequences={'9' * 30} is above 16384"),
        ([str(TINY), "--target", "cpu", "--prefill-tokens", "9" * 30], f"prefill_tokens={'9' * 30} is above 131072"),
        ([str(TINY), "--target", "cpu", "--attention", "flash"], "attention='flash' is not one of auto, cpu, triton"),
        ([str(TINY), "--target", "cpu", "--prefill-tokens", "-1"], "prefill_tokens=-1"),
        ([str(TINY), "--target", "cpu", "--context", "100000"], "max_context_tokens=100000 is above the model's"),
        ([str(TINY), "--target", "cpu", "--kv-dtype", "fp3"], "kv_dtype='fp3' is not one of float32"),
        ([str(TINY), "--target", "cpu", "--dtype", "int3"], "dtype='int3'"),
        ([str(TINY), "--target", "cpu", "--block-size", "24"], "block_size=24 is not a power of two"),
        ([str(TINY), "--target", "cpu", "--compile", "/no/such/place.zip"], "is in no directory that exists"),
        ([str(TINY), "--target", "cpu", "--compile", str(GOLDENS)], "is a directory; name a file in it"),
        (["no-such-model", "--target", "cpu"], "no-such-model"),
        ([str(GOLDENS / "cases.json"), "--target", "cpu"], "cases.json holds a list"),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(arguments, words, capsys):
    status, out, err = plan([*arguments, "--quiet"], capsys)
    assert (status, out) == (2, "")
    assert err.startswith("metrale-jax: ") and err.count("\n") == 1 and words in err


@pytest.mark.parametrize("name", ["CPU", " cpu "])
def test_a_target_is_known_in_letters_of_either_case(name, capsys):
    status, out, _ = plan([str(TINY), "--target", name, *SIZES, "--quiet"], capsys)
    assert status == 0 and "fits" in out


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "quant_method='awq'"),
        ({"architectures": ["Gpt5ForCausalLM"]}, "architecture 'Gpt5ForCausalLM' is not supported; supported are"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused_by_what_is_wrong_with_it(changes, words, tmp_path, capsys):
    values = json.loads((TINY / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, **changes}))
    status, _, err = plan([str(tmp_path), "--target", "cpu", "--quiet"], capsys)
    assert status == 2 and err.count("\n") == 1 and words in err


def test_an_archive_that_was_cut_short_is_refused(archived, tmp_path):
    data, path = archived
    content = path.read_bytes()
    for size in (0, 10, len(content) // 2, len(content) - 1):
        short = tmp_path / f"{size}.zip"
        short.write_bytes(content[:size])
        with pytest.raises(ConfigError, match="is none that .* wrote"):
            LLM(TINY, executables=short, **data["options"])


def test_a_model_that_no_kernel_serves_is_refused_in_one_line(capsys):
    """Here a kernel for TPUs, interpreted, asked for a dtype that TPUs do not load."""
    arguments = [str(TINY), "--target", "cpu", *SIZES, "--dtype", "float16", "--attention", "mosaic_tpu-interpreted"]
    status, out, err = plan([*arguments, "--quiet"], capsys)
    assert (status, out) == (2, "") and err.count("\n") == 1
    assert "a kernel of cpu does not serve this model" in err and "dtype='float16' cannot be loaded by a TPU" in err


@pytest.mark.parametrize(
    ("absent", "arguments", "words"),
    [
        ("libtpu", ["--target", "v6e-8"], "needs the tpu compiler, which is not installed; run `pip install"),
        ("matplotlib", ["--target", "cpu", "--plot", "x.png"], "plot needs matplotlib, .* `pip install matplotlib`"),
    ],
)
def test_what_is_not_installed_is_named_with_the_line_that_installs_it(absent, arguments, words, capsys, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == absent else find(name))
    status, _, err = plan([str(TINY), *arguments, "--quiet"], capsys)
    assert status == 2
    assert re.search(words, err), err


def test_a_plot_is_drawn(tmp_path, capsys):
    path = tmp_path / "plan.png"
    status, _, _ = plan([str(TINY), "--target", "cpu", *SIZES, "--quiet", "--plot", str(path)], capsys)
    assert status == 0 and path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name, has_pages", [("qwen3-next-dense", True), ("mamba2", False)])
def test_a_plan_counts_recurrent_slots_and_the_states_that_are_kept(name, has_pages, capsys):
    arguments = [str(GOLDENS / name), "--target", "cpu", *SIZES, "--snapshot-mib", "1", "--quiet"]
    status, out, err = plan([*arguments, "--json"], capsys)
    found = json.loads(out)
    assert status == 0, err
    held = found["bytes_per_device"]
    slot = held["recurrent_slots"] // 5
    assert slot > 0 and held["recurrent_slots"] == 5 * slot, "four sequences and the slot of padding"
    assert 0 < held["snapshots"] <= 1 << 20 and held["snapshots"] % slot == 0
    assert (held["kv_blocks"] > 0) == has_pages
    llm = LLM(GOLDENS / name, **found["options"])
    assert llm.stats().num_snapshots == held["snapshots"] // slot
    assert "states kept for later prompts" in plan(arguments, capsys)[1]


def test_every_platform_has_blocks_of_its_own_size():
    assert set(BLOCK_TOKENS) == set(PLATFORMS)
    assert [chosen_block_size(None, name) for name in ("cpu", "cuda", "tpu")] == [16, 16, 64]
    assert chosen_block_size(128, "tpu") == 128


def planned(num_sequences, capacity):
    """The plan of Qwen3-8B with keys and values of a byte on an H200 of so much memory, nothing compiled."""
    description = describe(model_for("qwen3-8b"))
    model = make_model(description.config, "cuda", 16, StateFormats("int8", "bfloat16"))
    params = abstract_params(description.specs, "bfloat16")
    return Plan(
        model="qwen3-8b",
        dtype="bfloat16",
        kv_format="int8",
        attention="auto",
        chip=CHIPS["h200"],
        num_devices=1,
        idle_devices=0,
        ask=Ask(num_sequences, 8192, 40960, 512),
        budget=budget_of(model, params, capacity, 10**8),
        workspace=Workspace({"advance": 10**8}),
        decode=decode_work(model, params, num_sequences, 8192),
        prefill=prefill_work(model, params, 512, 0),
    )


def test_a_pool_that_kernels_cannot_address_is_planned_larger_or_refused_with_the_way_out():
    # Ten sequences need 5,131 blocks, whose keys are an array of 2.8 GiB; 7,282 are the next that can be addressed.
    roomy = planned(10, 126 * 10**9)
    rows = dict(roomy.lines())
    assert roomy.fits and "7,282 blocks of 16 tokens" in rows["KV blocks"]
    assert roomy.options()["kv_cache_mib"] << 20 >= 7282 * roomy.budget.block
    assert any("5,131 blocks are needed" in value for _, value in roomy.lines())
    weights = roomy.budget.weights
    tight = planned(10, weights + 10**8 + 6000 * roomy.budget.block)
    assert not tight.fits and "kernels cannot address arrays of this size; ask for fewer" in dict(tight.lines())["fits"]
    assert tight.budget.max_sequences(8192) == 7  # of 3,640 blocks, the most below 2 GiB
    few = planned(7, weights + 10**8 + 6000 * roomy.budget.block)
    assert few.fits and few.budget.num_blocks(7, 8192) == 7 * 513 + 1
