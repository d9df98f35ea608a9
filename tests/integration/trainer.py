"""A small training loop with the real client, for tests: counts steps and writes them down.

Environment: `STEPS`, `EVERY`, `SAVE_BYTES`, `STEP_SECONDS`, `STEP_LOG` (one line `<step> <seconds it took>` per step).
Prints what it begins from and how it ends.
"""

import os
import sys
import time
from pathlib import Path

import keepstep
from keepstep.agent_client import channel

# An agent that answers late on a busy machine is not away.
channel.ANNOUNCE_SECONDS = 300.0  # type: ignore[misc]
channel.Channel._call.__kwdefaults__["deadline_seconds"] = 300.0  # type: ignore[index]


def main() -> None:
    steps, every = int(os.environ["STEPS"]), int(os.environ["EVERY"])
    payload = os.urandom(int(os.environ["SAVE_BYTES"]))
    checkpointer = keepstep.Checkpointer()
    path = checkpointer.resume()
    step = int((path / "step").read_text()) if path else 0
    with Path(os.environ["STEP_LOG"]).open("a") as log:
        print(f"begin {step}", flush=True)
        while step < steps and not checkpointer.stopping:
            began = time.monotonic()
            step += 1
            time.sleep(float(os.environ["STEP_SECONDS"]))  # the work of one step
            if step == steps or checkpointer.should_save(step, every=every):
                with checkpointer.save(step, kind="final" if step == steps else None) as directory:
                    (directory / "model.bin").write_bytes(payload)
                    (directory / "step").write_text(str(step))
            log.write(f"{step} {time.monotonic() - began:.6f}\n")
            log.flush()
    checkpointer.finish()
    print(f"done {step}", flush=True)
    sys.exit(int(os.environ.get("EXIT_CODE", "0")))


if __name__ == "__main__":
    main()
