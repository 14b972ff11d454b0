"""Find out what has started this process, and which rank, count and host it gave it.

`LAUNCHERS` is the one table of the launchers' variables. Launchers are nested: torchrun runs in a
task of Slurm, and a program may start ranks of its own within that. The table is in the order of
nesting, the innermost launcher first.

Invariants:
- The framework's rank and count are used. Those of a launcher only explain an error: a launcher
  also starts processes that are no ranks of one job, such as the trainings of a sweep.
- Everything here is a function of the environment, and of the Ray that the program has imported.

`HOLDFAST_LAUNCHER` names the launchers that count, separated by commas, or `none`.

See docs/decisions/0054.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from holdfast.environment import LAUNCHER_VARIABLE
from holdfast.errors import InvalidArgumentError

NO_LAUNCHER = "none"
HOSTS_MAX = 100_000
"""A list of more hosts is not expanded."""

TORCHRUN, RAY, SLURM = "torchrun", "ray", "slurm"


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherVariables:
    """The variables of one launcher. Of several names for one thing, the first that is set counts.

    Attributes:
        name: The launcher, as `HOLDFAST_LAUNCHER` names it.
        label: The same, for messages.
        signs: The launcher has started this process if one of these is set.
        ranks_by: The ranks are known only if this is set, too; empty: always.
        nests: Whether it may start several ranks, or another job, in one task of a launcher around
            it. Otherwise its rank and count are those of the outer launcher, or a multiple.
        restarts: How often the job was started again.
        hosts: The hosts of the job, in Slurm's notation.
        signals: The signals by which it announces a preemption, besides SIGTERM.
    """

    name: str
    label: str
    signs: tuple[str, ...]
    ranks_by: str = ""
    nests: bool = False
    rank: tuple[str, ...] = ()
    count: tuple[str, ...] = ()
    local_rank: tuple[str, ...] = ()
    node: tuple[str, ...] = ()
    node_count: tuple[str, ...] = ()
    restarts: tuple[str, ...] = ()
    job: tuple[str, ...] = ()
    host: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    signals: tuple[signal.Signals, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All variables that are read."""
        groups = (
            *(self.signs, self.rank, self.count, self.local_rank, self.node, self.node_count),
            *(self.restarts, self.job, self.host, self.hosts),
        )
        return tuple(dict.fromkeys(name for group in groups for name in group))


