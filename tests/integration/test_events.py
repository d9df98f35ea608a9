"""Events of commits come through, by the real agent: after a kill, and to a receiver that was down."""

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.harness.agent_process import AgentProcess, wait_until, write_checkpoint
from tests.harness.bounds import HANG_SECONDS
from tests.harness.run_process import RunProcess
from tests.servers.process import free_port
from tests.servers.server import Bucket

SECRET = "s3cr3t"


@contextmanager
def receiver(port: int) -> Iterator[list[str]]:
    """While it is open, it takes events; the list has their ids."""
    taken: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            taken.append(json.loads(body)["id"])
            self.send_response(204)
            self.end_headers()

        def log_request(self, code: object = "-", size: object = "-") -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield taken
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def commit(agent: AgentProcess, step: int) -> str:
    source = write_checkpoint(agent.checkpoints / f"checkpoint-{step}", {"model.bin": 1000})
    save = agent.announce(source, step).save
    agent.wait_committed(save)
    return save


def test_an_agent_killed_between_commit_and_delivery_delivers_after_its_restart(
    tmp_path: Path, rclone_bucket: Bucket
) -> None:
    port = free_port()
    with AgentProcess(
        tmp_path / "volume",
        rclone_bucket.destination,
        endpoint_url=rclone_bucket.endpoint_url,
        environment={"KEEPSTEP_EVENT_URL": f"http://127.0.0.1:{port}/{SECRET}"},
    ) as agent:
        saves = [commit(agent, 1), commit(agent, 2)]
        wait_until(
            lambda: "event-url" in {line["to"] for line in agent.log("outbox.not_taken")},
            HANG_SECONDS,
            "the receiver is down",
        )
        agent.kill()
        agent.start()
        with receiver(port) as taken:
            wait_until(lambda: len(taken) >= 2, HANG_SECONDS, "both are told")
            saves.append(commit(agent, 3))
            wait_until(lambda: len(taken) >= 3, HANG_SECONDS, "so is the next")
        # What was taken before the last one is not told again, also not by the next agent.
        agent.kill()
        agent.start()
        with receiver(port) as later:
            saves.append(commit(agent, 4))
            wait_until(lambda: saves[-1] in later, HANG_SECONDS, "the last one is told")
        assert list(dict.fromkeys(taken + later)) == saves
        assert not set(later) & set(saves[:2])
        assert SECRET not in agent.log_text()


def test_a_runs_last_commit_is_told_before_it_ends_and_a_command_is_enough_for_that(tmp_path: Path) -> None:
    log = tmp_path / "events"
    command = f"{sys.executable} -c \"import sys; open('{log}', 'a').write(sys.stdin.read() + '\\n')\""
    with RunProcess(
        tmp_path / "volume",
        f"file://{tmp_path}/bucket",
        trainer={"STEPS": 4},
        environment={"KEEPSTEP_EVENT_COMMAND": command, "KEEPSTEP_EVENT_TIMEOUT_SECONDS": "300"},
    ) as run:
        assert run.wait() == 0
    events = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(event["data"]["step"], event["data"]["kind"]) for event in events] == [(4, "final")]
