"""Begin an interpreter of `holdfast run --standby`; this folder is the first one on PYTHONPATH.

Python imports `sitecustomize` before the program. In an attempt that is started cold, this one
only notes that it ran. In the standby process it imports the modules that the supervisor names and
waits for requests. The answer to a request is a fork, which returns from here, so that the
interpreter goes on to the program as in a cold start: same command line, same `__main__`.

Invariants:
- Only a fork that the supervisor has let go leaves this module in the standby process, which ends
  with the supervisor, and at any error.
- When the program begins, `sys.path`, the environment, the open files and the random generators are
  those of a cold start, except for what the imported modules themselves have changed.

The program's interpreter may have no `holdfast`, so only the standard library is imported here.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import TracebackType

CHANNEL_VARIABLE = "_HOLDFAST_STANDBY_CHANNEL"
"""The descriptor of the standby process's socket to the supervisor."""
ADOPTION_SECS = 5.0
"""How long a fork waits until it is the supervisor's child."""
FAILED = 70
REQUEST_BYTES_MAX = 1 << 16
"""The size of a request: the variables of the attempt that differ from this process's."""
LOW_PRIORITY = 10
FIRST_VICTIM = "1000"
CHOSEN_SEED_MAX = 1 << 40
"""Seeds that people choose are smaller; PyTorch begins with 64 random bits."""
PLAIN_DEVICES = ("null", "zero", "full", "random", "urandom", "tty", "pts/", "shm/", "mqueue/")


def begin() -> None:
    """Remove the traces of this module, and serve requests in the standby process."""
    own = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if entry != own]
    sys.path_importer_cache.pop(own, None)
    paths = os.environ.pop("PYTHONPATH", own).removeprefix(own).removeprefix(os.pathsep)
    if paths:
        os.environ["PYTHONPATH"] = paths
    channel_fd = os.environ.pop(CHANNEL_VARIABLE, None)
    if channel_fd is None:
        with open(f"{os.environ['HOLDFAST_STANDBY']}/started-{os.getpid()}", "wb"):
            return
    try:
        _Standby(int(channel_fd)).serve()
    except BaseException:  # `site` would report it and run the program
        os._exit(FAILED)


def run_next() -> None:
    """Run the next `sitecustomize` on the path, which this one hides."""
    from importlib import machinery, util

    spec = machinery.PathFinder.find_spec("sitecustomize")
    if spec is None or spec.loader is None:
        raise ImportError("no sitecustomize", name="sitecustomize")  # which `site` expects
    module = sys.modules[__name__] = util.module_from_spec(spec)
    spec.loader.exec_module(module)


