"""Nested JSON or TOML of any depth ends no program: a decoder gives up with RecursionError, which is no ValueError.

Every call of a decoder in agent and client lies in a `try` that expects it, or is on a list with its reason.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
PACKAGES: Final = (ROOT / "agent" / "keepstep_agent", ROOT / "client" / "keepstep")
DECODERS: Final = frozenset({"json.loads", "json.load", "msgspec.json.decode", "tomllib.loads", "tomllib.load"})
EXPECTED: Final = frozenset({"RecursionError", "Exception", "BaseException"})

_RANKS: Final = "from another rank of the job, by the job's own store"
_OWN: Final = "written by this process"
REASONS: Final = {
    "client/keepstep/asynchronous_saves/safetensors_file.py:write_tensors": _OWN,
    "client/keepstep/checkpoints/records.py:_decode": "its caller expects it",
    "client/keepstep/checkpoints/staged_save.py:encode": _OWN,
    "client/keepstep/gate/gates.py:decode": _RANKS,
    "client/keepstep/gate/gates.py:_count": _RANKS,
    "client/keepstep/ranks/coordinator.py:_choose_newest": _RANKS,
    "client/keepstep/ranks/rendezvous.py:look": _RANKS,
    "client/keepstep/ranks/rendezvous.py:rendezvous": _RANKS,
    "agent/keepstep_agent/console/refresh.py:details": _OWN,
}


def decoding(tree: ast.AST, function: str = "", expects: bool = False) -> Iterator[tuple[str, bool]]:
    """Yield the function of each call of a decoder, and whether it expects RecursionError."""
    for field, value in ast.iter_fields(tree):
        for node in value if isinstance(value, list) else [value]:
            if not isinstance(node, ast.AST):
                continue
            inside = isinstance(tree, ast.Try) and field == "body" and _names(tree.handlers) & EXPECTED
            if isinstance(tree, ast.With) and field == "body":
                inside = inside or _suppressed(tree) & EXPECTED
            if isinstance(node, ast.Call) and ast.unparse(node.func) in DECODERS:
                yield function, expects or bool(inside)
            name = node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else function
            yield from decoding(node, name, expects or bool(inside))


def _names(handlers: list[ast.ExceptHandler]) -> set[str]:
    return {name.id for one in handlers if one.type for name in ast.walk(one.type) if isinstance(name, ast.Name)}


def _suppressed(tree: ast.With) -> set[str]:
    calls = [item.context_expr for item in tree.items if isinstance(item.context_expr, ast.Call)]
    return {
        name.id
        for call in calls
        if ast.unparse(call.func).endswith("suppress")
        for argument in call.args
        for name in ast.walk(argument)
        if isinstance(name, ast.Name)
    }


def test_every_decoder_of_what_others_wrote_expects_any_depth() -> None:
    found = {
        f"{path.relative_to(ROOT)}:{function}"
        for package in PACKAGES
        for path in sorted(package.rglob("*.py"))
        for function, expects in decoding(ast.parse(path.read_text()))
        if not expects
    }
    assert found == set(REASONS)
