# SPDX-License-Identifier: Apache-2.0
"""`metrale-jax`: generate, chat and inspect on the command line. A `MetraleError` is one line on stderr and exit 2."""

import argparse
import importlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

from metrale_jax.core.errors import MetraleError, RequestError
from metrale_jax.flags import add_flags, chosen

# Known without importing JAX, so that `--help` and mistakes answer at once.
EPILOG = "MODEL is an alias (smollm2-135m, gemma3-270m), a Hugging Face directory, a .gguf file or a hub id."

# A terminal wants the likeliest answer, and the whole of it.
ANSWER_DEFAULTS = {"temperature": 0.0, "max_tokens": 256}


class ServingCommand(NamedTuple):
    """A command that lives above this module, in one with `ABOUT`, `add_arguments(parser)` and `run(arguments, load)`.

    `load()` gives the model as an `LLM`. One that `loads_itself` brings all its flags and has `run(arguments)`.
    """

    module: str
    loads_itself: bool = False


SERVING_COMMANDS = {
    "batch": ServingCommand("serving.batch.command"),
    "serve": ServingCommand("serving.serve_command", loads_itself=True),
    "warm": ServingCommand("serving.warm_command", loads_itself=True),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status: 0, 2 for a user's mistake, 130 for an interrupt."""
    arguments = _parser().parse_args(argv)
    try:
        return arguments.command(arguments)
    except MetraleError as error:
        print(f"metrale-jax: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 0


def _parser() -> argparse.ArgumentParser:
    from metrale_jax.convert import add_convert
    from metrale_jax.llm_config import LLMConfig
    from metrale_jax.plan_command import add_plan
    from metrale_jax.sampling.params import SamplingParams
    from metrale_jax.training.command import add_train_drafter

    parser = argparse.ArgumentParser(prog="metrale-jax", description=__doc__.split(":")[0], epilog=EPILOG)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    about = {
        "generate": ("continue or answer a prompt, streaming it", partial(_with_stack, _generate)),
        "chat": ("converse; the conversation is kept; an empty line or Ctrl-D ends it", partial(_with_stack, _chat)),
        "inspect": ("what a checkpoint is and what it needs in memory", _inspect),
    }
    for name, (text, command) in about.items():
        sub = commands.add_parser(name, help=text, description=text, epilog=EPILOG)
        sub.set_defaults(command=command)
        sub.add_argument("--model", default="smollm2-135m", help="default smollm2-135m")
        add_flags(sub, LLMConfig)
        if name == "inspect":
            continue
        _add_running(sub)
        add_flags(sub, SamplingParams, **ANSWER_DEFAULTS)
        sub.add_argument("--system", default=None, help="a system message for the chat template")
        if name == "generate":
            sub.add_argument("prompt", nargs="?", help="the prompt; - or nothing reads standard input")
            sub.add_argument("--raw", action="store_true", help="continue the text as it is, without a chat template")
    for name, serving in SERVING_COMMANDS.items():
        _add_serving(commands, name, serving)
    add_convert(commands, EPILOG)
    add_plan(commands, EPILOG)
    add_train_drafter(commands, EPILOG)
    return parser


def _add_serving(commands, name: str, serving: ServingCommand) -> None:
    from metrale_jax.llm_config import LLMConfig

    module = importlib.import_module(serving.module)
    sub = commands.add_parser(name, help=module.ABOUT, description=module.ABOUT, epilog=EPILOG)
    if serving.loads_itself:
        sub.set_defaults(command=module.run)
        module.add_arguments(sub)
        return
    sub.set_defaults(command=partial(_with_stack, partial(_serve, module)))
    sub.add_argument("--model", default="smollm2-135m", help="default smollm2-135m")
    _add_running(sub)
    module.add_arguments(sub)
    add_flags(sub, LLMConfig)


def _add_running(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--no-compile-cache", action="store_true", help="keep no compiled programs on disk")
    sub.add_argument("--quiet", action="store_true", help="no progress and no speed")
    sub.add_argument("--profile", metavar="DIR", help="record a JAX profiler trace of the answers in DIR")


def _with_stack(command: Callable, arguments: argparse.Namespace) -> int:
    with ExitStack() as stack:
        return command(arguments, stack)


def _serve(module, arguments: argparse.Namespace, stack: ExitStack) -> int:
    return module.run(arguments, lambda: _opened(arguments, stack))


def _opened(arguments: argparse.Namespace, stack: ExitStack):
    """The model; if a profile is asked for, it is recorded from now until `stack` is closed."""
    from metrale_jax.runtime import check_writable

    if arguments.profile is None:
        return _loaded(arguments)
    check_writable("profile directory", Path(arguments.profile))
    llm = _loaded(arguments)
    stack.enter_context(llm.profile(arguments.profile))
    return llm


def _loaded(arguments: argparse.Namespace):
    from metrale_jax.llm import LLM
    from metrale_jax.llm_config import LLMConfig
    from metrale_jax.runtime import default_cache_dir

    options = chosen(arguments, LLMConfig)
    if "compile_cache" not in options and not arguments.no_compile_cache:
        options["compile_cache"] = default_cache_dir() / "programs"
    return LLM(arguments.model, options.pop("dtype", None), progress=not arguments.quiet, **options)


def _sampling(arguments: argparse.Namespace):
    from metrale_jax.sampling.params import SamplingParams

    return SamplingParams(**{**ANSWER_DEFAULTS, **chosen(arguments, SamplingParams)})


def _generate(arguments: argparse.Namespace, stack: ExitStack) -> int:
    params = _sampling(arguments)
    prompt = arguments.prompt if arguments.prompt not in (None, "-") else sys.stdin.read()
    if not prompt:
        raise RequestError("prompt of 0 characters is empty; give some text.")
    llm = _opened(arguments, stack)
    if not arguments.raw and llm.tokenizer.has_chat_template:
        prompt = llm.chat_tokens([*_system(arguments), {"role": "user", "content": prompt}])
    if params.n == 1 and not params.beam_width:
        _show(llm.stream(prompt, params), arguments.quiet)
        return 0
    choices = llm.generate([prompt], params)[0].choices
    for index, choice in enumerate(choices):
        print(f"[{index}] {choice.text}")
    for choice in choices:
        if choice.error is not None:
            raise choice.error
    return 0


def _chat(arguments: argparse.Namespace, stack: ExitStack) -> int:
    params, llm = _sampling(arguments), _opened(arguments, stack)
    messages = _system(arguments)
    while True:
        print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline().strip()
        if not line:
            return 0
        messages.append({"role": "user", "content": line})
        result = _show(llm.stream(llm.chat_tokens(messages), params), arguments.quiet)
        messages.append({"role": "assistant", "content": result.text})


def _system(arguments: argparse.Namespace) -> list[dict[str, str]]:
    return [{"role": "system", "content": arguments.system}] if arguments.system else []


def _show(pieces: Iterator, quiet: bool):
    """Prints a stream and its speed; returns its result."""
    began = time.perf_counter()
    for piece in pieces:
        print(piece, end="", flush=True)
    print()
    result = piece.result
    if result.error is not None:
        raise result.error
    if not quiet:
        tokens, metrics = result.usage.generated_tokens, result.metrics
        print(
            f"[{result.usage.prompt_tokens} prompt tokens, first token after {metrics.first_token_s:.2f} s; "
            f"{tokens} tokens in {time.perf_counter() - began:.2f} s, "
            f"{metrics.decode_tokens_per_s(tokens):.1f} tokens/s; "
            f"{result.finish_reason}]",
            file=sys.stderr,
        )
    return result


def _inspect(arguments: argparse.Namespace) -> int:
    from metrale_jax.checkpoint.hub import resolve_model
    from metrale_jax.inspection import describe_checkpoint
    from metrale_jax.llm_config import LLMConfig
    from metrale_jax.runtime import chosen_block_size, default_cache_dir

    options = LLMConfig(**chosen(arguments, LLMConfig))
    cache_dir = Path(options.cache_dir) if options.cache_dir else default_cache_dir()
    for name, value in describe_checkpoint(
        resolve_model(arguments.model, cache_dir), options.dtype, chosen_block_size(options.block_size, "cpu")
    ):
        print(f"{name:<22} {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
