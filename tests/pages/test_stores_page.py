"""docs/stores.md names the right for every request that Keepstep sends to a store, and no other right to objects."""

import re
from pathlib import Path

from tests.pages.test_pages import ROOT

_RIGHTS = {
    "abort_multipart_upload": "AbortMultipartUpload",
    "complete_multipart_upload": "PutObject",
    "create_multipart_upload": "PutObject",
    "delete_object": "DeleteObject",
    "get_bucket_lifecycle_configuration": "GetLifecycleConfiguration",
    "get_bucket_versioning": "GetBucketVersioning",
    "get_object": "GetObject",
    "head_object": "GetObject",
    "list_multipart_uploads": "ListBucketMultipartUploads",
    "list_objects_v2": "ListBucket",
    "list_parts": "ListMultipartUploadParts",
    "put_object": "PutObject",
    "upload_part": "PutObject",
}
"""Of each request, as AWS documents it."""


def test_the_page_has_the_right_for_each_request() -> None:
    sent: set[str] = set()
    for path in Path(ROOT, "agent/keepstep_agent/adapters/s3").glob("*.py"):
        sent |= set(re.findall(r"client\.([a-z]+_[a-z0-9_]+)\b", path.read_text()))
    table = Path(ROOT, "docs/stores.md").read_text().split("## Rights")[1].split("\n\n`ls`")[0]
    named = set(re.findall(r"`s3:(\w+)`", table)) - {"PutObjectTagging"}
    assert {_RIGHTS[operation] for operation in sent} == named
