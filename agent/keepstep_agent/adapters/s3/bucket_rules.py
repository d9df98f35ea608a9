"""Asks a bucket what it does by itself: whether it aborts unfinished uploads, and whether old versions stay for ever.

Owns the meaning of lifecycle rules. A rule counts only if it covers everything below the destination. Many stores do
not answer these questions, and many policies forbid them: that is a StoreError, and says nothing of the bucket.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

from keepstep_agent.adapters.s3.errors import ignored
from keepstep_agent.core.errors import ErrorKind

_Request = Callable[[str, str], AbstractAsyncContextManager[object]]
_Rule = Mapping[str, Any]


async def aborts_uploads(client: Any, bucket: str, prefix: str, *, request: _Request) -> bool:
    rules = await _lifecycle_rules(client, bucket, request)
    return _any_covers(rules, "AbortIncompleteMultipartUpload", prefix)


async def keeps_old_versions(client: Any, bucket: str, prefix: str, *, request: _Request) -> bool:
    async with request("GetBucketVersioning", ""):
        versioning = await client.get_bucket_versioning(Bucket=bucket)
    # Where it is suspended, what was written before still has old versions.
    if not versioning.get("Status"):
        return False
    return not removes_old_versions(await _lifecycle_rules(client, bucket, request), prefix)


def removes_old_versions(rules: Iterable[_Rule], prefix: str) -> bool:
    """Whether a rule ends every old version below `prefix`.

    Keepstep writes a key once. So a rule that keeps a number of old versions never removes the only one of a key.
    """
    ending = [rule for rule in rules if "NewerNoncurrentVersions" not in rule.get("NoncurrentVersionExpiration", {})]
    return _any_covers(ending, "NoncurrentVersionExpiration", prefix)


async def _lifecycle_rules(client: Any, bucket: str, request: _Request) -> Iterable[_Rule]:
    rules: Iterable[_Rule] = ()
    with ignored(ErrorKind.NOT_FOUND):
        async with request("GetBucketLifecycleConfiguration", ""):
            answer = await client.get_bucket_lifecycle_configuration(Bucket=bucket)
            # Every S3 sends them. A store that does not know the question may answer something else.
            rules = answer["Rules"]
    return rules


def _any_covers(rules: Iterable[_Rule], action: str, prefix: str) -> bool:
    return any(action in rule and _covers(rule, prefix) for rule in rules)


def _covers(rule: _Rule, prefix: str) -> bool:
    """Whether a rule is in force for everything below `prefix`. One for some tags or sizes is not."""
    chosen = rule.get("Filter", {})
    chosen = chosen.get("And", chosen)
    whole = rule.get("Status") == "Enabled" and chosen.keys() <= {"Prefix"}
    return whole and prefix.startswith(chosen.get("Prefix", rule.get("Prefix", "")))
