# SPDX-License-Identifier: Apache-2.0
"""curl, and the README's examples as they stand there."""

import asyncio
import json
import os
import re
import sys
from pathlib import Path

import pytest

from metrale_jax import LLM, SamplingParams
from serving.core.keys import KeyRing
from serving.core.service import ServiceSettings
from tests.serving.http.fronts import events_of, fronted, run
from tests.serving.scripted import ScriptedService, answer
from tests.serving.tiny_chat import write_tiny_chat
from tests.serving.whole_server import whole_server

ROOT = Path(__file__).parents[3]
CHAT = "/v1/chat/completions"
HELLO = '{"messages": [{"role": "user", "content": "hi"}]}'
JSON = ("-H", "Content-Type: application/json")
TOKEN = "alice-0123456789-secret"
WHERE, NAME = "http://localhost:8000", "smollm2-135m"
COMPILING_S = 300


def readme_examples() -> tuple[list[str], list[str]]:
    """The commands and the programs of the README's section on HTTP."""
    _, _, rest = (ROOT / "README.md").read_text().partition("\n## HTTP\n")
    section = rest.partition("\n## ")[0]
    programs = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    indented = re.findall(r"(?:^    .*\n)+", re.sub(r"```.*?```", "", section, flags=re.DOTALL), re.MULTILINE)
    return [re.sub(r"^    ", "", block, flags=re.MULTILINE) for block in indented], programs


COMMANDS, PROGRAMS = readme_examples()


async def told_by(*command: str, **environment: str) -> tuple[str, str]:
    """What a command that ends well writes to its two outputs."""
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    return out.decode(), errors.decode()


async def curl(*arguments: str) -> tuple[str, str]:
    """What curl writes to its two outputs."""
    return await told_by("curl", "-sS", "--max-time", "15", *arguments)


async def header_of(url: str, name: str, *arguments: str) -> str:
    """One header of curl's answer."""
    head, _ = await curl("-o", os.devnull, "-D", "-", *arguments, url)
    return dict(line.lower().split(": ", 1) for line in head.splitlines() if ": " in line)[name]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = write_tiny_chat(tmp_path_factory.mktemp("tiny"))
    return LLM(directory, max_sequences=4, max_context_tokens=256, prefill_tokens=64, kv_cache_mib=1)


def scene(model, test, **options) -> None:
    async def whole():
        async with whole_server(model, settings=ServiceSettings(NAME, warm_up=False), **options) as server:
            await test(server)
            await server.quiet()

    run(whole(), COMPILING_S)


def test_the_readme_starts_a_server_with_settings_that_there_are():
    async def act():
        [start] = [command for command in COMMANDS if command.startswith("metrale-jax serve")]
        _, *arguments = start.split()
        out, _ = await told_by(sys.executable, "-m", "metrale_jax", *arguments, "--print-config")
        assert 'model = "smollm2-135m"' in out and "http_port = 8000" in out

    run(act(), 60)


def test_the_readmes_commands_are_answered(model, tmp_path):
    plain = [command for command in COMMANDS if command.startswith("curl") and "$TOKEN" not in command]
    [keyed] = [command for command in COMMANDS if "$TOKEN" in command]
    path = tmp_path / "keys.toml"
    path.write_text(f'[[keys]]\nid = "alice"\ntoken = "{TOKEN}"\n')
    path.chmod(0o600)

    async def check(server):
        whole, streamed = [(await told_by("bash", "-c", command.replace(WHERE, server.url)))[0] for command in plain]
        prompt = model.chat_tokens([{"role": "user", "content": "Why is the sky blue?"}])
        [expected] = model.generate([prompt], SamplingParams(max_tokens=32, temperature=0.0))
        assert json.loads(whole)["choices"][0]["message"]["content"] == expected.text
        [expected] = model.generate(["Once upon a time"], SamplingParams(max_tokens=32, seed=7))
        *chunks, done = events_of(streamed)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected.text and done == "[DONE]"

    async def check_keyed(server):
        command = keyed.replace(WHERE, server.url)
        out, _ = await told_by("bash", "-c", command, TOKEN=TOKEN)
        assert [one["id"] for one in json.loads(out)["data"]] == [NAME]
        out, _ = await told_by("bash", "-c", command, TOKEN="another")
        assert json.loads(out)["error"]["code"] == "invalid_api_key"

    scene(model, check)
    scene(model, check_keyed, keys=KeyRing.open(path))


