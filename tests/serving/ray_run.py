# SPDX-License-Identifier: Apache-2.0
"""A batch on a local Ray of two workers that breaks off, goes on, and loses a worker: run by `test_ray_batch`."""

import json
import os
import sys
import time
from pathlib import Path

from serving.ray_batch import Job, answer_dataset
from tests.serving.batch.fake import FakeBackend
from tests.serving.test_ray_batch import ROWS


class Sabotaged(FakeBackend):
    """Leaves a trace of its process; fails after some steps in the first run, and dies once in the second."""

    def __init__(self, directory, run):
        super().__init__(max_in_flight=4, on_step=self._on_step_of_test)
        self._directory, self._run, self._steps = directory, run, 0
        (directory / f"{run}-{os.getpid()}").touch()

    def _on_step_of_test(self):
        self._steps += 1
        time.sleep(0.005)
        if self._run == "first" and self._steps > 12:
            raise MemoryError("out of memory")
        if self._run == "second" and self._steps == 3:
            try:
                (self._directory / "died").touch(exist_ok=False)
            except FileExistsError:
                return
            os._exit(1)


def main():
    directory = Path(sys.argv[1])
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray

    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=80 << 20, log_to_driver=False)
    output = directory / "out.parquet"
    rows = ray.data.from_items(ROWS)

    def run(name):
        job = Job(lambda: Sabotaged(directory, name), "fake")
        return answer_dataset(rows, output, job, num_actors=2, rows_per_part=5)

    try:
        run("first")
    except ray.exceptions.RayError as error:
        assert "out of memory" in str(error)
    parts = list(output.glob("part-*.parquet"))
    counts = run("second")
    workers = len(list(directory.glob("second-*"))) - 1  # the one that died was replaced
    told = {"parts_at_the_break": len(parts), "rows_at_the_break": 5 * len(parts), "workers": workers}
    print(json.dumps({**counts, **told}))
    ray.shutdown()


if __name__ == "__main__":
    main()
