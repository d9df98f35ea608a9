"""The benchmark of many agents, with few: what it counts is there, and what does not depend on the machine holds."""

from pathlib import Path

import pytest

from benchmarks import scale, scale_simulation

pytestmark = pytest.mark.nightly


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_real_agents_commit_also_without_their_committer_and_at_their_end(short_directory: Path) -> None:
    found = scale.measure(short_directory, 3, rounds=1)
    assert [one.what for one in found] == ["commit", "committer killed", "end of all pods"]
    commit = found[0]
    # Its manifest, which the committer reads, and a look for the marker; then the committer's own, of three agents.
    assert commit.requests >= 3.0
    assert all(0.0 < one.marker_seconds < one.all_know_seconds for one in found)
    assert all(one.cpu_seconds > 0 for one in found)
    assert len(scale.goals(found)) == 6


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_committer_s_memory_is_that_of_a_process_that_reads_all_manifests(short_directory: Path) -> None:
    assert 30 < scale.committer_memory_mib(short_directory, 20) < scale.MEMORY_GOAL_MIB


def test_on_a_clock_of_their_own_fifty_agents_commit_with_few_requests_each() -> None:
    found = scale_simulation.measure((50,))
    commit, killed, more_killed, end = found
    assert commit.marker_seconds < 0.5
    assert commit.requests <= 5.0
    # It is listed by the deputy twice, a second apart.
    assert killed.marker_seconds < 3.0
    assert more_killed.marker_seconds < 20.0
    assert end.marker_seconds < 1.0
    assert all(met for _, _, met in scale_simulation.goals(found))
    assert "| commit | 50 |" in "\n".join(scale_simulation.section(found))
