"""The chart and its webhook with a real API server: what it takes, what it asks, and what becomes of pods meanwhile.

They run where `KUBEBUILDER_ASSETS` names a folder with etcd and kube-apiserver, as envtest's `setup-envtest` fetches
them, and say that they skip elsewhere.
"""

import base64
import copy
import threading
from datetime import UTC, datetime
from typing import Any

import pytest
from cryptography import x509
from tests.chart.rendering import NAMESPACE
from tests.cluster.api import Api, ApiError, Object
from tests.cluster.installation import Installation, InstalledWebhook, without_classes
from tests.harness.agent_process import wait_until
from tests.harness.bounds import HANG_SECONDS
from tests.harness.installed_chart import bundle_patch, made
from tests.harness.webhook_process import training_pod
from tests.injection import golden_pods

from keepstep_agent.core.injection.spec import Mutation
from keepstep_agent.webhook.certificates import SecretContent, bundle_of

pytestmark = [pytest.mark.nightly, pytest.mark.slow, pytest.mark.timeout(1200)]

_SECONDS = 120.0


def pod(namespace: str, **annotations: str) -> Object:
    asked = training_pod(**annotations)
    asked["metadata"]["namespace"] = namespace
    return asked


def plain_pod(namespace: str) -> Object:
    plain = pod(namespace)
    del plain["metadata"]["annotations"]
    return plain


def init_containers(made: Object) -> list[str]:
    return [one["name"] for one in made["spec"].get("initContainers", [])]


INJECTED = ["keepstep-restore", "keepstep-agent"]


@pytest.fixture
def namespace(installation: Installation, request: pytest.FixtureRequest) -> str:
    """A new one: nobody deletes pods here."""
    return installation.make_namespace()


def test_every_object_of_the_chart_is_taken_by_the_strictest_api_server_without_a_warning(
    installation: Installation,
) -> None:
    assert installation.warnings == []
    assert {one["kind"] for one in installation.objects} >= {"Deployment", "Secret", "Role", "ClusterRole"}


def test_a_pod_that_asks_for_it_gets_the_agent_and_others_are_left_alone(
    installation: Installation, namespace: str, webhook: InstalledWebhook
) -> None:
    made = installation.api.create(pod(namespace)).object
    assert init_containers(made) == INJECTED
    assert made["spec"]["initContainers"][1]["restartPolicy"] == "Always"
    assert made["spec"]["terminationGracePeriodSeconds"] == 120
    assert installation.api.get(made)["spec"] == made["spec"]
    asked = webhook.get("/metrics")[1]
    plain = installation.api.create(plain_pod(namespace)).object
    assert init_containers(plain) == []
    assert "keepstep" not in str(plain)
    assert reviews_in(webhook.get("/metrics")[1]) == reviews_in(asked), "nobody waits for the webhook for nothing"


def reviews_in(metrics: str) -> list[str]:
    return [line for line in metrics.splitlines() if line.startswith("keepstep_webhook_reviews_total")]


def test_a_mistake_is_refused_with_the_right_name(
    installation: Installation, namespace: str, webhook: InstalledWebhook
) -> None:
    with pytest.raises(ApiError, match=r"did you mean keepstep\.dev/destination\?"):
        installation.api.create(pod(namespace, destinaton="s3://bucket"))


def test_what_was_injected_once_is_not_injected_again(
    installation: Installation, namespace: str, webhook: InstalledWebhook
) -> None:
    made = installation.api.create(pod(namespace)).object
    again = copy.deepcopy(made)
    again["metadata"] = {name: made["metadata"][name] for name in ("generateName", "namespace", "annotations")}
    del again["status"]
    assert installation.api.create(again, dry_run=True).object["spec"] == made["spec"]


def test_a_jobs_template_stays_as_it_was_written_and_its_pods_are_injected(
    installation: Installation, namespace: str, webhook: InstalledWebhook
) -> None:
    asked = pod(namespace)
    template = {"metadata": {"annotations": asked["metadata"]["annotations"]}, "spec": asked["spec"]}
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "train", "namespace": namespace},
        "spec": {"template": template},
    }
    dry = installation.api.create(job, dry_run=True).object
    made = installation.api.create(job).object
    for one in (dry, made):
        assert init_containers(one["spec"]["template"]) == []
    # As the Job's controller would: labels and all from the template, owned by the Job.
    of_template = made["spec"]["template"]
    metadata = made["metadata"]
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "train", "uid": metadata["uid"], "controller": True}
    for_job = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            **of_template["metadata"],
            "generateName": "train-",
            "namespace": namespace,
            "ownerReferences": [owner],
        },
        "spec": of_template["spec"],
    }
    for_job["metadata"].pop("creationTimestamp", None)
    assert init_containers(installation.api.create(for_job, dry_run=True).object) == INJECTED
    assert init_containers(installation.api.create(for_job).object) == INJECTED


def test_a_dry_run_is_injected_and_leaves_nothing(
    installation: Installation, namespace: str, webhook: InstalledWebhook
) -> None:
    asked = pod(namespace)
    asked["metadata"]["name"] = asked["metadata"].pop("generateName") + "1"
    assert init_containers(installation.api.create(asked, dry_run=True).object) == INJECTED
    with pytest.raises(ApiError) as caught:
        installation.api.get(asked)
    assert caught.value.status == 404


