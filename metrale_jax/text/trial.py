# SPDX-License-Identifier: Apache-2.0
"""`tried`: whether a grammar is compiled within bounds, found out in a process that can be stopped. And `refusals`: why
others are not."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_PROGRAM = Path(__file__).with_name("grammar_trial.py")
# The program stops itself by its CPU time long before, unless the machine gives it none.
_WAIT_S = 30
TOO_COMPLEX = "it takes more than 1 s or 1 GiB to compile"


class TrialError(Exception):
    """A text that is not compiled; the message says why."""


@dataclass(frozen=True)
class Named:
    """The tokens that a text may name: any id below `vocab_size`, and `special` ones by their text."""

    vocab_size: int = 0
    special: Mapping[str, int] = field(default_factory=dict)


NOTHING = Named()


def tried(text: str, limits: Mapping[str, Any], gbnf: bool = False, named: Named = NOTHING) -> str:
    """`text`, or the Lark that it is in GBNF. Raises `TrialError` where that is not to be had within bounds; a text
    that is merely wrong is let through, since whoever compiles it says so."""
    vocabulary = {"vocab_size": named.vocab_size, "special": dict(named.special)}
    given = json.dumps({"text": text, "limits": dict(limits), "gbnf": gbnf, **vocabulary})
    command = [sys.executable, "-I", str(_PROGRAM)]
    try:
        done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=_WAIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise TrialError(TOO_COMPLEX) from error
    if not done.stdout:
        last = done.stderr.strip().rpartition("\n")[2]
        raise TrialError(f"not GBNF: {last}" if gbnf and done.returncode >= 0 and last else TOO_COMPLEX)
    found = json.loads(done.stdout)
    if "error" in found:
        raise TrialError(found["error"])
    return found["grammar"]


def refusals(texts: Sequence[str], limits: Mapping[str, Any], named: Named = NOTHING) -> list[str]:
    """Why each of `texts` is not compiled, by the library or within bounds; "" for one that is."""
    vocabulary = {"vocab_size": named.vocab_size, "special": dict(named.special)}
    command, found = [sys.executable, "-I", str(_PROGRAM)], []
    while len(found) < len(texts):
        given = json.dumps({"texts": texts[len(found) :], "limits": dict(limits), **vocabulary})
        try:
            told = subprocess.run(
                command, input=given, capture_output=True, text=True, timeout=_WAIT_S, check=False
            ).stdout
        except subprocess.TimeoutExpired as error:
            told = (error.stdout or b"").decode() if isinstance(error.stdout, bytes | None) else error.stdout
        # The last line is nobody's, or broken off.
        found += [json.loads(line) for line in told.split("\n")[:-1]][: len(texts) - len(found)]
        if len(found) < len(texts):
            found.append(TOO_COMPLEX)
    return found
