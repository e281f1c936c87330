# SPDX-License-Identifier: Apache-2.0
"""What /openapi.json says is so: schemathesis asks for all that it allows, and for what it does not."""

import asyncio
import logging

import httpx
import hypothesis
import pytest
import schemathesis
from schemathesis import GenerationMode
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi import checks

from metrale_jax import LLM, SamplingParams
from tests.serving.tiny_chat import write_tiny_chat
from tests.serving.whole_server import whole_server

KNOWN = {"prompt": "A known prompt", "temperature": 0, "max_tokens": 8}
CHECKS = [
    schemathesis.checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
]
FEW, MANY, SEED = 6, 150, 2026
# The second is what the server is told of the time.
LIMIT_S, HEADERS = 60, {"x-request-timeout": "20"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = write_tiny_chat(tmp_path_factory.mktemp("tiny"))
    return LLM(directory, max_sequences=4, max_context_tokens=256, prefill_tokens=32, kv_cache_mib=1)


def shows_no_code(ctx, response, case) -> None:
    """A check: nothing of the server's own is in an answer."""
    assert b"Traceback" not in response.content and b'File "' not in response.content


def asked(operation, mode: GenerationMode, url: str, num_examples: int) -> tuple[int, str]:
    """How many calls of one kind an operation had, and what was wrong with one of them."""
    num_calls = 0

    @hypothesis.seed(SEED)
    @hypothesis.settings(
        max_examples=num_examples,
        deadline=None,
        database=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def ask(case):
        nonlocal num_calls
        num_calls += 1
        response = case.call(base_url=url, headers=HEADERS, timeout=LIMIT_S)
        case.validate_response(response, checks=[*CHECKS, shows_no_code])

    try:
        ask()
    except FailureGroup as failures:
        return num_calls, "\n".join(str(failure) for failure in failures.exceptions)
    except hypothesis.errors.Unsatisfiable:
        return 0, ""  # it takes nothing that could be wrong
    return num_calls, ""


def explored(url: str, num_examples: int) -> tuple[int, list[str]]:
    """How many calls were made, and what was wrong with which operation."""
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    total, faults = 0, []
    for result in schema.get_all_operations():
        operation = result.ok()
        for mode in GenerationMode:
            num_calls, fault = asked(operation, mode, url, num_examples)
            total += num_calls
            if fault:
                faults.append(f"{operation.label} ({mode.value}): {fault}")
    return total, faults


@pytest.mark.parametrize("num_examples", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_what_is_described_is_true(num_examples, model, caplog):
    caplog.set_level(logging.ERROR, "serving")
    [expected] = model.generate([KNOWN["prompt"]], SamplingParams(temperature=0.0, max_tokens=8))

    async def scene():
        async with whole_server(model) as server:
            total, faults = await asyncio.to_thread(explored, server.url, num_examples)
            assert not faults, "\n\n".join(faults)
            assert total > 8 * num_examples
            async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
                told = (await client.post("/v1/completions", json=KNOWN)).json()
                assert told["choices"][0]["text"] == expected.text
            await server.quiet()

    asyncio.run(scene())
    assert not caplog.records
