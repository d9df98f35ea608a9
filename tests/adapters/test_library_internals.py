"""What is used of libraries although it is private: an upgrade that takes it away is named at the start."""

import aiohttp
import pytest
from aiobotocore.httpsession import AIOHTTPSession

from mooring_agent.adapters.s3.http_session import require_internals
from mooring_agent.core.errors import StoreError


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
