# SPDX-License-Identifier: Apache-2.0
"""Text on the way in and out: tokenizers, chat templates, streaming and stop strings.

`tokenizer.Tokenizer` turns text into ids and back; it is read from a directory or, by
`gguf_tokenizer.tokenizer_from_gguf`, from the metadata of a GGUF file. `chat_template.ChatTemplate` renders messages.
`detokenizer.Detokenizer` gives the text of a growing token stream piece by piece, and `stops.StopMatcher` holds back
what may become a stop string. `grammar.GrammarCompiler` says token by token what keeps an answer to a schema or a
pattern (`grammar_spec.GrammarSpec`). A model without a tokenizer is served by ids, and nothing here is then needed.

May import `metrale_jax.core`, `tokenizers`, `jinja2`, `llguidance` and numpy; never jax.
"""
