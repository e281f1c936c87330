# SPDX-License-Identifier: Apache-2.0
"""Kept prefixes in the host's memory and on disk: found again, by the right prompts, and never wrongly."""

import json
import logging
import os
import subprocess
import sys
import time
from shutil import rmtree

import numpy as np
import pytest

from metrale_jax import LLM, SamplingParams
from metrale_jax.core.errors import ConfigError
from metrale_jax.engine.disk import STATE, DiskStore, block_kind
from metrale_jax.engine.leaves import Node
from metrale_jax.engine.moves import spill_kept
from metrale_jax.engine.spill import Spill
from metrale_jax.engine.tiers import Tier, digests_of, node_digest
from tests.conftest import GOLDENS
from tests.engine.engine_world import STEMS, Job, World

BLOCK = block_kind(0)
MODEL = {"weights": "abc"}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
OPTIONS = {"max_sequences": 2, "max_context_tokens": 96, "kv_cache_mib": 1, "prefill_tokens": 32}
SHARED = [3 + i % 90 for i in range(70)]


def arrays(number, size=64):
    return [np.full(size, number, np.float32), np.arange(size, dtype=np.int32)]


def put(tier, kind, digest, content):
    assert tier.wants(kind, digest)
    tier.spill([(kind, digest)], lambda fetch: [fetch(content)])
    tier.settle(lambda out: out)


def test_a_digest_is_of_all_that_comes_before_and_of_the_namespace():
    whole = digests_of(("salt", ()), range(12), 4)
    assert len(whole) == 3 and digests_of(("salt", ()), range(11), 4) == whole[:2]
    assert not set(whole) & set(digests_of(("other", ()), range(12), 4))
    assert digests_of(("salt", ()), [9, 1, 2, 3, 4, 5, 6, 7], 4)[1] != whole[1]
    root = Node(None, ("salt", ()), (), 0)
    node = Node(Node(root, (0, 1, 2, 3), (1,), 0), (4, 5, 6, 7), (2,), 0)
    assert node_digest(node) == whole[1]


def path_of(*blocks):
    """Nodes of the pool, with these blocks of each group."""
    return [Node(None, (), held, 0) for held in blocks]


def test_how_far_a_prompt_is_served():
    tier = Tier(1 << 20)
    digests = digests_of("a", range(40), 4)
    for index in (2, 3, 4):
        put(tier, BLOCK, digests[index], arrays(index))
    put(tier, STATE, digests[3], arrays(9))
    stateless, stateful = (Spill(tier, None, 4, (0,), with_state) for with_state in (False, True))
    assert stateless.reach(digests, path_of((1,), (2,)), 2) == 5
    assert stateless.reach(digests, path_of((1,)), 1) == 1, "block 1 is nowhere"
    assert stateful.reach(digests, path_of((1,), (2,)), 0) == 4, "the deepest state"
    assert stateful.reach(digests, path_of(*[(1,)] * 6), 0) == 4, "blocks in the pool, the state here"
    assert stateful.reach(digests, path_of((1,), (2,)), 4) == 4, "no deeper than the pool's own"
    assert stateful.reach(digests[:4], path_of((1,), (2,)), 2) == 4


def test_how_far_a_prompt_is_served_that_sees_no_more_than_windows():
    digests, window = digests_of("a", range(40), 4), 6
    tier = Tier(1 << 20)
    for index in (4, 5, 7):
        put(tier, block_kind(1), digests[index], arrays(index))
    for index in range(2, 9):
        put(tier, block_kind(0), digests[index], arrays(index))
    alone, beside = Spill(tier, None, 4, (window,), False), Spill(tier, None, 4, (0, window), False)
    assert alone.reach(digests, [], 0) == 9, "the last two blocks are enough"
    assert beside.reach(digests, path_of((1, 0), (2, 3)), 2) == 6, "block 6 of the second group is nowhere"
    assert beside.reach(digests, path_of((1, 0), (2, 0), (3, 0), (4, 5)), 4) == 6
    assert beside.reach(digests[:5], path_of((1, 0), (2, 3)), 2) == 2, "nor block 3"
    put(tier, STATE, digests[3], arrays(1))
    pool = path_of((1, 0), (2, 0), (3, 0), (4, 5), (6, 7))
    stateful = Spill(tier, None, 4, (0, window), True)
    assert stateful.reach(digests, pool, 0) == 0, "the pool has no more of what a token there sees"
    pool[2].blocks = (3, 8)
    assert stateful.reach(digests, pool, 0) == 4


WINDOW_WORLDS = {1: (0, 6), 2: (5,), 3: (9, 0, 4)}


