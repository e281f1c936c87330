# SPDX-License-Identifier: Apache-2.0
"""`tried`: whether a grammar is compiled within bounds, found out in a process that can be stopped."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_PROGRAM = Path(__file__).with_name("grammar_trial.py")
# The program stops itself by its CPU time long before, unless the machine gives it none.
_WAIT_S = 30
TOO_COMPLEX = "it takes more than 1 s or 1 GiB to compile"


class TrialError(Exception):
    """A text that is not compiled; the message says why."""


def tried(text: str, limits: Mapping[str, Any], gbnf: bool = False) -> str:
    """`text`, or the Lark that it is in GBNF. Raises `TrialError` where that is not to be had within bounds; a text
    that is merely wrong is let through, since whoever compiles it says so."""
    given = json.dumps({"text": text, "limits": dict(limits), "gbnf": gbnf})
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
