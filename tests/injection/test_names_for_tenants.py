"""Who has written an annotation reads its name in every message about it: at the review, and in the pod's logs."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import keepstep_agent
from keepstep_agent.core.injection.annotation_table import OWN, settings_annotations
from keepstep_agent.core.injection.annotations import read_annotations
from keepstep_agent.core.injection.spec import InjectionDefaults, Refusal
from keepstep_agent.core.settings.table import SettingField, setting_fields, spelled

PACKAGE = Path(keepstep_agent.__file__).parent
NOT_IN_PODS = (
    # Commands of people, except for the two that pods run.
    *(path for path in (PACKAGE / "cli").rglob("*.py") if path.name not in ("agent.py", "restore.py")),
    # Help of flags and of annotations, and checks that are told what to call a setting.
    *(PACKAGE / "core/settings").glob("*.py"),
    PACKAGE / "core/injection/annotation_table.py",
    # `keepstep run`, `keepstep plan`, and the command for events, which no pod has.
    PACKAGE / "runtime/process/autoload_check.py",
    PACKAGE / "restore/run_lease.py",
    PACKAGE / "core/policies/save_advice.py",
    PACKAGE / "adapters/receivers/command.py",
)
IN_ANNOTATIONS = {setting.name: setting for setting in settings_annotations().values()}
CALLED_BY_FLAG = {*IN_ANNOTATIONS, *(field.name.replace("-", "_") for field in OWN)}


def texts(path: Path) -> Iterator[str]:
    """The sentences of a module that its running program may say."""
    tree = ast.parse(path.read_text())
    said_to_readers = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said_to_readers:
            yield node.value


def named(text: str) -> set[str]:
    """The settings that a sentence calls by their flags, or by names that can be nothing else, and not by both."""
    if " " not in text.strip():
        return set()
    words = re.findall(r"--[a-z][a-z0-9-]*(?![a-z0-9-]| \(in a pod )|\b[a-z0-9]+(?:_[a-z0-9]+)+\b", text)
    return {name for word in words if (name := word.lstrip("-").replace("-", "_")) in CALLED_BY_FLAG}


@pytest.mark.parametrize(
    "path", sorted({*PACKAGE.rglob("*.py")} - {*NOT_IN_PODS}), ids=lambda path: path.relative_to(PACKAGE).as_posix()
)
def test_no_message_of_a_pod_calls_a_setting_by_its_flag_alone(path: Path) -> None:
    """`spelled` has the annotation too."""
    metrics_help = "the setting step_timeout"
    assert [text for text in texts(path) if named(text) and metrics_help not in text] == []


def test_a_hint_has_both_names_of_a_setting() -> None:
    assert spelled("store.endpoint_url") == "--endpoint-url (in a pod keepstep.dev/endpoint-url)"


MISTAKES = [
    {"part-size-bytes": "1MiB"},
    {"part-size-bytes": "6GiB"},
    {"max-concurrency": "0"},
    {"max-connections": "0"},
    {"kms-key-id": "key"},
    {"keep-every-steps": "100"},
    {"keep-daily": "1"},
    {"weights-only-after": "1d"},
    {"optimizer-files": ","},
    {"optimizer-files": "a/b", "keep-last": "1"},
    {"optimizer-files": ",".join("abcdefghijklmnopqrstuvwxyz" * 2)},
    {"recovery-point": "0.5"},
    {"priority-boost": "5"},
    {"event-url": "host"},
    {"event-timeout-seconds": "0"},
    {"eviction-threshold-percent": "100"},
    {"peak-factor": "0.5"},
    {"connect-timeout-seconds": "0"},
    {"read-timeout-seconds": "0"},
    {"commit-reserve-seconds": "600"},
    {"grace-seconds": "1"},
    {"destination": f"s3://bucket/{'a' * 300}"},
    *({name.replace("_", "-"): "no such value"} for name, one in IN_ANNOTATIONS.items() if one.value_type is not str),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: " ".join(mistake))
def test_a_review_calls_every_wrong_value_by_its_annotation(mistake: dict[str, str]) -> None:
    said = {"inject": "true", "destination": "s3://bucket/run", **mistake}
    outcome = read_annotations(
        {f"keepstep.dev/{name}": text for name, text in said.items()}, InjectionDefaults(image="i")
    )
    assert isinstance(outcome, Refusal)
    for problem in outcome.problems:
        assert any(f"keepstep.dev/{name}" in problem for name in mistake), problem
        assert not [one.key for one in setting_fields() if _is_called(one, problem)], problem


def _is_called(setting: SettingField, problem: str) -> bool:
    """Whether a problem has the setting's flag, its variable, or a name that only Keepstep's programmers use."""
    has_name = "_" in setting.name and re.search(rf"\b{setting.name}\b", problem)
    return setting.environment in problem or f"{setting.flag} " in problem or bool(has_name)