def test_where_pods_must_be_restricted_an_injected_one_is(
    installation: Installation, webhook: InstalledWebhook
) -> None:
    restricted = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "warn")}
    namespace = installation.make_namespace(restricted)
    asked = pod(namespace)
    asked["spec"]["securityContext"] = {
        "runAsNonRoot": True,
        "runAsUser": 1000,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    asked["spec"]["containers"][0]["securityContext"] = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    answer = installation.api.create(asked)
    assert init_containers(answer.object) == INJECTED
    assert not [one for one in answer.warnings if "PodSecurity" in one]


CASES = [case for case in golden_pods.cases() if isinstance(case.outcome(), Mutation)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.path.stem)
def test_every_golden_pod_is_taken_as_it_is_injected(
    installation: Installation, namespace: str, webhook: InstalledWebhook, case: golden_pods.Case
) -> None:
    """By the decisions of an ordinary admin, whatever its file's are."""
    asked = without_classes(case.pod)
    asked["metadata"]["namespace"] = namespace
    assert "keepstep-agent" in str(installation.api.create(asked, dry_run=True).object["spec"])


def test_the_certificate_is_renewed_and_no_pod_is_refused_meanwhile(
    installation: Installation, namespace: str, webhook: InstalledWebhook
) -> None:
    old = SecretContent(served=made(days_ago=244), following=made(days_ago=0.05))
    bundle = bundle_of(old, (), datetime.now(UTC))
    publish(installation, bundle)
    installation.api.patch(installation.secret, {"data": old.data(bundle)})
    webhook.mount()
    wait_until(lambda: webhook.served() == old.certificates[0], HANG_SECONDS, "the old one is served")
    installation.wait_until_asked()
    ends = threading.Event()
    failures: list[Exception] = []
    asked = 0

    def ask() -> None:
        nonlocal asked
        try:
            while not ends.is_set():
                made = installation.api.create(pod(namespace), dry_run=True).object
                assert init_containers(made) == INJECTED
                asked += 1
        except Exception as error:
            failures.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        webhook.renew()
        wait_until(
            lambda: bool(failures) or webhook.served() == old.certificates[1], HANG_SECONDS, "the next one is served"
        )
        so_far = asked
        wait_until(lambda: bool(failures) or asked > so_far + 5, HANG_SECONDS, "it goes on")
    finally:
        ends.set()
        asking.join(HANG_SECONDS)
    assert not failures
    assert old.certificates[0] in x509.load_pem_x509_certificates(published(installation))


def published(installation: Installation) -> bytes:
    (webhook,) = installation.configuration["webhooks"]
    return base64.b64decode(webhook["clientConfig"].get("caBundle", ""))


def publish(installation: Installation, bundle: str | None) -> None:
    configuration = installation.configuration
    installation.api.patch(configuration, bundle_patch(configuration, bundle))


def test_a_bundle_that_somebody_took_away_is_put_back(
    installation: Installation, namespace: str, webhook: InstalledWebhook
) -> None:
    publish(installation, None)
    webhook.renew()
    assert published(installation)
    installation.wait_until_asked()


def test_an_upgrade_of_the_chart_keeps_what_the_job_wrote(
    installation: Installation, namespace: str, webhook: InstalledWebhook
) -> None:
    secret, bundle = installation.secret["data"], published(installation)
    installation.upgrade()
    assert installation.secret["data"] == secret
    assert published(installation) == bundle
    assert init_containers(installation.api.create(pod(namespace), dry_run=True).object) == INJECTED


def test_without_a_webhook_pods_that_ask_for_it_are_refused_and_others_run(
    installation: Installation, namespace: str, webhook: InstalledWebhook
) -> None:
    webhook.terminate()
    assert webhook.wait() == 0
    with pytest.raises(ApiError, match=r"failed calling webhook .*pods\.keepstep\.dev"):
        installation.api.create(pod(namespace))
    assert init_containers(installation.api.create(plain_pod(namespace)).object) == []


def test_under_ignore_they_run_without(installation: Installation, namespace: str, webhook: InstalledWebhook) -> None:
    webhook.terminate()
    assert webhook.wait() == 0
    installation.set_failure_policy("Ignore")
    try:
        made: list[Any] = []

        def runs() -> bool:
            """The API server hears of the policy some time later."""
            try:
                made.append(installation.api.create(pod(namespace)).object)
            except ApiError:
                return False
            return True

        wait_until(runs, HANG_SECONDS, "a pod runs")
        assert init_containers(made[0]) == []
    finally:
        installation.set_failure_policy("Fail")


@pytest.mark.parametrize(
    ("group", "resource", "verb", "name"),
    [
        ("", "secrets", "create", ""),
        ("", "secrets", "list", ""),
        ("", "secrets", "get", "another"),
        ("", "pods", "list", ""),
        ("admissionregistration.k8s.io", "mutatingwebhookconfigurations", "delete", "keepstep"),
        ("admissionregistration.k8s.io", "mutatingwebhookconfigurations", "patch", "another"),
    ],
)
def test_the_job_may_do_nothing_else_and_the_webhook_nothing(
    installation: Installation, group: str, resource: str, verb: str, name: str
) -> None:
    assert not may(installation.api, "keepstep-certs", group, resource, verb, name)
    assert not may(installation.api, "keepstep-webhook", group, resource, verb, name)


def test_the_job_may_do_what_it_needs(installation: Installation) -> None:
    """That the other test would notice."""
    asked = ("", "secrets", "get", "keepstep-webhook-certificates")
    assert may(installation.api, "keepstep-certs", *asked)
    assert not may(installation.api, "keepstep-webhook", *asked)


def may(api: Api, account: str, group: str, resource: str, verb: str, name: str) -> bool:
    attributes = {"group": group, "resource": resource, "verb": verb, "name": name, "namespace": NAMESPACE}
    user = f"system:serviceaccount:{NAMESPACE}:{account}"
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "metadata": {},
        "spec": {"user": user, "resourceAttributes": attributes},
    }
    allowed: bool = api.create(review).object["status"]["allowed"]
    return allowed
