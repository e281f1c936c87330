# SPDX-License-Identifier: Apache-2.0
"""`metrale-jax serve`: flags and body of the command. Where the environment is looked at."""

import argparse
import os
import sys
from importlib.util import find_spec

from metrale_jax.core.errors import ConfigError
from metrale_jax.flags import add_flags, chosen
from metrale_jax.llm_config import LLMConfig
from serving.config import ServeConfig
from serving.settings_sources import FILE_VARIABLE, Resolved, printed, read_file, resolve

ABOUT = "serve a model over gRPC and HTTP"
# What the extra `serve` brings.
PACKAGES = tuple(
    "grpc grpc_health grpc_reflection grpc_status google.protobuf prometheus_client h11 starlette uvicorn".split()
)
# How long the event loop and the engine thread may keep the interpreter from each other.
SWITCH_S = 0.001


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the model as an argument, the command's own flags, and those of `ServeConfig` and `LLMConfig`."""
    parser.add_argument("model", nargs="?", metavar="MODEL", default=argparse.SUPPRESS, help="as --model")
    parser.add_argument("--config", metavar="FILE", help=f"settings as TOML; {FILE_VARIABLE} does as well")
    parser.add_argument("--print-config", action="store_true", help="print all settings and where each came from")
    add_flags(parser, ServeConfig)
    add_flags(parser, LLMConfig)


def run(arguments: argparse.Namespace) -> int:
    """Serves until it is told to stop; returns the exit status: 0 after a drain, 70 where the engine died or hangs, 128
    and the signal where a second one came. Raises `MetraleError` for mistakes."""
    resolved = resolved_settings(arguments)
    if arguments.print_config:
        print(printed(resolved), end="")
        return 0
    missing = [package for package in PACKAGES if not _is_there(package)]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} is not installed and serving needs it; pip install 'metrale-jax[serve]'."
        )
    # What gRPC's core prints of others' failed handshakes would stand between the lines of the log.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from serving.server import serve

    sys.setswitchinterval(SWITCH_S)
    exporter = os.environ.get("OTEL_TRACES_EXPORTER") or "otlp"
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL") or "http/protobuf"
    ending = serve(resolved, exporter, protocol)
    if not ending.clean:
        # A thread that hangs in a step or in a load would keep the interpreter from ending.
        sys.stdout.flush()
        os._exit(ending.status)
    return ending.status


def resolved_settings(arguments: argparse.Namespace) -> Resolved:
    """The settings of flags, environment and file, and the command line's own directory for compiled programs where
    none is named. Raises `ConfigError` for mistakes in them."""
    from metrale_jax.runtime import default_cache_dir

    environment = dict(os.environ)
    path = arguments.config or environment.get(FILE_VARIABLE)
    return resolve(
        chosen(arguments, ServeConfig) | chosen(arguments, LLMConfig),
        environment,
        read_file(path) if path else {},
        {"compile_cache": default_cache_dir() / "programs"},
    )


def _is_there(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # of google.protobuf where there is no google
        return False
