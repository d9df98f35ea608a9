"""Which living children a process has besides this one."""

import subprocess
import sys

from tests.harness.agent_process import wait_until
from tests.harness.bounds import HANG_SECONDS

from keepstep_agent.adapters.output.program import family, other_children


def test_a_child_that_has_ended_counts_no_more_although_nobody_has_waited_for_it() -> None:
    # Children of the tests themselves, as warm processes, would count.
    code = """if True:
        import os, subprocess, sys
        from keepstep_agent.adapters.output.program import other_children
        print(len(other_children(os.getpid())))
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        print(len(other_children(os.getpid())))
        child.stdin.close()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        print(len(other_children(os.getpid())))
    """
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_SECONDS, check=True
    )
    assert result.stdout.split() == ["0", "1", "0"]


def test_without_a_parent_to_ask_for_there_is_no_doubt() -> None:
    assert other_children(None) is None
    with subprocess.Popen(["true"]) as gone:
        wait_until(lambda: gone.poll() is not None, HANG_SECONDS, "it ends")
    assert other_children(gone.pid) is None, "the kernel does not say"


def test_the_family_of_a_program_is_all_that_live_of_it() -> None:
    code = """if True:
        import subprocess, sys
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        print(child.pid, flush=True)
        input()
        child.kill()
        print("killed", flush=True)
        input()
    """
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        child = int(program.stdout.readline())
        assert family([program.pid]) == {program.pid, child}
        program.stdin.write(b"\n")
        program.stdin.flush()
        program.stdout.readline()
        wait_until(lambda: family([program.pid]) == {program.pid}, HANG_SECONDS, "the child has ended")
        program.stdin.close()
    assert family([program.pid]) == frozenset()
