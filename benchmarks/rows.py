"""The rows of the table: each is measured over all rounds, the systems taking turns in each."""

from __future__ import annotations

import operator
import statistics
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.bench import Bench, median_of
from benchmarks.figures import Figure
from benchmarks.goodput import goodput
from benchmarks.lost_ranks import lost_rank
from benchmarks.restarts import restart
from benchmarks.scale import scale
from benchmarks.shape_rows import SHAPE_ROWS
from benchmarks.torch_rows import TORCH_ROWS

GB = 10**9
SYSTEMS = ("holdfast", "orbax")
STATES = {"adam": 0.4, "many": 0.08, "large": 4.5}
TRAINING_STEPS = 80
TRAINING_PERIODS = 4
"""Training is measured over so many steps and so many checkpoints at least."""
MEMORY_STEPS = 40
MATMULS = 1
BUDGETS = {0.01: 4, 0.03: 8, 0.1: 16}
"""The shares that are given, and over how many periods between checkpoints each is measured."""
SAVES = {"adam": 3, "many": 1, "large": 1}
"""In each round; of 20,000 leaves Orbax takes half a minute for one."""
HOSTS = 4
HOST_STEPS = 1000
REPLICATED_GB = 1.0
REPLICATED_SAVES = 10
BUCKET_GB = 1.0
BUCKET_STEPS = 40
BUCKET_UNITS = ("secs", "cpu_secs")
BUCKET_TRAININGS = {
    "holdfast bucket": ("bucket", "holdfast"),
    "holdfast disk": ("disk", "holdfast"),
    "dcp bucket": ("bucket", "dcp s3torchconnector"),
}
WATCHED_STEPS = 1000
"""In each of four observed and four other blocks."""

Rounds = dict[str, list[dict[str, Any]]]

OTHERS_TIMES = 2.0
"""How many times faster than Orbax with the states that are not `adam`."""


def times_wanted(kind: str, of_adam: float) -> float:
    """How many times faster than Orbax is wanted with this state."""
    return of_adam if kind == "adam" else OTHERS_TIMES


def share_wanted(kind: str, of_adam: float) -> float:
    """Likewise, as a share of Orbax's time."""
    return of_adam if kind == "adam" else 1 / OTHERS_TIMES


def each_system(bench: Bench, measure: Callable[[str], dict[str, Any]]) -> Rounds:
    """Every round measures each system once."""
    found: Rounds = {system: [] for system in SYSTEMS}
    for number in range(bench.rounds):
        # Whoever comes second finds the machine as the first one left it; so they swap.
        for system in SYSTEMS if number % 2 == 0 else reversed(SYSTEMS):
            found[system].append(measure(system))
    return found


def limits(bench: Bench, size_gb: float) -> dict[str, float]:
    """The machine's own rates now: those of a disk that others share are not the same for long."""
    rates: dict[str, float] = bench.worker(
        "limits", size_gb=size_gb, disk=str(bench.disk), ram=str(bench.ram)
    )
    return rates


def training(bench: Bench, kind: str = "adam") -> Iterator[Figure]:
    """Training time lost per checkpoint and GB; the interval of durable checkpoints; memory."""
    size_gb = STATES[kind] * bench.scale
    rates = limits(bench, size_gb)

    def measure(system: str) -> dict[str, Any]:
        with bench.directory() as directory:
            return bench.worker(
                "train",
                system=system,
                directory=directory,
                kind=kind,
                size_gb=size_gb,
                matmuls=MATMULS,
                steps=TRAINING_STEPS,
                periods=TRAINING_PERIODS,
            )

    found = each_system(bench, measure)
    lost = {system: median_of(rounds, _lost_secs_per_gb) for system, rounds in found.items()}
    copy_secs = GB / rates["copy_recycled"]
    step = {s: median_of(r, lambda m: m["step_with_secs"]) for s, r in found.items()}
    measured = {"rounds": found, "limits": rates, "lost_secs_per_gb": lost, "step_secs": step}
    yield Figure(
        row="training time lost per checkpoint and GB, of Orbax's",
        state=kind,
        reached=lost["holdfast"] / lost["orbax"],
        wanted=share_wanted(kind, 1 / 8),
        at_most=True,
        measured=measured,
    )
    interval = {s: median_of(r, lambda m: m["interval_p50_secs"]) for s, r in found.items()}
    yield Figure(
        row="P50 interval between durable checkpoints, of Orbax's",
        state=kind,
        reached=interval["holdfast"] / interval["orbax"],
        wanted=share_wanted(kind, 1 / 3),
        at_most=True,
        measured={"interval_secs": interval},
    )
    yield Figure(
        row="mean step while checkpointing, of Orbax's",
        state=kind,
        reached=step["holdfast"] / step["orbax"],
        wanted=1,
        at_most=True,
    )
    if kind == "adam":
        yield Figure(
            row="training time lost per checkpoint, in plain copies of the state",
            state=kind,
            reached=lost["holdfast"] / copy_secs,
            wanted=3,
            at_most=True,
        )
        yield _peak_memory(bench, kind, size_gb)


