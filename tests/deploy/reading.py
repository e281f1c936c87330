# SPDX-License-Identifier: Apache-2.0
"""What the files of `deploy/` say, as values."""

import json
import re
import shlex
import tomllib
from dataclasses import dataclass
from pathlib import Path

import yaml

from metrale_jax import cli
from serving.settings_sources import HINTS, PREFIX, Resolved, resolve

ROOT = Path(__file__).parent.parent.parent
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
TARGETS = ("cpu", "cuda", "tpu")
USER = 10001


@dataclass(frozen=True)
class Stage:
    """A stage of the Dockerfile: what it stands on, and its instructions with their arguments."""

    base: str
    steps: tuple[tuple[str, str], ...]

    def arguments(self, instruction: str) -> list[str]:
        """Of all such instructions, in order."""
        return [rest for name, rest in self.steps if name == instruction]


def dockerfile() -> dict[str, Stage]:
    """The stages by name."""
    text = re.sub(r"^\s*#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE)
    stages: dict[str, Stage] = {}
    name, base, steps = "", "", []
    for line in filter(None, map(str.strip, text.replace("\\\n", " ").splitlines())):
        instruction, _, rest = line.partition(" ")
        if instruction == "FROM":
            stages[name] = Stage(base, tuple(steps))
            base, name = re.fullmatch(r"(\S+) AS (\S+)", rest).groups()
            steps = []
        else:
            steps.append((instruction, rest.strip()))
    stages[name] = Stage(base, tuple(steps))
    return stages


def image_environment(target: str) -> dict[str, str]:
    """The variables of an image, those of the stages below it included."""
    stages, found = dockerfile(), {}
    while target in stages:
        own = [shlex.split(rest) for rest in stages[target].arguments("ENV")]
        found = dict(pair.split("=", 1) for pairs in own for pair in pairs) | found
        target = stages[target].base
    return found


def documents(path: Path) -> list[dict]:
    """The documents of a YAML file."""
    return list(yaml.safe_load_all(path.read_text()))


def settings(environment: dict[str, str], file: Path | None = None, flags: list[str] | None = None) -> Resolved:
    """What a server with these would be told; an error for whatever is no setting."""
    entries = {} if file is None else tomllib.loads(file.read_text())
    own = {name: value for name, value in environment.items() if name.startswith(PREFIX)}
    if flags is None:
        return resolve({}, own, entries)
    given = vars(cli._parser().parse_args(flags))
    return resolve({name: value for name, value in given.items() if name in HINTS}, own, entries)


def seconds(text: str) -> float:
    """Of a duration as Docker, Prometheus and systemd write it."""
    units = {"ms": 0.001, "s": 1, "m": 60, "min": 60, "h": 3600, "": 1}
    return sum(float(number) * units[unit] for number, unit in re.findall(r"(\d+(?:\.\d+)?)([a-z]*)", text))


def measured_start_s(variant: str) -> float:
    """The slowest start that the last recorded run of `benchmarks.cold_start` saw."""
    latest = sorted((ROOT / "benchmarks" / "results").glob("*-cold-start.json"))[-1]
    return max(start["ready_s"] for start in json.loads(latest.read_text())["starts"][variant])
