# SPDX-License-Identifier: Apache-2.0
"""A batch as a stage over a Ray Dataset: actors hold a model each, answer rows, and write Parquet parts.

    job = Job(lambda: LLMBackend(LLM("smollm2-135m")), model="smollm2-135m")
    answer_dataset(ray.data.read_json("in.jsonl"), "out.parquet", job, num_actors=2)

Rows are input lines as in `serving.batch`, each with an `id` or `custom_id` of its own. Parts have it as `custom_id`; a
row whose id is there is done: the same call after a break answers the rest. Every node must see the output directory.
Needs the extra `ray`.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from serving.batch.backend import Backend
from serving.batch.files import told
from serving.batch.parquet import part_columns, row_json, write_part
from serving.batch.records import Told
from serving.batch.run import Settings, run_batch
from serving.batch.sidecar import Sidecar
from serving.batch.signals import StopWish
from serving.batch.sink import DirectSink

if TYPE_CHECKING:
    import pyarrow
    import ray.data

DIGEST_BYTES = 16
DIGEST = np.dtype((np.bytes_, DIGEST_BYTES))
COUNTS = ("answered", "refused", "tokens")


@dataclass(frozen=True)
class Job:
    """What an actor needs: how to make its model, the model's name, and sampling parameters where a row has none."""

    make_backend: Callable[[], Backend]
    model: str
    defaults: Mapping[str, Any] = field(default_factory=dict)


def answer_dataset(
    rows: "ray.data.Dataset",
    output: str | Path,
    job: Job,
    num_actors: int = 1,
    rows_per_part: int = 1024,
    **resources: Any,
) -> dict[str, int]:
    """Counts of rows `answered` and `refused` and of `tokens` drawn, once parts in `output` hold every row.

    `resources` are `map_batches`'s, such as `num_gpus`. Raises `BatchError` if another run writes there, or if a batch
    with another model or other parameters was begun there.
    """
    import ray

    output = Path(output)
    with closing(Sidecar.beside(str(output))) as sidecar:
        begun = sidecar.settle({"model": job.model, "sampling parameters": dict(job.defaults)})
        with told("output", output, "name a directory that can be written"):
            output.mkdir(exist_ok=True)
        done = ray.put(done_digests(output))
        counts = rows.map_batches(lambda table: undone(table, ray.get(done)), batch_format="pyarrow").map_batches(
            BatchStage,
            fn_constructor_args=(str(output), job, begun),
            batch_size=rows_per_part,
            batch_format="pyarrow",
            compute=ray.data.ActorPoolStrategy(size=num_actors),
            **resources,
        )
        total = dict.fromkeys(COUNTS, 0)
        for count in counts.iter_rows():
            total = {name: total[name] + int(count[name]) for name in COUNTS}
    return total


class BatchStage:
    """The actor: a model that answers tables of rows and writes each as one part."""

    def __init__(self, output: str, job: Job, begun: int):
        self._output = Path(output)
        self._backend = job.make_backend()
        self._settings = Settings(dict(job.defaults), Told(job.model, begun, self._backend.token_bytes))

    def __call__(self, table: "pyarrow.Table") -> dict[str, list[int]]:
        """The counts of one table of rows. Done again after a break, it writes the same part again."""
        rows = {row_key(row): row for row in table.to_pylist()}
        keys, answers = list(rows), _Answers()
        source = _Rows([row if _has_id(row) else {**row, "id": key} for key, row in rows.items()])
        tally = run_batch(source, DirectSink(answers), self._backend, self._settings, StopWish(), lambda *_: None)
        if keys:
            name = blake2b("\0".join(sorted(keys)).encode(), digest_size=DIGEST_BYTES).hexdigest()
            records = [_keyed(json.loads(text), keys) for text in answers.texts]
            write_part(self._output / f"part-{name}.parquet", records)
        return {"answered": [tally.answered], "refused": [tally.refused], "tokens": [tally.tokens]}


def row_key(row: Mapping[str, Any]) -> str:
    """What a row is known by: its id as text, or a digest of all of it."""
    for name in ("custom_id", "id"):
        if row.get(name) is not None:
            return str(row[name])
    return f"row-{blake2b(row_json(dict(row)), digest_size=DIGEST_BYTES).hexdigest()}"


def done_digests(output: Path) -> np.ndarray:
    """Sorted digests of the keys of all rows that parts in `output` hold, 16 bytes each."""
    pieces = [_digests(row["custom_id"] for row in rows) for rows in part_columns(output, ["custom_id"])]
    return np.sort(np.concatenate([np.empty(0, DIGEST), *pieces]))


def undone(table: "pyarrow.Table", done: np.ndarray) -> "pyarrow.Table":
    """The rows of `table` whose digests are not in `done`."""
    wanted = _digests(row_key(row) for row in table.to_pylist())
    places = np.searchsorted(done, wanted)
    there = np.zeros(len(wanted), bool)
    inside = places < len(done)
    there[inside] = done[places[inside]] == wanted[inside]
    return table.take(np.flatnonzero(~there))


def _digests(keys) -> np.ndarray:
    return np.array([blake2b(key.encode(), digest_size=DIGEST_BYTES).digest() for key in keys], DIGEST)


def _has_id(row: Mapping[str, Any]) -> bool:
    return row.get("custom_id") is not None or row.get("id") is not None


def _keyed(record: dict[str, Any], keys: list[str]) -> dict[str, Any]:
    # A line's number means nothing outside its table.
    key = keys[record.pop("line") - 1]
    named = f"batch_req_{blake2b(key.encode(), digest_size=DIGEST_BYTES).hexdigest()}"
    if record.get("response"):
        record["id"] = record["response"]["request_id"] = named
    return {**record, "custom_id": key}


class _Rows:
    def __init__(self, rows: list[Mapping[str, Any]]):
        self._rows = rows
        self.total, self.identity = len(rows), {}

    def rows(self) -> Iterator[tuple[int, bytes]]:
        return ((number, row_json(dict(row))) for number, row in enumerate(self._rows, start=1))


class _Answers:
    min_rows = 1

    def __init__(self):
        self.texts: list[bytes] = []

    def recover(self) -> Iterator[int]:
        return iter(())

    def append(self, texts: list[bytes]) -> None:
        self.texts.extend(texts)

    def sync(self) -> None:
        pass

    def close(self) -> None:
        pass