def budget(bench: Bench) -> Iterator[Figure]:
    """The share of the training time that checkpoints cost, where a share was given."""
    size_gb = STATES["adam"] * bench.scale
    for share, periods in BUDGETS.items():

        def measure(share: float = share, periods: int = periods) -> dict[str, Any]:
            with bench.directory() as directory:
                return bench.worker(
                    "budget",
                    directory=directory,
                    size_gb=size_gb,
                    matmuls=MATMULS,
                    share=share,
                    periods=periods,
                )

        found = [measure() for _ in range(bench.rounds)]
        yield Figure(
            row="share of the training time that checkpoints cost, in percent",
            state=f"budget {share:.0%}",
            reached=100 * median_of(found, lambda m: m["share"]),
            wanted=100 * share,
            at_most=True,
            unit="%",
            measured={"rounds": found},
        )


def _peak_memory(bench: Bench, kind: str, size_gb: float) -> Figure:
    def measure(system: str) -> dict[str, Any]:
        with bench.directory() as directory:
            return bench.worker(
                "peak_memory",
                system=system,
                directory=directory,
                kind=kind,
                size_gb=size_gb,
                matmuls=MATMULS,
                steps=MEMORY_STEPS,
            )

    found = each_system(bench, measure)
    beyond = median_of(found["holdfast"], lambda m: m["over_bytes"] - 2 * m["size_bytes"])
    return Figure(
        row="peak memory over the state, beyond two slots",
        state=kind,
        reached=beyond / 1e6,
        wanted=128,
        at_most=True,
        unit="MB",
        measured={"rounds": found},
    )


def _lost_secs_per_gb(measured: dict[str, Any]) -> float:
    extra = (measured["step_with_secs"] - measured["step_without_secs"]) * measured["steps"]
    return extra / max(measured["checkpoints"], 1) / (measured["size_bytes"] / GB)


def safe_and_durable(bench: Bench, kind: str, size_gb: float) -> Iterator[Figure]:
    """Seconds until safe from a crash of the process, and until durable."""
    size_gb *= bench.scale
    count = SAVES[kind]

    def measure(system: str, *, in_ram: bool = False) -> dict[str, Any]:
        rates = limits(bench, size_gb) if system == "holdfast" else {}
        with bench.directory(in_ram=in_ram) as directory:
            found = bench.worker(
                "save", system=system, directory=directory, kind=kind, size_gb=size_gb, count=count
            )
        return found | {"limits": rates}

    found = each_system(bench, measure)
    on_tmpfs = [measure("orbax", in_ram=True) for _ in range(bench.rounds)]
    size = found["holdfast"][0]["size_bytes"]
    state = f"{kind} {size / GB:.2g} GB"
    safe = median_of(found["holdfast"], lambda m: statistics.median(m["safe_secs"]))
    done = median_of(on_tmpfs, lambda m: statistics.median(m["durable_secs"]))
    durable = {
        s: median_of(r, lambda m: statistics.median(m["durable_secs"])) for s, r in found.items()
    }
    measured = {"rounds": found, "orbax_on_tmpfs": on_tmpfs}
    yield Figure(
        row="sealed in RAM, times sooner than Orbax is done on tmpfs",
        state=state,
        reached=done / safe,
        wanted=times_wanted(kind, 15),
        at_most=False,
        measured=measured,
    )
    yield Figure(
        row="durable, times sooner than Orbax",
        state=state,
        reached=durable["orbax"] / durable["holdfast"],
        wanted=times_wanted(kind, 3),
        at_most=False,
    )
    if kind == "adam":
        yield Figure(
            row="sealed in RAM, of the copy rate",
            state=state,
            reached=median_of(
                found["holdfast"],
                lambda m: size / statistics.median(m["safe_secs"]) / m["limits"]["copy_recycled"],
            ),
            wanted=0.6,
            at_most=False,
        )
        yield Figure(
            row="durable, of the O_DIRECT rate",
            state=state,
            reached=median_of(
                found["holdfast"],
                lambda m: size / statistics.median(m["durable_secs"]) / m["limits"]["write"],
            ),
            wanted=0.85,
            at_most=False,
        )


