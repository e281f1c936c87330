# SPDX-License-Identifier: Apache-2.0
"""`StateFormats`: in what form a run keeps its layers' state."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StateFormats:
    """`keys` names the format of keys and values (see `pallas_kernels.kv_formats.registry`), `recurrent` the dtype of
    recurrent matrices, `inputs` that of the activations, which convolutions keep the last of. `num_pending` is how many
    drafted tokens a slot can hold until it is known which stand."""

    keys: str
    inputs: str = "float32"
    recurrent: str = "float32"
    num_pending: int = 0
