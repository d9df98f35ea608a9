"""Every function of agent and client that removes or replaces something has a row in docs/contributing/removals.md.

A function counts by the names that it uses, because a test cannot know the types. Where a name means other things too,
the shape of the call tells them apart: `path.replace(target)` has one argument, `text.replace(old, new)` has two.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = ROOT / "docs" / "contributing" / "removals.md"
PACKAGES: Final = (ROOT / "agent" / "keepstep_agent", ROOT / "client" / "keepstep")

NAMES: Final = frozenset(
    {
        *("unlink", "rmdir", "rmtree", "removedirs", "remove_if_empty", "remove_recorded"),
        *("rename", "renames", "move_aside", "put_back", "copyfile", "copytree"),
        *("truncate", "ftruncate", "O_TRUNC", "write_text", "write_bytes", "write_durably"),
        *("delete", "delete_unlocked", "delete_object", "abort_upload", "abort_multipart_upload"),
    }
)
"""These mean a file, or an object in a store, also where a function is only passed on."""

LISTS: Final = frozenset(
    {
        "keepstep.agent_client.liveness:claimed",
        "keepstep.autoload.path.sitecustomize:_Answer.find_spec",
        "keepstep_agent.adapters.s3.credentials:make_session",
        "keepstep_agent.catalog.reading:_add_shared",
        "keepstep_agent.core.agent.upload_queue:_next_of",
        "keepstep_agent.runtime.monitors.ranks:LiveRanks.attached",
        "keepstep_agent.runtime.process.agent_supervisor:AgentSupervisor._mark_delivered",
        "keepstep_agent.runtime.work.duplicate_save_guard:_announcement_times",
        "keepstep_agent.runtime.work.fetch_requests:Fetch.waiting",
    }
)
"""These remove an element of a list or a set, and no file."""


def test_the_page_has_a_row_for_each_removal_and_for_nothing_else() -> None:
    in_code, on_page = set(removals_in_code()), set(removals_on_page())
    assert LISTS - in_code == set()
    assert in_code - LISTS - on_page == set(), "without a row"
    assert on_page - in_code == set(), "rows without a call"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("path.unlink()", True),
        ("for_each(keys, store.delete)", True),
        ("os.open(path, os.O_WRONLY | os.O_TRUNC)", True),
        ("path.open('wb')", True),
        ("open(path, 'w')", True),
        ("path.replace(target)", True),
        ("shutil.move(path, target)", True),
        ("folder.remove(name)", True),
        ("text.replace('a', 'b')", False),
        ("replace(value, name=1)", False),
        ("dataclasses.replace(value, name=1)", False),
        ("checkpoint.move(trigger)", False),
        ("path.open('rb')", False),
        ("text.removeprefix('w')", False),
    ],
)
def test_the_shape_of_a_call_tells_a_removal(line: str, expected: bool) -> None:
    assert any(map(removes, ast.walk(ast.parse(line)))) is expected


def removals_on_page() -> Iterator[str]:
    """The first cell of a row has the module, then its functions."""
    for cell in re.findall(r"^\| (`keepstep[^|]+) \|", PAGE.read_text(), re.MULTILINE):
        module, *functions = re.findall(r"`([^`]+)`", cell)
        yield from (f"{module}:{function}" for function in functions)


def removals_in_code() -> Iterator[str]:
    for package in PACKAGES:
        for path in package.rglob("*.py"):
            module = ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__")
            for name, function in functions_of(ast.parse(path.read_text())):
                if any(map(removes, ast.walk(function))):
                    yield f"{module}:{name}"


def functions_of(scope: ast.Module | ast.ClassDef) -> Iterator[tuple[str, ast.stmt]]:
    """Yield functions and methods with their names. Other statements of a module count as one function."""
    for node in scope.body:
        if isinstance(node, ast.ClassDef):
            yield from ((f"{node.name}.{name}", function) for name, function in functions_of(node))
        elif not isinstance(node, ast.Import | ast.ImportFrom):
            yield getattr(node, "name", "<module>"), node


def removes(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name in NAMES
        case ast.Call(func=ast.Attribute(attr="replace" | "remove"), args=[_], keywords=[]):
            return True
        case ast.Call(func=ast.Attribute(value=ast.Name(id="shutil"), attr="move")):
            return True
        case ast.Call(func=ast.Attribute(attr="open" | "fdopen") | ast.Name(id="open"), args=arguments):
            # The mode is the first argument of a path's `open`, and the second of others.
            return any(isinstance(one, ast.Constant) and "w" in str(one.value) for one in arguments[:2])
    return False
