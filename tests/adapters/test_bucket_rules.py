"""What a bucket does by itself, as its rules say; the rules are boto3's on a real server."""

from typing import Any

import pytest
from tests.servers.server import Bucket

from keepstep_agent.adapters.open_store import open_store
from keepstep_agent.adapters.s3.bucket_rules import removes_old_versions
from keepstep_agent.core.settings.values import StoreSettings

ABORT = {"AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 7}}
EXPIRE = {"NoncurrentVersionExpiration": {"NoncurrentDays": 30}}
EVERYTHING = {"Filter": {"Prefix": ""}}


async def answers(bucket: Bucket, rules: list[dict[str, Any]], settings: StoreSettings | None = None) -> list[object]:
    """Whether it aborts uploads and keeps old versions, once it has these rules."""
    if rules:
        named = [{"ID": str(number), "Status": "Enabled", **rule} for number, rule in enumerate(rules)]
        bucket.client().put_bucket_lifecycle_configuration(Bucket=bucket.name, LifecycleConfiguration={"Rules": named})
    async with open_store(settings or bucket.settings()) as store:
        return [await store.aborts_uploads(), await store.keeps_old_versions()]


def set_versioning(bucket: Bucket, status: str) -> None:
    bucket.client().put_bucket_versioning(Bucket=bucket.name, VersioningConfiguration={"Status": status})


@pytest.mark.parametrize(
    ("rule", "covers"),
    [
        ({**ABORT, **EXPIRE, **EVERYTHING}, True),
        ({**ABORT, **EXPIRE, "Filter": {}}, True),
        ({**ABORT, **EXPIRE, "Prefix": ""}, True),
        ({**ABORT, **EXPIRE, "Filter": {"Prefix": "runs/"}}, True),
        ({**ABORT, **EXPIRE, "Filter": {"Prefix": "runs/one"}}, True),
        # A part of the destination, its neighbour, something else.
        ({**ABORT, **EXPIRE, "Filter": {"Prefix": "runs/one/checkpoint-1"}}, False),
        ({**ABORT, **EXPIRE, "Filter": {"Prefix": "runs/one-more"}}, False),
        ({**ABORT, **EXPIRE, "Prefix": "logs/"}, False),
        ({**ABORT, **EXPIRE, **EVERYTHING, "Status": "Disabled"}, False),
    ],
)
async def test_a_rule_counts_if_it_covers_the_whole_destination(
    moto_bucket: Bucket, rule: dict[str, Any], covers: bool
) -> None:
    set_versioning(moto_bucket, "Enabled")

    assert await answers(moto_bucket, [rule]) == [covers, not covers]


@pytest.mark.parametrize(
    "chosen",
    [
        {"Tag": {"Key": "kind", "Value": "scratch"}},
        {"And": {"Prefix": "", "Tags": [{"Key": "kind", "Value": "scratch"}]}},
    ],
)
async def test_a_rule_for_some_tags_alone_does_not_count(moto_bucket: Bucket, chosen: dict[str, Any]) -> None:
    set_versioning(moto_bucket, "Enabled")

    assert await answers(moto_bucket, [{**EXPIRE, "Filter": chosen}]) == [False, True]


async def test_rules_are_counted_each_for_what_it_does(moto_bucket: Bucket) -> None:
    set_versioning(moto_bucket, "Enabled")
    expiring = {"Expiration": {"Days": 90}, **EVERYTHING}

    assert await answers(moto_bucket, []) == [False, True]
    assert await answers(moto_bucket, [expiring, {**ABORT, **EVERYTHING}]) == [True, True]
    assert await answers(moto_bucket, [expiring, {**EXPIRE, **EVERYTHING}]) == [False, False]


async def test_a_bucket_without_versioning_keeps_no_old_versions(moto_bucket: Bucket) -> None:
    assert await answers(moto_bucket, []) == [False, False]


async def test_a_bucket_whose_versioning_is_suspended_keeps_those_of_before(moto_bucket: Bucket) -> None:
    set_versioning(moto_bucket, "Suspended")
    assert await answers(moto_bucket, []) == [False, True]
    assert await answers(moto_bucket, [{**EXPIRE, **EVERYTHING}]) == [False, False]


def test_a_rule_that_keeps_a_number_of_versions_keeps_the_only_one_of_a_key() -> None:
    def rule(**ends: int) -> dict[str, object]:
        return {"NoncurrentVersionExpiration": {"NoncurrentDays": 1, **ends}, "Status": "Enabled", **EVERYTHING}

    assert removes_old_versions([rule()], "runs/")
    assert not removes_old_versions([rule(NewerNoncurrentVersions=1)], "runs/")


async def test_a_rule_for_a_prefix_does_not_cover_the_whole_bucket(moto_bucket: Bucket) -> None:
    whole = moto_bucket.settings(destination=f"s3://{moto_bucket.name}")
    rule = {**ABORT, "Filter": {"Prefix": "runs/"}}

    assert await answers(moto_bucket, [rule], whole) == [False, False]
    assert await answers(moto_bucket, [{**ABORT, **EVERYTHING}], whole) == [True, False]