def test_the_readmes_program_prints_its_answer(model):
    async def check(server):
        [program] = PROGRAMS
        out, _ = await told_by(sys.executable, "-c", program.replace(WHERE, server.url))
        assert re.fullmatch("The [A-Z][a-z]+", out)

    scene(model, check)


def test_curl_shows_a_stream_as_it_comes():
    going_on = asyncio.Event()
    first, *others = answer("yes")

    async def act():
        async with fronted(ScriptedService((first, going_on, *others))) as world:
            process = await asyncio.create_subprocess_exec(
                *("curl", "-sSN", *JSON, "-d", HELLO.replace("]}", '], "stream": true}'), world.base_url + CHAT),
                stdout=asyncio.subprocess.PIPE,
            )
            begun = (await process.stdout.readuntil(b'"y"') + await process.stdout.readuntil(b"\n\n")).decode()
            assert process.returncode is None and "[DONE]" not in begun
            going_on.set()
            rest, _ = await process.communicate()
            *chunks, done = events_of(begun + rest.decode())
            assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "yes"
            assert done == "[DONE]" and process.returncode == 0

    run(act())


def test_curl_asks_again_on_the_connection_that_it_has():
    async def act():
        async with fronted(ScriptedService()) as world:
            urls = [f"{world.base_url}{path}" for path in ("/health", "/v1/models", "/nothing", "/ready")]
            discarded = [part for url in urls for part in ("-o", os.devnull, url)]
            out, _ = await curl("-w", "%{http_code} %{num_connects} %{http_version}\n", *discarded)
            assert out.splitlines() == ["200 1 1.1", "200 0 1.1", "404 0 1.1", "200 0 1.1"]
            refused = ("-w", "%{http_code} %{num_connects}\n", "-o", os.devnull, *JSON, "-d", "{")
            out, _ = await curl(*refused, world.base_url + CHAT, "-o", os.devnull, world.base_url + CHAT)
            assert out.splitlines() == ["400 1", "400 0"]

    run(act())


def test_a_large_body_is_asked_for_before_it_is_sent(tmp_path):
    (tmp_path / "body").write_text(HELLO.replace("]}", f'], "user": "{"x" * (3 << 20)}"}}'))
    sent = ("-v", *JSON, "-H", "Expect: 100-continue", "--expect100-timeout", "10", "-d", f"@{tmp_path / 'body'}")

    async def act():
        async with fronted(ScriptedService(answer("long"))) as world:
            out, said = await curl(*sent, world.base_url + CHAT)
            assert json.loads(out)["choices"][0]["message"]["content"] == "long"
            assert said.count("HTTP/1.1 100") == 1
        async with fronted(ScriptedService(), max_body_bytes=1 << 20) as world:
            out, said = await curl(*sent, world.base_url + CHAT)
            assert json.loads(out)["error"]["message"].startswith("The body is larger than 1048576 bytes")
            assert "HTTP/1.1 413" in said and not world.service.asked

    run(act(), 40)


def test_what_curl_offers_to_decompress_or_upgrade_comes_as_it_is():
    async def act():
        async with fronted(ScriptedService(answer("plain"))) as world:
            for offered in ("--compressed", "--http2", "--http1.0", "--tcp-nodelay"):
                out, _ = await curl(offered, *JSON, "-d", HELLO, world.base_url + CHAT)
                assert json.loads(out)["choices"][0]["message"]["content"] == "plain", offered

    run(act())


def test_an_old_client_reads_a_stream_to_the_end_of_its_connection():
    async def act():
        async with fronted(ScriptedService(answer("old"))) as world:
            body = HELLO.replace("]}", '], "stream": true}')
            out, _ = await curl("--http1.0", *JSON, "-d", body, world.base_url + CHAT)
            assert events_of(out)[-1] == "[DONE]"

    run(act())


def test_a_head_has_the_headers_alone():
    async def act():
        async with fronted(ScriptedService()) as world:
            for path in ("/health", "/v1/models", "/metrics"):
                url = world.base_url + path
                head, _ = await curl("-I", url)
                body, _ = await curl(url)
                assert head.startswith("HTTP/1.1 200") and f"content-length: {len(body)}" in head, path
            assert await header_of(world.base_url + CHAT, "allow", "-I") == "post"

    run(act())
