"""The rows of PyTorch, beside `torch.save`, DCP and `torch_checkpointing`, which take turns."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.bench import Bench, median_of
from benchmarks.figures import Figure

GB = 10**9
PEERS = {
    "adam": ("torch.save", "dcp thread", "dcp process", "torch_checkpointing"),
    "many": ("torch.save", "dcp thread"),
}
"""The other two keep a descriptor open for each tensor: of 20,000 they exceed the usual limits."""
STATES = {"adam": 1.0, "many": 0.08}
STEPS = {"adam": 40, "many": 400}
PERIODS = 4
"""Training is measured over so many steps and so many checkpoints at least."""
SAVES = 3
BEYOND_SLOTS_MB = 128

Rounds = dict[str, list[dict[str, Any]]]


def each_system(bench: Bench, kind: str, measure: Callable[[str], dict[str, Any]]) -> Rounds:
    """Every round measures each system once, in turned order."""
    systems = ["holdfast", *PEERS[kind]]
    found: Rounds = {system: [] for system in systems}
    for number in range(bench.rounds):
        turned = number % len(systems)
        for system in systems[turned:] + systems[:turned]:
            found[system].append(measure(system))
    return found


def best_of_peers(figures: dict[str, float]) -> float:
    """The least time of a peer."""
    return min(secs for system, secs in figures.items() if system != "holdfast")


def torch_training(bench: Bench, kind: str) -> Iterator[Figure]:
    """Training time lost per checkpoint and GB, of that of the best peer; memory."""
    size_gb = STATES[kind] * bench.scale

    def measure(system: str) -> dict[str, Any]:
        with bench.directory() as directory:
            return bench.worker(
                "torch_train",
                system=system,
                directory=directory,
                kind=kind,
                size_gb=size_gb,
                steps=STEPS[kind],
                periods=PERIODS,
            )

    found = each_system(bench, kind, measure)
    lost = {system: median_of(rounds, _lost_secs_per_gb) for system, rounds in found.items()}
    yield Figure(
        row="PyTorch: training time lost per checkpoint and GB, of the best peer's",
        state=kind,
        # Noise may make it nothing, or less, for any of them.
        reached=max(lost["holdfast"], 0) / max(best_of_peers(lost), 1e-6),
        wanted=1 / 8 if kind == "adam" else 1 / 2,
        at_most=True,
        measured={"rounds": found, "lost_secs_per_gb": lost},
    )


def torch_memory(bench: Bench) -> Iterator[Figure]:
    """The most memory that checkpoints take beside the training."""

    def measure() -> dict[str, Any]:
        with bench.directory() as directory:
            return bench.worker(
                "torch_peak_memory",
                system="holdfast",
                directory=directory,
                kind="adam",
                size_gb=STATES["adam"] * bench.scale,
                periods=PERIODS,
            )

    found = [measure() for _ in range(bench.rounds)]
    beyond = median_of(found, lambda m: m["over_bytes"] - 2 * m["size_bytes"])
    yield Figure(
        row="PyTorch: peak memory over the state, beyond two slots",
        state="adam",
        reached=beyond / 1e6,
        wanted=BEYOND_SLOTS_MB,
        at_most=True,
        unit="MB",
        measured={"rounds": found},
    )


def torch_saving(bench: Bench) -> Iterator[Figure]:
    """Seconds until durable; of the peers, `torch.save` and DCP sync what they write."""
    size_gb = STATES["adam"] * bench.scale

    def measure(system: str) -> dict[str, Any]:
        rates: dict[str, Any] = {}
        if system == "holdfast":
            rates = bench.worker(
                "limits", size_gb=size_gb, disk=str(bench.disk), ram=str(bench.ram)
            )
        with bench.directory() as directory:
            found = bench.worker(
                "torch_save",
                system=system,
                directory=directory,
                kind="adam",
                size_gb=size_gb,
                count=SAVES,
            )
        return found | {"limits": rates}

    found = each_system(bench, "adam", measure)
    durable = {
        s: median_of(r, lambda m: statistics.median(m["durable_secs"])) for s, r in found.items()
    }
    yield Figure(
        row="PyTorch: durable, of the O_DIRECT rate",
        state="adam",
        reached=median_of(
            found["holdfast"],
            lambda m: m["size_bytes"] / statistics.median(m["durable_secs"]) / m["limits"]["write"],
        ),
        wanted=0.85,
        at_most=False,
        measured={"rounds": found, "durable_secs": durable},
    )


def torch_restoring(bench: Bench, kind: str) -> Iterator[Figure]:
    """Restores after a crash of the trainer: from RAM, beside peers with a warm page cache."""
    arguments: dict[str, Any] = {"kind": kind, "size_gb": STATES[kind] * bench.scale}

    def measure(system: str) -> dict[str, Any]:
        with bench.directory() as directory:
            own = {"system": system, "directory": directory, **arguments}
            saved = bench.killed_worker("torch_fill", **own)
            warm = bench.worker("torch_restore", **own, cold=False)
            bench.end_agents()
            cold = bench.worker("torch_restore", **own, cold=True)
            assert saved["fingerprint"] == warm["fingerprint"] == cold["fingerprint"], system
            return {"warm": warm, "cold": cold}

    found = each_system(bench, kind, measure)
    warm = {s: median_of(r, lambda m: m["warm"]["secs"]) for s, r in found.items()}
    cold = {s: median_of(r, lambda m: m["cold"]["secs"]) for s, r in found.items()}
    yield Figure(
        row="PyTorch: restore after a crash, from RAM: times faster than the best warm peer",
        state=kind,
        reached=best_of_peers(warm) / warm["holdfast"],
        wanted=5 if kind == "adam" else 2,
        at_most=False,
        measured={"rounds": found, "warm_secs": warm, "cold_secs": cold},
    )


def _lost_secs_per_gb(measured: dict[str, Any]) -> float:
    extra = (measured["step_with_secs"] - measured["step_without_secs"]) * measured["steps"]
    return extra / max(measured["checkpoints"], 1) / (measured["size_bytes"] / GB)


TORCH_ROWS: dict[str, Callable[[Bench], Iterator[Figure]]] = {
    "torch-training": lambda bench: torch_training(bench, "adam"),
    "torch-training-many": lambda bench: torch_training(bench, "many"),
    "torch-memory": torch_memory,
    "torch-saving": torch_saving,
    "torch-restoring": lambda bench: torch_restoring(bench, "adam"),
    "torch-restoring-many": lambda bench: torch_restoring(bench, "many"),
}
