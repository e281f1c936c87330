# SPDX-License-Identifier: Apache-2.0
"""`Statistics`: how many inferences a model has made and how long they took, as Triton's clients ask for it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from serving.grpc.kserve_calls import VERSION
from serving.grpc.stubs import open_inference_pb2


class Statistics:
    """Counts by model, since the server started."""

    def __init__(self):
        self._models: dict[str, open_inference_pb2.ModelStatistics] = {}

    @contextmanager
    def timed(self, model: str, num_texts: int) -> Iterator[None]:
        """Counts what runs inside as one execution over `num_texts` prompts."""
        began_ns, served = time.monotonic_ns(), False
        try:
            yield
            served = True
        finally:
            kept = self._kept(model)
            duration = kept.inference_stats.success if served else kept.inference_stats.fail
            duration.count += 1
            duration.ns += time.monotonic_ns() - began_ns
            if served:
                kept.inference_count += num_texts
                kept.execution_count += 1
                kept.last_inference = time.time_ns() // 1_000_000

    def message(self, model: str) -> open_inference_pb2.ModelStatistics:
        """What was counted."""
        return self._models.get(model, open_inference_pb2.ModelStatistics(name=model, version=VERSION))

    def _kept(self, model: str) -> open_inference_pb2.ModelStatistics:
        if model not in self._models:
            self._models[model] = open_inference_pb2.ModelStatistics(name=model, version=VERSION)
        return self._models[model]
