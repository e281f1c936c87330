# SPDX-License-Identifier: Apache-2.0
"""llama.cpp through the C interface that llama-cpp-python binds: one batch of all sequences for each step."""

import os
from collections.abc import Sequence

from protocol import Setup, run_peer

UBATCH_TOKENS = 512


class LlamaCppPeer:
    """A GGUF model, and one context for each shape of batch that is asked for. All cores, no GPU layers."""

    def __init__(self, setup: Setup):
        import llama_cpp
        import numpy as np

        self._lib, self._np = llama_cpp, np
        self._quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._quiet, None)
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(str(setup.model).encode(), params)
        assert self._model, f"{setup.model} was not loaded"
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._threads = int(setup.options.get("threads", os.cpu_count()))
        self._context, self._shape = None, None

    def generate(self, prompts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
        """The new token ids of each prompt."""
        self._open(len(prompts), len(prompts[0]))
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), False)
        last = self._prefill(prompts)
        answers = [[token] for token in last]
        for step in range(max_tokens - 1):
            position = len(prompts[0]) + step
            rows = [(token, position, sequence, True) for sequence, token in enumerate(last)]
            last = self._run(rows)
            for answer, token in zip(answers, last, strict=True):
                answer.append(token)
        return answers

    def _prefill(self, prompts: Sequence[list[int]]) -> list[int]:
        last = len(prompts[0]) - 1
        rows = [
            (token, position, sequence, position == last)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        return self._run(rows)

    def _run(self, rows: Sequence[tuple[int, int, int, bool]]) -> list[int]:
        """The most likely next token after each row (token, position, sequence, wanted) whose logits are wanted."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for index, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[index] = token
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = sequence
            batch.logits[index] = wanted
        code = self._lib.llama_decode(self._context, batch)
        assert code == 0, f"llama_decode returned {code} for {len(rows)} tokens"
        count = sum(row[3] for row in rows)
        logits = self._np.ctypeslib.as_array(self._lib.llama_get_logits(self._context), (count, self._vocab_size))
        return logits.argmax(axis=1).tolist()

    def _open(self, num_sequences: int, prompt_tokens: int) -> None:
        # A context is set up before it is timed: the warm-up run has the shape of the runs that follow.
        shape = (num_sequences, prompt_tokens)
        if shape == self._shape:
            return
        if self._context:
            self._lib.llama_batch_free(self._batch)
            self._lib.llama_free(self._context)
        params = self._lib.llama_context_default_params()
        params.n_seq_max = num_sequences
        params.n_ctx = num_sequences * max(256, prompt_tokens + 256)
        params.n_batch = max(num_sequences * prompt_tokens, UBATCH_TOKENS)
        params.n_ubatch = UBATCH_TOKENS
        params.n_threads = params.n_threads_batch = self._threads
        self._context = self._lib.llama_init_from_model(self._model, params)
        assert self._context, f"no context for {num_sequences} sequences"
        self._batch = self._lib.llama_batch_init(params.n_batch, 0, 1)
        self._shape = shape


if __name__ == "__main__":
    run_peer("llama.cpp", ("llama-cpp-python",), LlamaCppPeer)