@pytest.mark.parametrize("number", WINDOW_WORLDS, ids=lambda number: str(WINDOW_WORLDS[number]))
@pytest.mark.parametrize("recurrent", [0, 1])
def test_models_with_windows_find_what_they_left_and_read_no_more_than_they_see(number, recurrent):
    chosen = iter([number, 0, 60, 4, 24, 4, 1, 1, 0, recurrent, 8 * recurrent, *([0, 1, 1, 1, 0, 0] * recurrent)])
    world = World(lambda low, high: next(chosen, 0))
    memory, tier, read = world.engine.memory, Tier(1 << 20), []
    get = tier.get
    tier.get = lambda kind, digest: (read.append(kind), get(kind, digest))[1]
    memory.attach(Spill(tier, world.device, 4, WINDOW_WORLDS[number], bool(recurrent)))
    prompt = tuple(STEMS[0][:23])

    def run(*prompts):
        for one in prompts:
            world.submit(Job(one, SamplingParams(max_tokens=5, ignore_eos=True), (0,)))
        while world.step():
            world.check()
        world.check()
        return world.sent[-1].request

    run(prompt)
    spill_kept(world.engine)
    memory.tree.clear()
    assert run((*prompt, 3)).cached_tokens == 20 and tier.stats.hits == 1
    wanted = [5 if not window else 5 - max(0, 20 - window + 1) // 4 for window in WINDOW_WORLDS[number]]
    assert [read.count(block_kind(group)) for group in range(len(wanted))] == wanted
    assert run((*prompt, 5)).cached_tokens == 20 and tier.stats.hits == 1, "it is in the pool again"
    if not recurrent:
        assert run((*prompt[:13], 3, 3)).cached_tokens == 12 and tier.stats.hits == 2, (
            "but for what had left its window"
        )
    world.finish()


def test_least_recently_used_goes_first_and_what_is_too_large_never_comes():
    tier = Tier(3 * 512)
    for name in "abc":
        put(tier, BLOCK, name, arrays(1))
    assert tier.get(BLOCK, "a") and not tier.wants(BLOCK, "a"), "asked for, it counts as used"
    put(tier, BLOCK, "d", arrays(1))
    assert [name for name in "abcd" if tier.get(BLOCK, name)] == ["a", "c", "d"]
    put(tier, STATE, "e", arrays(1, size=1000))
    assert tier.get(STATE, "e") is None and tier.stats.num_bytes == 3 * 512


def test_what_the_device_fails_to_give_is_forgotten():
    tier = Tier(1 << 20)

    def failing(out):
        raise RuntimeError("lost")

    tier.spill([(BLOCK, "a")], lambda fetch: [fetch(1)])
    with pytest.raises(RuntimeError):
        tier.settle(failing)
    tier.settle(failing)
    assert tier.wants(BLOCK, "a")


def test_files_are_found_after_a_restart_and_wiped_for_another_model(tmp_path):
    tier = Tier(0, DiskStore(tmp_path, 1 << 20, MODEL))
    put(tier, BLOCK, "a", arrays(1))
    put(tier, STATE, "a", arrays(2))
    again = Tier(1 << 20, DiskStore(tmp_path, 1 << 20, MODEL))
    assert not again.wants(BLOCK, "a")
    found = again.get(BLOCK, "a")
    for one, other in zip(found, arrays(1), strict=True):
        np.testing.assert_array_equal(one, other)
        assert one.dtype == other.dtype
    other = DiskStore(tmp_path, 1 << 20, {"weights": "xyz"})
    assert other.num_files == 0 and {file.name for file in tmp_path.iterdir()} == {".lock", "model.json"}


def test_a_full_disk_store_drops_the_oldest(tmp_path):
    store = DiskStore(tmp_path, 3000, MODEL)
    for name in "abcd":
        store.put(BLOCK, name, arrays(1))
        store.has(BLOCK, "a")
    kept = {name for name in "abcd" if store.get(BLOCK, name)}
    assert "a" in kept and "b" not in kept and sum(f.stat().st_size for f in tmp_path.glob("*.safetensors")) <= 3000
    assert DiskStore(tmp_path, 1000, MODEL).num_files == 1


@pytest.mark.parametrize("damage", [b"", b"nonsense", "half", "swapped"])
def test_a_damaged_file_is_told_of_and_done_without(damage, tmp_path, caplog):
    store = DiskStore(tmp_path, 1 << 20, MODEL)
    store.put(BLOCK, "a", arrays(1))
    store.put(BLOCK, "b", arrays(2))
    path = tmp_path / "block0-a.safetensors"
    if damage == "half":
        damage = path.read_bytes()[: path.stat().st_size // 2]
    if damage == "swapped":
        damage = (tmp_path / "block0-b.safetensors").read_bytes()
    path.write_bytes(damage)
    with caplog.at_level(logging.WARNING):
        assert store.get(BLOCK, "a") is None
    assert "kept prefixes on disk" in caplog.text and not store.has(BLOCK, "a") and store.get(BLOCK, "b")


def test_what_another_process_deleted_or_wrote_is_found_out_without_a_word(tmp_path, caplog):
    mine, other = (DiskStore(tmp_path, 1 << 20, MODEL) for _ in range(2))
    mine.put(BLOCK, "a", arrays(1))
    assert other.has(BLOCK, "a") and other.get(BLOCK, "a") is not None
    other.clear()
    assert mine.get(BLOCK, "a") is None and not mine.has(BLOCK, "a") and mine.num_files == 0
    assert not caplog.text


def test_the_budget_is_of_the_directory_and_not_of_a_process(tmp_path):
    stores = [DiskStore(tmp_path, 5000, MODEL) for _ in range(3)]
    for number in range(30):
        stores[number % 3].put(BLOCK, str(number), arrays(number))
        assert sum(file.stat().st_size for file in tmp_path.glob("*.safetensors")) <= 5000
    kept = [number for number in range(30) if stores[0].get(BLOCK, str(number))]
    assert len(kept) >= 3 and 29 in kept


def test_who_loses_the_directory_to_another_model_reads_nothing_of_it_and_keeps_nothing_there(tmp_path, caplog):
    old = DiskStore(tmp_path, 1 << 20, MODEL)
    old.put(BLOCK, "a", arrays(1))
    new = DiskStore(tmp_path, 1 << 20, {"weights": "xyz"})
    new.put(BLOCK, "a", arrays(2))
    with caplog.at_level(logging.WARNING):
        assert old.get(BLOCK, "a") is None, "of the same tokens, but another model's"
        old.put(BLOCK, "b", arrays(1))
        old.put(BLOCK, "c", arrays(1))
    assert caplog.text.count("another model's") == 1 and not old.has(BLOCK, "b") and not old.has(BLOCK, "a")
    np.testing.assert_array_equal(new.get(BLOCK, "a")[0], arrays(2)[0])
    assert {file.name for file in tmp_path.glob("*.safetensors")} == {"block0-a.safetensors"}


def test_a_directory_with_a_files_name_and_what_was_never_finished_are_in_nobodys_way(tmp_path, caplog):
    (tmp_path / "block0-a.safetensors").mkdir()
    (tmp_path / ".block0-b.safetensors.writing-1").write_text("half")
    os.utime(tmp_path / ".block0-b.safetensors.writing-1", (1, 1))
    (tmp_path / ".block0-c.safetensors.writing-1").write_text("half")
    for model in (MODEL, MODEL, {"weights": "xyz"}):
        store = DiskStore(tmp_path, 1 << 20, model)
        assert store.num_files == 0 and not store.has(BLOCK, "a") and store.get(BLOCK, "a") is None
    store.put(BLOCK, "b", arrays(1))
    assert not caplog.text and store.has(BLOCK, "b")
    with caplog.at_level(logging.WARNING):
        store.put(BLOCK, "a", arrays(1))
    assert "kept prefixes on disk" in caplog.text and not store.has(BLOCK, "a")
    assert sorted(file.name for file in tmp_path.glob(".*writing*")) == [".block0-c.safetensors.writing-1"]


def test_a_lock_file_that_a_killed_process_left_counts_no_more_than_it_says(tmp_path):
    store = DiskStore(tmp_path, 5000, MODEL)
    for text in ("", "nonsense", "1", "99999999"):
        (tmp_path / ".lock").write_text(text)
        store.put(BLOCK, text, arrays(1))
        assert store.has(BLOCK, text)
    assert int((tmp_path / ".lock").read_text()) == sum(f.stat().st_size for f in tmp_path.glob("*.safetensors"))


SHARER = """
import sys
import numpy as np
from pathlib import Path
from metrale_jax.engine.disk import DiskStore, block_kind

BLOCK = block_kind(0)

def content(number, weights):
    return [np.full(2000, number + len(weights), np.float32)]

directory, weights, stop = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
chance = np.random.default_rng(int(sys.argv[4]))
store = DiskStore(directory, 200_000, {"weights": weights})
found = wrong = 0
while not (stop.exists() and found):
    number = int(chance.integers(60))
    arrays = store.get(BLOCK, str(number))
    if arrays is None:
        store.put(BLOCK, str(number), content(number, weights))
    else:
        if not found:
            print("found", flush=True)
        found += 1
        wrong += not np.array_equal(arrays[0], content(number, weights)[0])
print(found, wrong, flush=True)
"""


def test_processes_that_share_a_directory_never_read_what_is_not_theirs(tmp_path):
    shared = tmp_path / "shared"

    def started(weights, seed):
        command = [sys.executable, "-c", SHARER, str(shared), weights, str(tmp_path / "stop"), str(seed)]
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))

    def has_found(process):
        assert process.stdout.readline() == "found\n", process.stderr.read()

    running = []
    try:
        started("abc", 1)
        started("abc", 2)
        for process in running:
            has_found(process)
        started("another", 3)
        has_found(running[2])
        time.sleep(0.5)
        (tmp_path / "stop").touch()
        told = [process.communicate(timeout=60) for process in running]
    finally:
        for process in running:
            process.kill()
            process.communicate()
    found = [[int(number) for number in out.split()[-2:]] for out, _ in told]
    assert all(hits and not wrong for hits, wrong in found), told
    for _, errors in told[:2]:
        assert errors.count("kept prefixes on disk") == 1 == errors.count("is another model's by now"), errors
    assert not told[2][1], told[2][1]
    files = list(shared.glob("block0-*.safetensors"))
    size = sum(file.stat().st_size for file in files)
    # Files that were written over, or deleted by who lost the directory, are counted until it is looked at again.
    assert 0 < size <= int((shared / ".lock").read_text()) <= 200_000


