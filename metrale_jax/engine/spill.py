# SPDX-License-Identifier: Apache-2.0
"""`Spill`: between the prefix tree and its lower tier. What the pool gives up is read off it, and found again there."""

from collections.abc import Hashable, Sequence
from typing import Any

from metrale_jax.engine.device import FAILURES, Device
from metrale_jax.engine.disk import BLOCK, STATE
from metrale_jax.engine.leaves import Node
from metrale_jax.engine.saved import SavedState
from metrale_jax.engine.tiers import Tier, digests_of, node_digest


class Spill:
    """Copies between `device`, whose layers keep state in slots or not (`with_state`), and `tier`.

    Tails stay behind: what is found in the tier is whole blocks. For models without sliding windows: of others the tree
    keeps blocks with holes, which are of no use alone.
    """

    def __init__(self, tier: Tier, device: Device, block_size: int, with_state: bool):
        self.tier = tier
        self._device, self._block_size, self._with_state = device, block_size, with_state

    def give_up_blocks(self, nodes: Sequence[Node]) -> None:
        """Reads the blocks of nodes that are no longer kept, before anything is written to them."""
        wanted = [(node_digest(node), node.blocks) for node in nodes if len(node.key) == self._block_size]
        wanted = [(digest, blocks) for digest, blocks in wanted if self.tier.wants(BLOCK, digest)]
        if wanted:
            digests, blocks = zip(*wanted, strict=True)
            self._spill(BLOCK, digests, lambda: self._device.read_blocks(list(zip(*blocks, strict=True))))

    def give_up_state(self, node: Node, unit: int) -> None:
        """Reads the state in `unit`, which is that of `node`, before it is given to another."""
        digest = node_digest(node)
        if len(node.key) == self._block_size and self.tier.wants(STATE, digest):
            self._spill(STATE, [digest], lambda: self._device.read_slot(unit))

    def _spill(self, kind: str, digests: Sequence[str], read) -> None:
        try:
            owed = read()
        except FAILURES:
            return  # it is lost, as it was without a tier
        split = self._device.split_blocks if kind == BLOCK else self._device.split_slot
        self.tier.spill(kind, digests, lambda fetch: split(fetch(owed), len(digests)))

    def digests(self, namespace: Hashable, tokens: Sequence[int]) -> list[str]:
        """The digest of each whole block of a prompt."""
        return digests_of(namespace, tokens, self._block_size)

    def reach(self, digests: Sequence[str], start: int, floor: int) -> int:
        """How many blocks a prompt could go on after, of which the pool has `start`, and a state at `floor`."""
        return self.tier.reach(digests, start, floor, self._with_state)

    def found(self, digests: Sequence[str], start: int, known_len: int, regime: Hashable, groups: int) -> Any:
        """What a sequence lacks to go on after all of `digests`, of which it has the first `start` blocks: to be put
        into as many blocks more, and its slot. None where it cannot be read after all."""
        blocks = self.tier.blocks(digests[start:])
        state = self.tier.state(digests[-1]) if self._with_state else []
        if blocks is None or state is None:
            return None
        try:
            parts, slot = self._device.join(blocks, state)
        except ValueError:
            return None  # what was read has not the shapes of this pool
        self.tier.count_hit()
        held = (tuple(range(start, len(digests))),) * groups
        return SavedState(len(digests) * self._block_size, known_len, regime, held, parts, slot, 0, for_all=True)
