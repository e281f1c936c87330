# SPDX-License-Identifier: Apache-2.0
"""`metrale-jax warm`: fills the directory of compiled programs that `metrale-jax serve` will look into, and ends."""

import argparse
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from metrale_jax.core.errors import ConfigError
from metrale_jax.llm_config import checked_limits
from serving import serve_command
from serving.core.cards import model_card
from serving.settings_sources import Resolved, printed

ABOUT = "compile all that serving a model can need and keep it, so that a start takes seconds"


@dataclass(frozen=True)
class Kept:
    """What a directory holds: `num_files` of `num_bytes`; `num_compiled` programs were made for it or read from it."""

    directory: Path
    num_compiled: int
    num_files: int
    num_bytes: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds those of `metrale-jax serve`: programs follow from the settings, which have to be the same."""
    serve_command.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Compiles, and tells what that came to; returns 0. Raises `MetraleError` for mistakes."""
    resolved = serve_command.resolved_settings(arguments)
    if arguments.print_config:
        print(printed(resolved), end="")
        return 0
    began = time.monotonic()
    kept = warm(resolved)
    print(
        f"{kept.num_compiled} programs in {time.monotonic() - began:.1f} s; {kept.directory} holds "
        f"{kept.num_files} files, {kept.num_bytes / 2**20:.1f} MiB."
    )
    return 0


def warm(resolved: Resolved) -> Kept:
    """What is in the directory of compiled programs once a server with these settings finds all of them there. Raises
    `ConfigError` for settings by which it would look into none."""
    checked_limits(resolved.llm)
    directory = resolved.llm.compile_cache
    if directory is None or not resolved.serve.keep_programs:
        raise ConfigError("keep_programs=False keeps no compiled programs; leave it out, and name a compile_cache.")
    from metrale_jax.llm import LLM

    llm = LLM(resolved.serve.model, progress=sys.stderr.isatty(), **asdict(resolved.llm))
    num_compiled = llm.warm_up()
    model_card(llm, resolved.serve.name)  # has a fingerprint, whose programs a server runs too
    sizes = [path.stat().st_size for path in Path(directory).iterdir() if path.is_file()]
    return Kept(Path(directory), num_compiled, len(sizes), sum(sizes))
