"""The comparison with the OpenShift AI SDK, without the SDK: what its page says, and how the SDK's code is called."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.beside_sdk.__main__ import main
from benchmarks.beside_sdk.report import Rounds, Turn, notes_of, page, stalls
from benchmarks.beside_sdk.with_sdk import FOLDER, INSTRUMENTATION
from tests.harness.bounds import HANG_SECONDS

ROOT = Path(__file__).parents[2]
SDK = Turn(first_stall=0.2, later_stall=0.1, to_durable=3.0, resumed_start=4.0)


def turn(later_stall: float, to_durable: float, resumed_start: float) -> Turn:
    return Turn(first_stall=9.0, later_stall=later_stall, to_durable=to_durable, resumed_start=resumed_start)


def test_a_stall_is_the_pause_after_a_step_that_saves_less_the_usual_pause() -> None:
    lines = []
    for step in range(1, 8):
        pause = {3: 0.51, 6: 0.11}.get(step, 0.01)
        lines += [f"begin {step} {step * 10}\n", f"end {step} {step * 10 + 10 - pause}\n"]
    # The last line is being written.
    text = "".join([*lines, "begin 8 8"])
    notes = notes_of(text)
    assert (notes[-1].what, notes[-1].step) == ("end", 7)
    assert stalls(notes, 3) == pytest.approx([0.5, 0.1])


@pytest.mark.parametrize(
    ("ours", "met"),
    [
        (turn(0.1, 3.0, 4.8), [True, True, True]),
        (turn(0.11, 2.0, 4.0), [False, True, True]),
        (turn(0.01, 3.1, 4.0), [True, False, True]),
        (turn(0.01, 2.0, 4.9), [True, True, False]),
    ],
)
def test_each_goal_is_met_or_missed_by_itself(ours: Turn, met: list[bool]) -> None:
    rounds = Rounds(keepstep=[ours], sdk=[SDK])
    assert [one for _, _, one in rounds.goals()] == met


def test_the_median_is_that_of_each_round_s_ratio() -> None:
    # One busy round makes the ratio of the medians 2.
    seconds = [(1.0, 2.0), (8.0, 4.0), (4.0, 8.0)]
    rounds = Rounds(
        keepstep=[turn(ours, 1.0, 1.0) for ours, _ in seconds], sdk=[turn(theirs, 1.0, 1.0) for _, theirs in seconds]
    )
    assert rounds.ratio("later_stall") == 0.5
    text = " ".join(page(rounds, {"SDK": "1.2.3"}).split())
    assert "SDK 1.2.3" in text
    assert "≤ 1 x the SDK's | 0.50 x | yes |" in text


@pytest.mark.parametrize("words", [[], ["--sdk", "/nonexistent"]])
def test_without_the_sdk_it_says_where_that_is_from(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["beside_sdk", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "hint: git clone https://github.com/opendatahub-io/kubeflow-sdk" in capsys.readouterr().err


def test_the_sdk_s_code_runs_around_the_program(tmp_path: Path) -> None:
    (tmp_path / INSTRUMENTATION).parent.mkdir(parents=True)
    (tmp_path / FOLDER / "constants.py").write_text("MARKER = 'incomplete'\n")
    (tmp_path / FOLDER / "__init__.py").write_text("import no_such_client_of_kubernetes\n")
    (tmp_path / INSTRUMENTATION).write_text(
        "def _create_checkpoint_instrumentation(configuration):\n"
        "    from kubeflow.trainer.rhai.constants import MARKER\n"
        "    before, after = configuration['words']\n"
        "    return None, None, lambda: print(before, MARKER), lambda: print(after)\n"
    )
    (tmp_path / "trains.py").write_text("import sys\nprint('trains', *sys.argv[1:])\n")
    words = [str(tmp_path), '{"words": ["before", "after"]}', "trains", "well"]
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.beside_sdk.with_sdk", *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert ran.stdout.splitlines() == ["before incomplete", "trains well", "after"], ran.stderr
