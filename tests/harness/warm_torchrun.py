"""torchrun whose ranks are forked, as it is itself, from a process that has imported their libraries.

python -m tests.harness.warm_torchrun <torchrun's arguments>

What torchrun is told, what it starts and what it does with its ranks is all its own: only how a rank's Python comes
into being is ours. `warm_python.warm_torchrun` returns the process to start it from.
"""

from contextlib import suppress
from typing import Any

from tests.harness.warm_python import WarmProcess, WarmPython
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler


def main() -> None:
    # Now, as torchrun will have threads, which a fork does not take along.
    ranks = WarmPython.fork()

    def start(handler: SubprocessHandler, command: tuple[str, ...], environment: dict[str, str]) -> WarmProcess:
        out, errors = handler._stdout, handler._stderr
        files = [0, out.fileno() if out else 1, errors.fileno() if errors else 2]
        return ranks.start(command[1:], environment=environment, files=files, new_session=True)

    def close_one_that_may_be_gone(handler: SubprocessHandler, *arguments: Any, **keywords: Any) -> None:
        # A child of torchrun's own that has left is there until it is waited for; ours is gone.
        with suppress(ProcessLookupError):
            close(handler, *arguments, **keywords)

    close = SubprocessHandler.close
    SubprocessHandler._popen = start  # type: ignore[assignment,method-assign]
    SubprocessHandler.close = close_one_that_may_be_gone  # type: ignore[assignment,method-assign]
    run.main()


if __name__ == "__main__":
    main()
