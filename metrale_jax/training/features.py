# SPDX-License-Identifier: Apache-2.0
"""What the target computes for each token of texts that are known: rows on disk, made once, read as often as wanted.

A directory of arrays `[tokens, D]`: `hidden.rows`, final hidden rows in float16, and `layer-<n>.rows`, the residual
stream after n layers in bfloat16, whose outliers float16 may not hold; `tokens.json` says how far they are made.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np

from metrale_jax.core.errors import ConfigError
from metrale_jax.core.sequence import SequenceState
from metrale_jax.models.decoder import DecoderParams
from metrale_jax.steps.build import Steps
from pallas_kernels.shapes import ceil_div

HIDDEN, LAYER, DONE = "hidden.rows", "layer-{}.rows", "tokens.json"
CHUNK_TOKENS = 512
SEQUENCES = 8


def rows_file(directory: Path, capture: int | None) -> tuple[Path, np.dtype]:
    """The file of one kind of rows, final hidden ones for None, and the dtype that they are kept in."""
    if capture is None:
        return directory / HIDDEN, np.dtype(np.float16)
    return directory / LAYER.format(capture), np.dtype(ml_dtypes.bfloat16)


def read_rows(directory: Path, captures: Sequence[int | None], num_tokens: int, width: int) -> list[np.ndarray]:
    """Rows of each of `captures` as views of their files."""
    found = []
    for capture in captures:
        path, dtype = rows_file(directory, capture)
        found.append(np.memmap(path, np.uint16, "r", shape=(num_tokens, width)).view(dtype))
    return found


def record_rows(
    steps: Steps,
    params: DecoderParams,
    texts: Sequence[Sequence[int]],
    captures: tuple[int, ...],
    directory: Path,
    show: Callable[[int, int], None],
) -> None:
    """Nothing; `directory` holds the rows of the tokens of `texts`, end to end. A run that was killed goes on after
    the last batch of texts that it finished, and so does one with more texts after the same. Raises `ConfigError` for
    rows that are not finite numbers."""
    total, width = sum(map(len, texts)), steps.model.config.hidden_dim
    paths = [rows_file(directory, capture) for capture in (None, *captures)]
    made = _made(directory, texts)
    done = min(made.get(path.name, 0) for path, _ in paths)
    files = []
    for path, dtype in paths:
        mode = "r+" if made.get(path.name, 0) else "w+"
        files.append((np.memmap(path, np.uint16, mode, shape=(total, width)), dtype))
    start = 0
    for first in range(0, len(texts), SEQUENCES):
        batch = texts[first : first + SEQUENCES]
        stop = start + sum(map(len, batch))
        if stop > done:
            at = start
            for rows in batch_rows(steps, params, batch, captures):
                for (file, dtype), array in zip(files, rows, strict=True):
                    file[at : at + len(array)] = _stored(array, dtype, steps.model.config.family)
                at += len(rows[0])
            for file, _ in files:
                file.flush()
            made |= {path.name: max(stop, made.get(path.name, 0)) for path, _ in paths}
            _mark(directory, texts, made)
        start = stop
        show(start, total)


def batch_rows(
    steps: Steps, params: DecoderParams, texts: Sequence[Sequence[int]], captures: tuple[int, ...]
) -> Iterator[list[np.ndarray]]:
    """Final and captured rows `[t, D]` of consecutive stretches of the tokens of `texts`, which run side by side."""
    layout, longest = steps.model.layout, max(map(len, texts))
    width = ceil_div(ceil_div(longest, layout.block_size), 8) * 8
    pool = steps.make_pool((SEQUENCES * width + 1,) * len(layout.groups), num_slots=SEQUENCES + 1)
    state = _states(texts, width, len(layout.groups))
    tokens = np.concatenate([np.asarray(text, np.int32) for text in texts])
    ends = np.cumsum([len(text) for text in texts] + [0] * (SEQUENCES - len(texts)))
    for start in range(0, len(tokens), CHUNK_TOKENS):
        stop = min(start + CHUNK_TOKENS, len(tokens))
        chunk = np.zeros(CHUNK_TOKENS, np.int32)
        chunk[: stop - start] = tokens[start:stop]
        taken = np.clip(ends, start, stop)
        lengths = np.diff(taken, prepend=start).astype(np.int32)
        pool, state, rows = steps.run("record", params, pool, state, chunk, lengths, captures=captures)
        yield [np.asarray(array)[: stop - start] for array in rows]


def _states(texts: Sequence[Sequence[int]], width: int, num_groups: int) -> SequenceState:
    zeros = np.zeros(SEQUENCES, np.int32)
    lengths = zeros.copy()
    lengths[: len(texts)] = [len(text) for text in texts]
    table = np.arange(1, SEQUENCES * width + 1, dtype=np.int32).reshape(SEQUENCES, width)
    return SequenceState(
        seq_len=zeros,
        prompt_len=lengths,
        last_token=zeros,
        block_tables=(table,) * num_groups,
        recurrent_slot=np.arange(1, SEQUENCES + 1, dtype=np.int32),
        adapter_slot=zeros,
        sampling=(),
    )


def _stored(rows: np.ndarray, dtype: np.dtype, family: str) -> np.ndarray:
    with np.errstate(over="ignore"):
        kept = rows.astype(np.float32).astype(dtype)
    if not np.isfinite(kept.astype(np.float32)).all():
        raise ConfigError(
            f"a row of this {family} model is not of finite numbers in {dtype.name}, which rows are kept in; run the "
            "model in float32."
        )
    return kept.view(np.uint16)


def digest(texts: Sequence[Sequence[int]]) -> str:
    """What tells these texts from others."""
    found = hashlib.sha256()
    for text in texts:
        found.update(np.asarray([len(text), *text], np.int64).tobytes())
    return found.hexdigest()[:32]


def _made(directory: Path, texts: Sequence[Sequence[int]]) -> dict[str, int]:
    """How many tokens of each file are made; none where they are not of the first of these texts, or not there."""
    try:
        found = json.loads((directory / DONE).read_text())
    except FileNotFoundError:
        return {}
    ends = np.cumsum([0, *map(len, texts)])
    count = int(np.searchsorted(ends, max(found["files"].values(), default=0)))
    return found["files"] if found["texts"] == digest(texts[:count]) else {}


def _mark(directory: Path, texts: Sequence[Sequence[int]], files: dict[str, int]) -> None:
    ends = np.cumsum([0, *map(len, texts)])
    count = int(np.searchsorted(ends, max(files.values())))
    temporary = directory / f"{DONE}.writing"
    temporary.write_text(json.dumps({"texts": digest(texts[:count]), "files": files}))
    os.replace(temporary, directory / DONE)
