"""A training process under the test's control: it takes a step for every line on its standard input.

Prints what it does, one line each. Environment: `STEPS`, `EVERY`, and `HANG_IN_SAVE` to stop half-way through a save.
"""

import logging
import os
import sys

import keepstep
from keepstep.agent_client import channel

# On a slow machine an agent that answers is not away.
channel.ANNOUNCE_SECONDS = 300.0  # type: ignore[misc]
channel.Channel._call.__kwdefaults__["deadline_seconds"] = 300.0  # type: ignore[index]


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    checkpointer = keepstep.Checkpointer()
    path = checkpointer.resume()
    step = int((path / "state").read_text()) if path else 0
    print(f"begin {step}", flush=True)
    while step < int(os.environ["STEPS"]) and not checkpointer.stopping:
        sys.stdin.readline()
        step += 1
        if checkpointer.should_save(step, every=int(os.environ["EVERY"])):
            with checkpointer.save(step) as directory:
                (directory / "half").write_bytes(b"x" * 100_000)
                if "HANG_IN_SAVE" in os.environ:
                    print("saving", flush=True)
                    sys.stdin.readline()
                (directory / "state").write_text(str(step))
        print(f"step {step}", flush=True)
    checkpointer.finish()
    print("done", flush=True)


if __name__ == "__main__":
    main()
