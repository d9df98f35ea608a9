"""A training that gets SIGTERM while a save is being written in the background; that save waits for the signal.

python -m tests.torch_loop.stopped_while_saving
"""

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.harness.bounds import HANG_SECONDS
from tests.torch_loop.small import Small, make_loader

from keepstep import Checkpointer
from keepstep.asynchronous_saves.background_writer import BackgroundWriter
from keepstep.torch_loop import TorchLoop
from keepstep.torch_loop.storage import Storage


def main() -> None:
    is_stopped, is_waited_for = threading.Event(), threading.Event()
    save, wait = Storage.save, BackgroundWriter.wait

    def slow_save(storage: Storage, state: dict[str, Any], directory: Path, **options: Any) -> None:
        assert is_waited_for.wait(HANG_SECONDS)
        save(storage, state, directory, **options)
        print(directory.name.split("-")[1], "written")

    def told_wait(writer: BackgroundWriter) -> bool:
        if is_stopped.is_set():
            is_waited_for.set()
        return wait(writer)

    Storage.save, BackgroundWriter.wait = slow_save, told_wait  # type: ignore[method-assign,assignment]
    loader = make_loader("plain", workers=0, augments=True)
    small = Small(loader)
    loop = TorchLoop(
        small.model,
        small.optimizer,
        scheduler=small.scheduler,
        scaler=small.scaler,
        loader=loader,
        checkpointer=Checkpointer(keep_local=10),
    )
    for batch in loop.batches(steps=100):
        small.backward(batch)
        small.step()
        if loop.steps_done == 5:
            print("6 stopped")
            is_stopped.set()
            os.kill(os.getpid(), signal.SIGTERM)
        loop.step(every=5)
        if loop.steps_done == 5:
            print("5 begun")


if __name__ == "__main__":
    main()
