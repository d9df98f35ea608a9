"""What each annotation may say, and what a user is told of one that says something else."""

from pathlib import Path

import pytest
from tests.pages.annotations_page import annotations_page

from keepstep_agent.core.injection.annotations import default_problems, read_annotations
from keepstep_agent.core.injection.spec import (
    CaBundle,
    CaSource,
    Claim,
    Injection,
    InjectionDefaults,
    Refusal,
    Skip,
)

ROOT = Path(__file__).parents[2]
DEFAULTS = InjectionDefaults(image="example.com/keepstep:1")
LEAST = {"keepstep.dev/inject": "true", "keepstep.dev/destination": "s3://bucket/run"}


def said(texts: dict[str, str]) -> dict[str, str]:
    return LEAST | {f"keepstep.dev/{name.replace('_', '-')}": text for name, text in texts.items()}


def injection(defaults: InjectionDefaults = DEFAULTS, /, **texts: str) -> Injection:
    found = read_annotations(said(texts), defaults)
    assert isinstance(found, Injection), found
    return found


def problems(defaults: InjectionDefaults = DEFAULTS, /, **texts: str) -> tuple[str, ...]:
    found = read_annotations(said(texts), defaults)
    assert isinstance(found, Refusal), found
    return found.problems


def test_the_page_of_annotations_is_what_the_tables_give() -> None:
    """If this fails: python -m tests.pages.annotations_page > docs/annotations.md"""
    assert (ROOT / "docs/annotations.md").read_text() == annotations_page()


def test_the_least_is_a_destination_and_everything_else_has_a_default() -> None:
    assert injection() == Injection(destination="s3://bucket/run", grace_seconds=120)


def test_what_a_user_says_is_read() -> None:
    found = injection(
        credentials="my-secret",
        ca_bundle="trusted/ca.pem",
        container="main",
        checkpoint_directory="/out//checkpoints/",
        output="/workspace//out/ : /logs:/logs/",
        size_limit="500Gi",
        medium="Memory",
        grace_seconds=" 300 ",
        autoload="True",
        cpu="2",
        memory="1Gi",
        run_as_user="1000",
        attempt="one",
        keep_last="3",
        bandwidth_bytes_per_second=" 200MB ",
        watch="false",
    )
    assert found == Injection(
        destination="s3://bucket/run",
        credentials="my-secret",
        ca_bundle=CaBundle(source=CaSource.CONFIG_MAP, name="trusted", key="ca.pem"),
        container="main",
        checkpoint_directory="/out/checkpoints",
        output=("/workspace/out", "/logs"),
        watch=False,
        size_limit="500Gi",
        in_memory=True,
        grace_seconds=300,
        autoload=True,
        cpu="2",
        memory="1Gi",
        run_as_user=1000,
        attempt="one",
        settings={
            "KEEPSTEP_BANDWIDTH_BYTES_PER_SECOND": "200MB",
            "KEEPSTEP_KEEP_LAST": "3",
        },
    )


