"""A program that cannot load its newest snapshot gets the one before, under `keepstep run`, with real processes."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.harness.bounds import HANG_SECONDS
from tests.harness.warm_python import keepstep

PROGRAM = """
import sys
from pathlib import Path
out, made = Path(sys.argv[1]), sys.argv[2:]
with open(out / "train.log", "a") as log:
    print("begun", file=log)
if made == ["typo"]:
    sys.exit(1)
newest = max(out.glob("*.json"), default=None)
print("found", int(newest.read_text()) if newest else 0, flush=True)
for name in made:
    (out / f"{name}.json").write_text(name)
"""


class Job:
    """One job on one machine, with a disk that can be lost."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.disks = folder, 0
        self.lose_the_disk()

    def lose_the_disk(self) -> None:
        self.disks += 1
        self.volume = self.folder / str(self.disks)
        (self.volume / "out").mkdir(parents=True)

    def run(self, *arguments: str, code: int = 0, options: tuple[str, ...] = ()) -> "subprocess.CompletedProcess[str]":
        out = str(self.volume / "out")
        words = ["run", f"--to=file://{self.folder}/store", f"--volume={self.volume}", f"--watch={out}", *options]
        line = [sys.executable, "-m", "keepstep_agent", *words, "--", sys.executable, "-c", PROGRAM, out, *arguments]
        result = subprocess.run(line, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
        assert result.returncode == code, result.stderr
        return result


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """Its second save, of two, is one that it cannot load."""
    job = Job(tmp_path)
    job.run("1")
    job.run("2 torn")
    return job


@pytest.mark.parametrize("loses_its_disk", [False, True])
def test_after_three_starts_that_failed_the_snapshot_before_is_restored(loses_its_disk: bool, job: Job) -> None:
    for _ in range(3):
        if loses_its_disk:
            job.lose_the_disk()
        job.run(code=1)
    if loses_its_disk:
        job.lose_the_disk()
    fallen_back = job.run("3")
    assert fallen_back.stdout == "found 1\n"
    assert "3 starts in a row that resumed from it have failed within a minute" in fallen_back.stderr
    assert job.run().stdout == "found 3\n"
    listed = keepstep("ls", f"file://{job.folder}/store").stdout
    assert "a restore did not take it: 3 starts in a row" in listed


def test_a_program_that_fails_before_it_reads_anything_keeps_its_newest_snapshot(job: Job) -> None:
    for _ in range(3):
        job.run("typo", code=1)
    assert "that resumed from it have failed" not in job.run("typo", code=1).stderr
    assert (job.volume / "out" / "2 torn.json").exists()


def test_it_can_be_turned_off(job: Job) -> None:
    for _ in range(4):
        failed = job.run(code=1, options=("--fall-back-after=0",))
    assert "that resumed from it have failed" not in failed.stderr
