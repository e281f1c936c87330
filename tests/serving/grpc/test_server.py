# SPDX-License-Identifier: Apache-2.0
"""Where the front listens, under which certificates, what it says of itself, and how it ends."""

import asyncio

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from metrale_jax.core.errors import ConfigError
from serving.core.events import Delta
from serving.core.tls import TlsSettings
from serving.grpc.server import make_server
from serving.grpc.settings import GrpcSettings
from tests.serving.certificates import made_certificates
from tests.serving.grpc.fronts import asked, fronted, refused, run, world_of
from tests.serving.scripted import ScriptedService, answer

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
SERVICES = ("", "metrale.v1.GenerateService", "inference.GRPCInferenceService")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """A CA, and a server's and a client's certificate of it, as PEM by name."""
    return made_certificates(tmp_path_factory.mktemp("certificates"))


async def started(**settings):
    front = make_server(ScriptedService(), GrpcSettings(port=0, **settings))
    await front.start()
    return front


def secure_channel(front, certificates, **client):
    credentials = grpc.ssl_channel_credentials(root_certificates=certificates["ca.pem"], **client)
    return grpc.aio.secure_channel(f"localhost:{front.port}", credentials)


def test_connections_are_encrypted_where_a_certificate_is_given(certificates):
    async def check():
        front = await started(tls=TlsSettings(certificates["server.pem"], certificates["server.key"]))
        try:
            async with secure_channel(front, certificates) as channel:
                assert (await world_of(None, front, channel).stub.GenerateUnary(asked("x"))).answers[0].text == "x"
            async with grpc.aio.insecure_channel(f"localhost:{front.port}") as channel:
                await refused(world_of(None, front, channel).stub.GenerateUnary(asked()), grpc.StatusCode.UNAVAILABLE)
        finally:
            await front.stop()

    run(check())


def test_clients_show_certificates_where_a_ca_for_them_is_given(certificates):
    async def check():
        tls = TlsSettings(certificates["server.pem"], certificates["server.key"], certificates["ca.pem"])
        front = await started(tls=tls)
        own = {"private_key": certificates["client.key"], "certificate_chain": certificates["client.pem"]}
        try:
            async with secure_channel(front, certificates, **own) as channel:
                assert (await world_of(None, front, channel).stub.GenerateUnary(asked("x"))).answers[0].text == "x"
            async with secure_channel(front, certificates) as channel:
                await refused(world_of(None, front, channel).stub.GenerateUnary(asked()), grpc.StatusCode.UNAVAILABLE)
        finally:
            await front.stop()

    run(check())


@pytest.mark.parametrize("wrong", ["certificate", "key", "pair"])
def test_a_certificate_that_cannot_be_used_is_named(certificates, wrong):
    async def check():
        parts = {
            "certificate": (b"nonsense", certificates["server.key"]),
            "key": (certificates["server.pem"], b"nonsense"),
            "pair": (certificates["server.pem"], certificates["client.key"]),
        }
        with pytest.raises(ConfigError, match="TLS"):
            await started(tls=TlsSettings(*parts[wrong]))

    run(check())


def test_a_port_that_is_taken_is_named_with_the_reason():
    async def check():
        async with fronted(ScriptedService()) as world:
            second = make_server(ScriptedService(), GrpcSettings(port=world.front.port))
            with pytest.raises(ConfigError, match=f"port={world.front.port}.*in use.*use another"):
                await second.start()
            await second.stop()

    run(check())


def test_a_host_that_is_none_is_named_with_the_reason():
    async def check():
        front = make_server(ScriptedService(), GrpcSettings(host="no.such.host.invalid", port=0))
        with pytest.raises(ConfigError, match=r"host no\.such\.host\.invalid"):
            await front.start()

    run(check())