@pytest.mark.parametrize(
    ("text", "destination", "claim"),
    [
        ("s3://bucket", "s3://bucket", None),
        ("s3://bucket/a/b/", "s3://bucket/a/b/", None),
        ("pvc://claim", "file:///keepstep-destination/claim", Claim(name="claim")),
        ("pvc://claim/", "file:///keepstep-destination/claim", Claim(name="claim")),
        ("pvc://claim/a//b/", "file:///keepstep-destination/claim/a/b", Claim(name="claim", path="a/b")),
    ],
)
def test_a_destination_is_a_bucket_or_a_claim(text: str, destination: str, claim: Claim | None) -> None:
    found = injection(destination=text)
    assert (found.destination, found.claim) == (destination, claim)


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("destination", "bucket/run", "'bucket/run' is not a destination: write s3://bucket/prefix"),
        ("destination", "s3://bucket//run", "'s3://bucket//run' is not a destination"),
        ("destination", "s3://my bucket", "'s3://my bucket' is not a destination"),
        ("destination", "pvc://claim/../other", "is not a path in a claim"),
        ("destination", "pvc://claim/a:b", "is not a path in a claim"),
        ("destination", "pvc:///path", "'' is not an object's name"),
        ("destination", "", "'' is not a destination"),
        ("credentials", "My_Secret", "'My_Secret' is not an object's name"),
        ("ca-bundle", "name", "write configmap/name/key, secret/name/key, or name/key"),
        ("ca-bundle", "file/a/b", "does not name a bundle"),
        ("ca-bundle", "a/b/c/d", "does not name a bundle"),
        ("container", "", "the name is empty"),
        ("checkpoint-directory", "out", "'out' is not a directory in the trainer"),
        ("checkpoint-directory", "/", "a volume at '/' would hide /bin of the trainer's image"),
        ("checkpoint-directory", "/var", "a volume at '/var' would hide /var/lib of the trainer's image"),
        ("checkpoint-directory", "/out/../etc", "is not a directory in the trainer"),
        ("checkpoint-directory", "/run", "'/run' collides with /run/keepstep: choose another directory"),
        ("checkpoint-directory", "/proc/self", "collides with /proc"),
        ("checkpoint-directory", "/keepstep-state/x", "collides with /keepstep-state"),
        ("checkpoint-directory", "/out/$(RUN)", "write an absolute path without .., : or $("),
        ("checkpoint-directory", "/keepstep/.keepstep", "'.keepstep/file' lies in the reserved folder .keepstep"),
        ("output", "", "'' is not a directory in the trainer"),
        ("output", "out", "'out' is not a directory in the trainer"),
        ("output", "/", "a volume at '/' would hide /bin of the trainer's image: name a directory below it"),
        ("output", "/out:/./", "a volume at '/./' would hide /bin of the trainer's image"),
        ("output", "/etc", "a volume at '/etc' would hide /etc of the trainer's image"),
        ("output", "/usr/", "a volume at '/usr/' would hide /usr/bin of the trainer's image"),
        ("output", "/usr/local", "a volume at '/usr/local' would hide /usr/local/bin of the trainer's image"),
        ("output", "/out:", "'' is not a directory in the trainer"),
        ("output", "/out/../etc", "is not a directory in the trainer"),
        ("output", "/out,/logs", "'/out,/logs' has a comma: separate directories with colons"),
        ("output", "/out/.keepstep", "'.keepstep/file' lies in the reserved folder .keepstep"),
        ("output", "/run/keepstep/x", "'/run/keepstep/x' collides with /run/keepstep"),
        ("output", f"/{'ü' * 128}", "has a name of more than 255 bytes"),
        ("output", "/a\x7f", "has a control character"),
        ("output", "/a/out:/b/out", "/a/out and /b/out have the same last name"),
        ("output", "/a/out:/a", "/a/out lies in /a: give only /a"),
        ("output", "/a:/a/out", "/a/out lies in /a: give only /a"),
        ("output", ":".join(f"/out/{number}" for number in range(17)), "17 directories are too many"),
        ("watch", "/out", "'/out' is neither true nor off: name directories in keepstep.dev/output"),
        ("size-limit", "-1Gi", "'-1Gi' is less than a byte"),
        ("size-limit", "500 GB", "'500 GB' is not a quantity"),
        ("medium", "ssd", "'ssd' is neither memory nor disk"),
        ("grace-seconds", "2m", "'2m' is not a number of seconds from 1 to 604800"),
        ("grace-seconds", "0", "'0' is not a number of seconds"),
        ("autoload", "yes", "'yes' is neither true nor false"),
        ("cpu", "0", "'0' must be more than 0"),
        ("memory", "256", "'256' is less than the 128Mi"),
        ("memory", "64Mi", "'64Mi' is less than the 128Mi that the agent needs"),
        ("run-as-user", "root", "'root' is not a numeric user id"),
        ("run-as-user", "4294967296", "is not a numeric user id"),
        ("attempt", "a/b", "attempt 'a/b' cannot be part of an object key"),
        ("keep-last", "all", "'all' is not a number"),
        ("addressing", "dns", "'dns' is not one of auto, path, virtual"),
        ("tags", "team", "'team' is not key=value"),
        ("container", "a\nb", "one line of plain text"),
        ("region", "\ud800", "one line of plain text"),
        ("region", "a" * 5000, "at most 4,096 characters"),
    ],
)
def test_a_value_that_cannot_be_is_refused_with_what_to_write(name: str, text: str, problem: str) -> None:
    (found,) = problems(DEFAULTS, **{name: text})
    assert found.startswith(f"keepstep.dev/{name}: ")
    assert problem in found


