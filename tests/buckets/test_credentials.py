"""Where credentials come from, that they are renewed, and that they are repeated nowhere."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

import holdfast
from holdfast import CheckpointManager
from holdfast.clock import SystemClock
from holdfast.errors import (
    HoldfastError,
    InvalidArgumentError,
    SaveFailedError,
    StorageRefusedError,
)
from holdfast.store.bucket import aws_profile
from holdfast.store.bucket.aws_profile import profile_credentials
from holdfast.store.location import open_durable
from tests.buckets.fault_proxy import REFUSALS, FaultProxy
from tests.buckets.s3_server import ACCESS_KEY, SECRET_KEY
from tests.buckets.test_runs import check, run_command, state_of
from tests.hosts import Host, wait_until

MARKER = "marker-27182"


def write_profile(path: Path, name: str, key: str, secret: str) -> None:
    path.write_text(f"[{name}]\naws_access_key_id={key}\naws_secret_access_key={secret}\n")


@pytest.fixture
def profile(url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The file of a profile that has the only credentials, which are right."""
    pytest.importorskip("boto3", reason="boto3 is not installed")
    path = tmp_path / "credentials"
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("AWS_PROFILE", "training")
    write_profile(path, "training", ACCESS_KEY, SECRET_KEY)
    return path


def test_a_run_uses_the_credentials_of_a_profile(one_host: Host, profile: Path, url: str) -> None:
    with CheckpointManager(url) as manager:
        manager.save(1, state_of(1), force=True)
    check(holdfast.open_run(url).restore(), 1)


