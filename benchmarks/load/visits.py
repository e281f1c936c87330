# SPDX-License-Identifier: Apache-2.0
"""`Visit`: one stream of a soak, whatever the front: what it does by chance of a seed, and what came of it."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.load.fronts.api import AbstractClients

# Nobody waits longer for anything that is not meant to be slow.
PATIENCE_S = 300
HURRY_S = (0.002, 1.5)
DAWDLE_S = (0.01, 0.2)
MAX_PIECES_BEFORE_LEAVING = 12
MAX_KEPT_FAULTS = 20
# A server that is gone is not asked a thousand times a second.
FAULT_PAUSE_S = 1.0


class WrongAnswer(Exception):
    """Tokens that are not the known ones, or a status that was not provoked."""

    code = "wrong"


@dataclass
class Tally:
    """What came of a stream: `outcomes` counts (behaviour, outcome); `finished` requests gave their whole answers, of
    `tokens` together; those of them that nothing on this side slowed took `unhindered_s` for `unhindered_tokens`.
    `faults` are in words, `num_faults` counts them all."""

    finished: int = 0
    tokens: int = 0
    unhindered_tokens: int = 0
    unhindered_s: float = 0.0
    num_faults: int = 0
    longest_s: float = 0.0
    outcomes: Counter = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


class Visit:
    """One stream against a server whose answers to `known` requests (prompt, params, token_ids, text) are known."""

    def __init__(self, known: Sequence[dict], seed: str):
        self._known = known
        self.draw = random.Random(seed)
        self.tally = Tally()

    async def run(self, clients: "AbstractClients", until_s: float) -> None:
        """One behaviour after the other until the clock says so; each is checked."""
        behaviours = clients.behaviours
        names, weights = list(behaviours), [weight for weight, _ in behaviours.values()]
        while time.monotonic() < until_s:
            [name] = self.draw.choices(names, weights)
            started_s = time.monotonic()
            try:
                outcome = await behaviours[name][1](self)
            except (WrongAnswer, *clients.errors) as error:
                outcome = f"fault {error.code}"
                self.tally.num_faults += 1
                if len(self.tally.faults) < MAX_KEPT_FAULTS:
                    self.tally.faults.append(f"{name}: {type(error).__name__} {error}")
                await asyncio.sleep(FAULT_PAUSE_S)
            self.tally.outcomes[f"{name} {outcome}"] += 1
            self.tally.longest_s = max(self.tally.longest_s, time.monotonic() - started_s)

    def any(self) -> dict:
        """A request that is known."""
        return self.draw.choice(self._known)

    def few(self) -> int:
        """After how many pieces somebody leaves."""
        return self.draw.randint(0, MAX_PIECES_BEFORE_LEAVING)

    def dawdling_s(self) -> float:
        """How long a slow reader takes for a piece."""
        return self.draw.uniform(*DAWDLE_S)

    def hurry_s(self) -> float:
        """A time that is mostly too short."""
        return self.draw.uniform(*HURRY_S)

    def check_begin(self, known: dict, ids: Sequence[int]) -> None:
        """Raises `WrongAnswer` where the known answer does not begin so."""
        if list(ids) != known["token_ids"][: len(ids)]:
            raise WrongAnswer(f"{list(ids)} does not begin the known answer {known['token_ids']}")

    def finish(self, known: dict, ids: Sequence[int], text: str) -> None:
        """Counts a whole answer. Raises `WrongAnswer` for one that is not the known one."""
        if list(ids) != known["token_ids"]:
            raise WrongAnswer(f"{list(ids)} is not the known answer {known['token_ids']}")
        if text != known["text"]:
            raise WrongAnswer(f"{text!r} is not the known text {known['text']!r}")
        self.tally.finished += 1
        self.tally.tokens += len(ids)

    def unhindered(self, known: dict, started_s: float) -> None:
        """Notes that nothing but the server took time since then."""
        self.tally.unhindered_tokens += len(known["token_ids"])
        self.tally.unhindered_s += time.monotonic() - started_s