def restoring(bench: Bench, kind: str, size_gb: float) -> Iterator[Figure]:
    """Restores after a crash of the trainer, from RAM and from a cold disk."""
    size_gb *= bench.scale
    arguments: dict[str, Any] = {"kind": kind, "size_gb": size_gb}

    def measure(system: str) -> dict[str, Any]:
        with bench.directory() as directory:
            own = {"system": system, "directory": directory, **arguments}
            saved = bench.killed_worker("fill", **own)
            warm = bench.worker("restore", **own, cold=False)
            bench.end_agents()
            rates = limits(bench, size_gb) if system == "holdfast" else {}
            cold = bench.worker("restore", **own, cold=True)
            assert saved["fingerprint"] == warm["fingerprint"] == cold["fingerprint"]
            memory = bench.worker("restore_memory", **own) if kind == "adam" else {}
            return {"warm": warm, "cold": cold, "memory": memory, "limits": rates}

    found = each_system(bench, measure)
    warm = {s: median_of(r, lambda m: m["warm"]["secs"]) for s, r in found.items()}
    cold = {s: median_of(r, lambda m: m["cold"]["secs"]) for s, r in found.items()}
    size = size_gb * GB
    yield Figure(
        row="restore after a crash, from RAM: times faster than Orbax from a warm page cache",
        state=kind,
        reached=warm["orbax"] / warm["holdfast"],
        wanted=times_wanted(kind, 10),
        at_most=False,
        measured={"rounds": found},
    )
    yield Figure(
        row="restore from disk, cold: times faster than Orbax",
        state=kind,
        reached=cold["orbax"] / cold["holdfast"],
        wanted=times_wanted(kind, 2),
        at_most=False,
    )
    if kind == "adam":
        yield Figure(
            row="restore from disk, cold, of the raw read rate",
            state=kind,
            reached=median_of(
                found["holdfast"],
                # Of the reading alone: what opening costs is in the row above, and in `start`.
                lambda m: (
                    size / (m["cold"]["secs"] - m["cold"]["open_secs"]) / m["limits"]["read_cold"]
                ),
            ),
            wanted=0.8,
            at_most=False,
        )
        beyond = median_of(
            found["holdfast"], lambda m: m["memory"]["over_bytes"] - m["memory"]["size_bytes"]
        )
        yield Figure(
            row="peak memory of a restore from disk, beyond the state",
            state=kind,
            reached=beyond / 1e6,
            wanted=128,
            at_most=True,
            unit="MB",
        )


