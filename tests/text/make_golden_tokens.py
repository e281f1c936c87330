# SPDX-License-Identifier: Apache-2.0
"""Writes golden_tokens.json: ids, texts and chat prompts as transformers gives them for two real GGUF files.

Needs transformers 5 with torch, and the two files: `python make_golden_tokens.py SMOLLM2.gguf GEMMA3.gguf`.

transformers' reader of GGUF files does not know the word split `smollm` and falls back to GPT-2's. The model's own
`tokenizer.json`, like llama.cpp, cuts every digit off first, so that is set here before anything is recorded.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase

TEXTS = [
    "",
    " ",
    "  ",
    "\n",
    "\n\nlead and trail\n\n",
    "Hello world",
    " leading space",
    "trailing space ",
    "The quick brown fox doesn't jump; it's they're we've I'll I'd HE'S.",
    "Größe, Übermäßig schöne Straßenbahnhaltestellenüberdachungen für ältere Füchse",
    "今日は良い天気ですね。漢字とカナ、混ぜて書く。",
    "我能吞下玻璃而不伤身体。",
    "나는 유리를 먹을 수 있어요.",
    "Я могу есть стекло, оно мне не вредит.",
    "أنا قادر على أكل الزجاج و هذا لا يؤلمني.",
    "मैं काँच खा सकता हूँ और मुझे उससे कोई चोट नहीं पहुंचती.",
    "👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 👍🏽 tone, 🇩🇪 pair, 🤷‍♀️",
    "digits 1 12 123 1234 3.14159 1,000,000 0x1F  42   007 ٣ ½ Ⅷ",
    "def f(x):\n\tif x:\n\t\treturn {'a': [1, 2]}\n\n\t# done\n    return None\n",
    "for (int i=0;i<n;++i) { a[i] += b[i]*c; }  // sum\r\n\r\n",
    "a b  c   d    e     f" + " " * 17 + "g" + " " * 40 + "h",
    "tabs\t\t\tand\tspaces \t mixed \t\t ",
    "\u0301\u0308 lone marks e\u0301 n\u0303 a\u030a",
    "e\u0301 against \u00e9",
    "zero\u200bwidth\u200d \ufeffbom \u00a0nbsp \u3000wide\u2003em",
    "<|im_start|>user\nHi<|im_end|>\n<|endoftext|>",
    "<bos><start_of_turn>user\nHi<end_of_turn><eos><unused5>",
    "mid<|im_end|>dle <eos> x<bos>y </s> <unk> <pad> [multimodal]",
    "<0x41> <0xE4> literal byte tokens",
    "\u2581already \u2581\u2581spelt\u2581",
    "\x00\x01\x07\x1b[31mred\x1b[0m\x7f",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈 \U0010ffff \ufffd \ue000 ꙮ",
    "https://example.org/a?b=c&d=%20#frag user@example.com",
    "ALLCAPS camelCase snake_case kebab-case 中EnglishMix文",
    "....... !!!??? --- ___ *** ``` === ~~~ $$$ %%%",
    "<table><tr><td>cell</td></tr></table> <h1>x</h1>\n\n\n\n\n",
    "word " * 40,
    "a" * 200,
    "\n" * 45 + "x",
]

CHATS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": 'Hi <b>"you"</b> & ü'}], "add_generation_prompt": True},
    {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "1+1?"},
            {"role": "assistant", "content": "2", "reasoning": "add"},
            {"role": "user", "content": "why"},
        ],
        "add_generation_prompt": False,
    },
]

CHATS += [
    {
        "chat_template": "{{ bos_token }}\n{%- for m in messages %}\n"
        "    {% if loop.index0 > 2 %}{% break %}{% endif %}\n"
        "  {{- '[' + m.role + ']' + (m.content | trim) }}{% if m.reasoning_content is defined %}"
        "<think>{{ m['thinking'] }}{{ m.reasoning_content }}</think>{% endif %}\n"
        "{% endfor %}\n{% generation %}gen{{ eos_token }}{% endgeneration %}\n"
        "{{ tools | tojson }}{{ tools | tojson(indent=2) }}{% set ns = namespace(n=1) %}{% set ns.n = ns.n + 1 %}"
        "{{ ns.n }}{{ dict(a=1) | tojson }}{{ enable_thinking is defined and enable_thinking }}",
        "tools": [{"type": "function", "function": {"name": "größe", "parameters": {"a": ["<x>", 1.5, None, True]}}}],
        "enable_thinking": True,
        **chat,
    }
    for chat in CHATS
]


def random_texts(count: int) -> list[str]:
    """Random bytes read as UTF-8 with replacement, and random mixes of scripts."""
    source = random.Random(7)
    texts = [source.randbytes(source.randint(1, 24)).decode("utf-8", "replace") for _ in range(count)]
    alphabet = "aZ09 \n\t.,'<|>_äß漢字👩\u200d🏽\u0301\u2581½é"
    return texts + ["".join(source.choices(alphabet, k=source.randint(1, 24))) for _ in range(count)]


def golden(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """What one tokenizer makes of all texts, of random ids and of the chats."""
    source = random.Random(11)
    streams = [[source.randrange(len(tokenizer)) for _ in range(source.randint(1, 12))] for _ in range(12)]
    streams += [[source.randrange(700) for _ in range(source.randint(1, 12))] for _ in range(24)]
    texts = [
        {"text": text, "ids": tokenizer.encode(text), "plain": tokenizer.encode(text, add_special_tokens=False)}
        for text in TEXTS + random_texts(12)
    ]
    decoded = [
        {
            "ids": ids,
            "skipped": tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False),
            "full": tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False),
        }
        for ids in streams + [entry["ids"] for entry in texts]
    ]
    chats = [
        {
            "call": chat,
            "prompt": tokenizer.apply_chat_template(
                conversation=chat["messages"],
                tokenize=False,
                **{name: value for name, value in chat.items() if name != "messages"},
            ),
        }
        for chat in CHATS
        if "chat_template" in chat or tokenizer.chat_template
    ]
    return {
        "bos": tokenizer.bos_token_id,
        "eos": tokenizer.eos_token_id,
        "pad": tokenizer.pad_token_id,
        "size": len(tokenizer),
        "texts": texts,
        "decoded": decoded,
        "chats": chats,
    }


def main() -> None:
    """Reads both files and writes the JSON next to this script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("smollm2", type=Path)
    parser.add_argument("gemma3", type=Path)
    arguments = parser.parse_args()
    smollm2, gemma3 = (
        AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
        for path in (arguments.smollm2, arguments.gemma3)
    )
    smollm2.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    content = {"smollm2": golden(smollm2), "gemma3": golden(gemma3)}
    target = Path(__file__).with_name("golden_tokens.json")
    target.write_text(json.dumps(content, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
