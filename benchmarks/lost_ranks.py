"""Lost ranks: from the SIGKILL of one of four ranks to the next step of all ranks."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks.bench import Bench
from benchmarks.figures import Figure
from benchmarks.rank_trainer import RANKS

KILLS = 3
"""In each round."""
STEPS_BETWEEN = 7
WAIT_SECS = 240.0
DEFAULTS_WAIT_SECS = 100.0
"""torchft's defaults wait for up to a minute, several times: it is measured by one kill."""
WANTED_SECS = 1.0
"""Beside one step."""
STATE = "4 ranks of 100 MB, gloo"
OTHERS = {
    "torchrun": "`torchrun --max-restarts` and Holdfast: all ranks again",
    "torchft": "torchft with its defaults: the ranks that are left",
    "torchft, with the newcomer": "torchft with its defaults: all ranks again",
    "torchft, tuned": "torchft with timeouts of 0.5 to 5 s: the ranks that are left",
    "torchft, tuned, with the newcomer": "the same: all ranks again",
    "floor": "the same without a state: a new process group alone",
}


def lost_rank(bench: Bench) -> Iterator[Figure]:
    """Each way to go on after a lost rank."""
    systems = ["spares", "keep-last", "floor", "torchrun"]
    if importlib.util.find_spec("torchft") is None:
        print("  SKIPPED torchft: it is not installed", flush=True)
    else:
        systems += ["torchft, tuned", "torchft"]
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in systems}
    for seed in range(bench.rounds):
        for system in systems:
            if system != "torchft" or seed == 0:
                results[system].append(_measure(bench, system, seed))
    medians: dict[str, float] = {}
    for system, rounds in results.items():
        medians[system] = statistics.median(s for each in rounds for s in each["secs"])
        if system.startswith("torchft"):
            secs = [s for each in rounds for s in each["secs_of_all"]]
            medians[f"{system}, with the newcomer"] = statistics.median(secs)
    step_secs = statistics.median(each["step_secs"] for each in results["spares"])
    shown = ", ".join(f"{system} {secs:.2f} s" for system, secs in medians.items())
    print(f"  {STATE}: {shown}; a step {step_secs:.3f} s", flush=True)
    row = "lost-rank: from SIGKILL of a rank to the next new step of all ranks"
    for system in ("spares", "keep-last"):
        yield Figure(
            row=row + ("" if system == "spares" else ", the last step kept"),
            state=STATE,
            reached=medians[system],
            wanted=WANTED_SECS + step_secs,
            at_most=True,
            unit="s",
            measured={"medians": medians, "step_secs": step_secs, "rounds": results[system]},
        )
    for system, words in OTHERS.items():
        if system in medians:
            yield Figure(
                row=f"lost-rank, beside {words}",
                state=STATE,
                reached=medians["spares"] / medians[system],
                wanted=2.0 if system == "floor" else 1.0,
                at_most=True,
            )


def _measure(bench: Bench, system: str, seed: int) -> dict[str, Any]:
    """One training, of which a rank is killed `KILLS` times."""
    chance = random.Random(seed)
    found: dict[str, Any] = {"secs": [], "secs_of_all": []}
    with bench.directory() as directory, contextlib.ExitStack() as stack:
        journal = _Journal(Path(f"{directory}.jsonl"))
        arguments = [system, directory, str(journal.path)]
        environment = bench.environment | {
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "OMP_NUM_THREADS": "1",
        }
        if system.startswith("torchft"):
            job: Any = stack.enter_context(_Replicas(system, arguments, environment, journal))
        else:
            job = stack.enter_context(_Job(system, arguments, environment, journal))
        journal.await_each(STEPS_BETWEEN, set(), RANKS, job.look)
        for _ in range(1 if system == "torchft" else KILLS):
            before = journal.read()
            pids = sorted(_newest_pids(before))
            last = max(step for _, step, _ in before)
            journal.await_each(last + STEPS_BETWEEN, set(), RANKS, job.look)
            time.sleep(chance.random() * journal.step_secs())
            lost = chance.choice(pids)
            whole = journal.read()
            last = max(step for _, step, _ in whole)
            killed = time.perf_counter()
            os.kill(lost, signal.SIGKILL)
            if system.startswith("torchft"):
                survivors = set(pids) - {lost}
                limit = DEFAULTS_WAIT_SECS if system == "torchft" else WAIT_SECS
                found["secs"].append(
                    journal.await_pids(survivors, killed, job.look, limit) - killed
                )
                newcomer = job.await_newcomer(lost)
                found["secs_of_all"].append(
                    journal.await_pids(survivors | {newcomer}, killed, job.look, limit) - killed
                )
            else:
                found["secs"].append(journal.await_each(last + 1, {lost}, RANKS, job.look) - killed)
        found["step_secs"] = journal.step_secs()
    return found


def _newest_pids(records: list[tuple[int, int, float]]) -> set[int]:
    """Return the processes of the last steps, one for each rank."""
    last = max(step for _, step, _ in records)
    return {pid for pid, step, _ in records if step >= last - 1 and psutil.pid_exists(pid)}