class _Standby:
    """The standby process. Its only thread owns it."""

    def __init__(self, channel_fd: int) -> None:
        import random
        import socket

        self._channel = socket.socket(fileno=channel_fd)
        os.set_inheritable(channel_fd, False)
        self._supervisor = os.getppid()
        self._priority = os.getpriority(os.PRIO_PROCESS, 0)
        with open("/proc/self/oom_score_adj") as file:
            self._oom_score = file.read()
        self._generator = random
        self._drawn: Any = None
        """The state of Python's generator, if the imports have seeded it or drawn from it."""

    def serve(self) -> None:
        """Import, report, and fork at each request; return in the forks alone."""
        import gc
        import json
        import socket

        with self._channel.makefile("r", encoding="utf-8") as lines:
            line = lines.readline()
        if not line:
            os._exit(0)
        order = json.loads(line)
        _set_oom_score(FIRST_VICTIM)
        self._yield_processor()
        answer = self._import(order)
        os.setpriority(os.PRIO_PROCESS, 0, self._priority)
        gc.collect()
        gc.freeze()
        answer |= {"modules": list(sys.modules), "files": _own_files(), "problem": _problem()}
        self._channel.sendall(json.dumps(answer).encode() + b"\n")
        while True:
            changes, fds, _, _ = socket.recv_fds(self._channel, REQUEST_BYTES_MAX, 1)
            if not changes:
                os._exit(0)
            answers = socket.socket(fileno=fds[0])
            if not _fork():
                self._channel.close()
                _update_environment(json.loads(changes))
                self._become_attempt(answers)
                return
            answers.close()

    def _yield_processor(self) -> None:
        """Lower the priority if it can be raised again, which another thread tries."""
        import threading

        can_raise = []

        def lower_and_raise() -> None:
            os.setpriority(os.PRIO_PROCESS, 0, LOW_PRIORITY)
            try:
                os.setpriority(os.PRIO_PROCESS, 0, self._priority)
            except OSError:
                return
            can_raise.append(True)

        thread = threading.Thread(target=lower_and_raise)
        thread.start()
        thread.join()
        if can_raise:
            os.setpriority(os.PRIO_PROCESS, 0, LOW_PRIORITY)

    def _import(self, order: dict[str, Any]) -> dict[str, Any]:
        """Import the modules of the last attempt, in its order and as its program does.

        Returns:
            `failed`: the modules that cannot be imported. `own`: the variables that the program,
            and not a module, changes before it imports: another standby process needs them.
        """
        before = {name: os.environ.get(name) for name in order["own"]}
        fresh = self._generator.getstate()
        _update_environment(order["own"])
        first = [] if sys.flags.safe_path else [order["path"]]
        sys.path[:0] = first
        with _Silence():
            failed = _import_all(order["modules"])
            # The program may have added folders; the modules may have done so too, and keep theirs.
            extra = [entry for entry in order["paths"] if entry not in sys.path]
            sys.path += extra
            failed = _import_all(failed) if extra else failed
        sys.path[:] = [entry for entry in sys.path if entry not in extra]
        for entry in first:
            sys.path.remove(entry)
        own = {
            name: value
            for name, value in order["changed"].items()
            if name not in order["own"] and os.environ.get(name) != value
        }
        _update_environment(before)
        drawn = self._generator.getstate()
        self._drawn = drawn if drawn != fresh else None
        return {"failed": failed, "own": own}

    def _become_attempt(self, answers: Any) -> None:
        """Make this fork the attempt, once the supervisor has answered.

        It has to be the supervisor's child and to lead a process group, as if started by it.
        """
        import time

        deadline = time.monotonic() + ADOPTION_SECS
        while os.getppid() != self._supervisor:
            if time.monotonic() > deadline:
                os._exit(FAILED)
            time.sleep(0.0005)
        os.setpgid(0, 0)
        _set_oom_score(self._oom_score)
        self._renew_generators()
        answers.sendall(b"%d\n" % os.getpid())
        if not answers.recv(1):
            os._exit(0)
        answers.close()

    def _renew_generators(self) -> None:
        """Seed the global generators anew, unless a module has seeded them when it was imported.

        Python does so at every fork.
        """
        if self._drawn is not None:
            self._generator.setstate(self._drawn)
        numpy_random = sys.modules.get("numpy.random")
        if numpy_random is not None:
            bits = numpy_random.mtrand._rand._bit_generator
            if getattr(bits, "_seed_seq", None) is not None:
                numpy_random.seed()
        torch = sys.modules.get("torch")
        if torch is not None and torch.default_generator.initial_seed() > CHOSEN_SEED_MAX:
            torch.default_generator.seed()


class _Silence:
    """Discards what the block writes to standard output and error, also outside of Python."""

    def __enter__(self) -> None:
        self._saved = [os.dup(fd) for fd in (1, 2)]
        null_fd = os.open(os.devnull, os.O_WRONLY)
        for fd in (1, 2):
            os.dup2(null_fd, fd)
        os.close(null_fd)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        for fd, saved_fd in zip((1, 2), self._saved, strict=True):
            os.dup2(saved_fd, fd)
            os.close(saved_fd)


def _import_all(modules: list[str]) -> list[str]:
    """Import modules and return those that cannot be imported."""
    from importlib import import_module

    failed = []
    for name in modules:
        if name not in sys.modules:
            try:
                import_module(name)
            except BaseException:  # the program will find it too
                failed.append(name)
    return failed


def _update_environment(variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _set_oom_score(score: str) -> None:
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write(score)
    except OSError:
        return  # a container may forbid it


def _own_files() -> list[tuple[str, int, int]]:
    """Return path, time and size of the imported files of the program, and where packages are."""
    import sysconfig

    library = f"{sysconfig.get_path('stdlib')}/"
    # An installation changes the time of these folders.
    paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if isinstance(path, str) and not path.startswith(library) and "-packages/" not in path:
            paths.add(path)
    files = []
    for path in sorted(paths):
        try:
            state = os.stat(path)
        except OSError:
            continue
        files.append((path, state.st_mtime_ns, state.st_size))
    return files


def _problem() -> str | None:
    """Return why this process cannot be forked, or None.

    Libraries that are prepared for forks end their threads before one, as OpenBLAS does. So a
    first fork, which ends at once, shows which threads remain.
    """
    import threading

    if not (pid := os.fork()):
        os._exit(0)
    os.waitpid(pid, 0)
    count = len(os.listdir("/proc/self/task")) - 1
    if count:
        names = [f"{thread.name!r}" for thread in threading.enumerate()[1:]]
        return f"imports start {count} threads ({', '.join(names) or 'not of Python'})"
    for fd in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if path.startswith("/dev/") and not path.startswith(PLAIN_DEVICES, len("/dev/")):
            return f"imports open {path}"
    return None


def _fork() -> int:
    """Fork a process whose parent ends at once, so that the supervisor adopts it.

    Returns:
        0 in the new process.
    """
    if parent := os.fork():
        os.waitpid(parent, 0)
        return parent
    if child := os.fork():
        os._exit(0)
    return child


begin()
run_next()