def test_health_says_for_each_service_whether_it_serves():
    async def check():
        front = await started()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{front.port}") as channel:
                health = health_pb2_grpc.HealthStub(channel)
                for serving, status in [(None, NOT_SERVING), (True, SERVING), (False, NOT_SERVING)]:
                    if serving is not None:
                        front.set_serving(serving)
                    for service in SERVICES:
                        request = health_pb2.HealthCheckRequest(service=service)
                        assert (await health.Check(request)).status == status
                unknown = health_pb2.HealthCheckRequest(service="other")
                await refused(health.Check(unknown), grpc.StatusCode.NOT_FOUND)
                watched = await health.Watch(unknown).read()
                assert watched.status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
                listed = await health.List(health_pb2.HealthListRequest())
                assert {name: one.status for name, one in listed.statuses.items()} == dict.fromkeys(
                    SERVICES, NOT_SERVING
                )
        finally:
            await front.stop()

    run(check())


def test_watchers_hear_of_each_change_and_are_let_go():
    async def check():
        front = await started()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{front.port}") as channel:
            request = health_pb2.HealthCheckRequest(service=SERVICES[1])
            watch = health_pb2_grpc.HealthStub(channel).Watch(request)
            assert (await watch.read()).status == NOT_SERVING
            front.set_serving(True)
            assert (await watch.read()).status == SERVING
            front.set_serving(True)
            began = asyncio.get_running_loop().time()
            await front.drain(15)
            assert (await watch.read()).status == NOT_SERVING
            assert await watch.read() is grpc.aio.EOF and await watch.code() == grpc.StatusCode.OK
            assert asyncio.get_running_loop().time() - began < 5, "a watcher does not hold up the end"

    run(check())


def test_reflection_describes_both_services():
    async def check():
        front = await started()

        def reflected():
            with grpc.insecure_channel(f"127.0.0.1:{front.port}") as channel:
                database = ProtoReflectionDescriptorDatabase(channel)
                pool = DescriptorPool(database)
                found = {name: pool.FindServiceByName(name) for name in SERVICES[1:]}
                return database.get_services(), {name: list(one.methods_by_name) for name, one in found.items()}

        try:
            services, methods = await asyncio.to_thread(reflected)
            assert set(services) >= {*SERVICES[1:], "grpc.health.v1.Health"}
            assert "GenerateStream" in methods[SERVICES[1]] and "ModelStreamInfer" in methods[SERVICES[2]]
        finally:
            await front.stop()

    run(check())


def test_reflection_can_be_off():
    async def check():
        async with fronted(ScriptedService(), reflection=False) as world:
            call = world.channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")()
            await refused(call, grpc.StatusCode.UNIMPLEMENTED)

    run(check())


def test_draining_lets_calls_end_and_takes_no_more():
    async def check():
        gate = asyncio.Event()
        async with fronted(ScriptedService(script=(Delta(0, "a"), gate, *answer("b")))) as world:
            call = world.stub.Generate(asked())
            assert (await call.read()).delta.text == "a"
            draining = asyncio.create_task(world.front.drain(15))
            await asyncio.sleep(0.05)
            await refused(world.stub.GenerateUnary(asked()), grpc.StatusCode.UNAVAILABLE)
            assert not draining.done()
            gate.set()
            assert (await call.read()).delta.text == "b"
            assert (await call.read()).WhichOneof("event") == "done"
            await draining
            assert await call.code() == grpc.StatusCode.OK and world.service.ended

    run(check())


def test_draining_cancels_what_outlasts_its_grace():
    async def check():
        async with fronted(ScriptedService(script=(Delta(0, "a"), asyncio.Event()))) as world:
            call = world.stub.Generate(asked(request_id="q"))
            assert (await call.read()).delta.text == "a"
            await world.front.drain(0.1)
            assert world.service.cancelled == ["q"]
            with pytest.raises(grpc.aio.AioRpcError):
                await call.read()

    run(check())


def test_stopping_ends_what_runs_at_once():
    async def check():
        async with fronted(ScriptedService(script=(Delta(0, "a"), asyncio.Event()))) as world:
            call, stream = world.stub.Generate(asked(request_id="q")), world.stub.GenerateStream()
            assert (await call.read()).delta.text == "a"
            await stream.initial_metadata()
            await world.front.stop()
            assert world.service.cancelled == ["q"]

    run(check())
