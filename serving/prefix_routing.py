# SPDX-License-Identifier: Apache-2.0
"""Which of several replicas a prompt goes to: `links_of` names its beginnings, `PrefixTable` knows who has them.

The policy is that of SGLang's router and of Ray's `PrefixCacheAffinityRouter`, with a bound in the place of a switch:
among the replicas that are not too loaded the one that holds most of the prompt, else the least loaded.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from metrale_jax.core.errors import ConfigError

DIGEST_BYTES = 16
# Bytes of prompt that a link adds, and links that are made of one prompt: what follows decides nothing.
LINK_BYTES = 256
MAX_LINKS = 512


@dataclass(frozen=True)
class Link:
    """A beginning of a prompt: a digest of all of it and of the tenant's salt, and the bytes that it has beyond the
    one before."""

    digest: bytes
    size: int


def links_of(pieces: Iterable[bytes], salt: str, secret: bytes) -> tuple[Link, ...]:
    """The beginnings of a prompt that is made of `pieces`, shortest first: one ends with each piece, and every
    `LINK_BYTES` within one.

    Equal beginnings have equal digests where salt and `secret` (16 to 64 bytes) are equal, and only there. Without the
    secret nobody can try out what a digest is of.
    """
    links: list[Link] = []
    before = blake2b(salt.encode("utf-8", "surrogatepass"), key=secret, digest_size=DIGEST_BYTES).digest()
    for piece in pieces:
        for start in range(0, len(piece), LINK_BYTES):
            if len(links) == MAX_LINKS:
                return tuple(links)
            part = piece[start : start + LINK_BYTES]
            before = blake2b(before + part, key=secret, digest_size=DIGEST_BYTES).digest()
            links.append(Link(before, len(part)))
    return tuple(links)


@dataclass(frozen=True)
class RoutingSettings:
    """A replica with more than `max_imbalance` calls more than the least loaded is passed over, whatever it holds.
    What is held counts if it is `min_share` of the prompt or more. Of each replica the table remembers the
    `held_bytes` of prompts that came last: what its KV blocks have room for."""

    max_imbalance: int = 8
    min_share: float = 0.1
    held_bytes: int = 1 << 20

    def __post_init__(self):
        if isinstance(self.max_imbalance, bool) or not isinstance(self.max_imbalance, int) or self.max_imbalance < 0:
            raise ConfigError(f"max_imbalance={self.max_imbalance!r} is not an integer from 0; give a count of calls.")
        if not 0 <= self.min_share <= 1:
            raise ConfigError(f"min_share={self.min_share!r} is not between 0 and 1; give a share of a prompt.")
        if self.held_bytes < LINK_BYTES:
            raise ConfigError(f"held_bytes={self.held_bytes!r} is below {LINK_BYTES}; give the bytes of some prompts.")


class PrefixTable:
    """Who holds which beginnings, and how many calls each replica has. Replicas are known by any hashable name.

    It is as large as the replicas' prompts, never more, and holds digests only. Not for several threads.
    """

    def __init__(self, settings: RoutingSettings = RoutingSettings()):
        self.settings = settings
        self._held: dict[Hashable, _Held] = {}

    @property
    def replicas(self) -> tuple[Hashable, ...]:
        """Those there are."""
        return tuple(self._held)

    def set_replicas(self, names: Iterable[Hashable]) -> None:
        """These are there now: what others held is forgotten, new ones hold nothing."""
        self._held = {name: self._held.get(name) or _Held() for name in names}

    def drop(self, name: Hashable) -> None:
        """A replica has gone, if it was there."""
        self._held.pop(name, None)

    def load(self, name: Hashable) -> int:
        """Calls that began on a replica and have not ended."""
        return self._held[name].num_calls if name in self._held else 0

    def ranked(
        self,
        links: Sequence[Link],
        among: Iterable[Hashable] | None = None,
        loads: Mapping[Hashable, int] | None = None,
    ) -> tuple[Hashable, ...]:
        """The replicas (those of `among`) from the best to the last. `loads` are calls that others know of: the larger
        figure of each replica holds."""
        names = [name for name in (self._held if among is None else among) if name in self._held]
        if not names:
            return ()
        load = {name: max(self.load(name), (loads or {}).get(name, 0)) for name in names}
        most = min(load.values()) + self.settings.max_imbalance
        least_match = self.settings.min_share * sum(link.size for link in links)
        match = {name: self._held[name].match(links) for name in names}

        def place(name: Hashable) -> tuple:
            counts = load[name] <= most and match[name] and match[name] >= least_match
            return (-match[name] if counts else 0, load[name], self._held[name].num_bytes)

        return tuple(sorted(names, key=place))  # equal ones in the order of the replicas

    def began(self, name: Hashable, links: Sequence[Link]) -> None:
        """A call went to a replica, which will hold its prompt. One that has gone meanwhile is left out."""
        if name in self._held:
            self._held[name].num_calls += 1
            self._held[name].take(links, self.settings.held_bytes)

    def ended(self, name: Hashable) -> None:
        """A call that began on a replica is over."""
        if name in self._held:
            self._held[name].num_calls -= 1


class _Held:
    """What one replica holds: digests with their sizes, the one that was used longest ago first."""

    def __init__(self):
        self.num_calls = self.num_bytes = 0
        self._sizes: OrderedDict[bytes, int] = OrderedDict()

    def match(self, links: Sequence[Link]) -> int:
        """Bytes of the longest beginning that is held."""
        found = 0
        for link in links:
            if link.digest not in self._sizes:
                break
            found += link.size
        return found

    def take(self, links: Sequence[Link], most_bytes: int) -> None:
        # The ends first, so that of a prompt the end is forgotten before its beginning.
        for link in reversed(links):
            if link.digest not in self._sizes:
                self._sizes[link.digest] = link.size
                self.num_bytes += link.size
            self._sizes.move_to_end(link.digest)
        while self.num_bytes > most_bytes:
            self.num_bytes -= self._sizes.popitem(last=False)[1]
