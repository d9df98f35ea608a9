"""The pages a newcomer reads: what they name exists, what they list is complete, and the README's loop runs."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from tests.harness.bounds import HANG_SECONDS

from keepstep_agent.cli import cli

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_test_that_a_page_names_by_its_path_exists(page: Path) -> None:
    named = re.findall(r"`(tests/[\w/.-]+)`", page.read_text())
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        target, _, heading = link.partition("#")
        if target.startswith("https://"):
            continue
        file = page.parent / target if target else page
        assert file.exists(), link
        if heading:
            headings = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
            assert heading in [text.lower().replace(" ", "-") for text in headings], link


def test_the_index_lists_every_page() -> None:
    index = ROOT / "docs" / "index.md"
    listed = {(index.parent / link).resolve() for link in re.findall(r"\]\(([^)#\s]+)\)", index.read_text())}
    pages = set((ROOT / "docs").rglob("*.md")) - {index}
    assert sorted(page.name for page in pages - listed) == []


@pytest.mark.parametrize("page", ["promises.md", "threat-model.md"])
def test_every_promise_names_a_test_that_exists(page: str) -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / page).read_text()))
    existing: set[str] = set()
    for file in (ROOT / "tests").rglob("test_*.py"):
        existing.update(re.findall(r"def (test_\w+)\(", file.read_text()))
    assert named
    assert named - existing == set()


def test_the_page_of_commands_has_every_command() -> None:
    page = (ROOT / "docs" / "running.md").read_text()
    named = re.findall(r"^\| `keepstep ([a-z]+)", page, re.MULTILINE)
    assert sorted(named) == sorted(cli.list_commands(click.Context(cli)))


@pytest.mark.timeout(3 * HANG_SECONDS)
def test_the_loop_of_the_readme_runs_alone_and_resumes(tmp_path: Path) -> None:
    program = write_loop(tmp_path)
    assert run(tmp_path, sys.executable, program) == "None True\n"
    assert (tmp_path / "checkpoints" / "checkpoint-1000" / "state.pt").exists()
    # The second start has nothing left to train.
    assert run(tmp_path, sys.executable, program) == "checkpoint-1000 False\n"


@pytest.mark.nightly
@pytest.mark.timeout(3 * HANG_SECONDS)
def test_the_loop_of_the_readme_goes_on_from_its_destination_after_its_disk_is_lost(short_directory: Path) -> None:
    program = write_loop(short_directory)
    destination = short_directory / "bucket"
    destination.mkdir()
    command = (sys.executable, "-m", "keepstep_agent", "run", "--to", f"file://{destination}", "--")
    assert run(short_directory, *command, sys.executable, program) == "None True\n"
    shutil.rmtree(short_directory / "keepstep")
    assert run(short_directory, *command, sys.executable, program) == "checkpoint-1000 False\n"


@pytest.fixture
def short_directory() -> Iterator[Path]:
    """pytest's own directories are too deep for a unix socket."""
    with tempfile.TemporaryDirectory(prefix="readme-") as directory:
        yield Path(directory)


def write_loop(directory: Path) -> Path:
    """The README's block as a program; at its end it tells what it resumed from and whether it trained at all."""
    pytest.importorskip("torch")
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) == 1
    program = directory / "train.py"
    program.write_text(blocks[0] + "print(path and path.name, 'loss' in globals())\n")
    return program


def run(directory: Path, *command: object) -> str:
    """What it printed; it must end with 0."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KEEPSTEP_")}
    done = subprocess.run(
        list(map(str, command)), cwd=directory, env=environment, capture_output=True, text=True, timeout=HANG_SECONDS
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