def test_renewed_credentials_of_a_profile_are_used_by_an_open_store(
    profile: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With less than five minutes each request asks again.
    monkeypatch.setattr(aws_profile, "LIFETIME", timedelta(seconds=1))
    store = open_durable(url, SystemClock())
    store.put("a", b"1")

    def refusal() -> str:
        try:
            store.put("a", b"2")
        except StorageRefusedError as error:
            return str(error)
        return ""

    # obstore keeps credentials for a tenth of a second at least.
    write_profile(profile, "training", ACCESS_KEY, "expired")
    wait_until(lambda: "refuses the credentials" in refusal())
    profile.write_text("[other]\n")
    wait_until(lambda: "profile of ~/.aws gives no credentials" in refusal())
    write_profile(profile, "training", ACCESS_KEY, SECRET_KEY)
    wait_until(lambda: not refusal())
    store.put("a", b"3")
    assert store.get("a") == b"3"


def test_boto3_is_loaded_only_for_a_profile(url: str) -> None:
    script = (
        "import sys; from holdfast.store.location import open_durable; "
        "from holdfast.clock import SystemClock; "
        f"open_durable({url!r}, SystemClock()).put('a', b'1'); "
        "assert 'obstore' in sys.modules and 'boto3' not in sys.modules"
    )
    # The environment's own credentials come before a profile.
    variables = os.environ | {"AWS_PROFILE": "training"}
    done = subprocess.run([sys.executable, "-c", script], env=variables, check=False)
    assert done.returncode == 0


def test_a_profile_without_boto3_is_an_error_that_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(InvalidArgumentError, match=r"'training'.*holdfast-checkpoint\[aws\]"):
        profile_credentials("s3://b", {"AWS_PROFILE": "training"})
    file = tmp_path / "credentials"
    file.write_text("[default]\n")
    files = {"AWS_SHARED_CREDENTIALS_FILE": str(file), "AWS_CONFIG_FILE": os.devnull}
    # Without a profile by name, the machine may have a role.
    assert profile_credentials("s3://b", files) is None


def test_a_profile_that_is_not_there_is_named(profile: Path, url: str) -> None:
    profile.write_text("")
    with pytest.raises(InvalidArgumentError, match=r"'training' cannot be read"):
        open_durable(url, SystemClock())


@pytest.mark.parametrize(
    ("refusal", "right"),
    [
        ("expired", "have expired.*renew them"),
        ("skewed", "time.*set its clock"),
        ("refused", "lacks a permission.*needs s3:"),
        ("wrong region", "another region.*AWS_REGION"),
    ],
)
def test_each_refusal_is_one_clear_error_and_is_not_repeated(
    refusal: str, right: str, proxy: FaultProxy, proxied_url: str
) -> None:
    assert refusal in REFUSALS
    proxy.choose = lambda request: refusal
    store = open_durable(proxied_url, SystemClock())
    for count, call in enumerate((lambda: store.get("a"), lambda: [*store.list("a")]), 1):
        with pytest.raises(StorageRefusedError, match=right) as caught:
            call()
        assert "\n" not in str(caught.value)
        assert proxy.counts[refusal] == count


def test_a_refused_opening_changes_nothing(
    one_host: Host, proxy: FaultProxy, proxied_url: str
) -> None:
    proxy.choose = lambda request: "refused" if request.method == "PUT" else None
    with pytest.raises(HoldfastError, match="s3:PutObject"):
        CheckpointManager(proxied_url)
    proxy.choose = lambda request: None
    assert open_durable(proxied_url, SystemClock()).is_unused()  # type: ignore[attr-defined]


@pytest.mark.parametrize("refusal", ["expired", "skewed"])
def test_training_goes_on_with_refused_requests_and_saves_once_they_are_renewed(
    refusal: str, one_host: Host, proxy: FaultProxy, proxied_url: str
) -> None:
    with CheckpointManager(proxied_url) as manager:
        manager.resume(state_of(0))
        manager.save(1, state_of(1), force=True)
        manager.wait_until_finished()
        proxy.choose = lambda request: refusal
        assert manager.save(2, state_of(2), force=True)
        with pytest.raises(SaveFailedError, match=r"expired|clock"):
            manager.wait_until_finished()
        proxy.choose = lambda request: None
        assert manager.save(3, state_of(3), force=True)
        manager.wait_until_finished()
    with holdfast.open_run(proxied_url) as run:
        assert {1, 3} <= set(run.all_steps())
        check(run.restore(3), 3)


def test_credentials_are_in_no_file_no_argument_and_no_output(
    one_host: Host, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = []
    with CheckpointManager(url) as manager:
        manager.resume(state_of(0))
        manager.save(1, state_of(1), force=True)
        manager.wait_until_finished()
        (agent,) = one_host.agent_processes()
        said.append(" ".join(agent.cmdline()))
        said += [run_command(name, url) for name in ("status", "ls", "events", "show")]
        said += [run_command(name, url, "--json") for name in ("status", "ls")]
    folders = [one_host.folder, Path(os.environ["HOLDFAST_STATE"])]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    assert any(path.suffix == ".log" for path in files)
    assert any("events" in path.parts for path in files)
    store = open_durable(url, SystemClock())
    objects = list(store.all_keys())  # type: ignore[attr-defined]
    assert len(objects) >= 4
    for found in (
        *(text.encode() for text in said),
        *(path.read_bytes() for path in files),
        *(store.get(key) for key in objects),
    ):
        for secret in (SECRET_KEY, ACCESS_KEY):
            assert secret.encode() not in found


@pytest.mark.parametrize("scheme", ["s3", "az"])
def test_credentials_are_in_no_error(
    scheme: str, one_host: Host, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither where they are refused, nor where a URL that has them is repeated."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.setenv(name, MARKER)
    places = [os.environ["AWS_ENDPOINT_URL"], f"http://user:{MARKER}@127.0.0.1:1"]
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", f"sv=2021-08-06&sig={MARKER}")
    monkeypatch.setenv("AZURE_ALLOW_HTTP", "true")
    monkeypatch.setattr("holdfast.store.bucket.bucket.TRIES_MAX", 1)
    monkeypatch.setattr("holdfast.store.bucket.object_service.PART_RETRY_SECS", 1)
    for place in places:
        monkeypatch.setenv("AWS_ENDPOINT_URL", place)
        monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", place)
        store = open_durable(f"{scheme}://runs/run", SystemClock())
        for call in (
            lambda store=store: store.get("a"),
            lambda store=store: [*store.list("a")],
            lambda store=store: store.put("a", bytes(17 << 20)),
        ):
            with pytest.raises(HoldfastError) as caught:
                call()
            assert MARKER not in str(caught.value)
