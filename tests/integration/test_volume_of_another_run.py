"""A volume that outlives its run never sends one run's checkpoint into the bucket of another."""

from pathlib import Path

from tests.harness.agent_process import AgentProcess, tree, write_checkpoint


def test_a_checkpoint_that_did_not_reach_its_destination_never_goes_to_another(tmp_path: Path) -> None:
    volume, other = tmp_path / "volume", tmp_path / "other"
    with AgentProcess(volume, "s3://bucket/one", endpoint_url="http://127.0.0.1:9") as agent:
        agent.announce(write_checkpoint(agent.checkpoints / "checkpoint-7", {"a": 1000}), 7)
        agent.kill()
    wrong = AgentProcess(volume, f"file://{other}")
    assert wrong.start_refused() == 1
    error, hint = wrong.log_text().splitlines()[-2:]
    assert error == f"error: the volume {volume} belongs to s3://bucket/one, not to file://{other}"
    assert hint.startswith(
        "hint: use another --volume (in a pod keepstep.dev/checkpoint-directory), or the destination s3:"
    )
    assert not other.exists() or not tree(other)
