# SPDX-License-Identifier: Apache-2.0
"""`StateFormats`: in what form a run keeps its layers' state."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StateFormats:
    """`keys` names the format of keys and values (see `pallas_kernels.kv_formats.registry`), `recurrent` the dtype of
    recurrent matrices, `inputs` that of the activations, which convolutions keep the last of. `num_pending` is how many
    drafted tokens a slot can hold until it is known which stand. After every `norm_tokens` tokens of a sequence, 0 for
    never, each head's recurrent matrix is scaled down to a Frobenius norm of `max_norm`, if it is above that."""

    keys: str
    inputs: str = "float32"
    recurrent: str = "float32"
    num_pending: int = 0
    max_norm: float = 0.0
    norm_tokens: int = 0
