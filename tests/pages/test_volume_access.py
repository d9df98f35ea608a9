"""Nobody in the agent opens a path of the shared volume by its name: that is `shared_volume`'s alone.

A path that the trainer may have replaced by a link leads anywhere. So modules that have to do with the volume use none
of the calls that take a path; the exceptions below say what their paths are instead.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import keepstep_agent

AGENT = Path(keepstep_agent.__file__).parent

# Of pathlib, os and shutil: what opens, lists, looks at, makes, links, renames or removes by a path.
METHODS = {
    "chmod", "glob", "hardlink_to", "is_dir", "is_file", "is_symlink", "iterdir", "lstat", "mkdir", "open",
    "read_bytes", "read_text", "readlink", "rename", "rglob", "rmdir", "stat", "symlink_to", "touch", "unlink",
    "write_bytes", "write_text",
}  # fmt: skip
FUNCTIONS = {
    "os": {"access", "chmod", "link", "listdir", "lstat", "makedirs", "mkdir", "open", "readlink", "remove", "rename",
           "replace", "rmdir", "scandir", "stat", "symlink", "truncate", "unlink", "utime", "walk"},
    "shutil": {"copy", "copyfile", "copytree", "disk_usage", "move", "rmtree"},
}  # fmt: skip

# Folders whose paths are the volume's business, and of them what is left out.
HELD = ("adapters", "restore", "runtime")
WHY_NOT = {
    "adapters/volume/shared_volume.py": "is the one way",
    "adapters/output/directory_hints.py": "hears that something changed, wherever a link may lead, and reads nothing",
    "adapters/durable_files.py": "writes below a file:// destination, and syncs the state directory",
    "adapters/volume/identity.py": "makes the volume itself",
    "adapters/volume/shared_folders.py": "makes a state directory that is not on the volume",
    "adapters/volume/content_check.py": "reads /proc/self/mountinfo",
    "adapters/journal.py": "lies in the state directory, and refuses links there",
    "adapters/file_store/directory.py": "is a file:// destination",
    "adapters/file_store/store.py": "is a file:// destination",
    "adapters/output/program.py": "reads /proc",
    "adapters/control_group.py": "reads the control group's files",
    "adapters/kubernetes.py": "reads the service account's files",
    "adapters/s3/credentials.py": "reads a mounted Secret and the AWS files",
    "adapters/s3/http_session.py": "reads a CA bundle",
    "adapters/transfer/sink.py": "opens a descriptor again, by /proc/self/fd",
    "adapters/transfer/tls_connector.py": "reads a CA bundle",
    "runtime/process/autoload_check.py": "reads /proc; its file on the volume it opens by `shared_volume`",
    "runtime/process/descendants.py": "reads /proc",
    "runtime/process/runner.py": "opens the terminal",
    "runtime/process/open_volume.py": "makes the volume itself",
    "runtime/api/server.py": "is the socket, whose place is a setting",
}


def calls_by_path(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module in FUNCTIONS:
            yield f"{node.lineno}: from {node.module} import"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "open":
            yield f"{node.lineno}: open"
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner, name = node.func.value, node.func.attr
        if isinstance(owner, ast.Name) and owner.id in FUNCTIONS:
            given_folder = any(keyword.arg in {"dir_fd", "src_dir_fd", "dst_dir_fd"} for keyword in node.keywords)
            if name in FUNCTIONS[owner.id] and not given_folder:
                yield f"{node.lineno}: {owner.id}.{name}"
        elif name in METHODS and not _is_of_a_folder(owner):
            yield f"{node.lineno}: .{name}"


def _is_of_a_folder(owner: ast.expr) -> bool:
    """By the names that open folders and files have in these modules; mypy holds that they are such."""
    folders = {"root", "folder", "directory", "target", "source", "staged", "incoming", "opened", "to", "volume"}
    return isinstance(owner, ast.Name) and owner.id in folders | {"entry", "file", "self"}


def test_modules_that_touch_the_volume_use_no_call_that_takes_a_path() -> None:
    found = {}
    for part in HELD:
        for path in (AGENT / part).rglob("*.py"):
            name = path.relative_to(AGENT).as_posix()
            calls = list(calls_by_path(path.read_text())) if name not in WHY_NOT else []
            if calls:
                found[name] = calls
    assert found == {}


def test_every_exception_is_a_module_that_is_there() -> None:
    assert [name for name in WHY_NOT if not (AGENT / name).is_file()] == []


def test_a_call_by_path_is_found() -> None:
    source = "import os\nos.open(path, 0)\nPath(x).read_bytes()\nos.open(name, 0, dir_fd=folder)\nroot.unlink(x)\n"
    assert list(calls_by_path(source)) == ["2: os.open", "3: .read_bytes"]
    assert list(calls_by_path("from os import open\nopen(path)\n")) == ["1: from os import", "2: open"]
