"""Run real agents' processes that serve their RAM to each other, as they are configured."""

from __future__ import annotations

import contextlib
import shutil
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from holdfast.clock import SystemClock
from holdfast.engine.saving.part_layouts import PartLayouts
from holdfast.engine.transfer.fetch import fetch_part
from holdfast.errors import StorageError
from holdfast.format.names import CHECKPOINTS
from holdfast.host.wire import protocol
from holdfast.host.wire.agent_directory import ram_folder
from holdfast.host.wire.client import AgentClient
from holdfast.host.wire.config import AgentConfig
from holdfast.host.wire.launch import ensure_agent
from holdfast.peers.address import PeerAddress, parse_address
from holdfast.peers.config import LOOPBACK, PeerConfig
from holdfast.peers.tls import PeerTls
from tests.engine.making import Made, random_array
from tests.engine.stores import ram
from tests.hosts import Host, await_events, host, is_running, wait_until
from tests.peers import RUN, TOKEN, Authority, reaching


@dataclass
class Rig:
    """One host and one run, with a file that holds the run's token."""

    host: Host
    run: Path
    token_file: Path

    def start(self, **peers: object) -> protocol.AgentStatus:
        """Starts an agent, which serves its peers where there are settings for that."""
        config = AgentConfig(
            run=str(self.run),
            run_id=RUN,
            host=self.host.name,
            folder="",
            peers=PeerConfig(token_file=str(self.token_file), **peers) if peers else None,  # type: ignore[arg-type]
        )
        folder, _ = ensure_agent(config, SystemClock())
        with contextlib.closing(AgentClient(folder, 20.0)) as client:
            return client.call("status", protocol.Empty(), protocol.AgentStatus)


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    (tmp_path / "run").mkdir()
    token_file = tmp_path / "token"
    token_file.touch(mode=0o600)
    token_file.write_text(TOKEN)
    with host() as made:
        for name in ("HOLDFAST_RAM", "HOLDFAST_HOST"):
            monkeypatch.setenv(name, made.environment[name])
        yield Rig(made, tmp_path / "run", token_file)


def address_of(status: protocol.AgentStatus) -> PeerAddress:
    assert status.peer_address is not None
    return parse_address(status.peer_address)


def listens_at(pid: int) -> list[str]:
    found = psutil.Process(pid).net_connections("inet")
    return [f"{c.laddr.ip}:{c.laddr.port}" for c in found if c.status == psutil.CONN_LISTEN]


def assert_pulled(status: protocol.AgentStatus, root: Path, tls: PeerTls | None = None) -> None:
    """What is put into the agent's RAM is pulled into another one's."""
    made = Made()
    made.add(("w",), random_array((9 << 20,), "uint8", 1))
    with (
        contextlib.closing(ram(ram_folder(Path(status.folder)))) as theirs,
        contextlib.closing(ram(root / "own")) as own,
        reaching(address_of(status), tls=tls) as peer,
    ):
        (part,) = made.write(theirs)
        fetch_part(peer, own, part, PartLayouts(made.spec.arrays))
        for stored in theirs.list(CHECKPOINTS):
            assert own.get(stored.key) == theirs.get(stored.key)


def test_an_agent_serves_its_ram_where_its_status_says(rig: Rig) -> None:
    status = rig.start(address="lo")
    assert listens_at(status.pid) == [address_of(status).authority]
    assert_pulled(status, rig.host.folder / "other")


def test_an_agent_serves_nobody_unless_it_is_asked_to(rig: Rig) -> None:
    status = rig.start()
    assert status.peer_address is None
    assert listens_at(status.pid) == []


def test_the_token_is_on_no_command_line_and_in_no_log(rig: Rig) -> None:
    status = rig.start(address=LOOPBACK)
    with reaching(address_of(status), token="0" * 32) as peer, contextlib.suppress(StorageError):
        peer.get("a/b")
    assert TOKEN not in " ".join(psutil.Process(status.pid).cmdline())
    for path in (rig.run / "events").iterdir():
        assert TOKEN not in path.read_text()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")
def test_an_agent_serves_over_tls_where_it_is_asked_to(rig: Rig, tmp_path: Path) -> None:
    authority = Authority(tmp_path / "tls")
    status = rig.start(tls=authority.issue("a"))
    assert_pulled(status, rig.host.folder / "other", authority.issue("b"))


def test_an_agent_that_cannot_serve_says_so_and_lives(rig: Rig) -> None:
    with socket.create_server((LOOPBACK, 0)) as taken:
        status = rig.start(port=taken.getsockname()[1])
    assert status.peer_address is None
    (told,) = await_events(rig.run, "peers_unavailable", count=1)
    assert "choose another" in told["reason"]


@pytest.mark.parametrize("mode", [0o644, 0o666])
def test_a_token_that_others_may_read_is_not_used(rig: Rig, mode: int) -> None:
    rig.token_file.chmod(mode)
    assert rig.start(address=LOOPBACK).peer_address is None
    (told,) = await_events(rig.run, "peers_unavailable", count=1)
    assert "chmod" in told["reason"]
    assert TOKEN not in told["reason"]


def test_an_agent_that_leaves_serves_no_longer(rig: Rig) -> None:
    status = rig.start(address=LOOPBACK)
    with contextlib.closing(AgentClient(Path(status.folder), 20.0)) as client:
        client.call("stop", protocol.Stop(), protocol.Empty)
    wait_until(lambda: not is_running(status.pid))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((LOOPBACK, address_of(status).port), timeout=5).close()
