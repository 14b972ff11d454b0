"""Mutual TLS between agents: each shows a certificate, and takes only those of one authority.

A peer's certificate has to name the address that it is reached by, as an alternative name. Whoever
has any certificate of the authority may ask, so it should be the run's own; the token is asked for
besides.
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


def serving_context(tls: PeerTls) -> ssl.SSLContext:
    """For the end that is asked.

    Raises:
        StorageError: a file is missing, or is not what it should be.
    """
    return _context(tls, serves=True)


def asking_context(tls: PeerTls) -> ssl.SSLContext:
    """For the end that asks.

    Raises:
        StorageError: as `serving_context`.
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
        # A key with a passphrase would be asked for on a terminal that no agent has.
        context.load_cert_chain(tls.certificate, tls.key, password=lambda: "")
        context.load_verify_locations(tls.authority)
    except (OSError, ValueError) as error:
        raise StorageError(
            f"use TLS between peers: {tls.certificate}, {tls.key} and {tls.authority} do not go "
            f"together: {error}; expected a certificate, its key without a passphrase, and the "
            "authority's certificate"
        ) from error
    return context
