# SPDX-License-Identifier: Apache-2.0
"""`Programs`: which programs an `LLM` compiles, when, and what is shown of it."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from threading import get_ident

from metrale_jax.aot.archive import Archive, purpose_of
from metrale_jax.devices import device_kind
from metrale_jax.engine.buckets import ShapePlan, make_shape_plan
from metrale_jax.engine.warmup import all_programs, compile_programs, first_programs, program_kinds
from metrale_jax.llm_config import LLMConfig, engine_config, path_of
from metrale_jax.process_memory import release_freed_memory
from metrale_jax.progress import Progress, compiling
from metrale_jax.runtime import LoadedModel
from metrale_jax.steps.build import Steps


class Programs:
    """Compiles for engines of `config`, or takes what `config.executables` holds; shown by `progress`.

    `stepping` is the thread that steps the engine, 0 for none.
    """

    def __init__(self, config: LLMConfig, progress: Progress):
        self._config, self._progress = config, progress
        self._archive = Archive(path_of(config.executables)) if config.executables else None
        self.stepping = 0

    def compile_first(self, steps: Steps, shapes) -> None:
        """Returns when a first token can be drawn; what goes on from there may still be compiling."""
        config = engine_config(self._config, steps.model)
        if self._archive is not None:
            devices = steps.home.devices
            self._archive.check(purpose_of(steps, shapes, config, device_kind(devices[0])))
            steps.ready = self._archive.loader(devices)
        plan = make_shape_plan(config, len(steps.model.config.eos_token_ids))
        *first, _ = compile_programs(steps, shapes, config, first_programs(plan))
        self._awaited(first, len(first))

    def compile_all(self, loaded: LoadedModel, shapes: ShapePlan) -> int:
        """How many programs there are, once all are compiled that a load can need but for beams, swaps and saved
        answers."""
        kinds = program_kinds(loaded.model.layout)
        wanted = all_programs(shapes, loaded.config.vocab_size, *kinds)
        config = engine_config(self._config, loaded.steps.model)
        self._awaited(compile_programs(loaded.steps, loaded.params, config, wanted), len(wanted))
        return loaded.steps.num_compiles

    @contextmanager
    def compiling(self, name: str) -> Iterator[None]:
        """The context in which the program `name` is compiled."""
        # Shown where a step waits for it. What is compiled beside the steps would draw over an answer that streams.
        with compiling(self._progress, name) if get_ident() == self.stepping else nullcontext():
            yield
        release_freed_memory()  # a compiler leaves some hundred MiB behind

    def _awaited(self, promised: Sequence[Future], total: int) -> None:
        for count, program in enumerate(promised, start=1):
            program.result()
            self._progress("compile", count, total)
