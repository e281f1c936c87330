# SPDX-License-Identifier: Apache-2.0
"""Where answers with drafts part from those without, and whether rounding explains it: none may in float32, and in
bfloat16 each that does must be a tie.

    python -m benchmarks.draft_ties --dtype float32 --proposers ngram self mtp=DIR --json OUT
    python -m benchmarks.draft_ties --dtype bfloat16 --proposers ngram self mtp=DIR --json OUT

A verifying step runs several rows of a sequence at once, and a matrix product of another shape adds in another order.
In bfloat16 that moves values by a rounding step here and there, so two tokens whose scores are that near change places.
The same happens without drafts where a request has company: the rows of "none" count it. A first difference is taken
for a tie where, in the run without drafts, the two tokens' scores are within `TIE_STEPS` spacings of bfloat16 numbers
of the logits' size. Each run of the script adds one entry to OUT.
"""

import argparse
import json
import math
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from benchmarks.machine import machine_facts
from benchmarks.speculation import CHAT, CODE, COPY, GREEDY, ROUND
from metrale_jax import LLM, GenerationResult, SamplingParams
from metrale_jax.sampling.sample import gumbel

TIE_STEPS = 2.0
BATCH = 8
TOP = 20
# No filters: a token that one run filters and the other just keeps would hide how near the two scores were.
SORTS = {"greedy": GREEDY, "sampled": SamplingParams(temperature=1.0, seed=1)}
LIMITS = {"max_sequences": BATCH, "max_context_tokens": 512, "prefix_cache": False}


@dataclass(frozen=True)
class Parting:
    """Where two answers to one prompt differ first: the answer's `index`-th token, `taken` without drafts and `other`
    with them (-1 past the end)."""

    index: int
    taken: int
    other: int


def parting(expected: Sequence[int], found: Sequence[int]) -> Parting | None:
    """Where the answers part; None if they are equal."""
    for index in range(max(len(expected), len(found))):
        taken, other = (one[index] if index < len(one) else -1 for one in (expected, found))
        if taken != other:
            return Parting(index, taken, other)
    return None


def spacing(size: float) -> float:
    """The distance between neighbouring bfloat16 numbers of this size: they have 8 significant bits."""
    return 2.0 ** (math.floor(math.log2(size)) - 7) if size else 0.0


def score_margin(logits: np.ndarray, apart: Parting, params: SamplingParams, position: int) -> float:
    """How much higher `taken` scores than `other` at the sequence's `position`, in units of logits: noise included
    where the request draws, as `sampling.sample.draw` adds it."""
    ids = [apart.taken, apart.other]
    scores = logits[ids].astype(np.float64)
    if not params.greedy:
        noise = gumbel(jnp.asarray([params.seed], jnp.uint32), jnp.asarray([position], jnp.int32), len(logits))
        scores = scores + params.temperature * np.asarray(noise, np.float64)[0, ids]
    return float(scores[0] - scores[1])


def answers(llm: LLM, prompts: list[list[int]], params: SamplingParams, batch: int) -> list[GenerationResult]:
    """Results in the order of `prompts`, of which `batch` are answered at a time."""
    groups = [prompts[start : start + batch] for start in range(0, len(prompts), batch)]
    return [result for group in groups for result in llm.generate(group, params)]


