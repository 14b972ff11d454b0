"""Where an agent's folder is, and how a root that cannot hold it is passed over."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from holdfast.errors import AgentUnavailableError, StorageError
from holdfast.host.process import OOM_SCORE_ADJ
from holdfast.host.wire.config import AgentConfig
from holdfast.host.wire.launch import _choose_folder
from holdfast.local_agent.launch import _environment
from holdfast.local_agent.place import make_root, roots
from tests.trust.in_process import RUN_ID

CAP_SYS_RESOURCE = 24  # Linux's <linux/capability.h>


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AgentConfig:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return AgentConfig(run=str(tmp_path / "run"), run_id=RUN_ID, host="host-a", folder="")


def test_the_agent_gets_relative_paths_of_the_environment_as_absolute_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", "tls/ca.pem")
    monkeypatch.setenv("HOLDFAST_STATE", "state")
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "")
    found = _environment()
    assert found["SSL_CERT_FILE"] == str(tmp_path / "tls/ca.pem")
    assert found["HOLDFAST_STATE"] == str(tmp_path / "state")
    assert found["AWS_CONFIG_FILE"] == os.devnull
    assert found["GOOGLE_APPLICATION_CREDENTIALS"] == ""


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("impossible", ["/proc/none/ram", "/dev/null/ram", "/dev/null"], ids=str)
def test_an_impossible_root_is_passed_over_with_its_reason(
    config: AgentConfig, impossible: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_RAM", impossible)
    folder, reason = _choose_folder(config)
    assert folder.is_relative_to(tmp_path / "temporary")
    assert folder.is_dir()
    assert reason is not None
    assert reason.startswith(f"{impossible}: ")


def test_where_no_root_is_possible_every_reason_is_named(
    config: AgentConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_RAM", "/proc/none")
    (tmp_path / "temporary").write_text("a file")
    with pytest.raises(AgentUnavailableError, match=r"/proc/none: .*; .*temporary/.*HOLDFAST_RAM"):
        _choose_folder(config)


def test_a_host_without_a_folder_for_temporary_files_has_the_root_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setenv("HOLDFAST_RAM", "/ram")
    monkeypatch.setattr(tempfile, "gettempdir", fail)
    assert roots() == [Path("/ram")]


def test_a_root_that_exists_keeps_its_mode(
    config: AgentConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "shared"
    root.mkdir()
    root.chmod(0o1777)
    monkeypatch.setenv("HOLDFAST_RAM", str(root))
    folder, _ = _choose_folder(config)
    assert (mode(root), mode(folder)) == (0o1777, 0o700)


def test_a_root_that_is_created_is_for_the_user_alone(
    config: AgentConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_RAM", str(tmp_path / "new" / "root"))
    folder, _ = _choose_folder(config)
    assert (mode(folder.parent), mode(folder)) == (0o700, 0o700)


def test_a_sticky_root_of_the_superuser_is_used_and_a_strangers_is_refused() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can act as two users")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        place.chmod(0o755)
        sticky, strange = place / "sticky", place / "strange"
        for path, owner in ((sticky, 0), (strange, 1234)):
            path.mkdir()
            path.chmod(0o1777)
            os.chown(path, owner, owner)
        os.seteuid(4321)
        try:
            make_root(sticky)
            with pytest.raises(StorageError, match="found one of user 1234"):
                make_root(strange)
        finally:
            os.seteuid(0)


def test_an_agent_may_open_as_many_files_as_possible_and_is_not_killed_first() -> None:
    program = (
        "import resource\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, 4096))\n"
        "from holdfast.host.process import _raise_limits\n"
        "_raise_limits()\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
        "print(open('/proc/self/oom_score_adj').read())\n"
    )
    own_score = int(Path("/proc/self/oom_score_adj").read_text())
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    files, score = map(int, done.stdout.split())
    capabilities = Path("/proc/self/status").read_text().split("CapEff:")[1].split()[0]
    # Without the privilege the score stays, and that is no error.
    may_lower = int(capabilities, 16) >> CAP_SYS_RESOURCE & 1
    assert (files, score) == (4096, OOM_SCORE_ADJ if may_lower else own_score)


def test_a_relative_root_is_the_same_for_the_agent_in_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOLDFAST_RAM", "ram")
    assert roots()[0] == tmp_path / "ram"
