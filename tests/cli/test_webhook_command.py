"""What an admin is told when the webhook starts, rather than every user when a pod does."""

import subprocess
import sys

from tests.harness.bounds import HANG_SECONDS


def test_defaults_with_which_no_pod_could_be_injected_are_refused_at_once() -> None:
    options = ["--default-annotation", "keep-lasts=2", "--default-annotation", "part-size-bytes=1", "--memory", "1Mi"]
    done = subprocess.run(
        [sys.executable, "-m", "keepstep_agent", "webhook", "--image", "example.com/keepstep:1", *options],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "error: no pod could be injected with these defaults: "
        "there is no annotation keepstep.dev/keep-lasts: did you mean keepstep.dev/keep-last?; "
        "keepstep.dev/memory: '1Mi' is less than the 128Mi that the agent needs: write a size such as 256Mi; "
        "keepstep.dev/part-size-bytes: 1 is less than S3's minimum: give 5MiB or more",
        "hint: docs/annotations.md says which annotations every pod may be given",
    ]
