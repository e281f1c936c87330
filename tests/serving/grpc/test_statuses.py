# SPDX-License-Identifier: Apache-2.0
"""Errors as clients read them."""

import logging

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from serving.core.errors import Kind, ServiceError
from serving.grpc.statuses import CODES, status_of
from serving.grpc.stubs import generate_pb2 as pb
from tests.serving.grpc.fronts import asked, fronted, refused, run
from tests.serving.scripted import ScriptedService

CODE_NAMES = {
    Kind.INVALID: "INVALID_ARGUMENT",
    Kind.TOO_LONG: "INVALID_ARGUMENT",
    Kind.UNAUTHENTICATED: "UNAUTHENTICATED",
    Kind.FORBIDDEN: "PERMISSION_DENIED",
    Kind.NOT_FOUND: "NOT_FOUND",
    Kind.CONFLICT: "ABORTED",
    Kind.EXHAUSTED: "RESOURCE_EXHAUSTED",
    Kind.TOO_LATE: "DEADLINE_EXCEEDED",
    Kind.CANCELLED: "CANCELLED",
    Kind.UNAVAILABLE: "UNAVAILABLE",
    Kind.INTERNAL: "INTERNAL",
}


async def details_of(call, code) -> dict[str, object]:
    error = await refused(call, code)
    status = await rpc_status.aio.from_call(call)
    assert status.message == error.details()
    found = {}
    for packed in status.details:
        name = packed.type_url.rpartition(".")[2]
        found[name] = getattr(error_details_pb2, name)()
        assert packed.Unpack(found[name])
    return found


@pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.value)
@pytest.mark.parametrize("method", ["GenerateUnary", "Generate"])
def test_each_kind_has_its_code_and_reason(kind, method):
    async def check():
        service = ScriptedService(script=(ServiceError(kind, "It is so; do otherwise."),))
        async with fronted(service) as world:
            call = getattr(world.stub, method)(asked())
            details = await details_of(call, getattr(grpc.StatusCode, CODE_NAMES[kind]))
            assert await call.details() == "It is so; do otherwise."
            assert details == {"ErrorInfo": error_details_pb2.ErrorInfo(reason=kind.name, domain="metrale.jax")}

    run(check())


def test_every_kind_is_known():
    assert set(CODES) == set(Kind)


def test_the_field_at_fault_is_a_violation():
    async def check():
        async with fronted(ScriptedService()) as world:
            call = world.stub.GenerateUnary(pb.GenerateRequest())
            details = await details_of(call, grpc.StatusCode.INVALID_ARGUMENT)
            violation = details["BadRequest"].field_violations[0]
            assert violation.field == "prompt" and violation.description == await call.details()

    run(check())


def test_when_to_come_again_is_told():
    async def check():
        error = ServiceError(Kind.EXHAUSTED, "Too many requests.", retry_after_s=1.25)
        async with fronted(ScriptedService(script=(error,))) as world:
            details = await details_of(world.stub.GenerateUnary(asked()), grpc.StatusCode.RESOURCE_EXHAUSTED)
            assert details["RetryInfo"].retry_delay.ToNanoseconds() == 1_250_000_000

    run(check())


@pytest.mark.parametrize("method", ["GenerateUnary", "Generate"])
def test_what_nobody_foresaw_is_logged_and_not_told(method, caplog):
    async def check():
        async with fronted(ScriptedService(script=(KeyError("secret of another"),))) as world:
            error = await refused(getattr(world.stub, method)(asked()), grpc.StatusCode.INTERNAL)
            incident = error.details().partition("incident ")[2][:12]
            assert "secret" not in error.details() and "Traceback" not in error.details()
            record = next(record for record in caplog.records if incident in record.getMessage())
            assert record.exc_info[0] is KeyError and record.levelno == logging.ERROR

    run(check())


@pytest.mark.parametrize(
    "message", ["x" * 100_000, "ü\n\x00" * 50_000, "\ud800 alone"], ids=["long", "odd", "surrogate"]
)
def test_any_message_reaches_the_client(message):
    async def check():
        error = ServiceError(Kind.NOT_FOUND, message, field="model")
        async with fronted(ScriptedService(script=(error,))) as world:
            call = world.stub.GenerateUnary(asked())
            assert "BadRequest" in await details_of(call, grpc.StatusCode.NOT_FOUND)
            assert (await call.details())[:5] == message.replace("\ud800", "?")[:5]

    run(check())


def test_a_status_stays_within_what_trailers_carry():
    status = status_of(ServiceError(Kind.INVALID, "ü" * 10_000, field="params.stop"))
    assert len(status.details) * 6 + sum(len(value) * 4 / 3 for _, value in status.trailing_metadata) < 8192