def test_a_disk_that_fills_up_costs_no_request(tmp_path, caplog):
    store = DiskStore(tmp_path / "cache", 1 << 20, MODEL)
    rmtree(tmp_path / "cache")
    with caplog.at_level(logging.WARNING):
        store.put(BLOCK, "a", arrays(1))
        store.put(BLOCK, "b", arrays(1))
    assert caplog.text.count("kept prefixes on disk") == 1 and not store.has(BLOCK, "a")


def test_a_directory_that_cannot_be_used_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"disk cache .*file"):
        DiskStore(tmp_path / "file", 1 << 20, MODEL)


def crowded_out(llm):
    """Runs prompts that share nothing until nothing else is kept."""
    for seed in range(40):
        llm.generate([[3 + (seed * 31 + i * 7) % 100 for i in range(80)]], GREEDY)


@pytest.mark.parametrize("where", ["host", "disk", "both"])
def test_an_evicted_prefix_comes_back(where, tmp_path):
    places = {"host": {"host_cache_mib": 64}, "disk": {"disk_cache": tmp_path}}
    options = places.get(where, places["host"] | places["disk"])
    plain, llm = LLM(GOLDENS / "llama-default", **OPTIONS), LLM(GOLDENS / "llama-default", **OPTIONS | options)
    [first] = llm.generate([SHARED], GREEDY)
    crowded_out(llm)
    [again] = llm.generate([SHARED], GREEDY)
    assert again.usage.cached_tokens == 64 and first.usage.cached_tokens == 0
    assert again.token_ids == first.token_ids == plain.generate([SHARED], GREEDY)[0].token_ids
    assert llm.engine.memory.spill.tier.stats.hits == 1
    [salted] = llm.generate([SHARED], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, cache_salt="b"))
    assert salted.usage.cached_tokens == 0, "what one tenant left is not another's"


