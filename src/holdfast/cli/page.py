"""Implement `holdfast page`: serve a live page about a run."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import webbrowser
from pathlib import Path

import click

from holdfast.cli import output
from holdfast.clock import SystemClock
from holdfast.environment import TOKEN_VARIABLE
from holdfast.errors import StorageError
from holdfast.host.wire.agents_here import asker
from holdfast.observe.live.follower import RunFollower
from holdfast.peers.config import LOOPBACK, listen
from holdfast.trainer.opening.run_access import read_only

TOKEN_CHARS_MIN = 16
LOOPBACKS = ("127.0.0.1", "::1", "localhost")


@click.command()
@click.argument("directory", metavar="DIR", type=click.Path())
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="The port; 0: a free one.")
@click.option(
    "--address",
    metavar="ADDRESS",
    default=LOOPBACK,
    show_default=True,
    help="The address or network interface; another than loopback needs a token.",
)
@click.option(
    "--token-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help=f"A file with the token that a browser has to know; else {TOKEN_VARIABLE}.",
)
@click.option("--open", "opens", is_flag=True, help="Open it in this machine's browser.")
@click.option("--json", "as_json", is_flag=True, help="Print the address as one JSON document.")
def page(
    directory: str, port: int, address: str, token_file: Path | None, opens: bool, as_json: bool
) -> None:
    """Show the run in DIR in a browser, as it goes on; Ctrl-C ends it.

    The page shows which step is where, which losses the run survives now, step times, events, the
    goodput so far and the last failure. It is served on loopback, and loads nothing from elsewhere.
    """
    run = read_only(directory)
    token = _token(token_file)
    if token is None and address not in LOOPBACKS:
        raise click.UsageError(
            f"--address {address}: without a token the page is served on loopback only; "
            f"give one by --token-file or {TOKEN_VARIABLE}",
            click.get_current_context(),
        )
    from holdfast.observe.live.page_server import serve

    listener = listen(LOOPBACK if address == "localhost" else address, port, "serve the page")
    url = _url(listener)

    def on_ready() -> None:
        hint = "?token=…" if token is not None else ""
        if as_json:
            output.print_json({"run": str(run.location), "url": url})
            sys.stdout.flush()
        else:
            output.print_line(f"{run.location}: {url}{hint} (Ctrl-C ends it)")
        if opens:
            webbrowser.open(url if token is None else f"{url}?token={token}")

    follower = RunFollower(run, asker(run), SystemClock())
    asyncio.run(serve(follower, listener, token, on_ready))


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


def _token(path: Path | None) -> str | None:
    """Return the token that is asked for; None: there is none."""
    if path is None:
        token, where = os.environ.get(TOKEN_VARIABLE, "").strip(), TOKEN_VARIABLE
    else:
        try:
            token, where = path.read_text(encoding="utf-8").strip(), str(path)
        except (OSError, UnicodeDecodeError) as error:
            raise StorageError(f"read the token in {path}: {error}") from error
    if not token and path is None:
        return None
    if len(token) < TOKEN_CHARS_MIN or not (token.isascii() and token.isalnum()):
        raise click.UsageError(
            f"{where}: expected a token of at least {TOKEN_CHARS_MIN} letters and digits, such as "
            "that of `openssl rand -hex 16`",
            click.get_current_context(),
        )
    return token
