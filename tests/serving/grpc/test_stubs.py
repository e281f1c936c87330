# SPDX-License-Identifier: Apache-2.0
"""The committed stubs are what the protos make."""

import pytest

from serving.grpc.protos.generate import STUBS, generated


@pytest.fixture(scope="module")
def made():
    return generated()


def test_each_stub_is_what_its_proto_makes(made):
    committed = {path.name: path.read_text(encoding="utf-8") for path in STUBS.glob("*_pb2*")}
    assert committed == made, "run python -m serving.grpc.protos.generate"


def test_the_stubs_hold_the_service(made):
    assert {"generate_pb2.py", "generate_pb2.pyi", "generate_pb2_grpc.py"} <= set(made)
    assert "/metrale.v1.GenerateService/Generate" in made["generate_pb2_grpc.py"]