def test_a_prefix_outlives_its_process(tmp_path):
    options = OPTIONS | {"disk_cache": tmp_path}
    first = LLM(GOLDENS / "llama-default", **options)
    [before] = first.generate([SHARED], GREEDY)
    first.spill()
    [after] = LLM(GOLDENS / "llama-default", **options).generate([SHARED], GREEDY)
    assert after.usage.cached_tokens == 64 and after.token_ids == before.token_ids
    identity = json.loads((tmp_path / "model.json").read_text())
    assert identity["family"] == "llama"
    [other] = LLM(GOLDENS / "llama-untied-bias", **options).generate([SHARED], GREEDY)
    assert other.usage.cached_tokens == 0


def test_files_of_other_shapes_are_done_without(tmp_path):
    options = OPTIONS | {"disk_cache": tmp_path}
    first = LLM(GOLDENS / "llama-default", **options)
    [before] = first.generate([SHARED], GREEDY)
    first.spill()
    store = DiskStore(tmp_path, 1 << 30, json.loads((tmp_path / "model.json").read_text()))
    for digest in digests_of(("", ()), SHARED, 16):
        store.put(BLOCK, digest, arrays(1))
    [after] = LLM(GOLDENS / "llama-default", **options).generate([SHARED], GREEDY)
    assert after.usage.cached_tokens == 0 and after.token_ids == before.token_ids


def test_a_prefix_of_a_model_with_windows_outlives_its_process(tmp_path):
    options = OPTIONS | {"disk_cache": tmp_path}
    first = LLM(GOLDENS / "gemma2", **options)
    [before] = first.generate([SHARED], GREEDY)
    first.spill()
    [after] = LLM(GOLDENS / "gemma2", **options).generate([SHARED], GREEDY)
    assert after.usage.cached_tokens == 64 and after.token_ids == before.token_ids