LAUNCHERS = (
    LauncherVariables(
        name=TORCHRUN,
        label="torchrun",
        signs=("TORCHELASTIC_RUN_ID",),
        nests=True,
        rank=("RANK",),
        count=("WORLD_SIZE",),
        local_rank=("LOCAL_RANK",),
        node=("GROUP_RANK",),
        node_count=("GROUP_WORLD_SIZE",),
        # Differs between the nodes, so it is never the number of the job's attempt.
        restarts=("TORCHELASTIC_RESTART_COUNT",),
        job=("TORCHELASTIC_RUN_ID",),
    ),
    LauncherVariables(
        name=RAY,
        label="Ray",
        # Ray's node process sets it for its workers, a driver's process has none. A `TorchTrainer`
        # sets the ranks' variables in train_loop; for other trainers see `_ray_worker`.
        signs=("RAY_RAYLET_PID",),
        nests=True,
        rank=("RANK",),
        count=("WORLD_SIZE",),
        local_rank=("LOCAL_RANK",),
        node=("NODE_RANK",),
        job=("RAY_JOB_ID",),
    ),
    LauncherVariables(
        name="env",
        label="RANK and WORLD_SIZE",
        signs=("RANK",),
        rank=("RANK",),
        count=("WORLD_SIZE",),
        local_rank=("LOCAL_RANK",),
        node=("NODE_RANK", "GROUP_RANK"),
    ),
    LauncherVariables(
        name="mpi",
        label="MPI",
        # PMIX_RANK alone has no count; Slurm sets it too (`srun --mpi=pmix`).
        signs=("OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"),
        nests=True,
        rank=("OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"),
        count=("OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE"),
        local_rank=(
            *("OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"),
            "PMIX_LOCAL_RANK",
        ),
        job=("PMIX_NAMESPACE", "PMI_JOBID"),
    ),
    LauncherVariables(
        name=SLURM,
        label="Slurm",
        signs=("SLURM_JOB_ID",),
        # The batch script has SLURM_PROCID=0 too, and SLURM_NTASKS of the whole job.
        ranks_by="SLURM_STEP_NUM_TASKS",
        rank=("SLURM_PROCID",),
        count=("SLURM_STEP_NUM_TASKS",),
        local_rank=("SLURM_LOCALID",),
        node=("SLURM_NODEID",),
        node_count=("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES"),
        restarts=("SLURM_RESTART_COUNT",),
        job=("SLURM_JOB_ID",),
        host=("SLURMD_NODENAME",),
        hosts=("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"),
        signals=(signal.SIGUSR1, signal.SIGUSR2),
    ),
    LauncherVariables(
        name="kubernetes",
        label="Kubernetes",
        signs=("KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX", "JOBSET_NAME"),
        # The index of a pod in its Job; a JobSet may have several Jobs, and a pod several ranks.
        node=("JOB_COMPLETION_INDEX",),
        restarts=("JOBSET_RESTART_ATTEMPT",),
        job=("JOBSET_NAME",),
    ),
    LauncherVariables(
        name="holdfast",
        label="holdfast run",
        signs=("HOLDFAST_RESTART_COUNT",),
        restarts=("HOLDFAST_RESTART_COUNT",),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """One launcher of this process. A member is None, or empty, if it is not known.

    Attributes:
        variables: The variables of the table that are set, with their values.
    """

    of: LauncherVariables
    rank: int | None
    count: int | None
    local_rank: int | None
    node: int | None
    node_count: int | None
    restarts: int | None
    job: str
    host: str
    hosts: tuple[str, ...]
    variables: Mapping[str, str]

    @property
    def place_text(self) -> str:
        """The launcher and the rank that it gave this process, for messages."""
        job = f" (job {self.job})" if self.job else ""
        if self.rank is None or self.count is None:
            return f"{self.of.label}{job}"
        return f"{self.of.label}{job} as rank {self.rank} of {self.count}"

    @property
    def unreadable(self) -> tuple[str, ...]:
        """The variables of numbers whose values are none, as `NAME=value`; they are not used."""
        table = self.of
        numbers = (*table.rank, *table.count, *table.local_rank, *table.node, *table.node_count)
        return tuple(
            f"{name}={value}"
            for name, value in self.variables.items()
            if name in numbers and not _is_number(value)
        )

    @property
    def is_for_torch(self) -> bool:
        """Whether it has started several processes that meet by `init_process_group`."""
        return "RANK" in self.variables and (self.count or 1) > 1

    def contradicts(self, outer: Launcher) -> bool:
        """Return whether this launcher and one around it cannot both be right about the rank."""
        if self.of.nests or None in (self.rank, self.count, outer.rank, outer.count):
            return False
        assert self.count is not None
        assert outer.count is not None
        if self.count == outer.count:
            return self.rank != outer.rank
        # A task may have started several ranks by itself.
        return self.count < outer.count or self.count % outer.count != 0


@dataclass(frozen=True, slots=True)
class Launch:
    """All launchers of this process, the innermost first."""

    launchers: tuple[Launcher, ...] = ()

    @property
    def ranked(self) -> Launcher | None:
        """The innermost launcher that gave this process a rank and a count."""
        return next((each for each in self.launchers if None not in (each.rank, each.count)), None)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the launchers, the innermost first."""
        return tuple(each.of.name for each in self.launchers)

    @property
    def restarts(self) -> dict[str, int]:
        """How often the launchers that count it have started the job again, by their names."""
        return {e.of.name: e.restarts for e in self.launchers if e.restarts is not None}

    @property
    def host(self) -> str:
        """The name that a launcher has for this host; empty: none has one."""
        return next((each.host for each in self.launchers if each.host), "")

    @property
    def signals(self) -> tuple[signal.Signals, ...]:
        """The signals by which a launcher announces a preemption, besides SIGTERM."""
        return tuple(dict.fromkeys(n for each in self.launchers for n in each.of.signals))

    def host_of(self, rank: int, count: int) -> str:
        """Return the host of a rank of `count`, where a launcher has started one on each host."""
        for each in self.launchers:
            if each.count == count == len(each.hosts) and rank < count:
                return each.hosts[rank]
        return ""

    def check(self, rank: int, count: int) -> None:
        """Check that no two launchers contradict each other, unless the framework settles it.

        Args:
            rank: The rank of this process, as the framework has it.
            count: The number of processes, as the framework has it.

        Raises:
            InvalidArgumentError: They do, and the framework agrees with neither.
        """
        pair = self.contradiction()
        if pair is None or any((each.rank, each.count) == (rank, count) for each in pair):
            return
        inner, outer = pair
        left_over = ", ".join(inner.variables)
        raise InvalidArgumentError(
            f"find this process's rank: it was started by {inner.place_text} and by "
            f"{outer.place_text}, and the framework has rank {rank} of {count}; unset the "
            f"variables that are left over ({left_over}), or name the launcher that counts "
            f"({LAUNCHER_VARIABLE}={outer.of.name})"
        )

    def contradiction(self) -> tuple[Launcher, Launcher] | None:
        """Return two launchers that contradict each other, the inner one first."""
        for index, inner in enumerate(self.launchers):
            for outer in self.launchers[index + 1 :]:
                if inner.contradicts(outer):
                    return inner, outer
        return None

    def larger_job(self, count: int) -> str:
        """Return what has started more processes than the framework's job has, for messages.

        Args:
            count: The number of processes, as the framework has it.

        Returns:
            The launcher, and the rank that it gave this process; empty if none has.
        """
        larger = self._larger(count)
        return larger.place_text if larger is not None else ""

    def may_fence(self, count: int) -> bool:
        """Return whether this process may take a run over from a live attempt.

        If a launcher has started more processes than the framework's job has, they may be ranks of
        one job that do not know each other, and would fence each other: its first one alone may.

        Args:
            count: The number of processes, as the framework has it.
        """
        larger = self._larger(count)
        return larger is None or larger.rank == 0

    def _larger(self, count: int) -> Launcher | None:
        for each in self.launchers:
            if each.rank is not None and each.count is not None and each.count > count:
                return each
        return None


NO_LAUNCH = Launch()
"""A process that nothing of the table has started."""


def launched() -> Launch:
    """Return the launchers of this process.

    Raises:
        InvalidArgumentError: `HOLDFAST_LAUNCHER` names none.
    """
    return launch_of(os.environ, sys.modules)


def launch_of(environ: Mapping[str, str], modules: Mapping[str, Any]) -> Launch:
    """Return the launchers of a process with these variables and imported modules.

    Raises:
        InvalidArgumentError: `HOLDFAST_LAUNCHER` names none.
    """
    chosen = _chosen(environ.get(LAUNCHER_VARIABLE, ""))
    launchers: list[Launcher] = []
    # RANK of torchrun is not also that of the Ray or of the shell around it.
    left = dict(environ)
    for table in LAUNCHERS:
        if chosen is not None and table.name not in chosen:
            continue
        if any(left.get(sign) for sign in table.signs):
            launcher = _read(table, left)
            if table.name == RAY and "RANK" not in environ:
                launcher = _with_ray_ranks(launcher, modules)
            launchers.append(launcher)
            for name in (*table.rank, *table.count, *table.local_rank, *table.node):
                left.pop(name, None)
    return Launch(tuple(launchers))


def _chosen(text: str) -> set[str] | None:
    """Return the launchers that count; None: all."""
    names = {name.strip().lower() for name in text.split(",")} - {""}
    known = {variables.name for variables in LAUNCHERS}
    if names - known - {NO_LAUNCHER}:
        raise InvalidArgumentError(
            f"{LAUNCHER_VARIABLE}: expected {NO_LAUNCHER}, or some of {', '.join(sorted(known))}, "
            f"found {text!r}"
        )
    return names & known if names else None


def _read(table: LauncherVariables, environ: Mapping[str, str]) -> Launcher:
    variables = {name: environ[name] for name in table.names if environ.get(name)}

    def text(names: tuple[str, ...]) -> str:
        return next((variables[name] for name in names if name in variables), "")

    def number(names: tuple[str, ...]) -> int | None:
        value = text(names)
        return int(value) if _is_number(value) else None

    is_ranked = not table.ranks_by or table.ranks_by in variables
    return Launcher(
        of=table,
        rank=number(table.rank) if is_ranked else None,
        count=number(table.count) if is_ranked else None,
        local_rank=number(table.local_rank),
        node=number(table.node),
        node_count=number(table.node_count),
        restarts=number(table.restarts),
        job=text(table.job),
        host=text(table.host),
        hosts=hosts_in(text(table.hosts)),
        variables=variables,
    )


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal()


def _with_ray_ranks(launcher: Launcher, modules: Mapping[str, Any]) -> Launcher:
    """Return the launcher with the ranks of Ray Train's context, which are in no variable.

    Only a worker of a trainer has the context, and its program has imported Ray Train.
    """
    get_context = getattr(modules.get("ray.train"), "get_context", None)
    if get_context is None:
        return launcher
    try:
        context = get_context()
        rank, count = context.get_world_rank(), context.get_world_size()
    except (RuntimeError, DeprecationWarning):
        # Another worker of Ray. In a trial of Tune, Ray raises the warning.
        return launcher
    # Older versions return None outside of a trainer.
    return replace(launcher, rank=rank, count=count)


def hosts_in(text: str) -> tuple[str, ...]:
    """Return the hosts of a list in Slurm's notation: `n[01-03,7],other`.

    Returns:
        The hosts in their order; empty if the text is no such list, or too long.
    """
    hosts: list[str] = []
    for match in re.finditer(r"([^,\[\]]+(?:\[[^\]]*\][^,\[\]]*)*)(?:,|$)", text):
        pieces = re.split(r"\[([^\]]*)\]", match[1])
        names = [pieces[0]]
        for ranges, rest in zip(pieces[1::2], pieces[2::2], strict=True):
            numbers = _numbers_in(ranges, HOSTS_MAX // len(names))
            names = [f"{name}{number}{rest}" for name in names for number in numbers]
            if not names:
                return ()
        hosts += names
    return tuple(hosts) if len(hosts) <= HOSTS_MAX else ()


def _numbers_in(ranges: str, count_max: int) -> list[str]:
    """Return the numbers of `01-03,7`, each as wide as its range's first; empty if too many."""
    numbers: list[str] = []
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        last = last or first
        if not (first.isdecimal() and last.isdecimal()) or int(last) - int(first) > count_max:
            return []
        numbers += [f"{n:0{len(first)}}" for n in range(int(first), int(last) + 1)]
    return numbers if len(numbers) <= count_max else []
