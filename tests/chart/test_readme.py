"""The chart's pages say what the chart does."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.chart.rendering import CHART, NAMESPACE, objects_in, of_kind, template, with_image
from tests.chart.values_matrix import MATRIX
from tests.chart.values_table import README, page, values


def test_the_table_of_values_is_made_from_them() -> None:
    assert README.read_text() == page(), "hint: make pages"


def test_every_value_says_what_it_means() -> None:
    assert [value.path for value in values() if not value.meaning.endswith(".")] == []


def test_what_the_readme_sets_are_values() -> None:
    known = {value.path for value in values()}
    named = set(re.findall(r"--set '?([\w.]+?)=", README.read_text()))
    assert named
    assert named <= known


def test_what_the_readme_links_to_is_there() -> None:
    for link in re.findall(r"\]\((?!https://)([^)#]+)", README.read_text()):
        assert (CHART / link).exists(), link


@pytest.fixture
def notes(tmp_path: Path) -> Callable[[str], str]:
    """What `helm install` would end with. Helm shows it only where there is a cluster, so it is put into an object."""
    chart = shutil.copytree(CHART, tmp_path / "chart")
    (chart / "templates" / "NOTES.txt").rename(chart / "files" / "notes.txt")
    text = '{{ tpl (.Files.Get "files/notes.txt") . | quote }}'
    (chart / "templates" / "notes.yaml").write_text(f"kind: Notes\nmetadata: {{name: notes}}\ntext: {text}\n")

    def noted(case: str) -> str:
        objects = objects_in(template(with_image(MATRIX[case]), chart=chart))
        return str(of_kind(objects, "Notes")["text"])

    return noted


def test_notes_show_the_annotations_to_paste_and_how_to_try_them(notes: Callable[[str], str]) -> None:
    text = notes("defaults")
    assert 'keepstep.dev/inject: "true"' in text
    assert "keepstep.dev/destination: s3://" in text
    assert f"helm test keepstep --namespace {NAMESPACE}" in text
    assert "--dry-run=server" in text


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("lenient, in some namespaces alone", "failurePolicy is Ignore"),
        ("one replica, no network policy", "There is one replica of the webhook"),
        ("the console, with a token", "service/keepstep-console 8400:80"),
        ("the console, with a token", "An ingress cannot reach it"),
    ],
)
def test_notes_say_what_an_admin_may_not_have_thought_of(notes: Callable[[str], str], case: str, says: str) -> None:
    assert says in notes(case)
    assert says not in notes("defaults")
