# SPDX-License-Identifier: Apache-2.0
"""Batches that were cut short go on; what does not fit together is refused; nothing that was answered is lost."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from serving.batch.sidecar import Sidecar
from tests.serving.batch.fake import FakeBackend
from tests.serving.batch.inputs import held_correct, mixed, read, run, write

FAKE = [sys.executable, "-m", "tests.serving.batch.fake_run"]


class Broken(FakeBackend):
    """Fails after some steps, as a power cut would, with requests in flight."""

    def __init__(self, steps):
        super().__init__(max_in_flight=8)
        self._left = steps

    def step(self):
        self._left -= 1
        if self._left < 0:
            raise MemoryError("out of memory")
        super().step()


def untimely(backend_steps, source, output, *flags):
    with pytest.raises(MemoryError):
        run(source, output, *flags, backend=Broken(backend_steps))


@pytest.fixture
def begun(tmp_path):
    """An input of 60 requests and the output of a run that broke off; both paths."""
    source, output = write(tmp_path / "in.jsonl", mixed(60)), tmp_path / "out.jsonl"
    untimely(12, source, output)
    assert 5 < len(read(output)) < 50
    return source, output


@pytest.mark.parametrize("order", ["any", "input"])
def test_a_torn_line_is_cut_off_and_its_request_answered_again(tmp_path, order):
    requests = mixed(12)
    source, output = write(tmp_path / "in.jsonl", requests), tmp_path / "out.jsonl"
    assert run(source, output, "--order", order) == 0
    whole = output.read_bytes()
    last_two = len(whole) - len(b"".join(whole.splitlines(keepends=True)[-2:]))
    for size in [0, *range(last_two, len(whole), 11), *range(len(whole) - 4, len(whole) + 1)]:
        output.write_bytes(whole[:size])
        assert run(source, output, "--order", order) == 0
        records = read(output)
        held_correct(records, requests)
        assert order == "any" or list(records) == sorted(records)


def test_a_tail_of_zeros_is_cut_off(begun):
    source, output = begun
    kept = output.read_bytes()
    output.write_bytes(kept + bytes(5000))
    assert run(source, output) == 0
    assert output.read_bytes().startswith(kept)
    held_correct(read(output), mixed(60))


def test_what_is_answered_is_not_answered_again(begun):
    source, output = begun
    kept, backend = output.read_bytes(), FakeBackend()
    submitted = []
    backend.submit = lambda prompt, params: submitted.append(prompt) or FakeBackend.submit(backend, prompt, params)
    before = len(read(output))
    assert run(source, output, backend=backend) == 0
    assert len(submitted) == 60 - before
    assert output.read_bytes().startswith(kept)
    held_correct(read(output), mixed(60))


def test_a_complete_batch_does_without_the_model(begun):
    source, output = begun
    assert run(source, output) == 0
    done = output.read_bytes()
    assert run(source, output, backend=Broken(0)) == 0
    assert output.read_bytes() == done


def test_ids_seen_before_the_break_still_count_as_taken(tmp_path):
    requests = mixed(40)
    source, output = write(tmp_path / "in.jsonl", [*requests, requests[0]]), tmp_path / "out.jsonl"
    untimely(6, source, output, "--window", "10")
    assert run(source, output, "--window", "10") == 0
    assert read(output)[41]["error"]["code"] == "duplicate_id"


def test_held_answers_survive_a_break(tmp_path):
    requests = mixed(100)
    source, output = write(tmp_path / "in.jsonl", requests), tmp_path / "out.jsonl"
    for steps in (3, 5, 9):
        untimely(steps, source, output, "--order", "input", "--window", "50")
    held = read(tmp_path / "out.jsonl.state" / "held.jsonl")
    assert held, "answers wait for their place"
    backend = FakeBackend()
    submitted = []
    backend.submit = lambda prompt, params: submitted.append(prompt) or FakeBackend.submit(backend, prompt, params)
    before = set(held) | set(read(output))
    assert run(source, output, "--order", "input", "--window", "50", backend=backend) == 0
    assert len(submitted) == 100 - len(before)
    records = read(output)
    held_correct(records, requests)
    assert list(records) == sorted(records)
    assert (tmp_path / "out.jsonl.state" / "held.jsonl").stat().st_size == 0


def refused(capsys, source, output, *flags):
    kept = output.is_file() and output.read_bytes()
    assert run(source, output, *flags, backend=Broken(0)) == 2
    assert kept == (output.is_file() and output.read_bytes()), "a refusal changes nothing"
    return capsys.readouterr().err


def test_a_changed_input_is_refused(begun, capsys):
    source, output = begun
    write(source, [*mixed(59), {"id": 60, "prompt": "another"}])
    message = refused(capsys, source, output)
    assert "input is" in message and "--no-resume" in message


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--model", "other"], 'model is "other" and was "fake"'),
        (["--temperature", "0.5"], 'sampling parameters is {"temperature": 0.5} and was {}'),
        (["--order", "input"], 'order is "input" and was "any"'),
    ],
)
def test_another_model_or_other_parameters_are_refused(begun, capsys, flags, words):
    assert words in refused(capsys, *begun, *flags)


def test_no_resume_starts_afresh(begun):
    source, output = begun
    write(source, mixed(30))
    assert run(source, output, "--no-resume", "--order", "input") == 0
    held_correct(read(output), mixed(30))


def test_an_output_of_unknown_origin_is_not_touched(begun, capsys):
    source, output = begun
    shutil.rmtree(output.with_name("out.jsonl.state"))
    assert "is not empty" in refused(capsys, source, output)
    assert not output.with_name("out.jsonl.state").exists(), "what was never begun leaves nothing"


@pytest.mark.parametrize("more", [[], ["--no-resume"]])
def test_a_directory_is_no_output_of_json_lines(tmp_path, capsys, more):
    source, output = write(tmp_path / "in.jsonl", mixed(2)), tmp_path / "out"
    output.mkdir()
    assert "is a directory, and JSON lines come out as one file" in refused(capsys, source, output, *more)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out"]


def test_damage_in_the_middle_is_refused_and_named(begun, capsys):
    source, output = begun
    lines = output.read_bytes().splitlines(keepends=True)
    output.write_bytes(b"".join([*lines[:2], lines[2][:9] + b"\n", *lines[3:]]))
    assert "line 3 of" in refused(capsys, source, output)


def test_a_damaged_state_is_refused(begun, capsys):
    source, output = begun
    (output.with_name("out.jsonl.state") / "batch.json").write_text("{")
    assert "is damaged" in refused(capsys, source, output)


def test_two_runs_cannot_write_one_output(begun, capsys):
    source, output = begun
    other = Sidecar.beside(str(output))
    assert "is being written by another run" in refused(capsys, source, output)
    other.close()
    assert run(source, output) == 0


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--input", "{tmp}/none.jsonl"], "none.jsonl"),
        (["--output", "{tmp}/none/out.jsonl"], "none/out.jsonl"),
        (["--output", "{tmp}/in.jsonl"], "is the input"),
        (["--output", "-", "--resume"], "is a stream"),
        (["--window", "0"], "window=0"),
        (["--top-p", "3"], "top_p=3.0"),
        (["--output", "{tmp}/x.parquet", "--input", "{tmp}/in.parquet"], "in.parquet"),
    ],
)
def test_mistakes_show_before_the_model_is_loaded(tmp_path, capsys, flags, words):
    source = write(tmp_path / "in.jsonl", mixed(3))
    flags = [flag.format(tmp=tmp_path) for flag in flags]
    assert run(source, tmp_path / "out.jsonl", *flags, backend=Broken(0)) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and words in captured.err
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize("order", ["any", "input"])
def test_a_full_disk_loses_nothing(tmp_path, order):
    requests = mixed(60)
    source, output = write(tmp_path / "in.jsonl", requests), tmp_path / "out.jsonl"
    arguments = ["--input", str(source), "--output", str(output), "--quiet", "--order", order]

    limited = ["bash", "-c", 'ulimit -f 5; exec "$@"', "-", *FAKE, *arguments]  # 5 KiB a file
    done = subprocess.run(limited, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "cannot be used (File too large)" in done.stderr and "make room" in done.stderr
    kept = output.read_bytes()
    held = output.with_name("out.jsonl.state") / "held.jsonl"
    full_one = kept if order == "any" else held.read_bytes()
    assert 4000 < len(full_one) <= 5 * 1024 and full_one.endswith(b"\n"), "a line that did not fit is undone"
    assert subprocess.run([*FAKE, *arguments], check=False).returncode == 0
    assert output.read_bytes().startswith(kept)
    held_correct(read(output), requests)


def test_a_full_device_is_told(tmp_path, capsys):
    source = write(tmp_path / "in.jsonl", mixed(3))
    assert run(source, "/dev/full") == 2
    assert "'/dev/full' cannot be used (No space left on device)" in capsys.readouterr().err


def test_a_reader_that_leaves_ends_the_batch_quietly(tmp_path):
    source = write(tmp_path / "in.jsonl", mixed(3000))
    command = f"{' '.join(FAKE)} --quiet --input {source} --output - | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert json.loads(done.stdout)["line"] and "BrokenPipe" in done.stderr, "the command line turns it into silence"


def test_a_stream_given_again_is_known_by_its_beginning(tmp_path):
    requests, output = mixed(80), tmp_path / "out.jsonl"
    source = write(tmp_path / "in.jsonl", requests)
    command = [*FAKE, "--input", "-", "--output", str(output), "--quiet"]
    assert subprocess.run(command, input=source.read_bytes(), check=False).returncode == 0
    os.truncate(output, output.stat().st_size // 2)
    assert subprocess.run(command, input=source.read_bytes(), check=False).returncode == 0
    held_correct(read(output), requests)
    changed = source.read_bytes().replace(b"group", b"troop")
    done = subprocess.run(command, input=changed, capture_output=True, check=False)
    assert done.returncode == 2 and b"input is" in done.stderr
