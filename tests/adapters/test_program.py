"""Which living children a process has besides this one."""

import os
import subprocess
import sys

from tests.harness.agent_process import wait_until
from tests.harness.bounds import HANG_SECONDS

from keepstep_agent.adapters.output.program import living_below, other_children


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


def test_what_lives_below_a_process_is_told_with_all_that_it_has_started_itself() -> None:
    code = """if True:
        import subprocess, sys, threading

        def start_and_stay():
            # What a thread has started that has ended is moved to the main thread.
            child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
            print(child.pid, flush=True)
            commands.readline()
            child.kill()
            print("killed", flush=True)
            commands.readline()
            child.wait()

        commands = sys.stdin
        starting = threading.Thread(target=start_and_stay)
        starting.start()
        starting.join()
    """
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
        assert program.stdin is not None
        assert program.stdout is not None

        def below() -> set[int]:
            return set(living_below(os.getpid(), besides=None)) & {program.pid, child}

        child = int(program.stdout.readline())
        assert below() == {program.pid, child}
        assert child not in living_below(os.getpid(), besides=program.pid)
        program.stdin.write(b"\n")
        program.stdin.flush()
        program.stdout.readline()
        wait_until(lambda: below() == {program.pid}, HANG_SECONDS, "the child has ended")
        program.stdin.close()
    assert below() == set()
