"""A folder on a share of a real SMB server on this machine, mounted by FUSE (smbnetfs).

Both programs are in a network namespace of their own, where the server has SMB's port. Everything
that they write is in folders of the test's. Debian's packages samba, smbnetfs and iproute2.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts import wait_until

PROGRAMS = ("smbd", "smbnetfs", "unshare", "ip")
FOLDERS = ("share", "private", "lock", "state", "cache", "pid", "ncalrpc", "log", "mount", "home")
SERVER = """
[global]
    server role = standalone server
    interfaces = 127.0.0.1
    bind interfaces only = yes
    smb ports = 445
    disable netbios = yes
    private dir = {0}/private
    lock directory = {0}/lock
    state directory = {0}/state
    cache directory = {0}/cache
    pid directory = {0}/pid
    ncalrpc dir = {0}/ncalrpc
    log file = {0}/log/smbd.log
    map to guest = Bad User
    guest account = root
    load printers = no
    disable spoolss = yes
[share]
    path = {0}/share
    guest ok = yes
    read only = no
    force user = root
"""
START = """
ip link set lo up
smbd -s {0}/server.conf --foreground --no-process-group -l {0}/log >{0}/log/smbd.out 2>&1 &
echo $! >{0}/server.pid
exec smbnetfs {0}/mount -f -o config={0}/home/.smb/smbnetfs.conf >{0}/log/mount.out 2>&1
"""
CLIENT = {
    "smb.conf": "[global]\n    workgroup = WORKGROUP\n",
    "smbnetfs.conf": 'smb_query_browsers "false"\nfree_space_size 10737418240\n',
    "smbnetfs.auth": "",
    "smbnetfs.host": "",
}


@contextlib.contextmanager
def smb_share(folder: Path) -> Iterator[Path]:
    """Yield the mounted share; `folder` has what belongs to it. Skips where it cannot be had."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(
            f"an SMB share takes root, and the programs {', '.join(missing) or 'are there'}"
        )
    for name in FOLDERS:
        (folder / name).mkdir(parents=True)
    (folder / "server.conf").write_text(SERVER.format(folder))
    settings = folder / "home" / ".smb"
    settings.mkdir(mode=0o700)
    for name, text in CLIENT.items():
        (settings / name).write_text(text)
        (settings / name).chmod(0o600)
    command = ["unshare", "--net", "sh", "-c", START.format(folder)]
    environment = os.environ | {"HOME": str(folder / "home")}
    mounted = folder / "mount" / "127.0.0.1" / "share"
    # The server signals its process group when it ends.
    with subprocess.Popen(command, env=environment, start_new_session=True) as client:
        try:
            wait_until(lambda: client.poll() is not None or _answers(mounted))
            if client.poll() is not None:
                pytest.skip(f"smbnetfs: {(folder / 'log' / 'mount.out').read_text()}")
            yield mounted
        finally:
            if client.poll() is None:
                subprocess.run(["umount", "--lazy", str(folder / "mount")], check=True)
                client.terminate()
            os.kill(int((folder / "server.pid").read_text()), signal.SIGTERM)


def _answers(mounted: Path) -> bool:
    """Whether the server does: the mount shows a share before that."""
    try:
        (mounted / "a").write_bytes(b"a")
        (mounted / "a").unlink()
    except OSError:
        return False
    return True