def shifts(expected: GenerationResult, found: GenerationResult, count: int) -> Iterator[float]:
    """How far the log-probabilities of the same tokens lie apart in the first `count` places, where both have the same
    sequence before them; those of the likeliest ten of a place that both list."""
    for ours, theirs in zip(found.logprobs[:count], expected.logprobs[:count], strict=True):
        known = dict(theirs.top)
        yield from (abs(value - known[token]) for token, value in ours.top[: TOP // 2] if token in known)


def explained(llm: LLM, prompt: list[int], expected: GenerationResult, apart: Parting, params: SamplingParams) -> dict:
    """What a first difference rests on: the margin by the undrafted run's log-probabilities where it lists both tokens,
    by the logits of the sequence run as a prompt where not."""
    before = [*prompt, *expected.token_ids[: apart.index]]
    logits = llm.logits(before)[-1]
    step = spacing(float(np.abs(logits).max()))
    found = {"index": apart.index, "taken": apart.taken, "other": apart.other, "spacing": step, "tie": False}
    if min(apart.taken, apart.other) < 0:
        return found  # an answer that ends where the other goes on has no second token, and no excuse
    listed = dict(expected.logprobs[apart.index].top)
    seen = apart.taken in listed and apart.other in listed
    if seen:
        logits = logits.copy()
        logits[[apart.taken, apart.other]] = listed[apart.taken], listed[apart.other]
    margin = score_margin(logits, apart, params, len(before))
    return found | {"steps": round(margin / step, 3), "by_logprobs": seen, "tie": abs(margin) <= TIE_STEPS * step}


def compared(
    llm: LLM,
    prompts: list[list[int]],
    params: SamplingParams,
    expected: list[GenerationResult],
    found: list[GenerationResult],
) -> dict:
    """A row of the report: answers of an LLM without drafts beside those of another run."""
    apart, moved = [], []
    for prompt, theirs, ours in zip(prompts, expected, found, strict=True):
        where = parting(theirs.token_ids, ours.token_ids)
        moved += shifts(theirs, ours, where.index if where else len(theirs.token_ids))
        if where is not None:
            apart.append(explained(llm, prompt, theirs, where, params))
    return {
        "answers": len(prompts),
        "tokens": sum(len(one.token_ids) for one in expected),
        "answers_that_differ": len(apart),
        "first_tokens_that_differ": sum(one["index"] == 0 for one in apart),
        "unexplained": sum(not one["tie"] for one in apart),
        "widest_margin_in_steps": max((abs(one["steps"]) for one in apart if "steps" in one), default=None),
        "logprob_shift": {name: float(f"{value:.3g}") for name, value in _spread(moved).items()},
        "differences": apart,
    }


def _spread(values: list[float]) -> dict[str, float]:
    return dict(zip(("median", "p99", "max"), np.quantile(values or [0.0], [0.5, 0.99, 1.0]).tolist(), strict=True))


def prompts_of(llm: LLM, count: int) -> list[list[int]]:
    """`count` prompts of each kind: chat, code, text to be copied, and lists that go round."""
    talks = [text for texts in (CHAT, CODE, COPY) for text in texts[:count]]
    chats = [llm.chat_tokens([{"role": "user", "content": text}]) for text in talks]
    return chats + [llm.tokenizer.encode(text) for text in ROUND[:count]]


def run(arguments: argparse.Namespace) -> dict:
    """The entry of one dtype; prints a Markdown row for each line of it."""
    options = LIMITS | {"dtype": arguments.dtype, "compile_cache": arguments.compile_cache}
    plain = LLM(arguments.model, **options)
    prompts = prompts_of(plain, arguments.prompts)
    sorts = {
        name: replace(one, max_tokens=arguments.tokens, ignore_eos=True, logprobs=TOP) for name, one in SORTS.items()
    }
    expected = {
        (name, batch): answers(plain, prompts, params, batch) for name, params in sorts.items() for batch in (1, BATCH)
    }
    rows = []

    def add(proposer: str, name: str, batch: int, found: list[GenerationResult], than: int, **more) -> None:
        row = compared(plain, prompts, sorts[name], expected[name, than], found)
        rows.append({"proposer": proposer, "sort": name, "batch": batch, "against_batch": than, **more, **row})
        print(
            f"| {proposer} | {name} | {batch} | {row['answers_that_differ']}/{row['answers']} | "
            f"{row['first_tokens_that_differ']} | {row['unexplained']} | {row['widest_margin_in_steps']} |",
            flush=True,
        )

    print("| proposer | answers | batch | differ | in the first token | unexplained | widest margin, steps |")
    print("|---|---|--:|--:|--:|--:|--:|")
    for name in sorts:
        add("none", name, BATCH, expected[name, BATCH], 1)
    for named in arguments.proposers:
        proposer, _, drafter = named.partition("=")
        drafting = LLM(arguments.model, **options, proposer=proposer, drafter=drafter or None, draft_mode="always")
        for name, params in sorts.items():
            for batch in (1, BATCH):
                before = drafting.stats().drafts
                found = answers(drafting, prompts, params, batch)
                after = drafting.stats().drafts
                counts = {"proposed": after.proposed - before.proposed, "accepted": after.accepted - before.accepted}
                add(proposer, name, batch, found, batch, **counts)
        del drafting
    return {"dtype": arguments.dtype, "tokens_of_an_answer": arguments.tokens, "rows": rows}


def main() -> None:
    """Prints a table, and adds an entry to the JSON file where asked. Ends with 1 where a difference is unexplained, or
    where float32 has any."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--proposers", nargs="+", default=["ngram", "self"], metavar="NAME[=DRAFTER]")
    parser.add_argument("--prompts", type=int, default=4, help="of each of four kinds (default: 4)")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--compile-cache", help="a directory that keeps compiled programs for the next run")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    entry = run(arguments)
    if arguments.json:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        report = {
            "date": time.strftime("%Y-%m-%d"),
            "model": arguments.model,
            "commit": commit,
            "versions": {name: version(name) for name in ("jax", "jaxlib")},
            "machine": machine_facts(),
            "tie_steps": TIE_STEPS,
            "runs": [],
        }
        if arguments.json.exists():
            report["runs"] = json.loads(arguments.json.read_text())["runs"]
        report["runs"].append(entry)
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    wrong = "answers_that_differ" if arguments.dtype == "float32" else "unexplained"
    raise SystemExit(any(row[wrong] for row in entry["rows"]))


if __name__ == "__main__":
    main()
