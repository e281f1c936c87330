# SPDX-License-Identifier: Apache-2.0
"""`resolve_model`: from what a user types after `--model` to a path on this machine."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

from metrale_jax.checkpoint.packaged import ALIASES, PackagedModel, Progress, packaged_file
from metrale_jax.core.errors import ModelNotFoundError

# What loading reads: weights, configs, templates and tokenizers of the top folder, in one of the formats a repository
# offers.
_WANTED = ["*.safetensors", "*.json", "*.jinja", "tokenizer*", "*.model", "*.tiktoken", "vocab*", "merges.txt"]
_UNWANTED = ["*/*", "consolidated*.safetensors"]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_ANSWER_SECONDS = 10


def resolve_model(
    name: str,
    cache_dir: Path,
    aliases: Mapping[str, PackagedModel] = ALIASES,
    progress: Progress | None = None,
    wanted: Sequence[str] = _WANTED,
) -> Path:
    """The local path of a model: a `.gguf` or `.safetensors` file, or a directory of safetensors.

    `name` is, in this order of trial, an alias of a packaged model, an existing path (a directory that holds one GGUF
    and no safetensors stands for that file), or a Hub id `org/name`, which is downloaded into the Hub library's own
    cache under that library's own settings, offline mode among them. `cache_dir` takes packaged models that come in
    parts; of a Hub id, the files that match `wanted` are fetched. `ModelNotFoundError` says what was tried.
    """
    if name in aliases:
        return packaged_file(name, aliases[name], cache_dir, progress)
    path = Path(name)
    if name and os.path.isdir(path):  # unlike Path's, these answer no to a name that cannot be a path at all
        return _lone_gguf(path) or path
    if os.path.isfile(path):
        if path.suffix in (".gguf", ".safetensors"):
            return path
        raise ModelNotFoundError(
            f"model={name!r} is a {path.suffix or 'plain'} file. Give a .gguf or .safetensors file or a directory."
        )
    if _HUB_ID.fullmatch(name) and path.suffix not in (".gguf", ".safetensors"):
        return _from_hub(name, wanted)
    raise ModelNotFoundError(
        f"model={name!r} is no alias ({', '.join(sorted(aliases))}), no path here and no Hub id of the form org/name. "
        "Give one of these."
    )


def _lone_gguf(directory: Path) -> Path | None:
    ggufs = sorted(directory.glob("*.gguf"))
    if not ggufs or any(directory.glob("*.safetensors")):
        return None
    if len(ggufs) > 1:
        names = ", ".join(file.name for file in ggufs[:8])
        raise ModelNotFoundError(
            f"model={str(directory)!r} holds {len(ggufs)} GGUF files ({names}). Give the path of one."
        )
    return ggufs[0]


def _from_hub(repo_id: str, wanted: Sequence[str]) -> Path:
    try:
        from huggingface_hub import HfApi, constants, errors, snapshot_download
    except ImportError as error:
        raise ModelNotFoundError(
            f"model={repo_id!r} is no path here, and fetching it from the Hub needs a package that is missing "
            f"({error.name}). "
            "Run: pip install huggingface_hub"
        ) from error
    # The library's base of all failures to connect, whichever HTTP client its version uses.
    unreachable = (errors.HTTPError, errors.OfflineModeIsEnabled, OSError)
    try:
        cached_only = not _answers(HfApi, repo_id, errors, unreachable)
        return Path(
            snapshot_download(
                repo_id,
                etag_timeout=_ANSWER_SECONDS,
                allow_patterns=list(wanted),
                ignore_patterns=_UNWANTED,
                local_files_only=cached_only,
            )
        )
    except errors.GatedRepoError as error:
        raise ModelNotFoundError(
            f"model={repo_id!r} is gated on the Hub. Accept its terms on its page, then run: hf auth login"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelNotFoundError(
            f"model={repo_id!r} is no path here and not on the Hub, or it is private. Check the spelling, or run: hf "
            "auth login"
        ) from error
    except errors.HFValidationError as error:
        raise ModelNotFoundError(f"model={repo_id!r} is no path here and not a valid Hub id: {error}") from error
    except unreachable as error:
        reason = "the Hub library is in offline mode" if constants.HF_HUB_OFFLINE else "the Hub cannot be reached"
        raise ModelNotFoundError(
            f"model={repo_id!r} is no path here, its files are not all in the Hub cache, and {reason}. "
            "Connect and try again, or give the path of a downloaded copy."
        ) from error


def _answers(api: type, repo_id: str, errors: ModuleType, unreachable: tuple[type[Exception], ...]) -> bool:
    """Whether the Hub answers for this repository within seconds; the download alone would wait for minutes.

    A repository that the Hub says is gated or absent is raised as the library raises it, unless it is in the cache:
    then the download finds it there.
    """
    try:
        api().model_info(repo_id, timeout=_ANSWER_SECONDS)
    except (errors.HfHubHTTPError, errors.HFValidationError):
        return True
    except unreachable:
        return False
    return True
