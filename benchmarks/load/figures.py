# SPDX-License-Identifier: Apache-2.0
"""From the arrivals of tokens to percentiles, rates and tables. The same for a server's clients and the bare engine."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

# How requests end: with their answer, or past their time.
OK, LATE = "OK", "DEADLINE_EXCEEDED"


@dataclass
class Trace:
    """One request: when it was sent, when how many tokens came, when it ended and how. Seconds of the machine's
    monotonic clock, which all processes share."""

    started_s: float
    arrivals: list[tuple[float, int]]
    ended_s: float = 0.0
    status: str = OK

    @property
    def num_tokens(self) -> int:
        """All that came."""
        return sum(count for _, count in self.arrivals)

    def gaps_s(self) -> Iterable[float]:
        """The time before each token but the first; tokens that came with another took none."""
        last_s = None
        for at_s, count in self.arrivals:
            if last_s is not None and count:
                yield at_s - last_s
            yield from (0.0,) * (count - 1)
            last_s = at_s if count else last_s


def percentile(values: Sequence[float], share: float) -> float | None:
    """The value that `share` of all do not exceed; None of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def figures(traces: Sequence[Trace], deadline_s: float) -> dict:
    """What a run is told by. Goodput counts the tokens of requests that were answered within `deadline_s`."""
    wall_s = max(trace.ended_s for trace in traces) - min(trace.started_s for trace in traces)
    firsts = [trace.arrivals[0][0] - trace.started_s for trace in traces if trace.arrivals]
    gaps = [gap for trace in traces for gap in trace.gaps_s()]
    met = [trace for trace in traces if trace.status == OK and trace.ended_s - trace.started_s <= deadline_s]
    return {
        "first_ms_p50": _ms(percentile(firsts, 0.5)),
        "first_ms_p99": _ms(percentile(firsts, 0.99)),
        "between_ms_p50": _ms(percentile(gaps, 0.5)),
        "between_ms_p99": _ms(percentile(gaps, 0.99)),
        "tokens_per_s": round(sum(trace.num_tokens for trace in traces) / wall_s, 2),
        "goodput_tokens_per_s": round(sum(trace.num_tokens for trace in met) / wall_s, 2),
        "requests": len(traces),
        "statuses": dict(Counter(trace.status for trace in traces)),
        "wall_s": round(wall_s, 3),
    }


def medians(runs: Sequence[dict]) -> dict:
    """The median of each figure over the rounds, and all statuses together."""
    found = {}
    for name, value in runs[0].items():
        values = [run[name] for run in runs if run[name] is not None]
        if isinstance(value, dict):
            found[name] = dict(sum((Counter(one) for one in values), Counter()))
        else:
            found[name] = round(median(values), 3) if values else None
    return found


def table(head: Sequence[str], rows: Iterable[Sequence]) -> str:
    """A Markdown table; what is not there is a dash."""
    lines = ["| " + " | ".join(head) + " |", "|" + "--:|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join("–" if x is None else str(x) for x in row) + " |" for row in rows)])


def slope_per_min(samples: Sequence[tuple[float, float]]) -> float:
    """By how much a value grows in a minute: least squares over pairs of seconds and value."""
    if len(samples) < 2:
        return 0.0
    mean_s = sum(at for at, _ in samples) / len(samples)
    mean = sum(value for _, value in samples) / len(samples)
    spread = sum((at - mean_s) ** 2 for at, _ in samples)
    return 60 * sum((at - mean_s) * (value - mean) for at, value in samples) / spread if spread else 0.0


def spread(values: Sequence[float]) -> dict:
    """How evenly values are shared: order statistics and Jain's index, 1 where all are equal."""
    squares = sum(value * value for value in values)
    return {
        "min": round(min(values), 2),
        "p10": round(percentile(values, 0.1), 2),
        "median": round(median(values), 2),
        "p90": round(percentile(values, 0.9), 2),
        "max": round(max(values), 2),
        "jain": round(sum(values) ** 2 / (len(values) * squares), 4) if squares else 0.0,
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
