# SPDX-License-Identifier: Apache-2.0
"""`metrale-jax batch`: flags and body of the command."""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metrale_jax.flags import add_flags, chosen
from metrale_jax.sampling.params import SamplingParams
from serving.batch.backend import Backend, LLMBackend
from serving.batch.files import BatchError
from serving.batch.formats import Source, format_of
from serving.batch.progress import BatchProgress
from serving.batch.records import Told
from serving.batch.run import Settings, Tally, run_batch
from serving.batch.sidecar import Sidecar
from serving.batch.signals import StopWish
from serving.batch.sink import DirectSink, HeldSink

if TYPE_CHECKING:
    from metrale_jax.llm import LLM

ABOUT = "answer a file of requests; killed and started again, it goes on where it was"
# Options of the model on which answers depend.
DECISIVE = ("model", "dtype", "max_context_tokens")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's own flags and those of `SamplingParams`, which hold for lines that do not say."""
    window = Settings.window
    parser.add_argument("--input", required=True, help="requests: JSON lines, .parquet, or - for standard input")
    parser.add_argument(
        "--output", required=True, help="answers: JSON lines, a .parquet directory, or - for standard output"
    )
    parser.add_argument("--resume", action=argparse.BooleanOptionalAction, help="go on where it was (default)")
    parser.add_argument("--order", choices=("any", "input"), default="any", help="order of the answers; default any")
    parser.add_argument("--window", type=int, default=window, help=f"lines sorted at a time; default {window}")
    add_flags(parser, SamplingParams)


def run(arguments: argparse.Namespace, load: Callable[[], "LLM"]) -> int:
    """Answers the input; returns the exit status: 0, or 128 and the signal that stopped it. Raises `MetraleError`.

    `load` makes the model, once all else is found in order; a batch that is complete already does without.
    """
    return run_with(arguments, lambda: LLMBackend(load()))


def run_with(arguments: argparse.Namespace, load: Callable[[], Backend]) -> int:
    """As `run`, over any backend."""
    if arguments.window < 1:
        raise BatchError(f"window={arguments.window} is below 1; give a count of lines.")
    defaults = chosen(arguments, SamplingParams)
    SamplingParams(**defaults)
    with ExitStack() as stack:
        _check_paths(arguments)
        source = format_of(arguments.input).open_source(arguments.input)
        sidecar = _sidecar(arguments, stack)
        begun = sidecar.settle(_identity(arguments, source, defaults))
        sink = _sink(arguments, sidecar)
        return _answer(arguments, load, source, sink, defaults, begun)


def _check_paths(arguments: argparse.Namespace) -> None:
    given, wanted = arguments.input, arguments.output
    if os.path.exists(given) and os.path.exists(wanted) and os.path.samefile(given, wanted):
        raise BatchError(f"output {wanted!r} is the input; name another file.")
    format_of(wanted).check_target(wanted)
    if arguments.resume and format_of(wanted).is_stream(wanted):
        raise BatchError(
            f"output {wanted!r} is a stream, which cannot be taken up again; name a file, or drop --resume."
        )


def _sidecar(arguments: argparse.Namespace, stack: ExitStack) -> Sidecar:
    output, form = arguments.output, format_of(arguments.output)
    if form.is_stream(output):
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="metrale-jax-batch-"))
        return stack.enter_context(closing(Sidecar(Path(directory))))
    sidecar = stack.enter_context(closing(Sidecar.beside(output)))
    if arguments.resume is False:
        form.clear(output)
        sidecar.forget()
    elif not sidecar.recorded and not form.is_empty(output):
        sidecar.discard()
        raise BatchError(
            f"output {output!r} is not empty and nothing beside it says of which batch it is; name another, or give "
            "--no-resume to overwrite it."
        )
    return sidecar


def _identity(arguments: argparse.Namespace, source: Source, defaults: dict[str, Any]) -> dict[str, Any]:
    given = vars(arguments)
    return {
        "input": source.identity,
        **{name: given.get(name) for name in DECISIVE},
        "order": arguments.order,
        "sampling parameters": defaults,
    }


def _sink(arguments: argparse.Namespace, sidecar: Sidecar) -> DirectSink | HeldSink:
    target = format_of(arguments.output).open_target(arguments.output)
    ordered = arguments.order == "input"
    if ordered or target.min_rows > 1:
        return HeldSink(target, sidecar.journal, ordered)
    return DirectSink(target)


def _answer(
    arguments: argparse.Namespace,
    load: Callable[[], Backend],
    source: Source,
    sink: DirectSink | HeldSink,
    defaults: dict[str, Any],
    begun: int,
) -> int:
    before, began, stop, tally = sink.done.count, time.monotonic(), StopWish(), Tally()
    try:
        if before != source.total:
            backend = load()
            settings = Settings(defaults, Told(arguments.model, begun, backend.token_bytes), arguments.window)
            progress = BatchProgress(source.total, before, arguments.quiet)
            with stop.heard(), closing(progress):
                tally = _run(source, sink, backend, settings, stop, progress)
    finally:
        sink.close(tally.complete or before == source.total)
    _say(arguments, stop, tally, sink.done.count, source.total, time.monotonic() - began)
    return 128 + stop.signal if stop else 0


def _run(source, sink, backend, settings, stop, progress) -> Tally:
    try:
        return run_batch(source, sink, backend, settings, stop, progress)
    except KeyboardInterrupt:
        return Tally()


def _say(arguments, stop: StopWish, tally: Tally, done: int, total: int | None, seconds: float) -> None:
    if stop:
        place = f"{done} of {total}" if total is not None else str(done)
        hint = "the same command goes on from there" if arguments.output != "-" else "a stream cannot be taken up again"
        print(f"metrale-jax: {stop.signal.name} stopped it after {place} lines; {hint}.", file=sys.stderr)
    elif not arguments.quiet:
        speed = tally.tokens / seconds if seconds > 0 else 0.0
        print(
            f"[{done} lines done; this run answered {tally.answered}, refused {tally.refused}; {tally.tokens} tokens "
            f"in {seconds:.1f} s, {speed:.1f} tokens/s]",
            file=sys.stderr,
        )
