# SPDX-License-Identifier: Apache-2.0
"""The unit and the manifests: what they name exists in the code, and their times fit the server's."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from metrale_jax.core.errors import ConfigError
from serving.core.lifecycle import Lifecycle
from serving.server import DEAD, ENGINE_S, FAREWELL_S, JOURNAL_S
from serving.settings_sources import FILE_VARIABLE, resolve
from serving.side_port import SidePort
from tests.deploy.reading import (
    DEPLOY,
    KUBERNETES,
    USER,
    dockerfile,
    documents,
    image_environment,
    measured_start_s,
    seconds,
    settings,
)

AFTER_GRACE_S = FAREWELL_S + ENGINE_S + JOURNAL_S
OVERLAYS = {"base": "cpu", "overlays/gpu": "cuda", "overlays/tpu": "tpu"}
BASE = {
    (made["kind"], made["metadata"]["name"]): made
    for name in yaml.safe_load((KUBERNETES / "base" / "kustomization.yaml").read_text())["resources"]
    for made in documents(KUBERNETES / "base" / name)
}
POD = BASE["Deployment", "metrale-jax"]["spec"]["template"]["spec"]
SERVER = POD["containers"][0]
UNIT = [line.partition("=")[::2] for line in (DEPLOY / "metrale-jax.service").read_text().splitlines() if "=" in line]


def paths_served():
    side = SidePort("127.0.0.1", 0, Lifecycle(), lambda: (b"", ""))
    side._loop.close()
    return set(side._pages)


def unit(name):
    return [value for key, value in UNIT if key == name]


def kustomization(place):
    return yaml.safe_load((KUBERNETES / place / "kustomization.yaml").read_text())


def pod_settings(place):
    """What a server of this overlay is told."""
    patches = [documents(KUBERNETES / place / patch["path"])[0] for patch in kustomization(place).get("patches", ())]
    patched = [patch["spec"]["template"]["spec"]["containers"][0] for patch in patches]
    variables = {one["name"]: one["value"] for made in [SERVER, *patched] for one in made.get("env", ())}
    (generator,) = kustomization(place)["configMapGenerator"]
    (file,) = generator["files"]
    return settings(image_environment(OVERLAYS[place]) | variables, KUBERNETES / place / file), variables


def test_the_unit_starts_a_server_with_settings_that_exist_and_with_longer_to_end_than_it_takes():
    program, *flags = shlex.split(unit("ExecStart")[0])
    assert program == "/opt/metrale-jax/bin/metrale-jax" and flags[:2] == ["serve", "--config"]
    variables = dict(value.split("=", 1) for value in unit("Environment"))
    resolved = settings(variables, DEPLOY / "server.toml", flags)
    assert Path(flags[2]).name == "server.toml" and resolved.serve.key_file.startswith(str(Path(flags[2]).parent))
    for path in (resolved.llm.compile_cache, resolved.llm.cache_dir, variables["HF_HOME"]):
        assert Path(path).is_relative_to(f"/var/cache/{unit('CacheDirectory')[0]}")
    assert seconds(unit("TimeoutStopSec")[0]) > resolved.serve.grace_s + AFTER_GRACE_S


def test_the_unit_starts_again_what_another_start_may_cure_and_nothing_else():
    assert unit("Restart") == ["on-failure"] and unit("RestartForceExitStatus") == [str(DEAD)]
    assert unit("RestartPreventExitStatus") == ["2"]
    assert unit("SuccessExitStatus") == ["130 143"], "128 and the signals, where a second one came"
    assert unit("ExecReload") == ["/bin/kill -HUP $MAINPID"]


def test_the_unit_may_do_little():
    for name in ("NoNewPrivileges", "ProtectHome", "PrivateTmp", "PrivateDevices", "RestrictNamespaces"):
        assert unit(name) == ["yes"], name
    assert unit("ProtectSystem") == ["strict"] and unit("CapabilityBoundingSet") == [""]
    assert not unit("MemoryDenyWriteExecute"), "XLA runs what it compiles"


@pytest.mark.parametrize("place", sorted(OVERLAYS))
def test_a_pod_is_told_settings_that_exist_and_finds_its_files_where_they_are(place):
    resolved, variables = pod_settings(place)
    mounts = {mount["name"]: mount["mountPath"] for mount in SERVER["volumeMounts"]}
    assert variables[FILE_VARIABLE] == f"{mounts['settings']}/server.toml"
    assert Path(resolved.serve.key_file).parent == Path(mounts["keys"])
    assert mounts["cache"] == dockerfile()["server"].arguments("VOLUME")[0]
    for path in (resolved.llm.compile_cache, resolved.llm.cache_dir):
        assert Path(path).is_relative_to(mounts["cache"])
    assert kustomization(place)["images"][0]["newTag"] == OVERLAYS[place]
    ports = {port["name"]: port["containerPort"] for port in SERVER["ports"]}
    assert ports == {name: getattr(resolved.serve, f"{name}_port") for name in ("http", "grpc", "side")}


@pytest.mark.parametrize("place", sorted(OVERLAYS))
def test_a_pod_has_longer_to_end_than_it_takes(place):
    resolved, _ = pod_settings(place)
    command, pause_s = SERVER["lifecycle"]["preStop"]["exec"]["command"]
    assert command == "sleep"
    assert POD["terminationGracePeriodSeconds"] > float(pause_s) + resolved.serve.grace_s + AFTER_GRACE_S
    readiness = SERVER["readinessProbe"]
    assert float(pause_s) >= 5, "what proxies need to hear of it"
    assert readiness["periodSeconds"] * readiness["failureThreshold"] <= 10


@pytest.mark.parametrize("service", ["cpu", "cuda"])
def test_a_container_of_compose_has_longer_to_end_than_it_takes(service):
    made = documents(DEPLOY / "compose.yaml")[0]["services"][service]
    resolved = settings(image_environment(service) | made["environment"])
    assert seconds(made["stop_grace_period"]) > resolved.serve.grace_s + AFTER_GRACE_S


def test_probes_ask_the_side_port_for_paths_that_it_serves():
    served = paths_served()
    for probe, path in (("startupProbe", "/ready"), ("readinessProbe", "/ready"), ("livenessProbe", "/health")):
        asked = SERVER[probe]["httpGet"]
        assert (asked["path"], asked["port"]) == (path, "side") and path in served
    annotations = BASE["Deployment", "metrale-jax"]["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/path"] in served


def test_a_pod_has_longer_to_start_than_any_start_that_was_measured_and_a_rollout_longer_than_a_pod():
    probe = SERVER["startupProbe"]
    most_s = probe["periodSeconds"] * probe["failureThreshold"]
    assert most_s >= 3 * measured_start_s("empty")
    assert BASE["Deployment", "metrale-jax"]["spec"]["progressDeadlineSeconds"] > most_s
    assert probe["periodSeconds"] <= max(5, measured_start_s("shipped")), "a quick start is noticed as one"


def test_a_pod_is_not_told_of_services_whose_variables_would_be_no_settings():
    service = BASE["Service", "metrale-jax"]["metadata"]["name"]
    with pytest.raises(ConfigError, match="is no setting"):
        resolve({}, {f"{service.upper().replace('-', '_')}_SERVICE_HOST": "10.0.0.1"}, {})
    assert POD["enableServiceLinks"] is False


def test_a_pod_runs_as_the_image_does_and_may_do_little():
    assert POD["securityContext"]["runAsUser"] == POD["securityContext"]["fsGroup"] == USER
    assert POD["securityContext"]["runAsNonRoot"] and not POD["automountServiceAccountToken"]
    own = SERVER["securityContext"]
    assert own["readOnlyRootFilesystem"] and not own["allowPrivilegeEscalation"]
    assert own["capabilities"]["drop"] == ["ALL"]
    keys = next(volume for volume in POD["volumes"] if volume["name"] == "keys")
    assert keys["secret"]["defaultMode"] & 0o007 == 0


def test_services_budget_and_policy_are_about_the_pods_and_their_ports():
    names = {port["name"] for port in SERVER["ports"]}
    for kind, name in BASE:
        if kind == "Service":
            assert {port["targetPort"] for port in BASE[kind, name]["spec"]["ports"]} <= names
    pods = kustomization("base")["labels"][0]["pairs"]
    budget = BASE["PodDisruptionBudget", "metrale-jax"]["spec"]
    assert budget["selector"]["matchLabels"].items() <= pods.items()
    assert budget["maxUnavailable"] < BASE["Deployment", "metrale-jax"]["spec"]["replicas"]
    policy = BASE["NetworkPolicy", "metrale-jax"]["spec"]
    assert policy["podSelector"]["matchLabels"].items() <= pods.items()
    assert {port["port"] for rule in policy["ingress"] for port in rule["ports"]} <= names


@pytest.mark.parametrize("place, resource", [("overlays/gpu", "nvidia.com/gpu"), ("overlays/tpu", "google.com/tpu")])
def test_a_pod_has_as_many_devices_as_share_its_model(place, resource):
    (patch,) = (documents(KUBERNETES / place / patch["path"])[0] for patch in kustomization(place)["patches"])
    limits = patch["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert int(limits[resource]) == pod_settings(place)[0].llm.tensor_parallel


def test_files_that_kustomizations_name_exist_and_hold_no_secret():
    for path in KUBERNETES.rglob("kustomization.yaml"):
        made = yaml.safe_load(path.read_text())
        files = [file for generator in made.get("configMapGenerator", ()) for file in generator["files"]]
        patches = [patch["path"] for patch in made.get("patches", ()) if "path" in patch]
        for name in (*made["resources"], *files, *patches):
            assert (path.parent / name).exists(), name
    for path in filter(Path.is_file, DEPLOY.rglob("*")):
        assert not re.search(r"^kind: Secret$|BEGIN [A-Z ]*PRIVATE KEY", path.read_text(), re.MULTILINE), path
