# SPDX-License-Identifier: Apache-2.0
"""`Tracing`: a span for each call by OpenTelemetry, where its SDK is installed and asked for; nothing otherwise.

Spans follow an incoming W3C `traceparent`, and their attributes the semantic conventions for generative AI. Nothing
that was said is in them: no prompt, no answer, no message of an error.
"""

import asyncio
from collections.abc import Mapping
from importlib.metadata import entry_points
from importlib.util import find_spec
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING

from metrale_jax.core.errors import ConfigError
from metrale_jax.sampling.params import SamplingParams
from serving.core.errors import ServiceError
from serving.core.records import CallRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span as OtelSpan

Value = str | bool | int | float | tuple[str, ...]
Attributes = Mapping[str, Value]

NOTHING: Attributes = MappingProxyType({})
PROVIDER = "metrale"
# Names of models and requests are the caller's, of any length.
MAX_TEXT_CHARS = 256
# How a call ended that its caller took back.
TAKEN_BACK = (asyncio.CancelledError, GeneratorExit)


class Span:
    """One call, from the entry of its `with` to the exit. It is current nowhere, so that it may span an async
    generator. Without tracing every method does nothing."""

    def __init__(self, span: "OtelSpan | None" = None):
        self._span = span

    def add_event(self, name: str, attributes: Attributes = NOTHING) -> None:
        """Nothing; something happened now."""
        if self._span is not None:
            self._span.add_event(name, _bounded(attributes))

    def set(self, attributes: Attributes) -> None:
        """Nothing; adds what became known."""
        if self._span is not None:
            self._span.set_attributes(_bounded(attributes))

    def failed(self, kind: str) -> None:
        """Nothing; the call ended by an error of this kind."""
        if self._span is not None:
            from opentelemetry.trace import StatusCode

            self._span.set_attribute("error.type", kind)
            self._span.set_status(StatusCode.ERROR)

    def __enter__(self) -> "Span":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(error, ServiceError):
            self.failed(error.kind.value)
        elif error is not None:
            self.failed("cancelled" if isinstance(error, TAKEN_BACK) else kind.__name__)
        if self._span is not None:
            self._span.end()


class Tracing:
    """Makes spans by `provider`; without one they do nothing."""

    def __init__(self, provider: "TracerProvider | None" = None):
        self._provider = provider
        self._tracer = None if provider is None else provider.get_tracer("metrale-jax")

    def span(self, name: str, carrier: Mapping[str, str] = NOTHING, attributes: Attributes = NOTHING) -> Span:
        """A span of the server that begins now, below the one that `carrier` names by its `traceparent`, if any."""
        if self._tracer is None:
            return Span()
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        above = TraceContextTextMapPropagator().extract(carrier, Context())
        name = name[:MAX_TEXT_CHARS]
        return Span(self._tracer.start_span(name, above, SpanKind.SERVER, _bounded(attributes)))

    def close(self) -> None:
        """Nothing; what ended is on its way, as far as that can be brought there."""
        if self._provider is not None:
            self._provider.shutdown()


def _bounded(attributes: Attributes) -> dict[str, Value]:
    return {name: value[:MAX_TEXT_CHARS] if isinstance(value, str) else value for name, value in attributes.items()}


def open_tracing(exporter: str, protocol: str) -> Tracing:
    """Spans that go to `exporter`, named as OTEL_TRACES_EXPORTER names them, by `protocol`, named as
    OTEL_EXPORTER_OTLP_PROTOCOL does. The rest is as OpenTelemetry's own variables have it. Raises `ConfigError` where
    a package is missing."""
    if exporter == "none":
        return Tracing()
    if find_spec("opentelemetry") is None or find_spec("opentelemetry.sdk") is None:
        raise ConfigError("tracing=True needs OpenTelemetry, which is not there; pip install 'metrale-jax[tracing]'.")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    name = {"grpc": "otlp_proto_grpc"}.get(protocol, "otlp_proto_http") if exporter == "otlp" else exporter
    found = tuple(entry_points(group="opentelemetry_traces_exporter", name=name))
    if not found:
        package = "opentelemetry-exporter-" + name.replace("_", "-")
        raise ConfigError(
            f"OTEL_TRACES_EXPORTER={exporter!r} needs an exporter that is not there; pip install {package}."
        )
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(found[0].load()()))
    return Tracing(provider)


def call_attributes(operation: str, model: str, params: SamplingParams | None = None) -> dict[str, Value]:
    """What is known of a call as it comes. `operation` is the conventions' "chat", "text_completion", "embeddings", or
    a name of our own."""
    known: dict[str, Value] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": model,
    }
    if params is None:
        return known
    known["gen_ai.request.temperature"] = float(params.temperature)
    known["gen_ai.request.top_p"] = float(params.top_p)
    if params.top_k > 0:
        known["gen_ai.request.top_k"] = float(params.top_k)
    known["gen_ai.request.frequency_penalty"] = float(params.frequency_penalty)
    known["gen_ai.request.presence_penalty"] = float(params.presence_penalty)
    if params.n != 1:
        known["gen_ai.request.choice.count"] = params.n
    if params.max_tokens is not None:
        known["gen_ai.request.max_tokens"] = params.max_tokens
    if params.seed is not None:
        known["gen_ai.request.seed"] = params.seed
    return known


def ended_attributes(record: CallRecord) -> dict[str, Value]:
    """What is known of a call when it has ended."""
    known: dict[str, Value] = {
        "gen_ai.response.model": record.model,
        "gen_ai.response.id": record.request_id,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.generated_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
    }
    if record.finish_reasons:
        known["gen_ai.response.finish_reasons"] = tuple(record.finish_reasons)
    if record.first_token_s:
        known["gen_ai.response.time_to_first_chunk"] = record.first_token_s
    return known
