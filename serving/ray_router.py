# SPDX-License-Identifier: Apache-2.0
"""`PrefixRouter`: Ray Serve asks it which replica a call goes to, and `PrefixTable` knows. Needs the extra `ray`."""

from collections import deque
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from serving.prefix_routing import Link, PrefixTable, RoutingSettings

# The keyword under which a call's links come along; what it is called with means nothing to the replica.
LINKS = "links"
# Calls that were over before they were told of.
MAX_EARLY = 1024


class PrefixRouter(RequestRouter):
    """One for each handle, on the handle's own event loop: what two handles know is two tables."""

    def initialize_state(self, **settings: Any) -> None:
        """Nothing; an empty table, of `RoutingSettings` by name."""
        self._table = PrefixTable(RoutingSettings(**settings))
        # Of calls under way, by Serve's id and the replica, since one that was refused is sent again elsewhere.
        self._calls: set[tuple[str, ReplicaID]] = set()
        self._early: deque[tuple[str, ReplicaID]] = deque(maxlen=MAX_EARLY)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is not None:
            # Where nobody takes the call, Serve is to wait a little before it asks again.
            pending_request.routing_context.should_backoff = True
        there = {replica.replica_id: replica for replica in candidate_replicas}
        known = {name: self.replica_queue_len_cache.get(name) for name in there}
        loads = {name: load for name, load in known.items() if load is not None}
        return [[there[name]] for name in self._table.ranked(_links(pending_request), there, loads)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Nothing; the replica now has the prompt of this call."""
        call = pending_request.metadata.internal_request_id, replica_id
        self._table.began(replica_id, _links(pending_request))
        if call in self._early:
            self._early.remove(call)
            self._table.ended(replica_id)
        else:
            self._calls.add(call)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Nothing; the call weighs on its replica no more."""
        call = internal_request_id, replica_id
        if call in self._calls:
            self._calls.remove(call)
            self._table.ended(replica_id)
        else:
            self._early.append(call)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Nothing; the table knows these replicas and no others."""
        self._table.set_replicas(replica.replica_id for replica in replicas)
        super().update_replicas(replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Nothing; what the replica had is gone."""
        self._table.drop(replica_id)
        super().on_replica_actor_died(replica_id)


def _links(pending_request: PendingRequest | None) -> tuple[Link, ...]:
    return () if pending_request is None else pending_request.kwargs.get(LINKS, ())
