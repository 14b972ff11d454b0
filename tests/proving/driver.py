"""Prove a program whose starts are forks of this process, which has imported what it imports.

Arguments: the folder for the proof, the options of `ProofRequest` as JSON, the program and its
arguments. Prints the result as JSON, or the error.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import signal
import sys
import traceback
import weakref
from collections.abc import Mapping
from pathlib import Path

from holdfast.clock import SystemClock
from holdfast.errors import HoldfastError
from holdfast.proving.program import Execution, NotComparableError
from holdfast.proving.proof import ProofRequest, prove
from holdfast.supervise.command import PASSED_ON, Child, Signals


class ForkedStarts:
    """Starts a program as a fork."""

    has_trained = False

    def __init__(self, program: list[str], output_fd: int) -> None:
        self._program = program
        self._output_fd = output_fd

    def start(self, environment: Mapping[str, str]) -> Child:
        sys.stdout.flush()
        pid = os.fork()
        if pid:
            return Child(pid)
        code = 70
        try:
            # Temporary directories of the parent are not this process's to remove.
            weakref.finalize._registry.clear()
            os.setpgid(0, 0)
            for number in PASSED_ON:
                signal.signal(number, signal.SIG_DFL)
            for stream in (1, 2):
                os.dup2(self._output_fd, stream)
            os.environ.clear()
            os.environ.update(environment)
            sys.argv = list(self._program)
            sys.path.insert(0, str(Path(self._program[0]).parent))
            runpy.run_path(self._program[0], run_name="__main__")
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
            if code and not isinstance(end.code, int):
                print(end.code, file=sys.stderr)
        except Exception:
            traceback.print_exc()
            code = 1
        finally:
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def attend(self, child: Child) -> None:
        pass


def main() -> None:
    root, options, *program = sys.argv[1:]
    folder = Path(root)
    folder.mkdir()
    signals = Signals()
    given = {"kill_count": 3, "seed": 0, "timeout_secs": 600} | json.loads(options)
    timeout_secs = given.pop("timeout_secs")
    request = ProofRequest(**given | {"without": tuple(given.pop("without", ()))})

    execution = Execution(
        starts=lambda output_fd: ForkedStarts(program, output_fd),
        root=folder,
        timeout_secs=float(timeout_secs),
        signals=signals,
        clock=SystemClock(),
        note=lambda text: print(text, file=sys.stderr),
    )
    try:
        with signals.handled():
            document = prove(request, execution).document
    except NotComparableError as error:
        document = {"error": type(error).__name__, "message": str(error), "output": error.output}
    except HoldfastError as error:
        document = {"error": type(error).__name__, "message": str(error)}
    print(json.dumps(document))


if __name__ == "__main__":
    main()
