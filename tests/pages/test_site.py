"""The pages as a site: it builds without a warning, and the reference has every public name."""

import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.harness.bounds import HANG_SECONDS

import keepstep

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `make site` builds it, from a copy."""
    project = tmp_path_factory.mktemp("project")
    shutil.copy(ROOT / "zensical.toml", project)
    for folder in ("client", "proto"):
        (project / folder).symlink_to(ROOT / folder)
    pages = project / ".tools" / "pages"
    unwanted = shutil.ignore_patterns("node_modules", "__pycache__")
    for folder in ("docs", "benchmarks", "charts", "examples", "proto", "tests/chaos", "tests/formats"):
        shutil.copytree(ROOT / folder, pages / folder, ignore=unwanted)
    for page in ROOT.glob("*.md"):
        shutil.copy(page, pages)
    built = subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--strict"],
        cwd=project,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return project / "build" / "site"


def pages_of(nav: list[Any]) -> Iterator[str]:
    for entry in nav:
        if isinstance(entry, str):
            yield entry
        else:
            for value in entry.values():
                yield from pages_of(value if isinstance(value, list) else [value])


def test_the_menu_names_every_page_once_and_no_other() -> None:
    named = sorted(pages_of(tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]))
    existing = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")]
    assert named == sorted([path.relative_to(ROOT).as_posix() for path in existing] + ["charts/keepstep/README.md"])


def test_every_page_is_built_and_every_link_leads_somewhere(site: Path) -> None:
    for page in ROOT.glob("docs/**/*.md"):
        path = page.relative_to(ROOT).with_suffix("")
        built = site / path.parent if path.name == "index" else site / path
        assert (built / "index.html").exists(), page


def test_the_reference_has_every_public_name(site: Path) -> None:
    reference = (site / "docs" / "reference" / "index.html").read_text()
    # `keepstep.protect` is a function in a module of its name.
    names = [f"keepstep.{name}" for name in keepstep.__all__ if name != "protect"]
    missing = [
        name
        for name in [*names, "keepstep.protect.protect", "keepstep.torch_loop.TorchLoop"]
        if f'id="{name}"' not in reference
    ]
    assert missing == []
