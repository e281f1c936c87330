# SPDX-License-Identifier: Apache-2.0
"""Images: what the Dockerfile copies is there, what it installs is pinned, its entry point does what it says."""

import json
import os
import re
import subprocess
import sys
import tomllib
from contextlib import contextmanager
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from serving.core.lifecycle import Lifecycle, State
from serving.side_port import SidePort
from tests.deploy.reading import (
    DEPLOY,
    ROOT,
    TARGETS,
    USER,
    dockerfile,
    documents,
    image_environment,
    measured_start_s,
    seconds,
    settings,
)

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
COMPOSE = documents(DEPLOY / "compose.yaml")[0]


def ignored(path: str) -> bool:
    """Whether the context leaves a file out: of patterns, the last that matches holds."""
    out = False
    for line in filter(None, (ROOT / ".dockerignore").read_text().splitlines()):
        if line.startswith("#"):
            continue
        pattern = line.removeprefix("!")
        if pattern == "*" or path == pattern or path.startswith(pattern + "/") or pattern in ("**/" + Path(path).name,):
            out = not line.startswith("!")
    return out


def test_what_is_copied_is_there_and_in_the_context():
    stages, known = dockerfile(), set()
    for name, stage in stages.items():
        for copy in stage.arguments("COPY"):
            options = re.findall(r"--(\w+)=(\S+)", copy)
            sources = re.sub(r"--\S+\s+", "", copy).split()[:-1]
            origin = dict(options).get("from")
            assert origin is None or origin in known, f"{name} copies from {origin}"
            for source in sources if origin is None else ():
                assert (ROOT / source).exists() and not ignored(source), source
        assert not stage.arguments("ADD")
        known.add(name)


@pytest.mark.parametrize("path", [".git", "deploy/keys.toml", ".venv", "tests", "deploy/models", "x.pem"])
def test_what_an_image_is_not_made_of_stays_out_of_the_context(path):
    assert ignored(path)


def test_the_base_is_pinned_and_of_a_python_that_the_package_runs_on():
    (argument,) = dockerfile()[""].arguments("ARG")
    version = re.fullmatch(r"PYTHON_IMAGE=\S+/python:(\d+\.\d+)\.\d+-slim-\w+", argument).group(1)
    assert version in Requirement(f"python{PROJECT['requires-python']}").specifier
    bases = {stage.base for name, stage in dockerfile().items() if name}
    assert bases - set(dockerfile()) == {"${PYTHON_IMAGE}"}


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_runs_as_nobody_of_importance_under_an_init(target):
    stages = dockerfile()
    assert stages[target].steps[-1] == ("USER", f"{USER}:{USER}")
    assert stages[target].base == "server"
    assert re.search(rf"useradd --uid {USER}\b", stages["base"].arguments("RUN")[0])
    (entry,) = stages["server"].arguments("ENTRYPOINT")
    assert json.loads(entry) == ["/usr/bin/tini", "--", "/usr/share/metrale-jax/entrypoint"]
    assert "tini" in stages["base"].arguments("RUN")[0]
    (health,) = stages["server"].arguments("HEALTHCHECK")
    assert json.loads(health.partition("CMD ")[2]) == ["/usr/share/metrale-jax/healthy"]
    assert "deploy/entrypoint deploy/healthy /usr/share/metrale-jax/" in stages["server"].arguments("COPY")[0]


@pytest.mark.parametrize("target", TARGETS)
def test_the_variables_of_an_image_are_settings_and_its_ports_are_exposed(target):
    resolved = settings(image_environment(target))
    given = {name for name, origin in resolved.origins.items() if origin == "environment"}
    assert {"host", "side_port", "compile_cache", "cache_dir"} <= given
    exposed = {int(port) for port in dockerfile()["server"].arguments("EXPOSE")[0].split()}
    assert exposed == {resolved.serve.http_port, resolved.serve.grpc_port, resolved.serve.side_port}
    (volume,) = dockerfile()["server"].arguments("VOLUME")
    for path in (resolved.llm.compile_cache, resolved.llm.cache_dir, image_environment(target)["HF_HOME"]):
        assert Path(path).is_relative_to(volume)


def test_an_image_has_longer_to_start_than_any_start_that_was_measured():
    (health,) = dockerfile()["server"].arguments("HEALTHCHECK")
    assert seconds(re.search(r"--start-period=(\w+)", health)[1]) >= 2 * measured_start_s("empty")


