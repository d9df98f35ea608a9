"""What the scripts of examples/slurm train here: counts steps until it is told to stop, alone or as ranks.

Each rank writes down, in `steps-<array task>-<rank>.log`, where each of its starts begins and every step.
"""

import json
import os
import time
from pathlib import Path

import keepstep


def main() -> None:
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        import torch.distributed

        torch.distributed.init_process_group("gloo")
    checkpointer = keepstep.Checkpointer()
    part = f"rank-{rank}.json"
    path = checkpointer.resume()
    step = json.loads((path / part).read_text())["step"] if path else 0
    with Path(f"steps-{os.environ.get('SLURM_ARRAY_TASK_ID', '0')}-{rank}.log").open("a") as log:
        print(f"begin {step}", file=log, flush=True)
        while not checkpointer.stopping:
            time.sleep(0.1)  # the work of one step
            step += 1
            print(step, file=log, flush=True)
            # Only a termination makes it save.
            if checkpointer.should_save(step, every=1_000_000):
                with checkpointer.save(step) as directory:
                    (directory / part).write_text(json.dumps({"step": step}))
    checkpointer.finish()


if __name__ == "__main__":
    main()
