"""Set up mutual TLS between agents: each accepts only certificates of one authority.

A peer's certificate has to contain the peer's address as an alternative name. Any certificate of
the authority is accepted, so the authority should be the run's own; the token is checked in
addition.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.errors import StorageError

if TYPE_CHECKING:
    import ssl


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerTls:
    """Three PEM files: this agent's certificate and key, and the authority that both ends trust."""

    certificate: str
    key: str
    authority: str


def server_context(tls: PeerTls) -> ssl.SSLContext:
    """Return the context of the serving end.

    Raises:
        StorageError: a file is missing or invalid.
    """
    return _context(tls, serves=True)


def client_context(tls: PeerTls) -> ssl.SSLContext:
    """Return the context of the asking end.

    Raises:
        StorageError: as `server_context`.
    """
    return _context(tls, serves=False)


def _context(tls: PeerTls, *, serves: bool) -> ssl.SSLContext:
    # Loaded here, so that programs without TLS start without OpenSSL.
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if serves else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    for path in (tls.certificate, tls.key, tls.authority):
        if not Path(path).is_file():
            raise StorageError(f"use TLS between peers: expected a PEM file at {path}, found none")
    try:
        # For a key with a passphrase the library would prompt on a terminal, which an agent does
        # not have.
        context.load_cert_chain(tls.certificate, tls.key, password=lambda: "")
        context.load_verify_locations(tls.authority)
    except (OSError, ValueError) as error:
        raise StorageError(
            f"use TLS between peers: {tls.certificate}, {tls.key} and {tls.authority} do not go "
            f"together: {error}; expected a certificate, its key without a passphrase, and the "
            "authority's certificate"
        ) from error
    return context
