# SPDX-License-Identifier: Apache-2.0
"""Two replicas on a local Ray, asked over HTTP, of which one is killed: run by `test_ray_serve`, prints what came."""

import asyncio
import json
import os
import re
import signal
import socket
import sys
from pathlib import Path

import httpx

from metrale_jax.core.errors import ConfigError

LIMITS = {"max_sequences": 4, "prefill_tokens": 32, "kv_cache_mib": 8}
NUM_CHATS, NUM_CALLS = 4, 6
DEADLINE_S = 60.0
LONG = 300


def words(number):
    """A prompt of its own, longer than a block and than the bytes of a link."""
    return f"chat {number} begins so: " + " ".join(f"word{number}-{index}" for index in range(20))


def body(messages, max_tokens, **more):
    asked = {"model": "tiny", "messages": messages, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return asked | {"return_token_ids": True} | more


class Calls:
    """HTTP calls to the proxy."""

    def __init__(self, client):
        self._client = client

    async def chat(self, messages, max_tokens, **more):
        """Status, and the object that came."""
        answer = await self._client.post("/v1/chat/completions", json=body(messages, max_tokens), **more)
        return answer.status_code, answer.json()

    async def stream(self, messages, max_tokens, begun, goes):
        """The events of a stream; `begun` is told of the first, and the rest is read when `goes`."""
        events = []
        asked = body(messages, max_tokens, stream=True)
        async with self._client.stream("POST", "/v1/chat/completions", json=asked) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    events.append(line.removeprefix("data: "))
                    begun.set()
                    await goes.wait()
        return events


async def conversations(calls):
    """What chats of their own and their second turns got."""
    found = []
    for number in range(NUM_CHATS):
        turns = [{"role": "user", "content": words(number)}]
        _, first = await calls.chat(turns, 6)
        text = first["choices"][0]["message"]["content"]
        turns += [{"role": "assistant", "content": text}, {"role": "user", "content": "and then?"}]
        _, second = await calls.chat(turns, 6)
        found.append([first, second])
    return found


async def killed(calls, logs):
    """What came of calls under way when a replica was killed: two streams, one on each, and some without streams."""
    goes = asyncio.Event()
    begun = [asyncio.Event() for _ in range(2)]
    streams = [
        asyncio.create_task(
            calls.stream([{"role": "user", "content": f"stream {words(90 + n)}"}], LONG, begun[n], goes)
        )
        for n in range(2)
    ]
    await asyncio.gather(*(one.wait() for one in begun))
    whole = [
        asyncio.create_task(calls.chat([{"role": "user", "content": words(50 + number)}], LONG))
        for number in range(NUM_CALLS)
    ]
    await asyncio.sleep(0.2)
    os.kill(min(replicas(logs)), signal.SIGKILL)
    goes.set()
    return await asyncio.gather(*streams), await asyncio.gather(*whole)


def replicas(logs):
    """Of the processes that log as a server does, each with how many calls that were answered its log has."""
    found = {}
    for path in logs.glob("worker-*.err"):
        lines = [json.loads(line) for line in path.read_text().splitlines() if line.startswith('{"')]
        if any(line["event"] == "state" for line in lines):
            answered = [line for line in lines if line["event"] == "call" and line["outcome"] == "ok"]
            found[int(re.search(r"-(\d+)\.err$", path.name)[1])] = len(answered)
    return found


async def asked(port, logs):
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=DEADLINE_S) as client:
        calls = Calls(client)
        told = {"models": (await client.get("/v1/models")).json()}
        json_type = {"content-type": "application/json"}
        told["wrong"] = [(await client.post("/v1/chat/completions", content=b"{", headers=json_type)).status_code]
        told["wrong"] += [(await client.get(path)).status_code for path in ("/v1/files", "/nothing")]
        told["chats"] = await conversations(calls)
        told["calls"] = list(replicas(logs).values())
        told["streams"], told["whole"] = await killed(calls, logs)
        again = [{"role": "user", "content": words(0)}]
        told["after"] = [await calls.chat(again, 6) for _ in range(3)]
        return told


def refusals(build):
    """What is said of arguments that are none."""
    said = []
    for wrong in ({"http_port": "8000"}, {"max_sequence": "4"}, {"num_replicas": "two"}, {"max_imbalance": "-1"}):
        try:
            build(wrong)
        except ConfigError as error:
            said.append(str(error))
    return said


def main():
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_SERVE_LOG_TO_STDERR"] = "0"
    import ray
    from ray import serve

    from serving.ray_serve import built

    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=80 << 20, log_to_driver=False)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    arguments = {"model": sys.argv[1], "served_name": "tiny", "warm_up": "false", "keep_programs": "false"}
    arguments |= {"num_replicas": 2, "num_cpus": "0.5"} | {name: str(value) for name, value in LIMITS.items()}
    serve.run(built(arguments))
    logs = Path(ray._private.worker._global_node.get_session_dir_path()) / "logs"
    print(json.dumps({"refused": refusals(built)} | asyncio.run(asked(port, logs))))
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
