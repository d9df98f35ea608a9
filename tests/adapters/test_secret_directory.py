"""The Secret that a pod mounts: however its author spells the keys, the store is reached with them."""

from pathlib import Path

import pytest
from tests.servers.server import ACCESS_KEY, ENVIRONMENT, SECRET_KEY, Bucket

from keepstep_agent.adapters.open_store import open_store
from keepstep_agent.adapters.s3.credentials import SecretKeys, read_secret
from keepstep_agent.core.errors import ErrorKind, KeepstepError
from keepstep_agent.core.settings.values import StoreSettings


def secret(directory: Path, **texts: str) -> str:
    """As kubelet mounts it: links to links, which change all at once."""
    (directory / "..2026").mkdir(parents=True)
    (directory / "..data").symlink_to("..2026")
    for key, text in texts.items():
        (directory / "..data" / key).write_text(text)
        (directory / key).symlink_to(Path("..data") / key)
    return str(directory)


@pytest.mark.parametrize(
    ("access", "secret_key"),
    [
        ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
        ("access-key-id", "secret-access-key"),
        ("accesskey", "secretkey"),
        ("accessKey", "secretKey"),
        ("ACCESS_KEY_ID", "ACCESS_SECRET_KEY"),
        ("S3_ACCESS_KEY", "S3_SECRET_KEY"),
        ("access_key_id", "access_key_secret"),
    ],
)
def test_every_common_spelling_of_the_keys_is_understood(tmp_path: Path, access: str, secret_key: str) -> None:
    directory = secret(tmp_path / "s", **{access: "id\n", secret_key: "very secret\n", "description": "ours"})
    assert read_secret(directory) == SecretKeys(access_key="id", secret_key="very secret")


def test_a_data_connection_says_endpoint_region_and_token_too(tmp_path: Path) -> None:
    directory = secret(
        tmp_path / "s",
        AWS_ACCESS_KEY_ID="id",
        AWS_SECRET_ACCESS_KEY="key",
        AWS_SESSION_TOKEN="token",
        AWS_S3_ENDPOINT="https://s3.example.com",
        AWS_S3_BUCKET="bucket",
        AWS_DEFAULT_REGION="eu-west-1",
    )
    assert read_secret(directory) == SecretKeys(
        access_key="id",
        secret_key="key",
        session_token="token",
        endpoint_url="https://s3.example.com",
        region="eu-west-1",
    )


@pytest.mark.parametrize("endpoint", ["https://s3.amazonaws.com/", "s3.us-east-1.amazonaws.com"])
def test_the_endpoint_of_aws_itself_is_left_to_the_region(tmp_path: Path, endpoint: str) -> None:
    directory = secret(tmp_path / "s", accesskey="id", secretkey="key", endpoint=endpoint)
    assert read_secret(directory).endpoint_url == ""


def test_a_connection_without_keys_leaves_them_to_the_workloads_identity(tmp_path: Path) -> None:
    assert read_secret(secret(tmp_path / "s", AWS_DEFAULT_REGION="eu-west-1")) == SecretKeys(region="eu-west-1")


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ({}, "lacks an access key and its secret; it has nothing"),
        ({"password": "hush"}, "lacks an access key and its secret; it has password"),
        ({"accesskey": "hush", "user": "u"}, "lacks the secret of its access key; it has accesskey, user"),
        ({"secretkey": "hush"}, "lacks an access key and its secret; it has secretkey"),
        (
            {"accesskey": "hush", "secretkey": "hush", "endpoint": "root:hush@minio:9000"},
            "the endpoint in the Secret is not a URL such as https://host:port",
        ),
        (
            {"accesskey": "hush", "secretkey": "hush", "endpoint": "https://root:hush/hush@minio"},
            "the endpoint in the Secret is not a URL such as https://host:port",
        ),
    ],
)
def test_what_a_secret_lacks_is_said_by_its_keys_and_never_by_their_values(
    tmp_path: Path, texts: dict[str, str], message: str
) -> None:
    with pytest.raises(KeepstepError, match=message) as caught:
        read_secret(secret(tmp_path / "s", **texts))
    assert caught.value.kind is ErrorKind.BAD_CONFIGURATION
    assert "hush" not in f"{caught.value} {caught.value.hint}"


def test_a_secret_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(KeepstepError, match="cannot read the Secret at"):
        read_secret(str(tmp_path / "s"))


@pytest.mark.parametrize("endpoint", ["root:hush@minio:9000", "https://root:hush/hush@minio"])
async def test_an_endpoint_of_the_environment_that_is_no_url_is_not_repeated(
    endpoint: str, s3_environment: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(KeepstepError, match="endpoint is not a URL") as caught:
        async with open_store(StoreSettings(destination="s3://bucket/runs")):
            pass
    assert caught.value.kind is ErrorKind.BAD_CONFIGURATION
    assert "hush" not in f"{caught.value} {caught.value.hint}"


async def test_a_store_is_reached_with_a_secret_alone(
    rclone_bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    assert ENVIRONMENT["AWS_EC2_METADATA_DISABLED"] == "true"
    texts = {"accesskey": ACCESS_KEY, "secretkey": SECRET_KEY, "endpoint": rclone_bucket.endpoint_url}
    directory = secret(tmp_path / "s", **texts)
    async with open_store(rclone_bucket.settings(endpoint_url="", credentials_directory=directory)) as store:
        await store.put("a/b", b"content")
    with_other_eyes = rclone_bucket.client()
    listed = with_other_eyes.list_objects_v2(Bucket=rclone_bucket.name)
    with_other_eyes.close()
    assert [found["Key"] for found in listed["Contents"]] == ["runs/one/a/b"]
