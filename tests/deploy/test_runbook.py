# SPDX-License-Identifier: Apache-2.0
"""The runbook names every metric, the alerts ask for metrics that there are, and both for settings that exist."""

import re
import time
from dataclasses import replace

import pytest
import yaml
from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector

from metrale_jax.speculative.policy import DraftStats
from serving.core.errors import Kind
from serving.core.gate import Gate
from serving.core.keys import KeyRing
from serving.core.lifecycle import Lifecycle, State
from serving.core.limits import Meter
from serving.metrics import EngineCollector, RequestHistograms
from serving.service_metrics import CallMetrics, ServiceCollector
from serving.settings_sources import HINTS
from tests.deploy.reading import DEPLOY, KUBERNETES, documents, seconds
from tests.serving.test_metrics import STATS

RUNBOOK = (DEPLOY / "RUNBOOK.md").read_text()
ALERTS = [rule for group in documents(DEPLOY / "alerts.yaml")[0]["groups"] for rule in group["rules"]]
NAMES = [rule["alert"] for rule in ALERTS]
# Of a scrape itself; made by Prometheus.
OF_PROMETHEUS = {"up"}
OWN = r"\b(?:metrale|process|python)_[a-z_]+"


def exported():
    """The families that a server with drafts exports, by name, with the labels of each."""
    registry, keys = CollectorRegistry(), KeyRing.anonymous()
    CallMetrics(registry)
    RequestHistograms(registry)
    gate = Gate(1, 1, time.monotonic)
    registry.register(ServiceCollector(Lifecycle(), Meter(keys.limits_of, time.monotonic), gate))
    ProcessCollector(registry=registry)
    GCCollector(registry=registry)
    stats = replace(STATS, drafts=DraftStats(2, 1, (), (), (), ((4, 3),), 0, 0, 1.0))
    registry.register(EngineCollector(lambda: stats))
    return {family.name: family for family in registry.collect()}


def test_every_metric_is_in_the_runbook():
    missing = sorted(name for name in exported() if f"| `{name}` |" not in RUNBOOK)
    assert not missing, f"of these the runbook says nothing: {missing}"


def asked_for(text):
    return {re.sub("_(total|bucket|sum|count)$", "", name) for name in re.findall(OWN, text)}


@pytest.mark.parametrize("rule", ALERTS, ids=NAMES)
def test_an_alert_asks_for_what_is_exported_and_says_where_to_read_on(rule):
    names = asked_for(rule["expr"])
    assert names <= set(exported()) and (names or re.search(r"\bup\b", rule["expr"]))
    for label, values in re.findall(r'(\w+)=~?"([^"]+)"', rule["expr"]):
        known = {"state": {state.value for state in State}, "outcome": {kind.value for kind in Kind}}.get(label)
        assert label == "job" or set(values.split("|")) <= known
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    file, _, anchor = rule["annotations"]["runbook"].partition("#")
    assert file == "RUNBOOK.md" and anchor in anchors()
    assert rule["annotations"]["summary"] and ("for" not in rule or seconds(rule["for"]) > 0)


def anchors():
    """Of headings, as they are made of them."""
    titles = re.findall(r"^#+ (.*)$", RUNBOOK, re.MULTILINE)
    return {re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_metrics_that_the_runbook_names_elsewhere_are_in_its_table():
    listed = set(re.findall(r"^\| `(\w+)` \|", RUNBOOK, re.MULTILINE))
    assert asked_for(RUNBOOK) <= listed | {"process_resident_memory_bytes"}


def test_the_settings_that_the_runbook_names_exist():
    block = RUNBOOK.partition("## Metrics")[0] + RUNBOOK.partition("## What to do when")[2]
    named = {name for name in re.findall(r"`([a-z]+(?:_[a-z]+)+)`", block) if not re.match(OWN, name)}
    assert len(named) > 20
    unknown = named - set(HINTS) - {"keys_read", "keys_kept", "too_late", "max_imbalance", "allow_model_changes"}
    assert not unknown, f"the runbook speaks of {unknown}, which are no settings"


def test_the_autoscaler_goes_by_metrics_that_are_exported():
    made = documents(KUBERNETES / "components" / "autoscaling" / "horizontalpodautoscaler.yaml")[0]["spec"]
    assert {metric["pods"]["metric"]["name"] for metric in made["metrics"]} <= set(exported())
    patch = yaml.safe_load((KUBERNETES / "components/autoscaling/kustomization.yaml").read_text())["patches"][0]
    assert patch["target"]["name"] == made["scaleTargetRef"]["name"]
