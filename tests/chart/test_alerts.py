"""What an alert fires for, and what it does not, by Prometheus' own promtool where it is installed.

In Debian it comes with the package `prometheus`.
"""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.chart.rendering import NAMESPACE, of_kind, render
from tests.chart.values_matrix import MATRIX
from tests.harness.bounds import HANG_SECONDS

PROMTOOL = shutil.which("promtool")
AGENT = 'namespace="research",pod="train-0"'
WEBHOOK = f'namespace="{NAMESPACE}",pod="keepstep-webhook-1"'
pytestmark = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")

# A minute between two values, as in promtool: begin+step x times.
CERTIFICATE = {f"keepstep_webhook_certificate_seconds_left{{{WEBHOOK}}}": "5000000+0x200"}
FAILURES = f"keepstep_work_failures_total{{{AGENT},kind="
REVIEWS = f"keepstep_webhook_reviews_total{{{WEBHOOK},outcome="
CASES: dict[str, tuple[dict[str, str], set[str]]] = {
    "all is well": (
        {
            f"keepstep_recovery_point_age_seconds{{{AGENT}}}": "600+0x200",
            f"keepstep_drain_seconds{{{AGENT}}}": "20+0x200",
            f"keepstep_grace_seconds{{{AGENT}}}": "120+0x200",
            f'keepstep_checkpoints_total{{{AGENT},outcome="committed"}}': "0+1x200",
            f'keepstep_checkpoints_total{{{AGENT},outcome="failed"}}': "0+0x200",
            f'{REVIEWS}"injected"}}': "0+5x200",
            f'keepstep_webhook_review_seconds_bucket{{{WEBHOOK},le="0.01"}}': "0+5x200",
            f'keepstep_webhook_review_seconds_bucket{{{WEBHOOK},le="+Inf"}}': "0+5x200",
        },
        set(),
    ),
    "uploads do not come through": (
        {f"keepstep_recovery_point_age_seconds{{{AGENT}}}": "0+60x200"},
        {"KeepstepRecoveryPointOld"},
    ),
    "nothing was ever committed": (
        {f"keepstep_recovery_point_age_seconds{{{AGENT}}}": "-1+0x200"},
        {"KeepstepNothingCommitted"},
    ),
    "a run that has just begun": ({f"keepstep_recovery_point_age_seconds{{{AGENT}}}": "_x190 -1+0x10"}, set()),
    "a trainer makes no step for an hour": (
        {
            f"keepstep_step_age_seconds{{{AGENT}}}": "10+0x140 10+60x60",
            f"keepstep_terminating{{{AGENT}}}": "0+0x200",
        },
        {"KeepstepTrainerStuck"},
    ),
    "a trainer whose pod ends makes no step": (
        {
            f"keepstep_step_age_seconds{{{AGENT}}}": "10+0x140 10+60x60",
            f"keepstep_terminating{{{AGENT}}}": "0+0x150 1+0x50",
        },
        set(),
    ),
    "trainers tell no steps": (
        {f"keepstep_step_age_seconds{{{AGENT}}}": "-1+0x200", f"keepstep_terminating{{{AGENT}}}": "0+0x200"},
        set(),
    ),
    "more is staged than the grace period lets out": (
        {f"keepstep_drain_seconds{{{AGENT}}}": "300+0x200", f"keepstep_grace_seconds{{{AGENT}}}": "120+0x200"},
        {"KeepstepBacklogExceedsGrace"},
    ),
    "how long the backlog takes is unknown": (
        {f"keepstep_drain_seconds{{{AGENT}}}": "-1+0x200", f"keepstep_grace_seconds{{{AGENT}}}": "120+0x200"},
        set(),
    ),
    "credentials are refused": ({f'{FAILURES}"access-denied"}}': "0+2x200"}, {"KeepstepUploadsBlocked"}),
    "the bucket is full": ({f'{FAILURES}"store-full"}}': "0+2x200"}, {"KeepstepUploadsBlocked"}),
    "the store has been away for an hour": ({f'{FAILURES}"unreachable"}}': "0+0x140 0+10x60"}, {"KeepstepStoreFails"}),
    "the store was away for a moment": ({f'{FAILURES}"unreachable"}}': "0+0x194 0+10x2 20+0x3"}, set()),
    "a checkpoint failed": (
        {f'keepstep_checkpoints_total{{{AGENT},outcome="failed"}}': "0+0x195 1+0x5"},
        {"KeepstepCheckpointFailed"},
    ),
    "work that killed two agents": ({f"keepstep_set_aside{{{AGENT}}}": "0+0x150 1+0x50"}, {"KeepstepWorkSetAside"}),
    "older checkpoints were shed": ({f'keepstep_checkpoints_total{{{AGENT},outcome="shed"}}': "0+1x200"}, set()),
    "the certificate was not renewed": (
        {f"keepstep_webhook_certificate_seconds_left{{{WEBHOOK}}}": "1200000-60x200"},
        {"KeepstepWebhookCertificateExpires"},
    ),
    "a bug": ({f'{REVIEWS}"failed"}}': "0+0x195 1+0x5"}, {"KeepstepWebhookFails"}),
    "pods run without": ({f'{REVIEWS}"let-through"}}': "0+0x170 1+0x30"}, {"KeepstepPodsLetThrough"}),
    "pods were refused, and their authors told": ({f'{REVIEWS}"refused"}}': "0+1x200"}, set()),
    "reviews take seconds": (
        {
            f'keepstep_webhook_review_seconds_bucket{{{WEBHOOK},le="1"}}': "0+5x200",
            f'keepstep_webhook_review_seconds_bucket{{{WEBHOOK},le="5"}}': "0+10x200",
            f'keepstep_webhook_review_seconds_bucket{{{WEBHOOK},le="+Inf"}}': "0+10x200",
        },
        {"KeepstepWebhookSlow"},
    ),
}


