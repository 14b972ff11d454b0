"""Have agents forked from a process that has imported what they run.

Python imports this module before each program of the tests, since its folder is on PYTHONPATH.
In `python -m holdfast.host CONFIG` it looks for a stem of agents (see `tests.prepared`) whose
circumstances are this process's own. If there is one, the agent is forked there, and this process
ends with the exit code of the fork. Otherwise the interpreter goes on to the program: in other
namespaces, control groups or limits, for another user, and below `holdfast run`, which adopts the
agents that its processes start.
"""

import os
import sys

STEMS = "STEMS_OF_THE_TESTS"
"""The variable that names the stems of the test process."""
AGENT = ["-m", "holdfast.host"]
SUPERVISED = "HOLDFAST_SUPERVISED"
INHERITED = {
    *("Umask", "Uid", "Gid", "Groups", "SigBlk", "SigIgn", "CapEff", "Seccomp", "Cpus_allowed")
}
"""Lines of /proc/self/status."""


def address(name: str, number: int) -> str:
    """Return the abstract address of one of two stems in this process's circumstances."""
    from binascii import crc32

    return f"\0{name}-{crc32(repr(_circumstances()).encode())}-{number % 2}"


def _circumstances() -> list[object]:
    """Return what a process inherits from the one that starts it, and a fork elsewhere does not."""
    import resource

    limits = sorted(name for name in dir(resource) if name.startswith("RLIMIT_"))
    with open("/proc/self/status") as status:
        lines = [line for line in status if line.partition(":")[0] in INHERITED]
    with open("/proc/self/cgroup") as groups, open("/proc/self/oom_score_adj") as score:
        placed = groups.read(), score.read()
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return [
        [os.stat(f"/proc/self/ns/{name}").st_ino for name in sorted(os.listdir("/proc/self/ns"))],
        [resource.getrlimit(getattr(resource, name)) for name in limits],
        [lines, placed, os.nice(0)],
        [sys.executable, sys.flags, [path for path in paths if path != root]],
    ]


def _fork_instead(name: str) -> None:
    """Have a stem fork this process's program, and end as it ends; return if there is no stem."""
    import _socket

    word_bytes = 4
    line = _socket.socket(_socket.AF_UNIX, _socket.SOCK_DGRAM)
    try:
        line.connect(address(name, os.getpid()))
    except ConnectionRefusedError:
        return
    reading, writing = os.pipe()
    order = repr((sys.orig_argv[1:], dict(os.environ), os.getcwd())).encode()
    ends = b"".join(fd.to_bytes(word_bytes, sys.byteorder) for fd in (1, 2, writing))
    line.sendmsg([order], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, ends)])
    os.close(writing)
    # The fork's pid, then its exit code.
    words = b"".join(iter(lambda: os.read(reading, word_bytes), b""))
    code = int.from_bytes(words[word_bytes:], sys.byteorder, signed=True)
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code if len(words) == 2 * word_bytes else 1)


if sys.orig_argv[1:3] == AGENT and STEMS in os.environ and SUPERVISED not in os.environ:
    _fork_instead(os.environ[STEMS])
