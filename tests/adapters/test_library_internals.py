"""What is used of libraries although it is private: an upgrade that takes it away is named at the start."""

from types import SimpleNamespace

import aiohttp
import pytest
from aiobotocore.httpsession import AIOHTTPSession

from keepstep_agent.adapters.s3 import http_session
from keepstep_agent.adapters.s3.http_session import require_internals
from keepstep_agent.core.errors import StoreError


def test_the_installed_libraries_have_what_is_used_of_them() -> None:
    require_internals()


@pytest.mark.parametrize(
    ("owner", "name"), [(AIOHTTPSession, "_get_session"), (aiohttp.TCPConnector, "_wrap_create_connection")]
)
def test_a_private_member_that_is_gone_is_named_with_its_library(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    monkeypatch.delattr(owner, name)
    with pytest.raises(StoreError, match=rf"{owner.__name__}\.{name}") as raised:
        require_internals()
    assert "constraints.txt" in raised.value.hint


async def test_a_connector_without_its_loop_is_refused_before_it_opens_a_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def make_session(*_: object) -> SimpleNamespace:
        return SimpleNamespace(connector=SimpleNamespace())

    monkeypatch.setattr(http_session, "_make_session", make_session)
    with pytest.raises(StoreError, match=r"aiohttp \S+ has no TCPConnector\._loop"):
        await http_session._OneAttemptSession()._get_session(None)