def groups() -> list[dict[str, Any]]:
    """As a file of rules has them."""
    found: list[dict[str, Any]] = of_kind(render(MATRIX["everything watched"]), "PrometheusRule")["spec"]["groups"]
    return found


def promtool(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """In `folder`, where the rules are. What it says is on stdout."""
    assert PROMTOOL is not None
    (folder / "rules.yaml").write_text(json.dumps({"groups": groups()}))
    return subprocess.run(
        [PROMTOOL, *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=HANG_SECONDS,
    )


def firing(folder: Path, series: dict[str, str]) -> set[str]:
    """After 200 minutes. promtool is told that no alert fires, and names those that do."""
    rules = [rule["alert"] for group in groups() for rule in group["rules"]]
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": [{"eval_time": "200m", "alertname": rule, "exp_alerts": []} for rule in rules],
    }
    (folder / "tests.yaml").write_text(
        json.dumps({"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [test]})
    )
    done = promtool(folder, "test", "rules", "tests.yaml")
    found = {rule for rule in rules if re.search(rf"alertname: {rule}\b", done.stdout)}
    assert bool(found) == bool(done.returncode), done.stdout
    return found


def test_prometheus_takes_the_rules(tmp_path: Path) -> None:
    done = promtool(tmp_path, "check", "rules", "rules.yaml")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(("series", "expected"), CASES.values(), ids=CASES)
def test_an_alert_fires_for_what_it_is_made_for_and_no_other_does(
    tmp_path: Path, series: dict[str, str], expected: set[str]
) -> None:
    assert firing(tmp_path, CERTIFICATE | series) == expected


def test_a_webhook_that_nobody_hears_of_is_told_whatever_another_release_says(tmp_path: Path) -> None:
    other = {'keepstep_webhook_certificate_seconds_left{namespace="other",pod="another"}': "5000000+0x200"}
    assert firing(tmp_path, other) == {"KeepstepWebhookUnreachable"}
