"""Tables and progress, as the command line prints them."""

import sys

import pytest

from keepstep_agent.cli.formatting import progress_line, table

ROWS = [
    ("STEP", "NAME", "SAVE"),
    ("1200", "a-very-long-name-of-a-checkpoint", "0123abcd-000012"),
    ("7", "\x1b[2J", ""),
]


def test_in_a_pipe_a_row_stays_on_one_line() -> None:
    assert list(table(ROWS, right=(0,), folded={1: 10, 2: 9})) == [
        "STEP  NAME                              SAVE",
        "1200  a-very-long-name-of-a-checkpoint  0123abcd-000012",
        "   7  \\x1b[2J",
    ]


@pytest.mark.parametrize("columns", [20, 30, 40, 50, 60])
def test_in_a_terminal_cells_wrap_where_they_may_and_lose_nothing(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = list(table(ROWS, right=(0,), folded={2: 9, 1: 10}))
    assert max(map(len, lines)) <= max(columns, len("1200") + 2 + 10 + 2 + 9)
    names = [line[6:].split("  ")[0].strip() for line in lines[1:-1]]
    assert "".join(names) == "a-very-long-name-of-a-checkpoint"


def test_progress_is_one_line_of_a_terminal_that_is_gone_at_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with progress_line() as advance:
        advance("step 7", 1, 2)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress_line() as advance:
        advance("step 7", 2**20, 2**30)
        advance("step 7", 2**21, 2**30)
    first, *rest, last = capsys.readouterr().err.split("\r\x1b[K")
    assert first == last == ""
    assert [line.startswith("step 7: 1.0 MiB of 1.0 GiB, ") for line in rest] == [True]
