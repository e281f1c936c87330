# SPDX-License-Identifier: Apache-2.0
"""From the samples of a comparison to medians, and to the tables of figures and ratios in Markdown."""

from collections.abc import Iterable, Sequence
from statistics import median

OURS = "metrale"
NOT_INSTALLED = "not installed"


def summarise(lines: Iterable[dict], peers: Sequence[str]) -> dict[str, dict]:
    """Of each peer that ran: its versions, its checked tokens, and by figure the median, extremes and sample count."""
    found: dict[str, dict] = {}
    for line in lines:
        peer = found.setdefault(line["peer"], {"versions": line["detail"]["versions"], "tokens": [], "figures": {}})
        if line["figure"] == "tokens":
            peer["tokens"] = line["detail"]["token_ids"]
            continue
        figure = peer["figures"].setdefault(line["figure"], {"unit": line["unit"], "samples": []})
        figure["samples"] += line["detail"]["samples"]
    for peer in found.values():
        for figure in peer["figures"].values():
            samples = sorted(figure["samples"])
            figure |= {"median": median(samples), "low": samples[0], "high": samples[-1]}
    return {name: found[name] for name in peers if name in found}


def markdown(record: dict) -> str:
    """The comparison as Markdown: where it ran, figures, ratios, and what did not run."""
    peers = record["peers"]
    figures = {name: figure["unit"] for peer in peers.values() for name, figure in peer["figures"].items()}
    rows = [_figures_row(name, unit, peers) for name, unit in figures.items()]
    parts = [_heading(record), _table(["", *peers], rows)]
    others = [name for name in peers if name != OURS]
    if OURS in peers and others:
        parts.append("Ratios, ours / theirs (rates: above 1 is faster here; seconds and MiB: below 1 is less here):")
        parts.append(_table(["", *others], [_ratios_row(name, peers, others) for name in figures]))
    parts.append(_tokens(peers))
    parts += [f"- {name}: {reason.splitlines()[-1]}" for name, reason in record["failures"].items()]
    parts.append(_versions(peers))
    return "\n\n".join(part for part in parts if part) + "\n"


def _heading(record: dict) -> str:
    before, after = record["machine"], record["machine_after"]
    changed = " with uncommitted changes" if record["uncommitted_changes"] else ""
    return (
        f"# {record['model']}, {record['date']}\n\n"
        f"{before['cpu']}, {before['cores']} cores, {before['memory_gib']} GiB; "
        f"DRAM {before['dram_gb_per_s']} GB/s before and {after['dram_gb_per_s']} after, float32 "
        f"{before['float32_gflop_per_s']} and {after['float32_gflop_per_s']} GFLOP/s, load "
        f"{before['load_average']:.1f} and {after['load_average']:.1f}. Commit {record['commit'][:12]}{changed}.\n\n"
        f"Medians; samples and extremes are in the JSON file. Decode is N sequences of 64 + 64 tokens, greedy, "
        "counted past the first token; starts are from the process's start to the first token of a 32-token prompt, "
        "cold with no compiled programs and warm with those of the run before. Offline is a list of requests of many "
        "lengths, answer tokens over the time of all; prefix is the time to a first token behind a prefix of 1,000 "
        "tokens, never seen and seen before."
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|---|" + "--:|" * (len(head) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def _figures_row(name: str, unit: str, peers: dict) -> list[str]:
    return [f"{name}, {unit}", *(_number(peer["figures"].get(name)) for peer in peers.values())]


def _ratios_row(name: str, peers: dict, others: Sequence[str]) -> list[str]:
    ours = peers[OURS]["figures"].get(name)
    row = [name]
    for other in others:
        theirs = peers[other]["figures"].get(name)
        row.append(f"{ours['median'] / theirs['median']:.2f}" if ours and theirs else "–")
    return row


def _number(figure: dict | None) -> str:
    if figure is None:
        return "–"
    value = figure["median"]
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _tokens(peers: dict) -> str:
    """How many leading greedy tokens of a fixed prompt each peer shares with ours, or with the first that ran."""
    if not peers:
        return ""
    base = OURS if OURS in peers else next(iter(peers))
    wanted, shared = peers[base]["tokens"], []
    for name, peer in peers.items():
        if name != base:
            pairs = zip(wanted, peer["tokens"], strict=False)
            same = next((index for index, (one, other) in enumerate(pairs) if one != other), len(wanted))
            shared.append(f"{name} {same}")
    if not shared:
        return ""
    return f"Of {len(wanted)} greedy tokens of a fixed prompt the same as {base}'s: {', '.join(shared)}."


def _versions(peers: dict) -> str:
    listed = (f"{name}: " + ", ".join(f"{k} {v}" for k, v in peer["versions"].items()) for name, peer in peers.items())
    return "Versions: " + "; ".join(listed) + "."
