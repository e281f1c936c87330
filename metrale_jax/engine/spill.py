# SPDX-License-Identifier: Apache-2.0
"""`Spill`: between the prefix tree and its lower tier. What the pool gives up is read off it, and found again there."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from metrale_jax.engine.device import FAILURES, Device
from metrale_jax.engine.disk import STATE, block_kind
from metrale_jax.engine.lease import first_visible_block
from metrale_jax.engine.leaves import Node
from metrale_jax.engine.saved import SavedState
from metrale_jax.engine.tiers import Tier, digests_of, node_digest


class Spill:
    """Copies between `device`, whose layers keep state in slots or not (`with_state`), and `tier`.

    Blocks are kept group by group: of a group with a sliding window the tree may have a hole where others have a block,
    and a prompt needs no more of it than its window. Tails stay behind: what is found in the tier is whole blocks.
    """

    def __init__(self, tier: Tier, device: Device, block_size: int, windows: tuple[int, ...], with_state: bool):
        self.tier = tier
        self._device, self._block_size, self._windows, self._with_state = device, block_size, windows, with_state

    def give_up_blocks(self, nodes: Sequence[Node]) -> None:
        """Reads the blocks of nodes that are no longer kept, before anything is written to them."""
        digests = [(node, node_digest(node)) for node in nodes if len(node.key) == self._block_size]
        keys, blocks = [], []
        for group in range(len(self._windows)):
            kind = block_kind(group)
            held = [(node.blocks[group], digest) for node, digest in digests if node.blocks[group]]
            held = [(block, digest) for block, digest in held if self.tier.wants(kind, digest)]
            keys += [(kind, digest) for _, digest in held]
            blocks.append([block for block, _ in held])
        counts = [len(ids) for ids in blocks]
        if keys:
            self._spill(
                keys,
                lambda: self._device.read_blocks(blocks),
                lambda content: self._device.split_blocks(content, counts),
            )

    def give_up_state(self, node: Node, unit: int) -> None:
        """Reads the state in `unit`, which is that of `node`, before it is given to another."""
        digest = node_digest(node)
        if len(node.key) == self._block_size and self.tier.wants(STATE, digest):
            self._spill([(STATE, digest)], lambda: self._device.read_slot(unit), self._device.split_slot)

    def _spill(self, keys: Sequence[tuple[str, str]], read: Callable, split: Callable) -> None:
        try:
            owed = read()
        except FAILURES:
            return  # it is lost, as it was without a tier
        self.tier.spill(keys, lambda fetch: split(fetch(owed)))

    def digests(self, namespace: Hashable, tokens: Sequence[int]) -> list[str]:
        """The digest of each whole block of a prompt."""
        return digests_of(namespace, tokens, self._block_size)

    def reach(self, digests: Sequence[str], path: Sequence[Node], floor: int) -> int:
        """How many blocks a prompt could go on after, of which the pool has those of `path`, all that is seen from its
        end, and a state at `floor`."""
        start = stop = len(path)
        whole = [block_kind(group) for group, window in enumerate(self._windows) if not window]
        while stop < len(digests) and all(self.tier.has(kind, digests[stop]) for kind in whole):
            stop += 1
        for count in range(stop, floor, -1):
            found = not self._with_state or self.tier.has(STATE, digests[count - 1])
            if found and all(self._seen(group, digests[:count], path) for group in range(len(self._windows))):
                return count
        return max(floor, start) if not self._with_state else floor

    def _first(self, group: int, count: int) -> int:
        return first_visible_block(count * self._block_size, self._windows[group], self._block_size)

    def _seen(self, group: int, digests: Sequence[str], path: Sequence[Node]) -> bool:
        """Whether the pool and the tier have what a token after all `digests` sees of a group with a window."""
        if not self._windows[group]:
            return True
        places = range(len(digests) - 1, self._first(group, len(digests)) - 1, -1)
        kind = block_kind(group)
        return all(path[i].blocks[group] if i < len(path) else self.tier.has(kind, digests[i]) for i in places)

    def found(self, digests: Sequence[str], start: int, known_len: int, regime: Hashable) -> Any:
        """What a sequence lacks to go on after all of `digests`, of which it has the first `start` blocks: to be put
        into as many blocks more, and its slot. None where it cannot be read after all."""
        groups = range(len(self._windows))
        held = tuple(tuple(range(max(start, self._first(group, len(digests))), len(digests))) for group in groups)
        blocks = [[self.tier.get(block_kind(group), digests[i]) for i in held[group]] for group in groups]
        state = self.tier.get(STATE, digests[-1]) if self._with_state else []
        if state is None or any(one is None for group in blocks for one in group):
            return None
        try:
            parts, slot = self._device.join(blocks, state)
        except ValueError:
            return None  # what was read has not the shapes of this pool
        self.tier.count_hit()
        return SavedState(len(digests) * self._block_size, known_len, regime, held, parts, slot, 0, for_all=True)