def small(bench: Bench) -> Iterator[Figure]:
    """A save that is not due; a run with 5,000 checkpoints; resharding."""
    calls = []
    for _ in range(bench.rounds):
        with bench.directory() as directory:
            calls.append(bench.worker("not_due", directory=directory, calls=20_000))
    yield Figure(
        row="`save` when not due",
        state="",
        reached=median_of(calls, lambda m: m["call_secs"]) * 1e6,
        wanted=5,
        at_most=True,
        unit="µs",
        measured={"rounds": calls},
    )
    with bench.directory() as directory:
        opened = bench.worker("open_many", directory=directory, count=5000, times=bench.rounds)
    yield Figure(
        row="a run with 5,000 checkpoints opened",
        state="",
        reached=statistics.median(opened["secs"]),
        wanted=0.5,
        at_most=True,
        unit="s",
        measured=opened,
    )
    size_gb = 0.4 * bench.scale

    def measure(system: str) -> dict[str, Any]:
        with bench.directory() as directory:
            own: dict[str, Any] = {"system": system, "directory": directory, "size_gb": size_gb}
            saved = bench.killed_worker("fill", devices=8, kind="large", rows=8, **own)
            bench.end_agents()
            found = bench.worker("reshard", devices=8, count=8, **own)
            assert saved["fingerprint"] == found["fingerprint"]
            return found

    found = each_system(bench, measure)
    read = {s: median_of(r, lambda m: m["read_bytes"] / m["size_bytes"]) for s, r in found.items()}
    yield Figure(
        row="8 row pieces restored as 8 column pieces: bytes read, of those needed",
        state="large",
        reached=read["holdfast"],
        wanted=1.1,
        at_most=True,
        measured={"read": read},
    )


def start(bench: Bench) -> Iterator[Figure]:
    """What importing Holdfast and opening a run cost: the best of 15 runs.

    Imports are measured in processor time, because others may use the cores at the same time.
    """
    with bench.directory() as directory:
        found = bench.worker("start", directory=directory)
    rows = (
        ("`import holdfast`: processor time", found["imports"]["holdfast"]["processor_secs"], 0.15),
        (
            "a new agent's processor time until it has taken a trainer",
            found["first"]["agent_secs"],
            0.25,
        ),
        ("a new run opened and closed, with a new agent", found["first"]["wall_secs"], 0.5),
        ("a run opened whose agent is there", found["second"]["wall_secs"], 0.1),
    )
    for row, secs, wanted in rows:
        yield Figure(
            row=row,
            state="",
            reached=min(secs),
            wanted=wanted,
            at_most=True,
            unit="s",
            measured=found,
        )


def frozen(bench: Bench) -> Iterator[Figure]:
    """A state of which 95 percent never change."""
    with bench.directory() as directory:
        own: dict[str, Any] = {"size_gb": bench.scale}
        found = {
            way: bench.worker(
                "frozen",
                directory=f"{directory}-{way}",
                share=0.95,
                count=bench.rounds,
                way=way,
                **own,
            )
            for way in ("same", "passed")
        }
        whole = bench.worker(
            "frozen", directory=f"{directory}-all", share=0.0, count=bench.rounds, **own
        )
    for way, told in (("same", "the same objects"), ("passed", "new objects of a jitted step")):
        yield Figure(
            row=f"95 percent unchanged, {told}: bytes written, of a whole checkpoint's",
            state="adam",
            reached=statistics.median(found[way]["written_bytes"]) / found[way]["first_bytes"],
            wanted=0.1,
            at_most=True,
            measured={way: found[way], "whole": whole},
        )
        yield Figure(
            row=f"95 percent unchanged, {told}: time until durable, of a whole checkpoint's",
            state="adam",
            reached=statistics.median(found[way]["secs"]) / statistics.median(whole["secs"]),
            wanted=0.1,
            at_most=True,
        )


def peers(bench: Bench) -> Iterator[Figure]:
    """An image of 1 GB pulled out of another process's RAM over loopback, every block checked."""
    with bench.directory(in_ram=True) as directory:
        found = bench.worker("pull", folder=directory, size_gb=bench.scale, count=bench.rounds)
    pulled, plain = (statistics.median(found[k]) for k in ("pulled_secs", "plain_secs"))
    yield Figure(
        row="pulled from a peer's RAM over loopback, of what one plain socket moves",
        state=f"{found['size_bytes'] / GB:.2g} GB",
        reached=plain / pulled,
        wanted=0.7,
        at_most=False,
        measured=found,
    )


