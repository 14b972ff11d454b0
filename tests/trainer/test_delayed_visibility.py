"""A shared directory where a host sees another host's changes seconds later, as over NFS.

Each host has a FUSE mount of its own of one folder (bindfs, the Debian package). The kernel keeps
names that were looked up, also those that were not there, and attributes for `DELAY_SECS`.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hosts import Host, events
from tests.trainer.job import check_went_on, run_job, seen, some_hosts, start_job
from tests.trust.figures import tell

DELAY_SECS = 5
KILL_COUNT = 3
MOUNTED = 'mount --bind "$0" "$1" && shift && exec "$@"'


@contextlib.contextmanager
def delayed_mount(folder: Path, place: Path) -> Iterator[Path]:
    """A mount of `folder` whose names and attributes are kept for `DELAY_SECS`."""
    if shutil.which("bindfs") is None:
        pytest.skip("bindfs is not installed (Debian package bindfs)")
    place.mkdir()
    options = ",".join(f"{kind}_timeout={DELAY_SECS}" for kind in ("entry", "negative", "attr"))
    command = ["bindfs", "-o", options, str(folder), str(place)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"bindfs: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[Host]]:
    """Two hosts that see one folder at `tmp_path / "shared"`, each through its own mount."""
    backing, shared = tmp_path / "backing", tmp_path / "shared"
    backing.mkdir()
    shared.mkdir()
    with contextlib.ExitStack() as stack:
        mounts = [
            stack.enter_context(delayed_mount(backing, tmp_path / f"mount-{number}"))
            for number in range(2)
        ]
        made = stack.enter_context(some_hosts(2))
        for one, place in zip(made, mounts, strict=True):
            one.prefix = ("unshare", "--mount", "sh", "-c", MOUNTED, str(place), str(shared))
        yield made


def check_delayed(one: Host, other: Host, folder: Path) -> None:
    """Check that a host does not see at once what another one has made."""
    look = "import os, sys, time\nfor _ in range(2):\n    print(os.path.exists(sys.argv[1]))\n"
    look += "    sys.stdout.flush()\n    sys.stdin.readline()\n"
    path = folder / "probe"
    with subprocess.Popen(
        [*other.prefix, "python3", "-c", look, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as looking:
        assert looking.stdin is not None
        assert looking.stdout is not None
        assert looking.stdout.readline() == "False\n"
        subprocess.run([*one.prefix, "touch", str(path)], check=True)
        looking.stdin.write("\n")
        looking.stdin.flush()
        assert looking.stdout.readline() == "False\n", "this mount hides nothing"
        looking.communicate("\n")


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_nothing_is_lost_where_hosts_see_each_others_files_seconds_later(
    hosts: list[Host], tmp_path: Path
) -> None:
    shared, run = tmp_path / "shared", tmp_path / "shared" / "run"
    check_delayed(hosts[0], hosts[1], shared)
    # The events are read where nothing is delayed.
    seen_run = tmp_path / "backing" / "run"
    todo: dict[str, Any] = {"device_count": 1, "lockstep": True, "sleep": 0.1, "interval": 1}
    job = start_job(hosts, run, **todo, goes_on=True, steps=10**6)
    job.wait_until(lambda: len(seen(seen_run, "committed")) > 5)
    for number in range(KILL_COUNT):
        hosts[number % 2].kill_agent()
        before = max(seen(seen_run, "committed"))
        job.wait_until(lambda before=before: max(seen(seen_run, "committed")) > before + 5)
    newest = max(seen(seen_run, "committed"))
    job.kill()
    starts = []
    # The next starts are led by each host in turn, the other one finds what it has written.
    for order in (hosts, hosts[::-1], hosts):
        found = run_job(order, run, **todo, steps=3)
        (start,) = {result["start"] for result in found}
        assert start > newest
        check_went_on(found, start - 1)
        starts.append(start)
        newest = max(seen(seen_run, "committed"))
    failed = len(events(seen_run, "failed"))
    tell(
        "delayed visibility",
        f"two hosts on FUSE mounts that keep names and attributes for {DELAY_SECS} s: nothing lost",
        f"{KILL_COUNT} agents killed, {len(seen(seen_run, 'committed'))} steps committed, {failed} "
        f"saves failed; three more starts, each led by the other host, from {starts}",
    )
