"""A process of a test's own and the JSON lines that it prints."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import threading
from collections.abc import Callable
from typing import Any

from tests.hosts import WAIT_SECS

ABORT_SECS = 5.0


class Said:
    """What a process says; threads read it while the process runs. `errors` is its stderr."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[dict] = []
        self.errors: list[str] = []
        self._said = threading.Condition()
        self._readers = [threading.Thread(target=read) for read in (self._read, self._read_errors)]
        for reader in self._readers:
            reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for text in self.process.stdout:
            # Of a process that was killed the last line may be cut short.
            with contextlib.suppress(json.JSONDecodeError), self._said:
                self.lines.append(json.loads(text))
                self._said.notify_all()
        with self._said:
            self._said.notify_all()

    def _read_errors(self) -> None:
        # A pipe that nobody reads would stop a process that says much.
        assert self.process.stderr is not None
        self.errors.extend(self.process.stderr)

    def said(self, name: str) -> list[dict]:
        """Its lines with that member."""
        with self._said:
            return [line for line in self.lines if name in line]

    def await_line(
        self, name: str, is_it: Callable[[dict], bool] = lambda line: True, secs: float = WAIT_SECS
    ) -> dict:
        """The first line with that member, of which `is_it` is true."""

        def found() -> dict | None:
            return next((line for line in self.lines if name in line and is_it(line)), None)

        with self._said:
            self._said.wait_for(lambda: found() or self.process.poll() is not None, secs)
            line = found()
        assert line is not None, f"no line {name!r} in {secs} s; {self.told()}"
        return line

    def together(self) -> dict[str, Any]:
        """All that it said, as one dict; of what was said twice the last counts."""
        with self._said:
            return {name: value for line in self.lines for name, value in line.items()}

    def told(self) -> str:
        """What a failing test shows of it."""
        code = self.process.poll()
        if code is not None:
            self.wait()
        errors = "".join(self.errors)
        return f"exit code {code}, the last lines {self.lines[-5:]}\n{errors[-6000:]}"

    def kill(self) -> None:
        """SIGKILL; returns once it is gone and all that it said is read."""
        self.process.kill()
        self.wait()

    def wait(self, secs: float = WAIT_SECS) -> int:
        """Its exit code, once it has ended and all that it said is read."""
        code = self.process.wait(secs)
        for reader in self._readers:
            reader.join(WAIT_SECS)
        return code

    def finish(self, secs: float = WAIT_SECS) -> None:
        """It has to end well."""
        try:
            code = self.process.wait(secs)
        except subprocess.TimeoutExpired as error:
            self.abort()
            raise AssertionError(f"it did not end in {secs} s; {self.told()}") from error
        finally:
            self.kill()
        assert code == 0, self.told()

    def abort(self) -> None:
        """Ends it, if it still runs; `told` says then what its threads were at."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGABRT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(ABORT_SECS)
        self.kill()
