"""The timeline on an agent's own port: live, from what the agent has seen itself, and harmless."""

import urllib.error
import urllib.request
from pathlib import Path

from tests.harness.agent_process import AgentProcess, wait_until, write_checkpoint
from tests.harness.bounds import HANG_SECONDS
from tests.servers.process import free_port

from keepstep_agent.console.agent_page import AgentNow, agent_page
from keepstep_agent.core.policies.restore_choice import CommittedSave
from keepstep_agent.core.stored.ledger import AgentLife, AgentStarted, Noticed, RanksChanged, SaveCommitted, Saved


def get(address: str, path: str) -> tuple[int, str, dict[str, str]]:
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=HANG_SECONDS) as answer:
            return answer.status, answer.read().decode(), dict(answer.headers)
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), dict(error.headers)


def wait_serving(agent: AgentProcess) -> None:
    wait_until(lambda: bool(agent.log("http.serving")), HANG_SECONDS, "the pages are served")


def test_the_page_of_a_running_agent_goes_on_with_its_commits(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    with AgentProcess(tmp_path / "volume", f"file://{tmp_path}/bucket", http_address=address) as agent:
        wait_serving(agent)
        status, page, headers = get(address, "/")
        assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
        assert headers["Content-Security-Policy"].startswith("default-src 'none';")
        assert "There is no checkpoint yet." in page
        source = write_checkpoint(agent.checkpoints / "checkpoint-41", {"model.bin": 100})
        agent.wait_committed(agent.announce(source, 41).save, HANG_SECONDS)
        _, page, _ = get(address, "/")
        assert "step 41, taken" in page
        assert "cannot be read now" not in page
        assert "<td>committed</td>" in page
        assert str(tmp_path) not in page, "the destination is nobody's business"
        for name in ("console.css", "console.js", "icon.svg"):
            assert f"/static/{name}" in page
            assert get(address, f"/static/{name}")[0] == 200
        for name in ("base.html", "..%2ftemplates%2fbase.html"):
            assert get(address, f"/static/{name}")[0] == 404
    with AgentProcess(tmp_path / "another", f"file://{tmp_path}/bucket", http_address=address) as agent:
        wait_serving(agent)
        page = get(address, "/")[1]
        assert "2 starts" in page, "what the first agent noted is in the bucket"
        assert "step 41, taken" in page


def test_an_agent_without_the_consoles_packages_says_what_the_page_needs(tmp_path: Path) -> None:
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "jinja2.py").write_text("raise ImportError\n")
    address = f"127.0.0.1:{free_port()}"
    with AgentProcess(
        tmp_path / "volume",
        f"file://{tmp_path}/bucket",
        http_address=address,
        environment={"PYTHONPATH": str(tmp_path / "hidden")},
    ) as agent:
        wait_serving(agent)
        assert get(address, "/")[:2] == (501, "this page needs the packages of keepstep-agent[console]\n")
        assert get(address, "/healthz")[0] == 200


def _life(*, name: str = "one", attempt: str = "job-1") -> AgentLife:
    return AgentLife(
        agent="a",
        attempt=attempt,
        place="",
        node_rank=0,
        entries=(
            AgentStarted(number=1, at=1000.0, start="s"),
            RanksChanged(number=2, at=1010.0, ranks=1),
            Saved(number=3, at=1100.0, save=name, step=7, save_kind="periodic"),
            SaveCommitted(number=4, at=1110.0, save=name, size_bytes=2048, upload_seconds=10.0),
            Saved(number=5, at=1150.0, save="two", step=0, save_kind="snapshot"),
            SaveCommitted(number=6, at=1160.0, save="two", size_bytes=10, upload_seconds=1.0),
            SaveCommitted(number=7, at=1161.0, save="forgotten", size_bytes=10, upload_seconds=1.0),
            Noticed(number=8, at=1170.0, source="SIGTERM"),
        ),
    )


def test_it_shows_saves_snapshots_and_notices_and_what_is_uncommitted() -> None:
    page = agent_page(AgentNow(life=_life(), at=1200.0, ranks=1, step=9))
    assert "<dd>9</dd>" in page
    assert "2.0 KiB" in page
    assert "snapshot of <bdi>node-0</bdi>" in page
    assert "1 termination notice;" in page


def test_it_shows_the_rest_of_its_run_and_why_that_is_older() -> None:
    other = AgentLife(
        agent="b",
        attempt="job-0",
        place="",
        node_rank=0,
        entries=(
            AgentStarted(number=1, at=100.0, start="t"),
            RanksChanged(number=2, at=110.0, ranks=1),
            Saved(number=3, at=200.0, save="gone", step=5, save_kind="periodic"),
            SaveCommitted(number=4, at=210.0, save="gone", size_bytes=1, upload_seconds=1.0),
            RanksChanged(number=5, at=300.0, ranks=0),
        ),
    )
    known = CommittedSave(key="", step=7, save="one", modified_at=1110.0)
    now = AgentNow(
        life=_life(),
        lives=(other,),
        committed=(known,),
        all_listed=True,
        problem="<no answer>",
        at=1200.0,
        ranks=1,
        step=9,
    )
    page = agent_page(now)
    assert "2 starts" in page
    assert "<td>pruned</td>" in page
    assert "cannot be read now: &lt;no answer&gt;" in page


def test_what_a_restore_found_damaged_is_not_called_committed() -> None:
    known = CommittedSave(key="", step=7, save="one", modified_at=1110.0)
    now = AgentNow(life=_life(), committed=(known,), damaged=frozenset({"one"}), at=1200.0, ranks=1, step=9)
    assert "<td>damaged</td>" in agent_page(now)


def test_hostile_names_are_text() -> None:
    page = agent_page(
        AgentNow(life=_life(name='"><script>alert(1)</script>', attempt="<img src=x>"), at=1200.0, ranks=0, step=None)
    )
    assert "<script>alert" not in page
    assert "<img" not in page