def test_installed_extras_exist_and_all_that_they_bring_is_pinned():
    runs = "\n".join(run for stage in dockerfile().values() for run in stage.arguments("RUN"))
    extras = {extra for group in re.findall(r"'\.\[([\w,]+)\]'", runs) for extra in group.split(",")}
    assert {"serve", "gpu", "tpu"} <= extras <= set(EXTRAS)
    lines = (DEPLOY / "constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    pinned = {canonicalize_name(name): version for name, version in pinned.items()}
    for text in PROJECT["dependencies"] + [need for extra in extras for need in EXTRAS[extra]]:
        need = Requirement(text)
        assert pinned[canonicalize_name(need.name)] in need.specifier, text
    assert "pip install" not in runs.replace("pip install --constraint", "").replace("pip install --no-deps", "")


def test_the_shipped_programs_are_made_by_a_command_that_there_is():
    (run,) = dockerfile()["programs"].arguments("RUN")
    command = re.search(r"metrale-jax (warm .*?);", run)[1].replace('"$WARM_MODEL"', "m").replace("$WARM_FLAGS", "")
    resolved = settings({}, flags=command.split())
    assert (resolved.serve.model, str(resolved.llm.compile_cache)) == ("m", "/programs")
    assert "--from=programs /programs /usr/share/metrale-jax/programs" in dockerfile()["cpu"].arguments("COPY")


@pytest.mark.parametrize("service", sorted(COMPOSE["services"]))
def test_a_service_of_compose_is_an_image_told_settings_that_exist(service):
    made = COMPOSE["services"][service]
    assert made["build"]["target"] == service and service in TARGETS
    assert (DEPLOY / made["build"]["context"] / made["build"]["dockerfile"]).samefile(DEPLOY / "Dockerfile")
    resolved = settings(image_environment(service) | made["environment"])
    assert resolved.serve.key_file == f"/run/secrets/{made['secrets'][0]['target']}"
    ports = {int(port.rpartition(":")[2]) for port in made["ports"]}
    assert ports == {resolved.serve.http_port, resolved.serve.grpc_port, resolved.serve.side_port}
    assert all(port.startswith("127.0.0.1:") for port in made["ports"])
    assert made["read_only"] and made["cap_drop"] == ["ALL"]
    volumes = dict(volume.split(":")[:2] for volume in made["volumes"])
    assert volumes["programs"] == dockerfile()["server"].arguments("VOLUME")[0] and "programs" in COMPOSE["volumes"]


@contextmanager
def entry_point(tmp_path, **variables):
    """A command that runs the entry point with a `metrale-jax` that only tells."""
    (tmp_path / "bin").mkdir()
    stand_in = tmp_path / "bin" / "metrale-jax"
    stand_in.write_text('#!/bin/sh\necho "pid $$ arguments $*"\nexit 70\n')
    stand_in.chmod(0o755)
    environment = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "HOME": str(tmp_path / "home")} | variables

    def run(*arguments):
        process = subprocess.Popen(
            [DEPLOY / "entrypoint", *arguments], env=environment, stdout=-1, stderr=-1, text=True
        )
        out, err = process.communicate(timeout=60)
        assert out.startswith(f"pid {process.pid} "), "the server takes the script's place, and its signals"
        return process.returncode, out.partition("arguments ")[2].strip(), err

    yield run


def test_the_entry_point_lays_out_the_shipped_programs_and_becomes_the_server(tmp_path):
    shipped, programs = tmp_path / "shipped", tmp_path / "cache" / "programs"
    shipped.mkdir()
    (shipped / "a-cache").write_text("shipped")
    (shipped / "b-cache").write_text("shipped")
    programs.mkdir(parents=True)
    (programs / "b-cache").write_text("own")
    (programs / "old-cache").symlink_to(tmp_path / "image of yesterday")
    with entry_point(tmp_path, SHIPPED_PROGRAMS=str(shipped), METRALE_COMPILE_CACHE=str(programs)) as run:
        assert run("serve", "--max-sequences", "4") == (70, "serve --max-sequences 4", "")
        assert {path.name: path.read_text() for path in programs.iterdir()} == {"a-cache": "shipped", "b-cache": "own"}
        assert run("serve")[0] == 70, "a second start finds them laid out"
    assert (shipped / "a-cache").read_text() == "shipped"


def test_the_entry_point_goes_on_without_programs_and_where_none_can_be_laid_out(tmp_path):
    shipped = tmp_path / "shipped"
    with entry_point(tmp_path, SHIPPED_PROGRAMS=str(shipped), METRALE_COMPILE_CACHE="/proc/programs") as run:
        assert run("serve") == (70, "serve", "")
        shipped.mkdir()
        status, arguments, err = run("serve")
        assert (status, arguments) == (70, "serve") and "/proc/programs cannot be written" in err
        assert run("plan", "x") == (70, "plan x", ""), "other commands need none"


def test_the_health_check_follows_readiness():
    lifecycle = Lifecycle()
    side = SidePort("127.0.0.1", 0, lifecycle, lambda: (b"", "text/plain"))
    port = side.start()

    def checked(port):
        environment = os.environ | {"METRALE_SIDE_PORT": str(port)}
        done = subprocess.run([sys.executable, DEPLOY / "healthy"], env=environment, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    try:
        assert checked(port)[0] == 1 and "loading" in checked(port)[1]
        lifecycle.move(State.SERVING)
        assert checked(port)[0] == 0 and "serving" in checked(port)[1]
    finally:
        side.stop()
    status, told = checked(port)
    assert status == 1 and "ConnectionRefusedError" in told
