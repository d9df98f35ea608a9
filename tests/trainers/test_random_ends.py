"""Every framework's trainer is ended at random, and always goes on from its newest whole checkpoint.

It saves at every second step, so that most ends come while a checkpoint is copied, written, named or recorded. It is
ended by SIGKILL, by SIGTERM, which SIGKILL follows at times, and by an exception. There is no agent: its part is tested
elsewhere. `make soak` ends each two hundred times, which takes a quarter of an hour.
"""

import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

import pytest
from tests.harness.agent_process import wait_until
from tests.harness.warm_python import WarmProcess, warm_python
from tests.servers.process import free_port
from tests.trainers.job import LIBRARIES
from tests.trainers.trainers import EXAMPLES

from mooring.checkpoints.records import is_whole, read_records
from mooring_api import names

DISTURBED: Final = Path(__file__).with_name("disturbed.py")
ENDS: Final = int(os.environ.get("MOORING_RANDOM_ENDS", "40"))
"""Of each framework; of four, one is with two ranks."""
STEPS: Final = 60
"""Of a whole training. When it has ended by itself, the next begins on an empty volume."""
LONGEST_SECONDS: Final = 1.2
"""From the first step to the end of a life."""
# They bound a hang and judge no speed.
START_SECONDS: Final = 120.0
END_SECONDS: Final = 120.0
_LINE: Final = re.compile(r"step=(\d+) loss=(\S+)\n")

pytestmark = [pytest.mark.trainers, pytest.mark.timeout(3000)]


class Life:
    """All ranks of a job, from their start to their end."""

    def __init__(self, trainer: str, folder: Path, volume: Path, ranks: int) -> None:
        folder.mkdir(parents=True)
        self._ranks: list[WarmProcess] = []
        self._outputs = [folder / f"rank-{rank}.log" for rank in range(ranks)]
        port = free_port()
        words = [str(DISTURBED), str(EXAMPLES / f"{trainer}.py"), f"--steps={STEPS}", "--save-every=2"]
        for rank, output in enumerate(self._outputs):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "GLOO_SOCKET_IFNAME": "lo",
                names.ENV_VOLUME: str(volume),
                names.ENV_CHECKPOINT_DIRECTORY: str(volume / names.CHECKPOINT_DIRECTORY),
            }
            with ExitStack() as files:
                nothing = files.enter_context(Path(os.devnull).open("rb"))
                out = files.enter_context(output.open("wb"))
                warm = warm_python(LIBRARIES[trainer])
                descriptors = [nothing.fileno(), out.fileno(), out.fileno()]
                self._ranks.append(
                    warm.start(words, environment=environment, files=descriptors, directory=folder, new_session=True)
                )

    @property
    def losses(self) -> Sequence[tuple[int, str]]:
        return [(int(step), loss) for step, loss in _LINE.findall(self._outputs[0].read_text(errors="replace"))]

    def output(self) -> str:
        return "\n".join(path.read_text(errors="replace") for path in self._outputs)

    def wait_training(self) -> None:
        """Until its first step is done, or it ends."""
        wait_until(lambda: bool(self.losses) or not self._running(), START_SECONDS, "it trains")

    def end(self, chance: random.Random) -> None:
        """End it, one way or another."""
        way = chance.choices(("kill", "notice", "notice and kill", "exception"), weights=(10, 3, 3, 2))[0]
        if way == "kill":
            self._kill()
            return
        rank = chance.choice(self._ranks)
        if way == "exception":
            # In some places, such as a finalizer, Python ignores it.
            rank.send_signal(signal.SIGUSR1)
            with suppress(subprocess.TimeoutExpired):
                rank.wait(LONGEST_SECONDS)
            # As launchers do: who waits for a rank that is gone is ended too.
            self._kill()
            return
        rank.send_signal(signal.SIGTERM)
        if way == "notice and kill":
            time.sleep(chance.uniform(0, 0.2))
            self._kill()
        else:
            self.wait(self._ranks)

    def wait(self, ranks: Sequence[WarmProcess] | None = None) -> Sequence[int]:
        """Return their exit codes."""
        try:
            return [one.wait(END_SECONDS) for one in ranks or self._ranks]
        except subprocess.TimeoutExpired as error:
            self._kill()
            raise AssertionError(f"it does not end\n{self.output()}") from error

    def _running(self) -> list[WarmProcess]:
        return [one for one in self._ranks if one.poll() is None]

    def _kill(self) -> None:
        for one in self._ranks:
            one.kill()
        for one in self._ranks:
            one.wait(END_SECONDS)


def newest_whole(volume: Path) -> int:
    """The step of the newest checkpoint that was recorded and is whole; 0 without one."""
    for record in read_records(volume / names.STATE_DIRECTORY / names.RECORDS_DIRECTORY):
        if is_whole(record, volume / (record.directory or names.CHECKPOINT_DIRECTORY) / record.name):
            return record.step
    return 0


@pytest.mark.parametrize("trainer", list(LIBRARIES))
@pytest.mark.parametrize(("ranks", "ends"), [(1, ENDS - ENDS // 4), (2, ENDS // 4)], ids=["alone", "two"])
def test_ended_at_any_moment_it_goes_on_from_its_newest_whole_checkpoint(
    trainer: str, ranks: int, ends: int, tmp_path: Path
) -> None:
    undisturbed = Life(trainer, tmp_path / "undisturbed", tmp_path / "volume", ranks)
    assert undisturbed.wait() == [0] * ranks, undisturbed.output()
    expected = undisturbed.losses

    seed = random.randrange(1 << 32)
    print(f"seed={seed}")
    chance = random.Random(seed)
    volume = tmp_path / "volume-0"
    for number in range(ends):
        begins_after = newest_whole(volume)
        if begins_after == STEPS:
            volume, begins_after = tmp_path / f"volume-{number}", 0
        life = Life(trainer, tmp_path / f"life-{number}", volume, ranks)
        life.wait_training()
        time.sleep(chance.uniform(0, LONGEST_SECONDS))
        life.end(chance)
        losses = life.losses
        # A checkpoint may have its name, and no record yet.
        begins_after = max(begins_after, losses[0][0] - 1) if losses else begins_after
        first = next(index for index, (step, _) in enumerate(expected) if step == begins_after + 1)
        assert losses == expected[first : first + len(losses)], f"after step {begins_after}\n{life.output()}"
