# SPDX-License-Identifier: Apache-2.0
"""What drafting is worth: tokens a second with each proposer against none in the same run, and how many drafts stand.

    python -m benchmarks.speculation --model smollm2-135m --proposers ngram self eagle3=DIR --batches 1 8 --json OUT

Engines with and without drafts answer the same requests by turns; figures are medians of the rounds. Answers are
compared token by token: in float32 none may differ.
"""

import argparse
import json
import platform
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path

from metrale_jax import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0)
CHAT = [
    "What should I consider before adopting an older dog?",
    "Explain why the sky turns red at sunset.",
    "Give me three ideas for a rainy Sunday with children.",
    "How does a refrigerator keep food cold?",
    "Write a short note thanking a neighbour for watering my plants.",
    "What is the difference between a virus and a bacterium?",
    "Describe a walk through an autumn forest.",
    "Which habits help people to fall asleep faster?",
]
CODE = [
    "Write a Python function that counts the vowels of a string.",
    "Write a Python class for a bank account with deposit and withdraw methods.",
    "Write a SQL query that lists the ten customers with the most orders.",
    "Write a JavaScript function that reverses an array in place.",
    "Write a Python script that reads a CSV file and prints the sum of a column.",
    "Write a C function that computes the factorial of n.",
    "Write HTML for a form with a name, an e-mail and a submit button.",
    "Write a Python function that merges two sorted lists.",
]
PASSAGE = (
    "The harbour of Kilronan lies on the sheltered side of the island. Ferries arrive four times a day in summer and "
    "twice in winter. The pier was rebuilt in 1998 after storms had broken its outer wall. Fishing boats tie up along "
    "the inner side, and a small crane lifts their boxes to the road. Beside the pier stands a shop that sells rope, "
    "paint and postcards. The shop opens at seven and closes when the last ferry has left. "
)
COPY = [
    f"Repeat the following text word for word, {how}:\n\n{PASSAGE}"
    for how in (
        "and nothing else",
        "without any comment",
        "exactly as it stands",
        "then stop",
        "in full",
        "from start to end",
        "once",
        "with the same punctuation",
    )
]


# What a small model copies faithfully: a text that was copied once before its eyes.
TEXTS = [
    PASSAGE.strip(),
    "The mill at Hartley Bridge was built in 1784 for a family of weavers. Its wheel turned four looms by day and a "
    "grain stone by night. When the river froze the weavers carried their yarn to Selby on a sledge. The last loom "
    "was sold in 1911, and the roof fell in nine winters later. Today swallows nest where the ledgers were kept.",
    "To clean the filter, first unplug the pump and close valve B. Turn the grey ring to the left until it clicks, "
    "then lift the lid. Rinse the two sponges in a bucket of pond water, never under the tap. Put the coarse sponge "
    "in first, the fine one on top, and close the lid. Open valve B before you plug the pump in again.",
    "Members may borrow six books for three weeks. A book that nobody has reserved can be renewed twice at the desk, "
    "by telephone or online. Fines are ten pence a day, and no more than four pounds a book. Lost cards cost two "
    "pounds. The reading room on the second floor is open until nine on Tuesdays and Thursdays.",
    "Dear Ms Okafor, thank you for the samples that arrived on 14 May. We compared the blue and the green glaze at "
    "1,040 and at 1,080 degrees. The blue one runs at the higher temperature, while the green one keeps its edge. "
    "Please send forty kilograms of the green glaze before the end of June, and an invoice in two copies.",
    "Route 27 leaves Station Road at 6:05 and then every twenty minutes until 22:45. It stops at the hospital, at "
    "Mill Lane and at both gates of the university. On Sundays the first bus is at 8:05. Tickets cost 2.40 and are "
    "valid for ninety minutes, also on the tram. Dogs travel free, bicycles only after nine.",
    "The committee met on 3 March with eleven members present. Mr Lindqvist reported that the roof of the boathouse "
    "leaks in two places. Three offers were opened, and the one of Harbour Carpenters for 7,950 was accepted with "
    "nine votes to two. Work begins after Easter. The next meeting will be held on 7 April in the old school.",
    "In a dry pan roast two spoons of cumin and one of coriander seed until they smell of nuts. Grind them with a "
    "pinch of salt. Fry three sliced onions in butter over a low flame for forty minutes, add the spices and a glass "
    "of stock, and stir in 200 grams of brown lentils. Cover the pot and let it stand on the warm stove overnight.",
]
COPIES = [f"Text:\n{text}\n\nCopy:\n{text}\n\nCopy:\n" for text in TEXTS]

WORDS = "one two three four five six seven eight nine ten red blue green black white north south east west".split()
ROUND = [f"{' '.join(WORDS[start : start + 11])} " * 4 for start in range(8)]


# How often each prompt is asked where several are at once.
REPEATS = 3


@dataclass(frozen=True)
class Kind:
    """Requests of one sort: prompts for a chat, or `raw` ones to be gone on with, and how they are answered."""

    name: str
    prompts: list[str]
    params: SamplingParams
    raw: bool = False

    def tokens(self, llm: LLM) -> list[list[int]]:
        """The prompts' token ids."""
        if self.raw:
            return [llm.tokenizer.encode(text) for text in self.prompts]
        return [llm.chat_tokens([{"role": "user", "content": text}]) for text in self.prompts]


