"""plan as an operator runs it: what it prints can be pasted."""

import json
import re
from typing import Any

import pytest
from tests.cli.test_report import note
from tests.core.noted_lives import killed_and_resumed
from tests.harness.warm_python import keepstep

from keepstep.save_schedule import parse_interval
from keepstep_agent.core.injection.annotation_table import known_keys, seconds, size
from keepstep_agent.core.settings.values import StoreSettings

NUMBERS = ("--checkpoint", "200Gi", "--rate", "1Gi/s", "--stall", "2s", "--mtbf", "3h", "--pods", "64")


def plan(*options: object) -> Any:
    completed = keepstep("plan", *NUMBERS, *options, "--json")
    assert completed.returncode == 0, completed.stderr
    return json.loads(completed.stdout)


def test_a_plan_says_what_to_set_and_what_follows() -> None:
    advice = plan()
    assert (advice["interval_seconds"], advice["recovery_point_seconds"], advice["grace_seconds"]) == (208, 213.125, 18)
    assert advice["annotations"] == {"keepstep.dev/size-limit": "10Gi"}
    assert advice["program"] == 'checkpointer.should_save(step, every="208s")'
    assert "cost_per_month" not in advice
    # Other spellings of the same numbers.
    same = ("--checkpoint", "204800 MiB", "--rate", "1024MiB", "--stall", "2", "--mtbf", "180m", "--write", "0")
    assert plan(*same) == advice


def test_what_is_to_be_pasted_is_what_its_readers_take() -> None:
    advice = plan("--write", "100s", "--keep-last", 3, "--keep-every-steps", 660, "--step", "1.3s", "--peak-factor", 2)
    annotations = advice["annotations"]
    assert set(annotations) <= set(known_keys())
    assert (annotations["keepstep.dev/keep-last"], annotations["keepstep.dev/keep-every-steps"]) == ("3", "660")
    assert annotations["keepstep.dev/peak-factor"] == "2.0"
    assert seconds(annotations["keepstep.dev/grace-seconds"]) == advice["grace_seconds"]
    assert size(annotations["keepstep.dev/size-limit"])
    assert advice["program"] == "checkpointer.should_save(step, every=160)"
    assert advice["interval_steps"] == 160
    every = re.search(r'every="(.*)"', plan()["program"])
    assert every
    assert str(parse_interval(every[1])) == "0:03:28"


def test_a_plan_in_a_terminal_has_all_numbers_caveats_and_annotations() -> None:
    completed = keepstep("plan", *NUMBERS, "--keep-last", 5, "--price-per-gib-month", 0.1)
    assert (completed.returncode, completed.stderr) == (0, "")
    said = completed.stdout
    for line in (
        "save interval   208 s ",
        "recovery point  213 s ",
        "grace period    18 s ",
        "volume          9.4 GiB a pod",
        "storage         1.2 TiB",
        "storage costs   120.00",
        '  keepstep.dev/size-limit: "10Gi"',
        '  keepstep.dev/keep-last: "5"',
    ):
        assert f"\n{line}" in f"\n{said}", said
    assert "and a margin; pods get 120 s anyway" in said
    assert "grace-seconds" not in said
    assert "It counts neither restarts" in said
    assert "Without --keep-last" not in said


def test_settings_of_the_environment_count_and_a_flag_beats_them() -> None:
    completed = keepstep("plan", *NUMBERS, "--json", KEEPSTEP_KEEP_LAST="7")
    assert json.loads(completed.stdout)["annotations"]["keepstep.dev/keep-last"] == "7"
    completed = keepstep("plan", *NUMBERS, "--json", "--keep-last", 8, KEEPSTEP_KEEP_LAST="7")
    assert json.loads(completed.stdout)["annotations"]["keepstep.dev/keep-last"] == "8"


def test_small_jobs_get_a_size_in_mebibytes() -> None:
    assert plan("--checkpoint", "64MiB", "--pods", 1)["annotations"]["keepstep.dev/size-limit"] == "192Mi"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--checkpoint", "much"), "'much' is not a size; write bytes"),
        (("--checkpoint", "0"), "'0' must be more than 0"),
        (("--rate", "1Gi/h"), "'1Gi/h' is not a size"),
        (("--stall", "-2s"), "'-2s' is not a duration; write seconds"),
        (("--mtbf", "0h"), "'0h' must be more than 0"),
        (("--pods", "0"), "0 is not in the range"),
        (("--keep-last", "few"), "--keep-last: 'few' is not a number"),
        (("--keep-every-steps", "100", "--step", "1s"), "--keep-every-steps needs --keep-last"),
        (("--keep-every-steps", "100", "--keep-last", "1"), "--keep-every-steps needs --step"),
        (("--price-per-gib-month", "free"), "'free' is not a price"),
    ],
)
def test_a_wrong_number_is_refused_with_what_to_write(options: tuple[str, ...], problem: str) -> None:
    refused = keepstep("plan", *NUMBERS, *options, KEEPSTEP_KEEP_LAST="")
    assert refused.returncode == 2
    assert problem in " ".join(refused.stderr.split())


def test_a_plan_without_its_numbers_says_which_are_missing() -> None:
    refused = keepstep("plan", "--checkpoint", "1Gi")
    assert refused.returncode == 2
    assert "give --rate, --stall, --mtbf: or --ledger with a run" in " ".join(refused.stderr.split())


def test_a_plan_takes_from_a_runs_ledger_what_is_not_given(bucket: StoreSettings) -> None:
    note(bucket)
    completed = keepstep("plan", "--ledger", bucket.destination, "--json")
    assert completed.returncode == 0, completed.stderr
    advice = json.loads(completed.stdout)
    # It failed once in 800 s of training, and a save held it up for 5 s.
    assert advice["young_seconds"] == pytest.approx((2 * 5 * 800) ** 0.5)
    given = keepstep("plan", "--ledger", bucket.destination, "--mtbf", "3200s", "--json")
    assert json.loads(given.stdout)["young_seconds"] == pytest.approx((2 * 5 * 3200) ** 0.5)


def test_what_a_ledger_does_not_tell_must_be_given(bucket: StoreSettings) -> None:
    no_ledger = keepstep("plan", "--ledger", bucket.destination)
    assert no_ledger.returncode == 1
    assert "has no ledger" in no_ledger.stderr
    note(bucket, lives=killed_and_resumed()[:1])
    refused = keepstep("plan", "--ledger", bucket.destination)
    assert refused.returncode == 2
    assert "give --mtbf: the ledger does not tell them" in " ".join(refused.stderr.split())
