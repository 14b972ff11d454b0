"""Restarts: from SIGKILL of the trainer to the end of the first step that was not done before."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.bench import Bench
from benchmarks.figures import Figure
from holdfast.demo import journal
from holdfast.demo.learner import TrainerOptions

KILLS = 4
"""In each round."""
STEPS_BETWEEN = 10
WAIT_SECS = 600.0
RESTARTS_MAX = 1000
TRAININGS = {
    "demo, jax": ("holdfast.demo.train", "jax"),
    "demo, torch": ("holdfast.demo.train", "torch"),
    "small, jax": ("benchmarks.restart_trainer", "jax"),
    "small, torch": ("benchmarks.restart_trainer", "torch"),
}
WANTED_SECS = {"demo": 1.0, "small": 0.4}
"""Beside one step."""
SYSTEMS = ("standby", "run", "torchrun", "process", "fork")
"""The first one shows what the last one has to import."""
OTHERS = {
    "run": ("`holdfast run` without it", 1.0),
    "torchrun": ("`torchrun --max-restarts`", 1.0),
    "process": ("a bare process, started at once", 1.0),
    "fork": ("a bare fork of what has imported the same", 1.5),
}
"""What it is measured beside, and how much of its time is wanted at most."""


def restart(bench: Bench) -> Iterator[Figure]:
    """Each training with each way to restart it."""
    for state, (program, framework) in TRAININGS.items():
        systems = [name for name in SYSTEMS if framework == "torch" or name != "torchrun"]
        results: dict[str, list[dict[str, Any]]] = {name: [] for name in systems}
        imports = bench.disk / f"{state}.imports.json"
        for seed in range(bench.rounds):
            for system in systems:
                job = _Job(system, program, framework, imports)
                results[system].append(_measure(bench, job, seed))
        medians = {
            system: statistics.median(secs for result in rounds for secs in result["secs"])
            for system, rounds in results.items()
        }
        step_secs = statistics.median(result["step_secs"] for result in results["standby"])
        shown = ", ".join(f"{system} {secs:.2f} s" for system, secs in medians.items())
        print(f"  {state}: {shown}; a step {step_secs:.3f} s", flush=True)
        yield Figure(
            row="restart: from SIGKILL to the end of the first step that was not done before",
            state=state,
            reached=medians["standby"],
            wanted=WANTED_SECS[state.partition(",")[0]] + step_secs,
            at_most=True,
            unit="s",
            measured={"medians": medians, "step_secs": step_secs, "rounds": results},
        )
        for system, (words, wanted) in OTHERS.items():
            if system in medians:
                yield Figure(
                    row=f"restart with `--standby`, beside {words}",
                    state=state,
                    reached=medians["standby"] / medians[system],
                    wanted=wanted,
                    at_most=True,
                )


@dataclass(frozen=True)
class _Job:
    """A training and what restarts it; `imports` is the file of what the training imports."""

    system: str
    program: str
    framework: str
    imports: Path


def _measure(bench: Bench, job: _Job, seed: int) -> dict[str, Any]:
    """One training, killed `KILLS` times."""
    system = job.system
    chance = random.Random(seed)
    with bench.directory() as directory:
        path = Path(f"{directory}.jsonl")
        path.touch()
        watch = _Watch(path)
        command = _command(job, _arguments(job.program, job.framework, directory, path))
        environment = bench.environment | {"XDG_CACHE_HOME": f"{directory}.cache"}
        if system != "standby":
            environment |= {
                "JAX_COMPILATION_CACHE_DIR": f"{directory}.compiled",
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            }
        with _Restarted(system, command, environment, watch) as restarted:
            watch.await_step(STEPS_BETWEEN)
            secs = []
            for _ in range(KILLS):
                restarted.await_ready()
                watch.await_step(watch.step + STEPS_BETWEEN)
                time.sleep(chance.random() * watch.step_secs)
                watch.read()
                killed, last = time.perf_counter(), watch.step
                os.kill(watch.pid, signal.SIGKILL)
                restarted.restart()
                watch.await_step(last + 1)
                secs.append(time.perf_counter() - killed)
        if system == "standby":
            (kept,) = Path(f"{directory}.cache").glob("holdfast/programs/*/imports.json")
            shutil.copy(kept, job.imports)
        return {"secs": secs, "step_secs": watch.step_secs}


def _arguments(program: str, framework: str, directory: str, path: Path) -> list[str]:
    if program == "benchmarks.restart_trainer":
        return [framework, directory, str(path)]
    options = TrainerOptions(run=directory, journal=str(path), steps=10**6, framework=framework)
    return [msgspec.json.encode(options).decode()]


def _command(job: _Job, arguments: list[str]) -> list[str]:
    plain = [sys.executable, "-m", job.program, *arguments]
    holdfast_run = [sys.executable, "-m", "holdfast", "run", "--max-restarts", str(RESTARTS_MAX)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1"]
    torchrun += ["--max-restarts", str(RESTARTS_MAX), "--monitor-interval", "0.1"]
    forking = [sys.executable, "-m", "benchmarks.fork_server", str(job.imports)]
    return {
        "standby": [*holdfast_run, "--standby", "--", *plain],
        "run": [*holdfast_run, "--", *plain],
        "torchrun": [*torchrun, "-m", job.program, *arguments],
        "process": plain,
        "fork": [*forking, job.program, *arguments],
    }[job.system]


class _Restarted(contextlib.AbstractContextManager["_Restarted"]):
    """A job that is restarted by what started it, or by the benchmark if it is a bare process."""

    def __init__(self, system: str, command: list[str], environment: Any, watch: _Watch) -> None:
        self._system, self._command, self._environment = system, command, environment
        self._watch = watch
        self._log = watch.path.with_suffix(".log")
        self._start()

    def _start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                bufsize=0,
            )
        self._ask_fork()

    def _ask_fork(self) -> None:
        if self._system == "fork":
            assert self._process.stdin is not None
            self._process.stdin.write(b"\n")

    def await_ready(self) -> None:
        """Waits for the standby process."""
        deadline = time.monotonic() + WAIT_SECS
        while self._system == "standby" and b"modules imported" not in self._log.read_bytes():
            if time.monotonic() > deadline:
                raise RuntimeError(f"no standby process:\n{self._log.read_text()[-3000:]}")
            time.sleep(0.05)

    def restart(self) -> None:
        """What a bare process needs; all others restart by themselves."""
        if self._system == "process":
            self._process.wait()
            self._start()
        self._ask_fork()

    def __exit__(self, *error: object) -> None:
        # First what would restart the trainer.
        self._process.kill()
        self._process.wait()
        self._watch.read()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._watch.pid, signal.SIGKILL)


class _Watch:
    """Follows a journal: the last step, how long steps take, and the trainer's process."""

    def __init__(self, path: Path) -> None:
        self.path, self._tail = path, journal.Tail(path)
        self.step, self.pid, self.step_secs = -1, 0, 0.0

    def read(self) -> None:
        """Reads what is new."""
        for record in self._tail.read():
            if isinstance(record, journal.Started):
                self.pid = record.pid
            elif isinstance(record, journal.Step):
                self.step, self.step_secs = max(self.step, record.step), record.secs

    def await_step(self, step: int) -> None:
        """Waits until a step is done."""
        deadline = time.monotonic() + WAIT_SECS
        while self.step < step:
            if time.monotonic() > deadline:
                raise RuntimeError(f"step {step} was not done; the last one is {self.step}")
            time.sleep(0.002)
            self.read()
