"""What `holdfast status` shows of file agents, and how `holdfast clean` ends them."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.cli.main import main
from holdfast.clock import SystemClock
from holdfast.format.digests import digest
from holdfast.interop.mindio.file_agent import protocol
from holdfast.interop.mindio.file_agent.client import FileAgent
from holdfast.interop.mindio.file_agent.ram_files import data_path
from tests.hosts import Host, is_running, wait_until

CONTENT = b"weights" * 1000


@pytest.fixture
def agent(one_host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileAgent]:
    """An agent that writes nothing: it has no threads for it."""
    # `clean` shall not find what other tests have just killed.
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name in ("HOLDFAST_RAM", "HOLDFAST_HOST"):
        monkeypatch.setenv(name, one_host.environment[name])
    made = FileAgent(SystemClock())
    made.call_agent("configure", protocol.Configure(thread_count=0), protocol.Done)
    yield made
    made.close()


def _save(agent: FileAgent, path: Path) -> None:
    reserved = agent.call_agent(
        "reserve", protocol.Reserve(size_bytes=len(CONTENT)), protocol.Reserved
    )
    data_path(agent.folder, reserved.name).write_bytes(CONTENT)
    marker = path.with_name(f".{path.name}.1.unfinished")
    marker.touch()
    sealed = protocol.Seal(
        name=reserved.name,
        size_bytes=len(CONTENT),
        digest=digest(CONTENT),
        targets=[protocol.FileTarget(path=str(path), marker=str(marker))],
    )
    agent.call_agent("seal", sealed, protocol.Done)


def _pid(agent: FileAgent) -> int:
    return agent.call_agent("status", protocol.FilesAsked(), protocol.FileAgentStatus).pid


def _printed(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> Any:
    capsys.readouterr()
    assert main([*arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def _folder_is_unused(agent: FileAgent) -> None:
    """Wait until the agent has noticed that its user is gone."""
    agent.close()

    def is_unused() -> bool:
        probe = FileAgent(SystemClock())
        try:
            found = probe.call_agent("status", protocol.FilesAsked(), protocol.FileAgentStatus)
        finally:
            probe.close()
        return found.user_count == 0

    wait_until(is_unused)


def test_status_shows_an_agent_and_its_files(
    agent: FileAgent, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _save(agent, tmp_path / "model.pt")
    (found,) = _printed(capsys, "status")["file_agents"]
    assert (found["pid"], found["users"]) == (_pid(agent), 1)
    assert (found["files"], found["to_be_written"]) == (1, 1)
    assert found["size_bytes"] >= len(CONTENT)
    assert main(["status"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"process {_pid(agent)}, used by 1 process" in text
    assert "1 file in RAM, 1 file to be written" in text
    assert "no agents" not in text


def test_clean_ends_an_unused_agent_after_its_files_are_written(
    agent: FileAgent, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _save(agent, tmp_path / "model.pt")
    pid = _pid(agent)
    assert _printed(capsys, "clean", "--yes")["found"] == []
    assert is_running(pid)
    agent.call_agent("configure", protocol.Configure(thread_count=4), protocol.Done)
    _folder_is_unused(agent)
    (found,) = _printed(capsys, "clean", "--yes")["found"]
    assert (found["pid"], found["kept_for"]) == (pid, None)
    # The memory of a process that has released its folder is freed last.
    wait_until(lambda: not is_running(pid))
    assert (tmp_path / "model.pt").read_bytes() == CONTENT
    assert not agent.folder.exists()
    assert _printed(capsys, "status")["file_agents"] == []


def test_clean_says_which_files_an_agent_could_not_write(
    agent: FileAgent, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _save(agent, tmp_path / "model.pt")
    _folder_is_unused(agent)
    (problem,) = _printed(capsys, "clean", "--yes", code=1)["problems"]
    assert "1 file could not be written" in problem
    (found,) = _printed(capsys, "status")["file_agents"]
    assert (found["pid"], found["to_be_written"]) == (None, 1)


def test_what_a_killed_agent_left_is_kept_while_a_file_is_not_written(
    agent: FileAgent, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _save(agent, tmp_path / "model.pt")
    pid = _pid(agent)
    os.kill(pid, signal.SIGKILL)
    # Its lock is given back by the last of its threads, after its process counts as dead.
    wait_until(lambda: not is_running(pid) and _printed(capsys, "clean", "--dry-run")["found"])
    (found,) = _printed(capsys, "clean", "--yes")["found"]
    assert "1 file may be in RAM alone" in found["kept_for"]
    assert main(["status"]) == 0
    assert "no file agent" in capsys.readouterr().out
    assert _printed(capsys, "clean", "--yes", "--all")["problems"] == []
    assert not agent.folder.exists()


def test_an_agent_of_another_version_is_a_warning(
    agent: FileAgent, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Other(msgspec.Struct):
        what: str

    monkeypatch.setattr("holdfast.cli.file_agents.FileAgentStatus", Other)
    assert main(["status"]) == 0
    assert f"the file agent in {agent.folder}: another version" in " ".join(
        capsys.readouterr().err.split()
    )
