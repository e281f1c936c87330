# SPDX-License-Identifier: Apache-2.0
"""Several replicas of the server on Ray Serve, behind one address. Prompts that begin alike go to one of them.

    serve run serving.ray_serve:app model=smollm2-135m num_replicas=2

Arguments are the settings of `metrale-jax serve` (but for those of one that stands alone), those of `RoutingSettings`,
and `num_replicas`, `num_cpus` and `num_gpus` of each. In a config file of Serve they are `args`, and `deployments` says
more of "Model" (autoscaling, say) and of "Ingress". Needs the extras `ray` and `serve`.

Limits of keys hold for each replica by itself, and so do answers that /v1/responses keeps.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from metrale_jax.core.errors import ConfigError, shown
from metrale_jax.llm_config import checked_limits
from serving.derived_settings import llm_settings
from serving.prefix_routing import RoutingSettings
from serving.ray_ingress import Ingress
from serving.ray_replica import ENDING_S, Replica
from serving.settings_sources import PREFIX, Resolved, resolve

# What Ray's proxies do in the place of the server, and what each replica would have for itself.
OF_LONE_SERVERS = (
    "host",
    "grpc_port",
    "http_port",
    "side_host",
    "side_port",
    "tls_certificate",
    "tls_key",
    "tls_client_ca",
    "max_streams",
    "reflection",
    "compression",
    "allow_model_changes",
    "allowed_models",
    "data_dir",
)
OF_REPLICAS = {"num_replicas": int, "num_cpus": float, "num_gpus": float}
ROUTING = {field.name: field.type for field in fields(RoutingSettings)}
# Answers that a replica takes in beyond those that may wait: what it cannot take it says itself, with a time.
ROOM_FOR_REFUSALS = 64


def app(args: dict) -> Application:
    """What `serve run` and Serve's config files start."""
    return built(args)


def built(args: Mapping[str, Any], root: str = "/") -> Application:
    """The application with these arguments. Raises `ConfigError` for one that is none, or that cannot be read."""
    routing = RoutingSettings(**{name: _number(name, args[name], ROUTING[name]) for name in ROUTING if name in args})
    of_replicas = {name: _number(name, args[name], kind) for name, kind in OF_REPLICAS.items() if name in args}
    resolved = _resolved({name: value for name, value in args.items() if name not in {*ROUTING, *OF_REPLICAS}})
    config, llm = resolved.serve, llm_settings(resolved)
    actor = {name: of_replicas[name] for name in ("num_cpus", "num_gpus") if name in of_replicas}
    most = config.max_waiting_requests + 2 * llm.max_sequences + ROOM_FOR_REFUSALS
    model = serve.deployment(
        Replica,
        name="Model",
        num_replicas=of_replicas.get("num_replicas", 1),
        ray_actor_options=actor,
        max_ongoing_requests=most,
        max_queued_requests=most,
        graceful_shutdown_timeout_s=config.grace_s + ENDING_S,
        request_router_config=RequestRouterConfig(
            request_router_class="serving.ray_router:PrefixRouter",
            request_router_kwargs={name: getattr(routing, name) for name in ROUTING},
        ),
    ).bind(config, llm)
    ingress = serve.deployment(
        Ingress,
        name="Ingress",
        max_ongoing_requests=1 << 16,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=config.grace_s + ENDING_S,
    )
    return ingress.bind(model, config)


def _resolved(args: Mapping[str, Any]) -> Resolved:
    """The settings; texts, which is all that a command line has, are read as the environment's are."""
    from metrale_jax.runtime import default_cache_dir

    texts = {PREFIX + name.upper(): value for name, value in args.items() if isinstance(value, str)}
    values = {name: value for name, value in args.items() if not isinstance(value, str)}
    resolved = resolve(values, texts, {}, {"compile_cache": default_cache_dir() / "programs"})
    for name in OF_LONE_SERVERS:
        if resolved.origins.get(name, "default") != "default":
            raise ConfigError(f"{name} is for a server that stands alone, and here there are several; leave it out.")
    checked_limits(resolved.llm)
    return resolved


def _number(name: str, value: Any, kind: type) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return kind(value)
    except ValueError:
        raise ConfigError(f"{name}={shown(value)} is not a number; give one.") from None
