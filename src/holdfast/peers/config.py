"""Configure how an agent serves its peers, and check the settings.

It listens on loopback unless an address or an interface is named, and never on all interfaces. The
token is read from a file, because every user can read command lines.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec

from holdfast.clock import SystemClock
from holdfast.errors import InvalidArgumentError, StorageError
from holdfast.peers.tls import PeerTls
from holdfast.peers.wire import check_token
from holdfast.store.files.whole_file import create_file, replacing, sync

LOOPBACK = "127.0.0.1"
TOKEN_FILE_SIZE_MAX_BYTES = 4096
BACKLOG = 64


class PeerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How an agent serves its peers. `address` may name an interface; port 0 takes a free port."""

    token_file: str
    address: str = LOOPBACK
    port: int = 0
    tls: PeerTls | None = None


def read_token(path: str) -> str:
    """Return the token in a file, without surrounding white space.

    Raises:
        StorageError: there is no such file, or it belongs to this user and others may read it.
        InvalidArgumentError: its contents cannot be a token.
    """
    try:
        with open(path, "rb") as file:
            state = os.fstat(file.fileno())
            data = file.read(TOKEN_FILE_SIZE_MAX_BYTES)
    except OSError as error:
        raise StorageError(f"read the peers' token {path}: {error.strerror}") from error
    # A file that the system provides for this process, such as a mounted secret, has the system's
    # mode.
    if state.st_uid == os.geteuid() and state.st_mode & 0o077:
        raise StorageError(
            f"read the peers' token {path}: expected a file of this user alone, found mode "
            f"{state.st_mode & 0o777:o}; chmod it to 600, and make a new token"
        )
    return check_token(data.decode("ascii", "replace").strip(), path)


def make_token(path: str, token: str) -> None:
    """Write the run's token, readable by this user alone, unless the file exists.

    Raises:
        StorageError: it cannot be written.
    """
    if not os.path.lexists(path):
        # Of two concurrent writers one wins, and no reader sees half a token.
        with contextlib.suppress(FileExistsError), _writing(path):
            create_file(Path(path), token.encode("ascii"), SystemClock())


def replace_token(path: str, token: str) -> None:
    """Write the token, readable by this user alone, in place of the file's contents.

    Raises:
        StorageError: it cannot be written.
    """
    with _writing(path), replacing(Path(path)) as file:
        file.write(token.encode("ascii"))
        sync(file)


@contextlib.contextmanager
def _writing(path: str) -> Iterator[None]:
    try:
        yield
    except FileExistsError:
        raise
    except OSError as error:
        raise StorageError(f"write the peers' token {path}: {error.strerror}") from error


def listen(address: str, port: int, purpose: str = "serve peers") -> socket.socket:
    """Return a socket that listens on the given address, or on the first one of that interface.

    `purpose` is for the messages.

    Raises:
        InvalidArgumentError: `address` is neither, or means every interface.
        StorageError: the system refuses it, for example because the port is taken.
    """
    host = _host(address, purpose)
    family = socket.AF_INET6 if host.version == 6 else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # A restarted agent can take its port again despite connections in TIME_WAIT.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((str(host), port))
        listener.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        listener.close()
        raise StorageError(
            f"{purpose} at {host}, port {port}: {error}; choose another address or port"
        ) from error
    listener.setblocking(False)
    return listener


def _host(address: str, purpose: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    try:
        host = ipaddress.ip_address(address)
    except ValueError:
        return _host_of_interface(address, purpose)
    if host.is_unspecified:
        raise InvalidArgumentError(
            f"{purpose} at {address}: that is every interface; name one address or interface"
        )
    return host


def _host_of_interface(address: str, purpose: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    import psutil

    interfaces = psutil.net_if_addrs()
    families = (socket.AF_INET, socket.AF_INET6)
    addresses = [a for a in interfaces.get(address, ()) if a.family in families]
    for candidate in sorted(addresses, key=lambda a: families.index(a.family)):
        # A link-local address is ambiguous without its interface.
        host = ipaddress.ip_address(candidate.address.partition("%")[0])
        if not host.is_link_local:
            return host
    raise InvalidArgumentError(
        f"{purpose} at {address}: expected an address, or an interface that has one, of "
        f"{sorted(interfaces)}"
    )
