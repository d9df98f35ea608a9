"""The store's Secret is replaced while a pod trains: kubelet swaps the files, and the store refuses the old keys."""

import pytest
from tests.harness.bounds import HANG_SECONDS
from tests.harness.credentials_file import NEXT_KEYS, refuse_first_keys
from tests.podsim.phase import Phase
from tests.servers.server import NEXT_ACCESS_KEY
from tests.simulated_pods.demo_job import AGENT, DemoJob

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(1800)]


def test_a_pod_whose_secret_is_replaced_trains_on_and_commits_with_the_next_keys(job: DemoJob) -> None:
    demo = job.start(steps=60, save_every=20)
    job.wait_stored(20, demo)
    job.node.replace_secret("s3", NEXT_KEYS)
    refuse_first_keys(job.proxy)
    assert demo.pod.wait_ended(HANG_SECONDS) is Phase.SUCCEEDED
    assert job.stored_kinds()[60] == "final"
    assert demo.pod.container(AGENT).endings[-1].exit_code == 0
    assert demo.agent_log("work.failed") == []
    assert not any(row["problems"] for row in job.view.verify())


def test_what_is_saved_before_kubelet_has_swapped_the_files_is_stored_when_it_has(job: DemoJob) -> None:
    demo = job.start()
    demo.wait_begun()
    job.wait_stored(demo.save_now(), demo)
    refuse_first_keys(job.proxy)
    refused = demo.save_now()
    demo.pod.wait(lambda: job.proxy.hits("old") > 0, HANG_SECONDS, "the old keys are refused")
    assert refused not in job.stored_steps()
    job.node.replace_secret("s3", NEXT_KEYS)
    job.wait_stored(refused, demo)
    # A pod that starts now begins with the next keys.
    demo.pod.delete()
    demo.pod.wait_ended(HANG_SECONDS)
    last = job.stored_steps()[-1]
    job.proxy.log.clear()
    assert job.start().wait_begun() == last
    assert {request.access_key for request in job.proxy.log} == {NEXT_ACCESS_KEY}
