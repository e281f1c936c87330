# SPDX-License-Identifier: Apache-2.0
"""Named shapes of grouped matmul, shared by tests and benchmarks."""

from dataclasses import dataclass

from pallas_kernels.activations import Activation

SWIGLU = Activation("silu")
CLAMPED = Activation("silu", limit=2.0, slope=1.702, shift=1.0)
SQUARED = Activation("relu2", gated=False)


@dataclass(frozen=True)
class Case:
    """Sizes of a call: `group_sizes` rows of each expert, `spare` rows of none, `width` outputs of `depth` inputs."""

    name: str
    group_sizes: tuple[int, ...]
    width: int = 20
    depth: int = 36
    spare: int = 0
    bias: bool = False
    activation: Activation | None = None


CASES = (
    Case("T1-E1", (1,)),
    Case("T8-E128-decode", tuple(int(e in (3, 9, 31, 64, 65, 77, 100, 127)) for e in range(128)), activation=SWIGLU),
    Case("T40-E7-empty-groups", (0, 17, 0, 0, 22, 1, 0), bias=True),
    Case("T33-E5-all-to-one", (0, 0, 33, 0, 0), bias=True, activation=CLAMPED),
    Case("T33-E5-all-to-the-last", (0, 0, 0, 0, 33), activation=SWIGLU),
    Case("T300-E3-spare", (130, 1, 40), spare=129, activation=SQUARED),
    Case("T64-E4-none", (0, 0, 0, 0), spare=64, bias=True),
    Case("T260-E2-F130-D67", (255, 5), width=130, depth=67, activation=CLAMPED, bias=True),
)

# Sizes that models use, for targets: experts, chosen ones, expert width and model width.
MODELS = {
    "mixtral-8x7b": (8, 2, 14336, 4096),
    "qwen3-30b-a3b": (128, 8, 768, 2048),
    "gpt-oss-20b": (32, 4, 2880, 2880),
    "gpt-oss-120b": (128, 4, 2880, 2880),
    "qwen3-next-80b-a3b": (512, 10, 512, 2048),
    "glm-4.5-air": (128, 8, 1408, 4096),
    "minimax-m2": (256, 8, 1536, 3072),
}