def test_settings_that_cannot_be_together_are_refused_as_the_agent_would() -> None:
    assert problems(keep_every_steps="10") == (
        "keepstep.dev/keep-every-steps needs keepstep.dev/keep-last: with keepstep.dev/keep-last 0 everything is kept",
    )
    (reserve,) = problems(commit_reserve_seconds="120")
    assert "leaves nothing of keepstep.dev/grace-seconds 120" in reserve


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("destinaton", "did you mean keepstep.dev/destination?"),
        ("keep-lasts", "did you mean keepstep.dev/keep-last?"),
        ("Inject", "did you mean keepstep.dev/inject?"),
        ("world-size", "see docs/annotations.md"),
        ("volume", "see docs/annotations.md"),
        ("qqq", "see docs/annotations.md"),
    ],
)
def test_an_unknown_annotation_is_refused_with_the_nearest_right_name(name: str, hint: str) -> None:
    assert problems(DEFAULTS, **{name: "x"}) == (f"there is no annotation keepstep.dev/{name}: {hint}",)


def test_a_flood_of_annotations_is_answered_with_a_few_words() -> None:
    """All that users send goes through one webhook: nobody may keep it from the others."""
    found = read_annotations(LEAST | {f"keepstep.dev/x{number}": "1" for number in range(20_000)}, DEFAULTS)
    assert isinstance(found, Refusal)
    assert len(found.problems) == 10


def test_a_destination_that_is_missing_is_said() -> None:
    found = read_annotations({"keepstep.dev/inject": "true"}, DEFAULTS)
    assert isinstance(found, Refusal)
    assert found.problems == ("keepstep.dev/destination is missing: set it to s3://bucket/prefix or pvc://claim/path",)


@pytest.mark.parametrize(
    ("annotations", "reason", "warning"),
    [
        ({}, "the pod has no annotation keepstep.dev/inject", False),
        (
            {"example.com/x": "1", "keepstep.dev/injected": "0.1.0 abc"},
            "the pod has no annotation keepstep.dev/inject",
            False,
        ),
        ({"keepstep.dev/inject": "false", "keepstep.dev/zzz": "1"}, "keepstep.dev/inject is false", False),
        (
            {"keepstep.dev/keep-last": "3"},
            'the pod has keepstep.dev/keep-last, and nothing is injected without keepstep.dev/inject: "true"',
            True,
        ),
        (
            LEAST | {"kubernetes.io/config.mirror": "x"},
            "the pod is a static pod of its node and cannot be changed",
            True,
        ),
    ],
)
def test_a_pod_that_does_not_ask_is_skipped_with_the_reason(
    annotations: dict[str, str], reason: str, warning: bool
) -> None:
    assert read_annotations(annotations, DEFAULTS) == Skip(reason=reason, warning=warning)


def test_what_keepstep_wrote_itself_is_no_mistake() -> None:
    assert injection(injected="0.0.9 abc", skipped="was", last_committed="checkpoint-7") == injection()


def test_the_admins_annotations_count_where_the_pod_has_none() -> None:
    admins = {"keepstep.dev/keep-last": "2", "keepstep.dev/region": "eu-west-1", "keepstep.dev/grace-seconds": "600"}
    defaults = InjectionDefaults(image="i", annotations=admins)
    found = injection(defaults, keep_last="5")
    assert found.settings == {"KEEPSTEP_S3_REGION": "eu-west-1", "KEEPSTEP_KEEP_LAST": "5"}
    assert found.grace_seconds == 600


def test_the_admins_own_mistakes_are_found_before_any_pod_comes() -> None:
    assert default_problems(DEFAULTS) == ()
    wrong = {"keepstep.dev/keep-lasts": "2", "keepstep.dev/part-size-bytes": "1", "keepstep.dev/inject": "true"}
    assert default_problems(InjectionDefaults(image="i", memory="1", annotations=wrong)) == (
        "keepstep.dev/inject cannot be a default for all pods",
        "there is no annotation keepstep.dev/keep-lasts: did you mean keepstep.dev/keep-last?",
        "keepstep.dev/memory: '1' is less than the 128Mi that the agent needs: write a size such as 256Mi",
        "keepstep.dev/part-size-bytes: 1 is less than S3's minimum: give 5MiB or more",
    )
