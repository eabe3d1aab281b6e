"""metrics.prom: every line is a sample that Prometheus reads, names and labels are those of rules and dashboard."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from pytest_gpucluster.page.document import document_of
from pytest_gpucluster.page.outputs import HELP, metrics_of
from tests.support import REPOSITORY
from tests.support.fleet_records import failed, fleet, outcomes
from tests.support.result_files import document, of_version_2, text_of

PLACES = fleet(2, 4, absent=[1])
RECORDS = outcomes(PLACES, [failed("bf16_tflops", "node0-gpu2", 543.25)])
DEPLOY = REPOSITORY / "deploy" / "prometheus"
UNPACKED = "GPUCLUSTER_TEST_PROMTOOL"
"""Where the session `deploy` has unpacked Prometheus; empty or absent where it is installed, or cannot be had."""
SAMPLE = re.compile(r'([a-z_]+)(?:{((?:[a-z0-9_]+="(?:[^"\\\n]|\\["\\n])*",?)*)})? (\S+)')
LABEL = re.compile(r'([a-z0-9_]+)="((?:[^"\\\n]|\\["\\n])*)"')


def metrics(places: Any = PLACES, records: Any = RECORDS, *, version: int = 1, **facts: Any) -> str:
    """The metrics of a run."""
    members = document(records, places, **facts)
    members = of_version_2(members, records, places) if version == 2 else members
    return metrics_of(document_of(text_of(members)), written_s=1795718572.809)


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Each sample by its name and labels, after all lines were checked."""
    found: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    told: list[str] = []
    for line in text.splitlines():
        if line.startswith("# "):
            told += [line.split()[2]] if line.startswith("# TYPE") else []
            continue
        match = SAMPLE.fullmatch(line)
        assert match is not None, line
        assert match[1] == told[-1]
        key = (match[1], frozenset(LABEL.findall(match[2] or "")))
        assert key not in found
        found[key] = float(match[3])
    assert len(told) == len(set(told))
    return found


def test_what_a_run_tells() -> None:
    """Verdict, counts, worst value with its limit and headroom, bad parts with serial number, GPUs."""
    found = {(name, tuple(sorted(labels))): value for (name, labels), value in samples(metrics()).items()}
    assert found["gpucluster_accepted", ()] == 0
    assert found["gpucluster_verdict", (("verdict", "REJECTED"),)] == 1
    assert found["gpucluster_run_end_timestamp_seconds", ()] == 1795718572.809
    assert found["gpucluster_run_duration_seconds", ()] == 61.5
    assert found["gpucluster_checks", (("outcome", "missing"),)] == 12
    assert found["gpucluster_gpus", (("state", "found"),)] == 4
    assert found["gpucluster_criterion_worst_value", (("criterion", "bf16_tflops"), ("unit", "TFLOPS"))] == 543.25
    assert found["gpucluster_criterion_headroom_ratio", (("criterion", "bf16_tflops"),)] == pytest.approx(-0.2239, abs=1e-4)
    parts = [dict(labels) for name, labels in found if name == "gpucluster_bad_part"]
    assert {"gpu-node-0"} <= {part["host"] for part in parts}
    assert {"1654923000002"} <= {part["serial"] for part in parts}
    assert metrics().endswith("\n")


def test_when_the_run_ended() -> None:
    """Version 2 tells it."""
    text = metrics(version=2)
    assert "gpucluster_run_end_timestamp_seconds 1795717864.123" in text
    assert 'run="6f1c0f3e"' in text


@pytest.mark.parametrize("text", ['a"b', "a\\b", "a\nb", "}", "é", "\x1b", 'x\\"} 1\nevil 1'])
def test_foreign_text_stays_in_its_label(text: str) -> None:
    """No new sample, no broken line."""
    places = {name: replace(place, hostname=text, serial=text) for name, place in PLACES.items()}
    bad = failed(f"c{text}", "node0-gpu2", 543.25)
    found = samples(metrics(places, outcomes(places, [bad]), profile=text))
    assert {name for name, _ in found} <= set(HELP)


def names_in(text: str) -> set[str]:
    """Metrics that a rule or a panel names."""
    return set(re.findall(r"\bgpucluster_[a-z_]+", text))


