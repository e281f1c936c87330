# SPDX-License-Identifier: Apache-2.0
"""Named shapes of paged attention, shared by tests and benchmarks."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """Lengths for each sequence and static sizes; `query_lens` counts the new tokens, 0 for a padding row."""

    name: str
    kv_lens: tuple[int, ...]
    query_lens: tuple[int, ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    v_head_dim: int = 16
    block_size: int = 16
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    tree: bool = False
    latent: int = 0


CASES = (
    Case("decode-S1", (37,), (1,)),
    Case("decode-S3-padding", (1, 0, 64), (1, 0, 1)),
    Case("decode-N9-K3-H24-Hv40", (33, 70), (1, 1), 9, 3, 24, 40),
    Case("decode-long", (1500, 3, 700), (1, 1, 1), block_size=8),
    Case("decode-long-window", (1500, 3, 900), (1, 1, 1), block_size=8, window=50),
    # More rows than run together: padding among them, lengths in no order, the last ones no whole group.
    Case("decode-many-N9-K3", (70, 0, 5, 300, 1, 40, 0, 16, 17, 90, 33, 3), (1, 0, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1), 9, 3),
    Case("decode-many-padding", (0, 0, 9, 0, 0, 0, 0, 0, 0, 21), (0, 0, 1, 0, 0, 0, 0, 0, 0, 1)),
    Case(
        "verify-many-window",
        (40, 9, 0, 330, 12, 7, 90, 2, 61, 1, 150),
        (4, 2, 0, 3, 1, 4, 4, 2, 3, 1, 4),
        window=30,
        softcap=4.0,
    ),
    Case("verify-ragged", (40, 9, 0, 130), (4, 2, 0, 3), 6, 1),
    Case("prefill-fresh", (33, 7, 1), (33, 7, 1)),
    Case("prefill-past", (90, 40, 0), (17, 40, 0), softcap=5.0),
    Case("prefill-past-window", (90, 40, 600), (17, 40, 70), window=20, block_size=8),
    Case("prefill-window-1", (12, 40), (12, 3), window=1, softcap=3.0),
    Case("prefill-sinks-N8-K2", (33, 70), (33, 17), 8, 2, window=24, sinks=True),
    Case("decode-sinks", (33, 0, 700), (1, 0, 1), 6, 2, sinks=True),
    Case("verify-tree", (9, 40, 0, 130, 5), (8, 3, 0, 8, 5), 6, 2, tree=True),
    Case("verify-tree-window-sinks", (60, 140, 9), (5, 7, 4), window=20, sinks=True, tree=True),
)

# Values are a part of the keys and have no memory of their own.
LATENT_CASES = (
    Case("latent-decode", (37, 0, 300), (1, 0, 1), 6, 1, 14, 0, latent=10),
    Case("latent-verify", (40, 9, 0, 130), (4, 2, 0, 3), 3, 1, 24, 0, latent=16),
    Case("latent-prefill", (90, 40, 0), (17, 40, 0), 6, 1, 14, 0, latent=10),
)

# Sizes that models use, for targets: head widths, block sizes and ratios of heads. Every backend serves all of them.
HEAD_DIMS = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 192), (256, 256), (192, 128))
BLOCK_SIZES = (16, 32, 64, 128, 256)
HEADS = ((9, 3), (32, 8), (64, 8), (16, 16), (8, 1), (12, 4))
DTYPES = ("bfloat16", "float16", "float32")
KV_FORMATS = ("bfloat16", "float16", "float32", "fp8_e4m3", "fp8_e5m2", "int8")
