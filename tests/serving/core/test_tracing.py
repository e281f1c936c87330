# SPDX-License-Identifier: Apache-2.0
"""Spans as an exporter of OpenTelemetry gets them."""

import asyncio
import subprocess
import sys

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv.attributes import error_attributes
from opentelemetry.trace import SpanKind, StatusCode

from metrale_jax import SamplingParams
from metrale_jax.core.errors import ConfigError
from serving.core.errors import Kind, ServiceError
from serving.core.records import CallRecord
from serving.core.tracing import Tracing, call_attributes, ended_attributes, open_tracing

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CARRIER = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
CONVENTIONS = {getattr(gen_ai_attributes, name) for name in dir(gen_ai_attributes) if name.startswith("GEN_AI_")}


@pytest.fixture
def traced():
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield Tracing(provider), exporter.get_finished_spans
    provider.shutdown()


def test_a_span_follows_the_callers_and_holds_its_events(traced):
    tracing, finished = traced
    with tracing.span("Generate", CARRIER, {"gen_ai.request.model": "m"}) as span:
        span.add_event("first token", {"n": 1})
        span.set({"gen_ai.usage.output_tokens": 3})
        assert finished() == ()
    (span,) = finished()
    assert (span.name, span.kind, span.status.status_code) == ("Generate", SpanKind.SERVER, StatusCode.UNSET)
    assert f"{span.context.trace_id:032x}" == TRACE and f"{span.parent.span_id:016x}" == PARENT
    assert span.context.trace_state["vendor"] == "1"
    assert dict(span.attributes) == {"gen_ai.request.model": "m", "gen_ai.usage.output_tokens": 3}
    (event,) = span.events
    assert event.name == "first token" and span.start_time <= event.timestamp <= span.end_time


def test_what_a_caller_names_is_cut(traced):
    tracing, finished = traced
    with tracing.span("a" * 1000, attributes={"b": "c" * 1000, "d": 1}) as span:
        span.set({"e": "f" * 1000})
    (span,) = finished()
    assert (len(span.name), len(span.attributes["b"]), span.attributes["d"]) == (256, 256, 1)
    assert len(span.attributes["e"]) == 256


@pytest.mark.parametrize("carrier", [{}, {"traceparent": "nonsense"}, {"traceparent": f"00-{'0' * 32}-{PARENT}-01"}])
def test_without_a_parent_that_can_be_read_a_trace_begins(carrier, traced):
    tracing, finished = traced
    with tracing.span("a", carrier):
        pass
    with tracing.span("b", carrier):
        pass
    first, second = finished()
    assert first.parent is None and second.parent is None and first.context.trace_id != second.context.trace_id


@pytest.mark.parametrize(
    "error, kind",
    [
        (ServiceError(Kind.EXHAUSTED, "secret words"), "exhausted"),
        (asyncio.CancelledError(), "cancelled"),
        (GeneratorExit(), "cancelled"),
        (RuntimeError("secret words"), "RuntimeError"),
    ],
)
def test_an_error_is_its_kind_and_never_its_message(error, kind, traced):
    tracing, finished = traced
    with pytest.raises(type(error)), tracing.span("a"):
        raise error
    (span,) = finished()
    assert span.attributes[error_attributes.ERROR_TYPE] == kind and span.status.status_code is StatusCode.ERROR
    assert "secret words" not in span.to_json()


def test_an_async_generator_may_be_closed_from_another_task(traced):
    tracing, finished = traced

    async def answers():
        with tracing.span("a"):
            yield 1
            yield 2

    async def main():
        stream = answers()
        assert await asyncio.create_task(anext(stream)) == 1
        await asyncio.create_task(stream.aclose())

    asyncio.run(main())
    assert [span.attributes["error.type"] for span in finished()] == ["cancelled"]


def test_attributes_are_the_conventions_and_hold_nothing_that_was_said():
    params = SamplingParams(
        n=2, temperature=0.5, top_p=0.9, top_k=7, seed=3, max_tokens=9, stop=["secret words"], presence_penalty=0.5
    )
    record = CallRecord(
        "Generate",
        "r",
        "k",
        "p",
        "m",
        "ok",
        "secret words",
        ("stop",),
        5,
        4,
        3,
        first_token_s=0.5,
        prompt_text="secret",
    )
    known = call_attributes("chat", "m", params) | ended_attributes(record)
    assert set(known) <= CONVENTIONS
    assert known["gen_ai.request.choice.count"] == 2 and known["gen_ai.request.max_tokens"] == 9
    assert known["gen_ai.usage.input_tokens"] == 5 and known["gen_ai.response.finish_reasons"] == ("stop",)
    assert "secret" not in repr(known)
    assert set(call_attributes("embeddings", "m")) <= CONVENTIONS


def test_without_a_provider_nothing_happens():
    tracing = Tracing()
    with tracing.span("a", CARRIER, {"b": 1}) as span:
        span.add_event("c")
        span.set({"d": 1})
        span.failed("e")
    tracing.close()


def test_without_the_package_nothing_is_imported_and_to_ask_for_it_is_an_error():
    code = (
        "import sys\n"
        "sys.modules['opentelemetry'] = None\n"
        "from serving.core.tracing import Tracing, open_tracing\n"
        "from metrale_jax.core.errors import ConfigError\n"
        "with Tracing().span('a', {'traceparent': 'x'}) as span: span.add_event('b')\n"
        "open_tracing('none', 'grpc')\n"
        "try: open_tracing('otlp', 'grpc')\n"
        "except ConfigError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "metrale-jax[tracing]" in done.stdout, done.stderr


def test_exporters_are_found_by_their_names():
    code = (
        "from serving.core.tracing import open_tracing\n"
        "tracing = open_tracing('console', 'grpc')\n"
        f"with tracing.span('a', {CARRIER}): pass\n"
        "tracing.close()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert TRACE in done.stdout, done.stderr
    for protocol, package in (("grpc", "exporter-otlp-proto-grpc"), ("http/protobuf", "exporter-otlp-proto-http")):
        with pytest.raises(ConfigError, match=package):
            open_tracing("otlp", protocol)
