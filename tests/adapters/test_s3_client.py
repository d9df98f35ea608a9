"""botocore's client as we make it: with less of AWS in memory, and every endpoint where it was."""

from contextlib import AsyncExitStack
from typing import Any

import botocore.session
import pytest
from aiobotocore.session import get_session
from botocore.regions import EndpointResolver
from botocore.utils import parse_timestamp
from tests.servers.server import Bucket

from keepstep_agent.adapters.open_store import open_store
from keepstep_agent.adapters.s3.client import connect, read_time
from keepstep_agent.adapters.s3.credentials import forget_other_services
from keepstep_agent.core.settings.values import StoreSettings

REGIONS = ["us-east-1", "eu-central-1", "ap-southeast-2", "cn-north-1", "us-gov-west-1", "xx-unheard-of-1"]
SERVICES = ["s3", "sts", "portal.sso", "oidc", "signin"]
"""The store, and those from which credentials come: a service account's, or a person's who signed in."""


def endpoint(session: Any, service: str, region: str) -> Any:
    table = session.get_component("data_loader").load_data("endpoints")
    found = EndpointResolver(table).construct_endpoint(service, region)
    return found and {key: found.get(key) for key in ("hostname", "partition", "protocols", "credentialScope")}


@pytest.mark.parametrize("region", REGIONS)
async def test_the_client_goes_where_botocores_own_would_go(region: str, s3_environment: None) -> None:
    plain = botocore.session.get_session().create_client("s3", region_name=region)
    async with AsyncExitStack() as stack:
        client = await connect(StoreSettings(destination="s3://bucket/run", region=region), stack)
        assert client.meta.endpoint_url == plain.meta.endpoint_url
        assert client.meta.partition == plain.meta.partition


@pytest.mark.parametrize("service", SERVICES)
def test_forgetting_the_other_services_moves_none_that_is_asked(service: str) -> None:
    whole, slim = botocore.session.get_session(), get_session()
    forget_other_services(slim)
    for region in REGIONS:
        expected, found = endpoint(whole, service, region), endpoint(slim, service, region)
        assert found == expected, region


def test_of_the_services_of_aws_only_a_few_stay_in_memory() -> None:
    session = get_session()
    forget_other_services(session)
    partitions = session.get_component("data_loader").load_data("endpoints")["partitions"]
    assert {service for partition in partitions for service in partition["services"]} <= set(SERVICES)


@pytest.mark.parametrize(
    "said",
    [
        "Wed, 25 Nov 2026 02:24:00 GMT",
        "2026-11-25T02:24:00.123Z",
        "2026-11-25T02:24:00Z",
        "2026-11-25T03:24:00+01:00",
        "Wednesday, 25-Nov-26 02:24:00 GMT",
        "1795573440",
        1795573440.5,
    ],
)
def test_a_time_is_what_botocore_takes_it_for(said: object) -> None:
    assert read_time(said).timestamp() == parse_timestamp(said).timestamp()


@pytest.mark.parametrize("said", ["", "soon", "Z", "yesterday GMT"])
def test_what_is_no_time_is_refused_as_botocore_does(said: str) -> None:
    with pytest.raises(ValueError, match="Invalid timestamp"):
        read_time(said)


async def test_times_in_answers_are_read_without_trying_every_format(
    rclone_bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_store(rclone_bucket.settings()) as store:
        await store.put("a", b"x")
        monkeypatch.setattr("dateutil.parser.parse", None)
        (listed,) = [one async for one in store.list("")]
        assert int(listed.modified_at) == (await store.head("a")).modified_at > 0