class _Journal:
    """What all ranks have written: process, step, time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    def read(self) -> list[tuple[int, int, float]]:
        lines = self.path.read_text().splitlines(keepends=True)
        found = [json.loads(line) for line in lines if line.endswith("\n")]
        return [(each["pid"], each["step"], each["secs"]) for each in found]

    def step_secs(self) -> float:
        """Return the median time between two steps of a process."""
        last: dict[int, float] = {}
        secs = []
        for pid, _, time_secs in self.read()[-40 * RANKS :]:
            if pid in last:
                secs.append(time_secs - last[pid])
            last[pid] = time_secs
        return statistics.median(secs)

    def await_each(
        self, step: int, without: set[int], count: int, look: Callable[[], None]
    ) -> float:
        """Wait until so many processes have done a step; return when the last one did."""

        def ends() -> list[float]:
            first: dict[int, float] = {}
            for pid, done, secs in self.read():
                if done >= step and pid not in without:
                    first.setdefault(pid, secs)
            return sorted(first.values())

        return self._await(lambda: ends()[:count] if len(ends()) >= count else None, look)

    def await_pids(
        self, pids: set[int], since: float, look: Callable[[], None], limit_secs: float
    ) -> float:
        """Wait until each of these processes has done a step; return when the last one did.

        After `limit_secs` the present time is returned, which is too early then.
        """

        def ends() -> list[float] | None:
            first: dict[int, float] = {}
            for pid, _, secs in self.read():
                if secs > since and pid in pids:
                    first.setdefault(pid, secs)
            return list(first.values()) if first.keys() == pids else None

        deadline = time.perf_counter() + limit_secs
        while (found := ends()) is None and time.perf_counter() < deadline:
            look()
            time.sleep(0.01)
        return max(found) if found else time.perf_counter()

    def _await(self, ends: Callable[[], list[float] | None], look: Callable[[], None]) -> float:
        deadline = time.monotonic() + WAIT_SECS
        while (found := ends()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no step of all ranks within {WAIT_SECS:.0f} s: {self.path}")
            look()
            time.sleep(0.01)
        return max(found)


def _trainer(arguments: list[str]) -> list[str]:
    return [sys.executable, "-m", "benchmarks.rank_trainer", *arguments]


class _Job(contextlib.AbstractContextManager["_Job"]):
    """Four ranks, and what replaces them."""

    def __init__(
        self, system: str, arguments: list[str], environment: Any, journal: _Journal
    ) -> None:
        run = [sys.executable, "-m", "holdfast", "run", "--nproc", str(RANKS), "--spares", "1"]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]
        torchrun += ["--max-restarts", "1000", "--monitor-interval", "0.1"]
        torchrun += ["-m", "benchmarks.rank_trainer", *arguments]
        command = torchrun if system == "torchrun" else [*run, "--", *_trainer(arguments)]
        with journal.path.with_suffix(".log").open("ab") as log:
            self._process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def look(self) -> None:
        """Notice that the job has ended."""
        if self._process.poll() is not None:
            raise RuntimeError(f"the job has ended: exit code {self._process.returncode}")

    def __exit__(self, *error: object) -> None:
        _end([self._process])


class _Replicas(contextlib.AbstractContextManager["_Replicas"]):
    """Four replicas of torchft, each of which is started again at once, and its lighthouse."""

    def __init__(
        self, system: str, arguments: list[str], environment: Any, journal: _Journal
    ) -> None:
        self._log = journal.path.with_suffix(".log")
        port = _free_port()
        words = ["--bind", f"127.0.0.1:{port}", "--min_replicas", "1"]
        if system == "torchft, tuned":
            words += ["--heartbeat_timeout_ms", "500", "--join_timeout_ms", "500"]
            words += ["--quorum_tick_ms", "20"]
        self._environment = environment | {"TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}"}
        self._command = _trainer(arguments)
        lighthouse = str(Path(sys.executable).with_name("torchft_lighthouse"))
        self._lighthouse = self._start([lighthouse, *words])
        self._replicas = [self._start(self._command) for _ in range(RANKS)]
        self._newcomers: dict[int, int] = {}

    def _start(self, command: list[str]) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(
                command, env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def look(self) -> None:
        """Start a replica again that has ended."""
        for i, replica in enumerate(self._replicas):
            if replica.poll() is not None:
                self._replicas[i] = self._start(self._command)
                self._newcomers[replica.pid] = self._replicas[i].pid

    def await_newcomer(self, lost: int) -> int:
        """Return the process that was started in place of a lost one."""
        while lost not in self._newcomers:
            self.look()
            time.sleep(0.01)
        return self._newcomers[lost]

    def __exit__(self, *error: object) -> None:
        _end([*self._replicas, self._lighthouse])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    """Kill processes with all that they have started."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            for each in (psutil.Process(process.pid), *psutil.Process(process.pid).children(True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
        process.wait()