def hosts(bench: Bench) -> Iterator[Figure]:
    """Steps between the checkpoints of several hosts: nothing there waits for anything."""
    measured = []
    for _ in range(bench.rounds):
        with bench.directory() as directory:
            measured.append(
                bench.worker("steps_between", directory=directory, hosts=HOSTS, steps=HOST_STEPS)
            )
    yield Figure(
        row=f"waits in all calls of `save` between checkpoints, {HOSTS} hosts",
        state="",
        reached=sum(found["waits"] for found in measured),
        wanted=0,
        at_most=True,
        unit="waits",
        measured={"rounds": measured},
    )


def replicas(bench: Bench) -> Iterator[Figure]:
    """Saves of two ranks that compare a twentieth of what both hold, beside such that do not."""
    found: Rounds = {"plain": [], "checked": []}
    for number in range(bench.rounds):
        for name in found if number % 2 == 0 else reversed(found):
            with bench.directory() as directory:
                found[name].append(
                    bench.worker(
                        "replica_check",
                        directory=directory,
                        size_gb=REPLICATED_GB * bench.scale,
                        count=REPLICATED_SAVES,
                        is_checked=name == "checked",
                    )
                )
    for row, unit, wanted in (
        ("blocked by `save` that compares replicas, of one that does not", "blocked_secs", 1.25),
        ("until durable with a comparison of replicas, of without", "durable_secs", 1.1),
    ):
        secs = {
            name: median_of(rounds, operator.itemgetter(unit)) for name, rounds in found.items()
        }
        yield Figure(
            row=f"PyTorch, 2 ranks: {row}",
            state=f"{REPLICATED_GB * bench.scale:.2g} GB on each",
            reached=secs["checked"] / secs["plain"],
            wanted=wanted,
            at_most=True,
            measured={"rounds": found},
        )


def buckets(bench: Bench) -> Iterator[Figure]:
    """Upload and restore at a server of S3 on tmpfs, beside obstore on the same bytes.

    Orbax has no store for S3, so it has no row here.
    """
    for task, name in (("upload", "upload to"), ("restore", "restore from")):
        with bench.directory(in_ram=True) as folder:
            measured = bench.worker(
                "in_bucket",
                folder=folder,
                measured=task,
                size_gb=BUCKET_GB * bench.scale,
                count=max(2, bench.rounds),
            )
        size_gb = measured["size_bytes"] / GB
        ours, plain = (
            [statistics.median(one[unit] for one in measured[system]) for unit in BUCKET_UNITS]
            for system in ("holdfast", "obstore")
        )
        yield Figure(
            row=f"{name} a bucket of SeaweedFS on tmpfs, of obstore's own rate",
            state=f"{size_gb:.2f} GB",
            reached=plain[0] / ours[0],
            wanted=0.85,
            at_most=False,
            measured=measured,
        )
        yield Figure(
            row=f"processor time to {name} a bucket, of obstore's own",
            state=f"{size_gb:.2f} GB",
            reached=ours[1] / plain[1],
            wanted=1.5,
            at_most=True,
            measured={"holdfast_per_gb": ours[1] / size_gb, "obstore_per_gb": plain[1] / size_gb},
        )


def bucket_rounds(bench: Bench) -> Rounds:
    """Every round trains with each of `BUCKET_TRAININGS`; the server has a core of its own."""

    def measure(place: str, system: str) -> dict[str, Any]:
        with bench.directory(in_ram=True) as folder, bench.directory() as directory:
            return bench.worker(
                "in_bucket",
                folder=folder,
                measured="train",
                place=directory if place == "disk" else "",
                system=system,
                size_gb=STATES["adam"] * bench.scale,
                steps=BUCKET_STEPS,
                periods=TRAINING_PERIODS,
            )

    found: Rounds = {name: [] for name in BUCKET_TRAININGS}
    for number in range(bench.rounds):
        for name in BUCKET_TRAININGS if number % 2 == 0 else reversed(BUCKET_TRAININGS):
            found[name].append(measure(*BUCKET_TRAININGS[name]))
    return found


