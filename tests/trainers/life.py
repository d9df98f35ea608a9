"""A training job that is ended somewhere, as often as a test wants, by signals or at a moment of its saves.

There is no agent: its part is tested elsewhere.
"""

import os
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from tests.harness.agent_process import wait_until
from tests.harness.bounds import HANG_SECONDS
from tests.harness.warm_python import WarmProcess, warm_python
from tests.servers.process import free_port
from tests.trainers.job import LIBRARIES
from tests.trainers.save_moments import Moment, Way
from tests.trainers.trainers import EXAMPLES

from keepstep.checkpoints.records import is_whole, read_records
from keepstep_api import names

ALONE: Final = Path(__file__).with_name("alone.py")
DISTURBED: Final = Path(__file__).with_name("disturbed.py")
_POLL_SECONDS: Final = 0.01
_LINE: Final = re.compile(r"step=(\d+) loss=(\S+)\n")


class Life:
    """All ranks of a job of `steps` steps that saves at every second one, from their start to their end.

    `moment`: where rank 0 ends itself in its second save, and `way`, how. `asynchronous`: what the variable says; None:
    there is none. `looks`: it reads, adds to and loads what it saves. `alone`: without Keepstep.
    """

    def __init__(
        self,
        trainer: str,
        folder: Path,
        volume: Path,
        ranks: int,
        *,
        steps: int,
        moment: Moment | None = None,
        way: Way = Way.KILL,
        asynchronous: bool | None = True,
        looks: bool = False,
        alone: bool = False,
    ) -> None:
        folder.mkdir(parents=True)
        self._ranks: list[WarmProcess] = []
        self._outputs = [folder / f"rank-{rank}.log" for rank in range(ranks)]
        port = free_port()
        program = ALONE if alone else DISTURBED
        words = [str(program), str(EXAMPLES / f"{trainer}.py"), f"--steps={steps}", "--save-every=2"]
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
                **({} if asynchronous is None else {names.ENV_ASYNCHRONOUS_SAVES: str(asynchronous).lower()}),
                **({"LOOKS": "yes"} if looks else {}),
                **({"DISTURB_AT": moment, "DISTURB_BY": way} if moment and rank == 0 else {}),
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
        wait_until(lambda: bool(self.losses) or not self._running(), HANG_SECONDS, "it trains")

    def send_signal(self, number: signal.Signals, rank: int) -> None:
        """Send it to one rank."""
        self._ranks[rank].send_signal(number)

    def wait_any(self, seconds: float) -> None:
        """Until a rank has ended, or for so long."""
        until = time.monotonic() + seconds
        while len(self._running()) == len(self._ranks) and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)

    def wait(self) -> Sequence[int]:
        """Return their exit codes."""
        try:
            return [one.wait(HANG_SECONDS) for one in self._ranks]
        except subprocess.TimeoutExpired as error:
            self.kill()
            raise AssertionError(f"it does not end\n{self.output()}") from error

    def kill(self) -> None:
        """As launchers do where a rank is gone."""
        for one in self._ranks:
            one.kill()
        for one in self._ranks:
            one.wait(HANG_SECONDS)

    def _running(self) -> list[WarmProcess]:
        return [one for one in self._ranks if one.poll() is None]


def newest_whole(volume: Path) -> int:
    """The step of the newest checkpoint that was recorded and is whole; 0 without one."""
    for record in read_records(volume / names.STATE_DIRECTORY / names.RECORDS_DIRECTORY):
        if is_whole(record, volume / (record.directory or names.CHECKPOINT_DIRECTORY) / record.name):
            return record.step
    return 0
