# SPDX-License-Identifier: Apache-2.0
"""`ParamSpec`s of a mixture of experts under the names that Hugging Face checkpoints use."""

from dataclasses import dataclass, replace

from metrale_jax.core.config import LayerConfig, ModelConfig
from metrale_jax.core.specs import ParamSpec, Part, Source, stacked_rows
from metrale_jax.layers.linear import Linear
from metrale_jax.layers.mlp import MlpParams
from metrale_jax.layers.moe import MoeConfig, MoeParams
from metrale_jax.models.decoder_specs import (
    DecoderNames,
    LayerSpecs,
    attention_specs,
    dense_layer,
    fused_specs,
    linear_specs,
    with_norms,
)
from metrale_jax.models.stack import LayerParams
from metrale_jax.sharding import axes


@dataclass(frozen=True)
class ExpertNames:
    """What a checkpoint that has a tensor for each expert calls a mixture's parts, under the prefix of a layer.

    `up` lists the projections that are stacked, the gate first; `{}` is the expert's number. An empty name means that
    there is no such part. `float32_router` keeps the router in float32 whatever the run's dtype is.
    """

    router: str = "mlp.gate"
    up: tuple[str, ...] = ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj")
    down: str = "mlp.experts.{}.down_proj"
    correction: str = ""
    shared: str = ""
    shared_gate: str = ""
    float32_router: bool = False


def moe_specs(width: int, config: MoeConfig, names: ExpertNames, prefix: str) -> MoeParams:
    """Specs of a mixture on inputs of `width` whose experts have a tensor each."""
    return MoeParams(
        router=router_specs(width, config, names.router, prefix, names.float32_router),
        gate_up=experts_specs(prefix, names.up, config, (config.hidden_dim, width), (axes.FFN, axes.HIDDEN)),
        down=experts_specs(prefix, (names.down,), config, (width, config.hidden_dim), (axes.HIDDEN, axes.FFN)),
        correction=correction_spec(prefix + names.correction, config) if names.correction else (),
        shared=shared_specs(width, config, names.shared, prefix) if names.shared else (),
        shared_gate=linear_specs(prefix, names.shared_gate, 1, width, False, (axes.EXPERTS, axes.HIDDEN))
        if names.shared_gate
        else (),
    )


def router_specs(
    width: int, config: MoeConfig, name: str, prefix: str, keep_float32: bool = False, bias: bool = False
) -> Linear:
    """A router `[E, D]`."""
    linear = linear_specs(prefix, name, config.router.num_experts, width, bias, (axes.EXPERTS, axes.HIDDEN))
    return linear.replace(weight=replace(linear.weight, keep_float32=True)) if keep_float32 else linear


def correction_spec(name: str, config: MoeConfig) -> ParamSpec:
    """What is added to the scores that choose, `[E]` in float32."""
    shape = (config.router.num_experts,)
    return ParamSpec(shape, (axes.EXPERTS,), (Source(name, shape),), keep_float32=True)


def experts_specs(
    prefix: str, modules: tuple[str, ...], config: MoeConfig, shape: tuple[int, int], logical: tuple[str, str]
) -> Linear:
    """Every expert's `modules`, each `shape`, one under the other, as `[E, rows, columns]`."""
    count = config.router.num_experts
    sources = tuple(
        Source(f"{prefix}{module.format(expert)}.weight", shape) for expert in range(count) for module in modules
    )
    whole = (count, len(modules) * shape[0], shape[1])
    return Linear(ParamSpec(whole, (axes.EXPERTS, *logical), sources, stacked_rows))


def shared_specs(width: int, config: MoeConfig, name: str, prefix: str) -> MlpParams:
    """The expert that every token goes through, whose tensors begin with `name`."""
    hidden = config.shared.hidden_dim
    gate_up = (f"{name}.gate_proj", f"{name}.up_proj")
    return MlpParams(
        gate_up=fused_specs(prefix, gate_up, (Part(hidden, 1),) * 2, width, False, (axes.GATE_UP, axes.HIDDEN)),
        down=linear_specs(prefix, f"{name}.down_proj", width, hidden, False, (axes.HIDDEN, axes.FFN)),
    )


def mixture_layers(experts: ExpertNames) -> LayerSpecs:
    """What makes the specs of layers of one attention each, of which some end in a mixture named by `experts`."""

    def specs(config: ModelConfig, layer: LayerConfig, names: DecoderNames, prefix: str) -> LayerParams:
        if not isinstance(layer.mlp, MoeConfig):
            return dense_layer(config, layer, names, prefix)
        (attention,) = layer.mixers
        mixers = (attention_specs(config.hidden_dim, attention, names, prefix),)
        params = LayerParams(mixers, moe_specs(config.hidden_dim, layer.mlp, experts, prefix))
        return with_norms(params, config, names, prefix)

    return specs