def bucket_training(bench: Bench) -> Iterator[Figure]:
    """How much longer a step is while checkpoints are uploaded, beside the disk tier and DCP.

    Orbax has no store for S3.
    """
    found = bucket_rounds(bench)
    longer = {
        name: median_of(rounds, lambda m: m["step_with_secs"] / m["step_without_secs"])
        for name, rounds in found.items()
    }
    lost = {
        name: median_of(
            rounds,
            lambda m: (
                (m["step_with_secs"] - m["step_without_secs"])
                * m["steps"]
                / (m["checkpoints"] * m["size_bytes"] / GB)
            ),
        )
        for name, rounds in found.items()
    }
    processor_secs_per_gb = {
        name: median_of(
            rounds, lambda m: m["processor_secs"] / (m["checkpoints"] * m["size_bytes"] / GB)
        )
        for name, rounds in found.items()
        if name.startswith("holdfast")
    }
    plain_secs_per_gb = median_of(found["holdfast bucket"], lambda m: m["plain_secs_per_gb"])
    processor = {
        "agent_secs_per_gb": processor_secs_per_gb,
        "obstore_secs_per_gb": plain_secs_per_gb,
    }
    measured = {"rounds": found}
    yield Figure(
        row="PyTorch: mean step while uploading to a bucket, of that with the disk tier",
        state="adam",
        reached=longer["holdfast bucket"] / longer["holdfast disk"],
        wanted=1.2,
        at_most=True,
        measured=measured | {"step_of_the_plain_one": longer},
    )
    yield Figure(
        row="PyTorch: training time lost per checkpoint and GB in a bucket, of DCP's",
        state="adam",
        reached=max(lost["holdfast bucket"], 0) / max(lost["dcp bucket"], 1e-9),
        wanted=1,
        at_most=True,
        measured={"lost_secs_per_gb": lost},
    )
    yield Figure(
        row="processor time of the agent that uploads while training, per GB, of obstore's own",
        state="adam",
        reached=processor_secs_per_gb["holdfast bucket"] / plain_secs_per_gb,
        wanted=2,
        at_most=True,
        measured=processor,
    )


def watched(bench: Bench) -> Iterator[Figure]:
    """By how much a training of 100 steps a second is slower while everything observes it."""

    def measure() -> dict[str, Any]:
        with bench.directory() as directory:
            steps = max(50, round(WATCHED_STEPS * bench.scale))
            return bench.worker("watched", directory=directory, steps=steps, blocks=4)

    found = [measure() for _ in range(bench.rounds)]
    slower = [m["step_secs"]["watched"] / m["step_secs"]["plain"] - 1 for m in found]
    calls = [
        (m["call_secs"]["watched"] - m["call_secs"]["plain"] + m["metrics_secs_per_step"])
        / m["step_secs"]["plain"]
        for m in found
    ]
    for row, shares in (
        ("observed by metrics, a live page and events: longer steps, of the step", slower),
        ("the same: the training thread's time in calls beside `save`, of the step", calls),
    ):
        yield Figure(
            row=row,
            state="100 steps a second",
            reached=statistics.median(shares),
            wanted=0.001,
            at_most=True,
            measured={"rounds": found},
        )


ROWS: dict[str, Callable[[Bench], Iterator[Figure]]] = {
    "training": training,
    "training-many": lambda bench: training(bench, "many"),
    "training-large": lambda bench: training(bench, "large"),
    "budget": budget,
    "saving-1": lambda bench: safe_and_durable(bench, "adam", 1.0),
    "saving-4": lambda bench: safe_and_durable(bench, "adam", 4.0),
    "saving-many": lambda bench: safe_and_durable(bench, "many", STATES["many"]),
    "saving-large": lambda bench: safe_and_durable(bench, "large", STATES["large"]),
    "restoring": lambda bench: restoring(bench, "adam", 1.0),
    "restoring-many": lambda bench: restoring(bench, "many", STATES["many"]),
    "restoring-large": lambda bench: restoring(bench, "large", STATES["large"]),
    "small": small,
    "start": start,
    "frozen": frozen,
    "goodput": goodput,
    "restart": restart,
    "lost-rank": lost_rank,
    "peers": peers,
    "buckets": buckets,
    "bucket-training": bucket_training,
    "hosts": hosts,
    "replicas": replicas,
    "scale": scale,
    **SHAPE_ROWS,
    **TORCH_ROWS,
    "watched": watched,
}
