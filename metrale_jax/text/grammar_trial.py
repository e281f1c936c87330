# SPDX-License-Identifier: Apache-2.0
"""A program, not to be imported: compiles a grammar where it can be stopped, in a process of its own.

llguidance's fuel bounds most of what a form can ask for, but not the algebra of its patterns: intersections, negations
and long runs of loops can take minutes and gigabytes, and no thread can be stopped. Reads JSON from stdin, `text` with
its `limits`, whether it is `gbnf`, and the tokens that it may name: ids below `vocab_size`, and `special` ones by their
text. A text that fails here for want of a token would go untried. Writes JSON, the text that llguidance takes as
`grammar`, or `error`. Of several `texts` each has its bounds, and a line that says why it is refused. It needs nothing
but llguidance, so that it starts in a tenth of a second.
"""

import json
import math
import resource
import sys
import threading

# Of CPU time, so that a busy machine refuses nobody.
CPU_SECONDS = 1
MEMORY_BYTES = 1 << 30
STACK_BYTES = 256 << 20


class Bytes:
    """A vocabulary of special tokens with their own ids and, behind them, single bytes, under the names that llguidance
    looks for."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocab_size: int, special: dict[str, int]):
        tokens = [b""] * vocab_size
        for text, token in special.items():
            tokens[token] = text.encode()
        self._first = vocab_size
        self.tokens = [*tokens, *(bytes([byte]) for byte in range(256)), b"<eos>"]
        self.eos_token_id = vocab_size + 256
        self.special_token_ids = [*special.values(), self.eos_token_id]

    def __call__(self, text: str) -> list[int]:
        """The bytes of `text`."""
        return [self._first + byte for byte in text.encode()]


def tried(given: dict) -> dict:
    """What comes of one text."""
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if given.get("gbnf"):
        try:
            return {"grammar": gbnf_to_lark(given["text"])}
        except RecursionError:
            return {"error": "not GBNF: too deeply nested"}
    tokenizer = LLTokenizer(Bytes(given["vocab_size"], given["special"]))
    limits = LLParserLimits(**given["limits"])
    for text in given.get("texts", ()):
        _bound_cpu()
        matcher = LLMatcher(tokenizer, text, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
        print(json.dumps(matcher.get_error() if matcher.is_error() else ""), flush=True)
    if "texts" in given:
        return {}
    matcher = LLMatcher(tokenizer, given["text"], log_level=0, limits=limits)
    matcher.compute_bitmask()
    return {"grammar": given["text"]}


def _bound_cpu() -> None:
    """Nothing; from here on the process has its CPU time anew."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = math.ceil(used.ru_utime + used.ru_stime) + CPU_SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def main() -> None:
    """Reads, tries, writes."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, resource.getrlimit(resource.RLIMIT_CPU)[1]))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=lambda: print(json.dumps(tried(json.load(sys.stdin)))))
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
