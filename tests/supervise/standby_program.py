"""A program for `holdfast run --standby`: prints what it can see, and ends as a file says.

Arguments: a folder. The modules of the folder `own` beside it are its own.
"""

import json
import os
import resource
import signal
import sys
import time
from pathlib import Path

import numpy as np

folder = Path(sys.argv[1])
sys.path.insert(1, str(folder / "own"))
if (folder / "flag").exists():
    os.environ["STANDBY_FLAG"] = os.environ.get("STANDBY_FLAG", "") + "x"

import standby_own  # noqa: E402

from holdfast.trainer.process.imports import is_recorded, record_imports  # noqa: E402


def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


main = sys.modules["__main__"]
count = os.environ["HOLDFAST_RESTART_COUNT"]
identity = {
    "argv": sys.argv,
    "orig_argv": sys.orig_argv,
    "command line": Path("/proc/self/cmdline").read_text(),
    "path": sys.path,
    "flags": str(sys.flags),
    "main": [
        main.__name__,
        main.__file__,
        getattr(main.__spec__, "name", None),
        type(main.__loader__).__name__,
    ],
    "directory": os.getcwd(),
    "environment": {name: os.environ[name] for name in sorted(os.environ)} | {"_": ""},
    "files": {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in "012"},
    "open": sorted(os.listdir("/proc/self/fd")),
    "parent": os.getppid(),
    "leads": os.getpgrp() == os.getpid(),
    "session": os.getsid(0),
    "umask": umask(),
    "limits": [resource.getrlimit(number) for number in range(16)],
    "priority": os.getpriority(os.PRIO_PROCESS, 0),
    "oom": Path("/proc/self/oom_score_adj").read_text(),
    "handlers": [str(signal.getsignal(number)) for number in range(1, 32)],
    "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "customised": "sitecustomize" in sys.modules,
    "seeded": standby_own.SEEDED,
}
identity["environment"].pop("HOLDFAST_RESTART_COUNT")
assert Path(identity["environment"].pop("HOLDFAST_SUPERVISED")).is_dir()
seen = {
    "identity": identity,
    "count": count,
    "pid": os.getpid(),
    "is_forked": os.getpid() != standby_own.PID,
    "text": standby_own.TEXT,
    "flag": standby_own.FLAG,
    "random": np.random.rand(),
}
print(json.dumps(seen), flush=True)
assert is_recorded()
record_imports()
while not (end := folder / f"end-{count}").exists():
    time.sleep(0.01)
    if os.getppid() != identity["parent"]:
        sys.exit("the supervisor has ended")
if end.read_text() == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(int(end.read_text()))
