"""Only the exact name of a loopback host is one."""

from __future__ import annotations

import pytest

from holdfast.errors import InvalidArgumentError
from holdfast.peers.address import names_loopback
from holdfast.peers.config import listen


@pytest.mark.parametrize(
    "header", ["localhost", "LocalHost:80", "127.0.0.1:18123", "[::1]", "[::1]:8080", "127.0.0.2"]
)
def test_a_loopback_host_is_named_with_or_without_a_port(header: str) -> None:
    assert names_loopback(header)


@pytest.mark.parametrize(
    "header",
    [
        *("", "[evil]", "evil@localhost", "[::1].evil.com", "localhost:18123.evil.com"),
        *("localhost/evil", "localhost.evil.com", "127.0.0.1.evil.com", "::1", "localhost:"),
        *("localhost\n", "[127.0.0.1]", "10.0.0.1", "0.0.0.0", "localhost:123456"),
    ],
)
def test_anything_else_is_no_loopback_host(header: str) -> None:
    assert not names_loopback(header)


@pytest.mark.parametrize("address", ["0.0.0.0", "::"])
def test_every_interface_is_refused_with_the_reason(address: str) -> None:
    with pytest.raises(InvalidArgumentError, match="that is every interface; name one address"):
        listen(address, 0, "serve the page")