def test_rules_and_dashboard_name_metrics_that_exist() -> None:
    """Three rules, one dashboard; each label that they use is one that the metric has."""
    rules = yaml.safe_load((DEPLOY / "alerts.yaml").read_text(encoding="utf-8"))
    alerts = [rule for group in rules["groups"] for rule in group["rules"]]
    dashboard = json.loads((DEPLOY / "dashboard.json").read_text(encoding="utf-8"))
    expressions = [rule["expr"] for rule in alerts]
    expressions += [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    assert len(alerts) == 3
    assert all(rule["annotations"]["summary"] and rule["labels"]["severity"] for rule in alerts)
    labels = {name: {key for found, pairs in samples(metrics()) if found == name for key, _ in pairs} for name in HELP}
    for expression in expressions:
        assert names_in(expression)
        assert names_in(expression) <= set(HELP)
        for name, matchers in re.findall(r"(gpucluster_[a-z_]+){([^}]*)}", expression):
            assert set(re.findall(r"([a-z0-9_]+)\s*(?:=|!)", matchers)) <= labels[name] | {"instance", "job"}
    for rule in alerts:
        used = set(re.findall(r"\$labels\.([a-z0-9_]+)", str(rule["annotations"])))
        name = next(iter(names_in(rule["expr"])))
        assert used <= labels[name] | {"instance", "job"}


def test_a_name_that_no_metric_has_is_found() -> None:
    """The check above sees a metric that was renamed."""
    assert names_in("gpucluster_acepted == 0") - set(HELP) == {"gpucluster_acepted"}


PROMTOOL = shutil.which("promtool") or shutil.which(Path(os.environ.get(UNPACKED) or "/", "usr", "bin", "promtool"))
with_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool of Prometheus is not installed")


def promtool(*words: str | Path, given: str = "", folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """What Prometheus' own reader says."""
    command = [str(PROMTOOL), *map(str, words)]
    return subprocess.run(command, input=given, cwd=folder, text=True, capture_output=True, check=False, timeout=60)


@with_promtool
@pytest.mark.parametrize("text", ["h200-sxm", 'a"b', "a\\b", "a\nb", "}", "é", "\x1b", "שלום"])
def test_promtool_takes_it(text: str) -> None:
    """Prometheus' own reader has nothing to say, whatever the host, serial number, profile and criterion are called."""
    places = {name: replace(place, hostname=text, serial=text) for name, place in PLACES.items()}
    found = metrics(places, outcomes(places, [failed(f"c{text}", "node0-gpu2", 543.25)]), profile=text)
    done = promtool("check", "metrics", given=found)
    assert (done.returncode, done.stderr) == (0, "")


@with_promtool
@pytest.mark.parametrize(
    ("ours", "broken"),
    [('="REJECTED"', '="REJECTED'), ("gauge", "gage"), ("gpucluster_gpus{", "gpucluster-gpus{"), ("} 1", "} one")],
)
def test_promtool_refuses_what_is_broken(ours: str, broken: str) -> None:
    """The check above can fail: a label without its end, an unknown type, a name with a hyphen, a word as a value."""
    assert ours in metrics()
    assert promtool("check", "metrics", given=metrics().replace(ours, broken)).returncode != 0


BAD_PART = {"kind": "gpu", "host": "gpu-node-3", "gpu": "5", "serial": "S", "uuid": "U", "part": "0"}
ALERTS = {
    "not accepted": ("GpuclusterNotAccepted", ("gpucluster_accepted", {}, 0), "6m", True),
    "not accepted, for a moment": ("GpuclusterNotAccepted", ("gpucluster_accepted", {}, 0), "1m", False),
    "accepted": ("GpuclusterNotAccepted", ("gpucluster_accepted", {}, 1), "6m", False),
    "a bad part": ("GpuclusterBadPart", ("gpucluster_bad_part", {**BAD_PART, "confidence": "high"}, 1), "1m", True),
    "perhaps a bad part": ("GpuclusterBadPart", ("gpucluster_bad_part", {**BAD_PART, "confidence": "medium"}, 1), "1m", False),
    "8 days old": ("GpuclusterRunTooOld", ("gpucluster_run_end_timestamp_seconds", {}, 0), "8d", True),
    "6 days old": ("GpuclusterRunTooOld", ("gpucluster_run_end_timestamp_seconds", {}, 0), "6d", False),
}


@with_promtool
@pytest.mark.parametrize("case", ALERTS)
def test_each_alert_fires_when_it_should(case: str, tmp_path: Path) -> None:
    """Prometheus evaluates our rules: an alert for a bad state, with host and serial number in its text, and none otherwise."""
    name, (metric, own, value), at, fires = ALERTS[case]
    labels = {"instance": "n1", **own}
    rules = yaml.safe_load((DEPLOY / "alerts.yaml").read_text(encoding="utf-8"))["groups"][0]["rules"]
    rule = next(one for one in rules if one["alert"] == name)
    filled = lambda text: re.sub(r"{{ \$labels\.(\w+) }}", lambda found: labels[found[1]], text)  # noqa: E731
    texts = {key: filled(text) for key, text in rule["annotations"].items()}
    expected = [{"exp_labels": {**labels, **rule["labels"]}, "exp_annotations": texts}] if fires else []
    series = {"series": f"{metric}{{{','.join(f'{key}={json.dumps(text)}' for key, text in labels.items())}}}"}
    test = {
        "interval": (step := "1h" if at.endswith("d") else "1m"),
        "input_series": [{**series, "values": f"{value}x200"}],
        "alert_rule_test": [{"eval_time": at, "alertname": name, "exp_alerts": expected}],
    }
    whole = {"rule_files": [str(DEPLOY / "alerts.yaml")], "evaluation_interval": step, "tests": [test]}
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(whole), encoding="utf-8")
    done = promtool("test", "rules", "test.yaml", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert promtool("check", "rules", DEPLOY / "alerts.yaml").returncode == 0
