# SPDX-License-Identifier: Apache-2.0
"""Write `routers.npz`, what transformers' routers choose for random logits, and `mxfp4.npz`, what it makes of random
MXFP4 weights: `python tests/goldens/make_moe_goldens.py`.

A router whose weight is the identity takes its input as its logits.
"""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2TopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

TOKENS = 64
NAMES = ("num_experts", "num_local_experts", "hidden_size")


def config_of(num_experts: int, top_k: int, **rest) -> SimpleNamespace:
    """The fields that any router reads."""
    return SimpleNamespace(**dict.fromkeys(NAMES, num_experts), num_experts_per_tok=top_k, **rest)


def glm(num_experts: int, top_k: int, n_group: int, topk_group: int, norm_topk_prob: bool, scale: float):
    """GLM's router, which is DeepSeek V3's."""
    groups = {"n_group": n_group, "topk_group": topk_group}
    return Glm4MoeTopkRouter(
        config_of(num_experts, top_k, routed_scaling_factor=scale, norm_topk_prob=norm_topk_prob, **groups)
    )


ROUTERS = {
    "softmax": Qwen3MoeTopKRouter(config_of(11, 4, norm_topk_prob=False)),
    "softmax-renormalised": Qwen3MoeTopKRouter(config_of(128, 8, norm_topk_prob=True)),
    "mixtral": MixtralTopKRouter(config_of(8, 2)),
    "gpt-oss": GptOssTopKRouter(config_of(32, 4)),
    "minimax": MiniMaxM2TopKRouter(config_of(37, 8)),
    "groups": glm(24, 6, 6, 3, True, 2.5),
    "groups-plain": glm(24, 5, 4, 2, False, 1.0),
}


def write_routers() -> None:
    """Nothing; writes routers.npz."""
    generator = torch.Generator().manual_seed(0)
    arrays = {}
    for name, router in ROUTERS.items():
        count = router.num_experts
        logits = 2 * torch.randn(TOKENS, count, generator=generator)
        correction = 0.3 * torch.randn(count, generator=generator)
        arrays[f"{name}/logits"] = logits.numpy()
        with torch.no_grad():
            router.weight.copy_(torch.eye(count))
            if hasattr(router, "e_score_correction_bias"):
                router.e_score_correction_bias.copy_(correction)
                arrays[f"{name}/correction"] = correction.numpy()
            if name == "minimax":
                arrays[f"{name}/correction"] = correction.numpy()
                _, weights, experts = router(logits, correction)
            else:
                _, weights, experts = router(logits)
        arrays[f"{name}/experts"], arrays[f"{name}/weights"] = experts.numpy().astype(np.int32), weights.numpy()
    np.savez_compressed(Path(__file__).parent / "routers.npz", **arrays)


def write_mxfp4() -> None:
    """Nothing; writes mxfp4.npz: blocks and scales of two experts, and the weights as transformers lays them out."""
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (2, 10, 3, 16)).astype(np.uint8)
    scales = rng.integers(100, 140, (2, 10, 3)).astype(np.uint8)
    scales[0, 0], scales[0, 1] = (3, 60, 252), (127, 128, 250)
    weights = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales), dtype=torch.float32)
    arrays = {"blocks": blocks, "scales": scales, "weights": weights.numpy()}
    np.savez_compressed(Path(__file__).parent / "mxfp4.npz", **arrays)


if __name__ == "__main__":
    write_routers()
    write_mxfp4()