KINDS = (
    Kind("chat", CHAT, GREEDY),
    Kind("code", CODE, GREEDY),
    Kind("copy", COPY, GREEDY),
    Kind("copies", COPIES, GREEDY, raw=True),
    Kind("round", ROUND, GREEDY, raw=True),
    Kind("sampled", CHAT, SamplingParams(temperature=1.0, top_p=0.95, seed=1)),
)


def answered(llm: LLM, prompts: list[list[int]], params: SamplingParams, batch: int) -> tuple[float, list[list[int]]]:
    """Seconds that all answers took together, and their tokens. `batch` are asked for at once, and as one ends the
    next: a drafter that speeds some rows up must not be charged for the end of a batch, when few are left."""
    waiting, running, found = list(enumerate(prompts))[::-1], {}, {}
    start = time.perf_counter()
    while waiting or running:
        while waiting and len(running) < batch:
            number, prompt = waiting.pop()
            running[number] = llm.submit(prompt, params)
        llm.step()
        for number in [number for number, answer in running.items() if answer.finished]:
            found[number] = running.pop(number).result().token_ids
    return time.perf_counter() - start, [list(found[number]) for number in range(len(prompts))]


def measured(plain: LLM, drafting: LLM, kind: Kind, batch: int, tokens: int, rounds: int) -> dict:
    """A row of the report: prompts of a kind, `batch` at a time."""
    params = replace(kind.params, max_tokens=tokens, ignore_eos=False)
    prompts = kind.tokens(plain)
    # One at a time each prompt is a measurement of its own; several are one together.
    groups = [[prompt] for prompt in prompts[:4]] if batch == 1 else [prompts * REPEATS]
    for llm in (drafting, plain):
        answered(llm, groups[0], params, batch)  # what is done once, as the first run of a program
    before = drafting.stats().drafts
    ratios, speeds, wrong, total = [], [], 0, 0
    for number, group in enumerate(groups * rounds):
        # Whoever goes second finds a warmer machine, so they take turns.
        if number % 2:
            drafted_s, found = answered(drafting, group, params, batch)
            alone_s, expected = answered(plain, group, params, batch)
        else:
            alone_s, expected = answered(plain, group, params, batch)
            drafted_s, found = answered(drafting, group, params, batch)
        count = sum(map(len, expected))
        wrong += sum(a != b for a, b in zip(found, expected, strict=True))
        total += len(group)
        ratios.append(alone_s / drafted_s)
        speeds.append((count / alone_s, sum(map(len, found)) / drafted_s))
    after = drafting.stats().drafts
    positions = [(b[0] - a[0], b[1] - a[1]) for a, b in zip(before.positions, after.positions, strict=True)]
    steps = {width: count - dict(before.steps)[width] for width, count in after.steps}
    return {
        "prompts": kind.name,
        "batch": batch,
        "plain_tokens_per_s": round(statistics.median(speed for speed, _ in speeds), 2),
        "tokens_per_s": round(statistics.median(speed for _, speed in speeds), 2),
        "ratio": round(statistics.median(ratios), 3),
        "least_ratio": round(min(ratios), 3),
        "acceptance": [round(accepted / proposed, 3) if proposed else None for proposed, accepted in positions],
        "steps_by_width": steps,
        "answers": total,
        "answers_that_differ": wrong,
    }


def main() -> None:
    """Prints a Markdown table, and writes JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--proposers", nargs="+", default=["ngram", "self"], metavar="NAME[=DRAFTER]")
    parser.add_argument("--kinds", nargs="+", default=[kind.name for kind in KINDS])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--num-drafts", type=int)
    parser.add_argument("--draft-mode", default="auto")
    parser.add_argument("--compile-cache", help="a directory that keeps compiled programs for the next run")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    common = {"max_sequences": max(arguments.batches), "max_context_tokens": 1024, "prefix_cache": False}
    common["compile_cache"] = arguments.compile_cache
    plain = LLM(arguments.model, **common)
    plain.warm_up()
    report = {"model": arguments.model, "machine": platform.processor() or platform.machine(), "rows": []}
    print("| proposer | prompts | batch | plain, tokens/s | tokens/s | ratio | accepted by position | differ |")
    print("|---|---|--:|--:|--:|--:|---|--:|")
    for named in arguments.proposers:
        name, _, drafter = named.partition("=")
        options = {"proposer": name, "drafter": drafter or None, "num_drafts": arguments.num_drafts}
        drafting = LLM(arguments.model, **common, **options, draft_mode=arguments.draft_mode)
        drafting.warm_up()
        for kind in (kind for kind in KINDS if kind.name in arguments.kinds):
            for batch in arguments.batches:
                row = measured(plain, drafting, kind, batch, arguments.tokens, arguments.rounds)
                report["rows"].append({"proposer": name, **row})
                shares = " ".join("-" if share is None else f"{share:.2f}" for share in row["acceptance"])
                print(
                    f"| {name} | {kind.name} | {batch} | {row['plain_tokens_per_s']} | {row['tokens_per_s']} | "
                    f"{row['ratio']} | {shares} | {row['answers_that_differ']}/{row['answers']} |",
                    flush=True,
                )
        del drafting
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
