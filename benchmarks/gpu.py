"""Checkpoints of a state on an NVIDIA GPU: blocking time, step inflation, time to sealed, rates.

One script, for a machine with a GPU and ten minutes:

    PYTHONPATH=src python benchmarks/gpu.py --json gpu.json

It needs Python 3.12, JAX 0.11 with CUDA, `cuda-bindings`, what Holdfast itself needs, and, for the
sections about them, Orbax and PyTorch 2.11. Each section is a process of its own; `--only` names
those to run. What cannot run is listed as not run, with the reason, and the exit code tells it. 0:
all sections ran and reached what was wanted. 1: one failed, or what was restored is not what was
saved. 3: one did not run. 4: there is no GPU, and nothing was measured. 5: all ran, and a figure is
not what was wanted.

`--stand-in` runs Holdfast's code path, small, on a stand-in device in the host's memory: that shows
that it works, and measures nothing; sections that need a GPU are listed as not run. The stand-in is
that of the tests: `PYTHONPATH=src:. python benchmarks/gpu.py --stand-in`.
"""

from __future__ import annotations

import argparse
import json
import logging
import mmap
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

GB = 10**9
SECTION_SECS = 240.0
"""No section takes longer; one that does has failed."""
STEP_SECS = 0.25
WORK = 64
WARM_UP_SAVES = 3
BLOCKING_WANTED_SECS = 0.020
RATE_WANTED = 0.9
RESTORE_RATE_WANTED = 0.8
RESTORES = 3
BEFORE_FIRST_SAVE_SECS = 15.0
TORCH_STEP_SECS = 0.6
"""PyTorch's steps change tensors in place, so one that is shorter than the copy waits for it."""
INFLATION_WANTED = 0.02
"""Of the copy's duration, with PyTorch: what a save costs the steps in all."""
FAILED, NOT_RUN, NO_GPU, MISSED = 1, 3, 4, 5

State = dict[str, Any]


class NotRunError(Exception):
    """Says why a section cannot run here."""


def make_state(size_gb: float) -> State:
    """Parameters and Adam's moments, as matrices of 64 MiB; of 256 KiB where the state is small."""
    import jax

    side = 4096 if size_gb >= 1 else 256
    count = max(1, round(size_gb * GB / (3 * 4 * side * side)))
    fill = jax.jit(lambda key: jax.random.uniform(key, (side, side)))
    keys = iter(jax.random.split(jax.random.key(0), 3 * count))
    return {
        group: {f"layer_{i:03d}": fill(next(keys)) for i in range(count)}
        for group in ("params", "mu", "nu")
    }


def make_step() -> Callable[[State, int], tuple[State, Any]]:
    """A donated step that changes every leaf, and computes `work` besides, a number XLA knows."""
    import jax
    import jax.numpy as jnp

    def step(state: State, work: int) -> tuple[State, Any]:
        weight = next(iter(state["params"].values()))
        x = jax.lax.fori_loop(0, work, lambda _, x: jnp.tanh(x @ weight * 1e-3), weight)
        loss = jnp.mean(x)
        grads = jax.tree.map(lambda p: p * 1e-2 + loss, state["params"])
        mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mu"], grads)
        nu = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, state["nu"], grads)
        params = jax.tree.map(
            lambda p, m, v: p - 1e-4 * m / (jnp.sqrt(v) + 1e-8), state["params"], mu, nu
        )
        return {"params": params, "mu": mu, "nu": nu}, loss

    return jax.jit(step, donate_argnums=0, static_argnums=1)


def fingerprint(state: State) -> list[int]:
    """A sum over each leaf's bits, weighted by their places."""
    import jax
    import jax.numpy as jnp

    def one(leaf: Any) -> Any:
        bits = jax.lax.bitcast_convert_type(leaf, jnp.uint32).reshape(-1)
        places = jax.lax.iota(jnp.uint32, bits.size)
        return jnp.sum(bits * (places * jnp.uint32(2) + jnp.uint32(1)), dtype=jnp.uint32)

    compute = jax.jit(one)
    return [int(compute(leaf)) for leaf in jax.tree.leaves(state)]


class Training:
    """A training whose steps take about `STEP_SECS`; each ends when the host has its loss."""

    def __init__(self, options: argparse.Namespace) -> None:
        import jax

        if jax.default_backend() != "gpu" and not options.stand_in:
            raise NotRunError("JAX sees no GPU; install jax[cuda13] or jax[cuda12]")
        self.about = {"jax": jax.__version__, "device": jax.devices()[0].device_kind}
        self.state = make_state(options.size_gb)
        self.size_bytes = sum(x.nbytes for of in self.state.values() for x in of.values())
        self._step, self.number = make_step(), 0
        self._work = WORK
        for _ in range(3):
            self._work = max(1, round(self._work * options.step_secs / self.run(2)[1]))
        self.run(2)

    def run(self, steps: int, save: Callable[[int, State], object] | None = None) -> list[float]:
        """Runs steps, and returns how long each took, `save` included."""
        secs = []
        for _ in range(steps):
            started = time.perf_counter()
            self.state, loss = self._step(self.state, self._work)
            float(loss)
            if save is not None:
                self.number += 1
                save(self.number, self.state)
            secs.append(time.perf_counter() - started)
        return secs


class Saves:
    """Times the calls of `save`; of those that took a checkpoint, when they were called too."""

    def __init__(self, save: Callable[[int, State], bool]) -> None:
        self._save = save
        self.blocked_secs: list[float] = []
        self.called_at: dict[int, float] = {}

    def __call__(self, step: int, state: State) -> None:
        now, started = time.time(), time.perf_counter()
        if self._save(step, state):
            self.blocked_secs.append(time.perf_counter() - started)
            self.called_at[step] = now


def summary(
    training: Training | TorchTraining, saves: Saves, without: list[float], on: list[float]
) -> State:
    """What all checkpointers are asked for."""
    lost_secs = (statistics.mean(on) - statistics.mean(without)) * len(on)
    return training.about | {
        "size_bytes": training.size_bytes,
        "saves": len(saves.blocked_secs),
        "blocking_p50_secs": statistics.median(saves.blocked_secs),
        "blocking_max_secs": max(saves.blocked_secs),
        "step_without_secs": statistics.mean(without),
        "step_with_secs": statistics.mean(on),
        "lost_per_save_secs": lost_secs / len(saves.blocked_secs),
    }


def pinned(options: argparse.Namespace) -> State:
    """The machine's own limits: 1 GiB from the device to memory of three kinds."""
    import numpy as np
    from cuda.bindings import runtime as cuda

    def check(result: tuple[Any, ...]) -> Any:
        if result[0] != cuda.cudaError_t.cudaSuccess:
            raise RuntimeError(f"CUDA says {result[0].name}")
        return result[1] if len(result) > 1 else None

    size = 1 << 30
    source = check(cuda.cudaMalloc(size))
    stream = check(cuda.cudaStreamCreateWithFlags(cuda.cudaStreamNonBlocking))
    kinds = cuda.cudaMemcpyKind

    def copy(target: int, source: int = source, kind: Any = kinds.cudaMemcpyDeviceToHost) -> None:
        check(cuda.cudaMemcpyAsync(target, source, size, kind, stream))
        check(cuda.cudaStreamSynchronize(stream))

    of_cuda = int(check(cuda.cudaHostAlloc(size, cuda.cudaHostAllocPortable)))
    back = lambda: copy(source, of_cuda, kinds.cudaMemcpyHostToDevice)  # noqa: E731
    found = {
        "pinned_bytes_per_sec": rate(size, options.rounds, lambda: copy(of_cuda)),
        "pinned_to_device_bytes_per_sec": rate(size, options.rounds, back),
    }
    with tempfile.TemporaryFile(dir=options.ram) as file:
        os.posix_fallocate(file.fileno(), 0, size)
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        pages = np.frombuffer(mmap.mmap(file.fileno(), size, flags=flags), np.uint8)
        at = pages.ctypes.data
        started = time.perf_counter()
        check(cuda.cudaHostRegister(at, size, cuda.cudaHostRegisterPortable))
        found["register_secs_per_gib"] = time.perf_counter() - started
        found["registered_tmpfs_bytes_per_sec"] = rate(size, options.rounds, lambda: copy(at))
        check(cuda.cudaHostUnregister(at))
    pageable = np.ones(size, np.uint8)
    found["pageable_bytes_per_sec"] = rate(size, options.rounds, lambda: copy(pageable.ctypes.data))
    return found


def rate(size: int, rounds: int, copy: Callable[[], object]) -> float:
    """The median of some rounds, after one that is not counted."""
    secs = []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        copy()
        secs.append(time.perf_counter() - started)
    return size / statistics.median(secs[1:])


def of_torch(options: argparse.Namespace) -> State:
    """PyTorch's own copy to the host."""
    try:
        import torch
    except ImportError as error:
        raise NotRunError(f"PyTorch cannot be imported: {error}") from error
    if not torch.cuda.is_available():
        raise NotRunError("PyTorch sees no GPU")
    size = 1 << 30
    source = torch.ones(size, dtype=torch.uint8, device="cuda")
    target = torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    found = rate(size, options.rounds, copy)
    return {"version": torch.__version__, "pinned_bytes_per_sec": found}


class TorchTraining:
    """A training of PyTorch: a compiled model, AdamW, steps of about `TORCH_STEP_SECS`."""

    def __init__(self, options: argparse.Namespace) -> None:
        try:
            import torch
        except ImportError as error:
            raise NotRunError(f"PyTorch cannot be imported: {error}") from error
        if not torch.cuda.is_available() and not options.stand_in:
            raise NotRunError("PyTorch sees no GPU")
        self._torch, self._is_small = torch, options.stand_in
        self.about = {"torch": torch.__version__}
        self.state = self.make(options.size_gb, seed=0)
        self.number = 0
        self._compiled = self.state["model"]
        if not options.stand_in:
            self._compiled = torch.compile(self._compiled)
        side = self.state["model"][0].in_features
        self._batch = torch.randn(side, side, device=self._device)
        self._work = 1
        self.run(3)
        self.size_bytes = sum(tensor.nbytes for tensor in self.tensors(self.state))
        wanted_secs = options.step_secs if options.stand_in else TORCH_STEP_SECS
        for _ in range(3):
            self._work = max(1, round(self._work * wanted_secs / self.run(2)[1]))
        self.run(2)

    @property
    def _device(self) -> str:
        return "cpu" if self._is_small else "cuda"

    def make(self, size_gb: float, seed: int) -> State:
        """A model of matrices of 64 MiB, and its AdamW; of 256 KiB where the state is small."""
        torch = self._torch
        torch.manual_seed(seed)
        side = 4096 if size_gb >= 1 else 256
        count = max(1, round(size_gb * GB / (3 * 4 * side * side)))
        layers = [torch.nn.Linear(side, side, bias=False) for _ in range(count)]
        model = torch.nn.Sequential(*layers).to(self._device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=not self._is_small)
        return {"model": model, "optimizer": optimizer}

    def tensors(self, state: State) -> list[Any]:
        """The parameters and moments of a state."""
        parameters = list(state["model"].parameters())
        of_each = (state["optimizer"].state[parameter] for parameter in parameters)
        moments = [(of["exp_avg"], of["exp_avg_sq"]) for of in of_each]
        return [*parameters, *(tensor for pair in moments for tensor in pair)]

    def fingerprint(self, state: State) -> list[int]:
        """A sum over each tensor's bits, weighted by their places."""
        torch, found = self._torch, []
        for tensor in self.tensors(state):
            bits = tensor.detach().reshape(-1).view(torch.int32).long()
            places = torch.arange(bits.numel(), device=bits.device) * 2 + 1
            found.append(int((bits * places).sum()))
        return found

    def run(self, steps: int, save: Callable[[int, State], object] | None = None) -> list[float]:
        """Runs steps, and returns how long each took, `save` included."""
        secs = []
        for _ in range(steps):
            started = time.perf_counter()
            for _ in range(self._work):
                loss = (self._compiled(self._batch) - self._batch).square().mean()
                loss.backward()
            self.state["optimizer"].step()
            self.state["optimizer"].zero_grad()
            float(loss)
            if save is not None:
                self.number += 1
                save(self.number, self.state)
            secs.append(time.perf_counter() - started)
        return secs


class CopiedLog(logging.Handler):
    """Collects what Holdfast logs of devices' copies, and all that it warns of."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.rates: list[float] = []
        self.warnings: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        found = re.fullmatch(r"devices copied (\d+) bytes in ([\d.]+) s", text)
        if found:
            self.rates.append(int(found[1]) / float(found[2]))
        elif record.levelno >= logging.WARNING:
            self.warnings.append(text)


def holdfast_section(options: argparse.Namespace) -> State:
    """Holdfast with a RAM tier: donated steps, and a restore that must be what was saved."""
    import jax

    import holdfast
    from holdfast import save_decision_policy as policies

    needs(Path(options.ram), 2.05 * options.size_gb * GB, "two slots of the RAM tier")
    log = CopiedLog()
    logging.getLogger("holdfast").addHandler(log)
    logging.getLogger("holdfast").setLevel(logging.DEBUG)
    with ExitStack() as stack:
        if options.stand_in:
            from tests.adapt.stand_in_device import StandInDevice

            stack.enter_context(StandInDevice().serving())
        training = Training(options)
        without = training.run(options.steps)
        # Into RAM alone: at the end of the run only would a checkpoint be made durable.
        every = max(1, options.steps // options.rounds)
        due = [WARM_UP_SAVES + every * (i + 1) for i in range(options.rounds)]
        in_ram = policies.SpecificStepsPolicy((*range(1, WARM_UP_SAVES + 1), *due))
        run = Path(options.directory) / "run"
        manager = holdfast.CheckpointManager(
            run,
            save_decision_policy=policies.SpecificStepsPolicy((1 << 40,)),
            ram=holdfast.RamTier(save_decision_policy=in_ram),
        )
        stack.callback(manager.close)
        manager.resume(training.state)
        preparing = training.run(preparing_steps(options, without))
        first, saves = Saves(manager.save), Saves(manager.save)
        for _ in range(WARM_UP_SAVES):
            training.run(1, first)
            sealed_at(run, training.number)
        log.rates.clear()
        on = training.run(every * options.rounds, saves)
        safe = [sealed_at(run, step) - at for step, at in saves.called_at.items()]
        found = summary(training, saves, without, on)
        expected = fingerprint(training.state)
        like = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), training.state
        )
        training.state = {}
        restored, restored_secs = timed_restores(
            lambda: jax.block_until_ready(manager.restore(due[-1], like=like))
        )
        return found | {
            "restored_bytes_per_sec": training.size_bytes / restored_secs,
            "first_blocking_secs": first.blocked_secs[0],
            "step_before_first_save_max_secs": max(preparing),
            "sealed_p50_secs": statistics.median(safe),
            "sealed_max_secs": max(safe),
            "copied_bytes_per_sec": statistics.median(log.rates) if log.rates else None,
            "restored_is_the_same": fingerprint(restored) == expected,
            "warnings": log.warnings,
        }


def preparing_steps(options: argparse.Namespace, without: list[float]) -> int:
    """Return how many steps a training makes before its first save, while slots are prepared."""
    secs = 1.0 if options.stand_in else BEFORE_FIRST_SAVE_SECS
    return round(secs / statistics.median(without))


def timed_restores(restore: Callable[[], Any]) -> tuple[Any, float]:
    """Return the last of some restores, and the median of their seconds."""
    secs = []
    restored = None
    for _ in range(RESTORES):
        restored = None  # there is no room for two
        started = time.perf_counter()
        restored = restore()
        secs.append(time.perf_counter() - started)
    return restored, statistics.median(secs)


def torch_section(options: argparse.Namespace) -> State:
    """Holdfast with a state of PyTorch: optimizer steps are the fence."""
    import holdfast
    from holdfast import save_decision_policy as policies

    needs(Path(options.ram), 2.05 * options.size_gb * GB, "two slots of the RAM tier")
    log = CopiedLog()
    logging.getLogger("holdfast").addHandler(log)
    logging.getLogger("holdfast").setLevel(logging.DEBUG)
    with ExitStack() as stack:
        if options.stand_in:
            from tests.adapt.stand_in_device import StandInDevice

            stack.enter_context(StandInDevice().serving_torch())
        training = TorchTraining(options)
        without = training.run(options.steps)
        every = max(1, options.steps // options.rounds)
        due = [WARM_UP_SAVES + every * (i + 1) for i in range(options.rounds)]
        in_ram = policies.SpecificStepsPolicy((*range(1, WARM_UP_SAVES + 1), *due))
        run = Path(options.directory) / "run"
        manager = holdfast.CheckpointManager(
            run,
            save_decision_policy=policies.SpecificStepsPolicy((1 << 40,)),
            ram=holdfast.RamTier(save_decision_policy=in_ram),
            framework="torch",
        )
        stack.callback(manager.close)
        manager.resume(training.state)
        preparing = training.run(preparing_steps(options, without))
        first, saves = Saves(manager.save), Saves(manager.save)
        for _ in range(WARM_UP_SAVES):
            training.run(1, first)
            sealed_at(run, training.number)
        log.rates.clear()
        on = training.run(every * options.rounds, saves)
        safe = [sealed_at(run, step) - at for step, at in saves.called_at.items()]
        expected = training.fingerprint(training.state)
        into = training.make(options.size_gb, seed=1)
        _, restored_secs = timed_restores(lambda: manager.restore(due[-1], like=into))
        return summary(training, saves, without, on) | {
            "first_blocking_secs": first.blocked_secs[0],
            "step_before_first_save_max_secs": max(preparing),
            "sealed_p50_secs": statistics.median(safe),
            "sealed_max_secs": max(safe),
            "copied_bytes_per_sec": statistics.median(log.rates) if log.rates else None,
            "restored_bytes_per_sec": training.size_bytes / restored_secs,
            "restored_is_the_same": training.fingerprint(into) == expected,
            "warnings": log.warnings,
        }


def dcp_section(options: argparse.Namespace) -> State:
    """DCP's `async_save` with pinned staging; a new save begins when the one before is done."""
    training = TorchTraining(options)
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    needs(Path(options.directory), 3.05 * options.size_gb * GB, "three checkpoints of DCP's")
    dist.init_process_group("cpu:gloo", store=dist.HashStore(), rank=0, world_size=1)
    without = training.run(options.steps)
    stager = DefaultStager(StagingOptions(True, False, True, True))
    pending: list[Any] = []

    def save(step: int, state: State) -> bool:
        if pending and not pending[-1].done():
            return False
        found: Any = dcp.async_save(
            {name: of.state_dict() for name, of in state.items()},
            storage_writer=dcp.FileSystemWriter(Path(options.directory) / "run" / str(step)),
            async_stager=stager,
        )
        # The next update must not come before the copy, and DCP leaves that to the training.
        found.staging_completion.result()
        pending.append(found.upload_completion)
        return True

    safe_secs = []
    for _ in range(WARM_UP_SAVES):
        started = time.perf_counter()
        training.run(1, save)
        pending[-1].result()
        safe_secs.append(time.perf_counter() - started)
        shutil.rmtree(Path(options.directory) / "run")
    saves, on = Saves(save), []
    deadline = time.monotonic() + SECTION_SECS / 3
    while len(saves.called_at) < options.rounds and time.monotonic() < deadline:
        on += training.run(1, saves)
        if pending[-1].done():
            shutil.rmtree(Path(options.directory) / "run", ignore_errors=True)
    pending[-1].result()
    stager.close()
    dist.destroy_process_group()
    return summary(training, saves, without, on) | {"sealed_p50_secs": min(safe_secs)}


def sealed_at(run: Path, step: int) -> float:
    """When the agent wrote that a step is complete in RAM."""
    from holdfast.observe.events.reader import read_events
    from holdfast.observe.events.schema import CheckpointSealed

    deadline = time.monotonic() + SECTION_SECS / 2
    while time.monotonic() < deadline:
        for event in read_events(run, CheckpointSealed):
            if event.step == step:
                return event.time.timestamp()
        time.sleep(0.005)
    raise RuntimeError(f"step {step} was not sealed in time")


def end_agents(ram: Path) -> None:
    """Ends the agents that this process started: what they hold was measured, and is let go."""
    from holdfast.host.wire import protocol
    from holdfast.host.wire.client import AgentClient
    from holdfast.local_agent.client import AgentGoneError

    for folder in ram.glob("*"):
        client = AgentClient(folder, timeout_secs=10.0)
        with suppress(AgentGoneError, ProcessLookupError):
            os.kill(
                client.call("status", protocol.Empty(), protocol.AgentStatus).pid, signal.SIGKILL
            )
        client.close()


def orbax_section(options: argparse.Namespace) -> State:
    """Orbax as its documentation recommends; safe is when a checkpoint is finished."""
    try:
        import orbax.checkpoint as ocp
        from orbax.checkpoint import checkpoint_managers
    except ImportError as error:
        raise NotRunError(f"Orbax cannot be imported: {error}") from error
    needs(Path(options.directory), 3.05 * options.size_gb * GB, "three checkpoints of Orbax's")
    training = Training(options)
    without = training.run(options.steps)
    manager = ocp.CheckpointManager(
        Path(options.directory) / "run",
        options=ocp.CheckpointManagerOptions(
            save_decision_policy=checkpoint_managers.ContinuousCheckpointingPolicy(),
            preservation_policy=checkpoint_managers.LatestN(2),
            enable_async_checkpointing=True,
        ),
    )
    save = lambda step, state: bool(manager.save(step, args=ocp.args.StandardSave(state)))  # noqa: E731
    safe_secs = []
    for _ in range(WARM_UP_SAVES):
        started = time.perf_counter()
        training.run(1, save)
        manager.wait_until_finished()
        safe_secs.append(time.perf_counter() - started)
    saves, on = Saves(save), []
    deadline = time.monotonic() + SECTION_SECS / 3
    while len(saves.called_at) < options.rounds and time.monotonic() < deadline:
        on += training.run(1, saves)
    manager.close()
    found = summary(training, saves, without, on)
    return found | {"version": ocp.__version__, "sealed_p50_secs": min(safe_secs)}


SECTIONS: dict[str, Callable[[argparse.Namespace], State]] = {
    "pinned": pinned,
    "holdfast": holdfast_section,
    "orbax": orbax_section,
    "torch": of_torch,
    "holdfast-torch": torch_section,
    "dcp": dcp_section,
}


@contextmanager
def private_folder(parent: str) -> Iterator[Path]:
    """A folder of our own, gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="holdfast-gpu-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def needs(folder: Path, wanted_bytes: float, what: str) -> None:
    """Refuses to fill up a file system, by a `NotRunError`."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < wanted_bytes:
        raise NotRunError(
            f"{folder} needs {wanted_bytes / GB:.1f} GB for {what}, and has {free_bytes / GB:.1f} "
            "GB; take a smaller --size-gb, or other folders"
        )


def run_section(name: str, options: argparse.Namespace, arguments: list[str]) -> State:
    """Runs a section in a process of its own, in folders of its own; what came of it."""
    with private_folder(options.ram) as ram, private_folder(options.directory) as folder:
        told = folder / "section.json"
        own = ["--section", name, "--json", told, "--ram", ram, "--directory", folder]
        command = [sys.executable, __file__, *arguments, *map(str, own)]
        environment = os.environ | {"HOLDFAST_RAM": str(ram / "tier")}
        try:
            subprocess.run(command, timeout=SECTION_SECS, env=environment, check=True)
            found: State = json.loads(told.read_text())
        except subprocess.SubprocessError as error:
            return {"failed": f"{error}; see above"}
        finally:
            end_agents(ram / "tier")
    return found


def gpu_trouble(options: argparse.Namespace) -> str | None:
    """Why this machine is none to measure on; None where it is."""
    try:
        from cuda.bindings import runtime as cuda
    except ImportError as error:
        return f"CUDA's bindings cannot be imported ({error}); install cuda-bindings"
    code, count = cuda.cudaGetDeviceCount()
    if code != cuda.cudaError_t.cudaSuccess or not count:
        return f"CUDA finds no device ({code.name})"
    code, free_bytes, _ = cuda.cudaMemGetInfo()
    # The state and its copy, of which JAX by itself takes three quarters of a device's memory.
    wanted_bytes = 2.2 * options.size_gb * GB / 0.75
    if code == cuda.cudaError_t.cudaSuccess and free_bytes < wanted_bytes:
        sizes = f"needs {wanted_bytes / GB:.1f} GB, and has {free_bytes / GB:.1f} GB free"
        return f"the device {sizes}; take a smaller --size-gb"
    return None


def report(found: dict[str, State], not_run: dict[str, str]) -> tuple[list[str], bool]:
    """The lines to print, and whether all that was wanted was reached."""
    lines = []
    for name, figures in found.items():
        lines += [name, *(f"  {key:32} {shown(key, value)}" for key, value in figures.items())]
    is_met = True
    ours, limit = found.get("holdfast", {}), found.get("pinned", {})
    if ours and limit:
        blocking = ours["blocking_p50_secs"]
        rate = (ours["copied_bytes_per_sec"] or 0.0) / limit["pinned_bytes_per_sec"]
        is_met = blocking < BLOCKING_WANTED_SECS and rate >= RATE_WANTED
        lines += [
            "wanted",
            f"  blocking under {BLOCKING_WANTED_SECS * 1e3:.0f} ms: {blocking * 1e3:.1f} ms",
            f"  copied at {RATE_WANTED} of the pinned rate: {rate:.2f}",
            restored_line(ours, limit),
        ]
        is_met &= restored_rate(ours, limit) >= RESTORE_RATE_WANTED
    of_torch = found.get("holdfast-torch", {})
    if of_torch and limit:
        blocking = of_torch["blocking_p50_secs"]
        bytes_per_sec = of_torch["copied_bytes_per_sec"] or 1.0
        rate = bytes_per_sec / limit["pinned_bytes_per_sec"]
        copy_secs = of_torch["size_bytes"] / bytes_per_sec
        inflation = of_torch["lost_per_save_secs"] / copy_secs
        is_met &= blocking < BLOCKING_WANTED_SECS and rate >= RATE_WANTED
        is_met &= inflation <= INFLATION_WANTED
        lines += [
            "wanted, with PyTorch",
            f"  blocking under {BLOCKING_WANTED_SECS * 1e3:.0f} ms: {blocking * 1e3:.1f} ms",
            f"  copied at {RATE_WANTED} of the pinned rate: {rate:.2f}",
            f"  lost, at most {INFLATION_WANTED} of the copy's duration: {inflation:.3f}",
            restored_line(of_torch, limit),
        ]
        is_met &= restored_rate(of_torch, limit) >= RESTORE_RATE_WANTED
    lines += [f"NOT RUN: {name}: {reason}" for name, reason in not_run.items()]
    return lines, is_met


def restored_rate(ours: State, limit: State) -> float:
    """The rate of a restore, of that of page-locked memory."""
    return float(ours["restored_bytes_per_sec"] / limit["pinned_to_device_bytes_per_sec"])


def restored_line(ours: State, limit: State) -> str:
    """The line that tells that rate."""
    return (
        f"  restored at {RESTORE_RATE_WANTED} of the pinned rate: {restored_rate(ours, limit):.2f}"
    )


def shown(key: str, value: Any) -> str:
    """A figure as a person reads it."""
    if key.endswith(("_bytes", "_bytes_per_sec")) and value is not None:
        return f"{value / GB:.2f} GB" + "/s" * key.endswith("_sec")
    return f"{value * 1e3:.2f} ms" if "secs" in key else str(value)


def parse(arguments: list[str]) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size-gb", type=float, default=None, help="of the state (20)")
    parser.add_argument("--steps", type=int, default=None, help="with saves, and without (80)")
    parser.add_argument("--rounds", type=int, default=5, help="saves that are measured")
    parser.add_argument("--ram", default="/dev/shm", help="a folder on a tmpfs")
    parser.add_argument("--directory", default=tempfile.gettempdir(), help="a folder on a disk")
    parser.add_argument("--json", default=None, help="where to write all figures")
    parser.add_argument("--stand-in", action="store_true", help="no GPU: a small run on the CPU")
    parser.add_argument("--only", nargs="*", choices=SECTIONS, default=None, help="sections")
    parser.add_argument("--section", choices=SECTIONS, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.size_gb = options.size_gb or (0.02 if options.stand_in else 20.0)
    options.steps = options.steps or (10 if options.stand_in else 80)
    options.step_secs = 0.01 if options.stand_in else STEP_SECS
    return options


def main(arguments: list[str]) -> int:
    """See the module."""
    options = parse(arguments)
    if options.section is not None:
        try:
            told = SECTIONS[options.section](options)
        except NotRunError as error:
            told = {"not_run": str(error)}
        Path(options.json).write_text(json.dumps(told))
        return 0
    if not options.stand_in and (trouble := gpu_trouble(options)):
        print(f"NOTHING WAS MEASURED: {trouble}")
        return NO_GPU
    names = ["holdfast", "holdfast-torch"] if options.stand_in else list(SECTIONS)
    not_run = {name: "it needs a GPU" for name in SECTIONS if name not in names}
    if options.only is not None:
        not_run |= {name: "it was not asked for" for name in names if name not in options.only}
        names = [name for name in names if name in options.only]
    found, failed = {}, {}
    for name in names:
        told = run_section(name, options, arguments)
        if "not_run" in told:
            not_run[name] = told["not_run"]
        elif "failed" in told or told.get("restored_is_the_same") is False:
            failed[name] = told.get("failed", "what was restored is not what was saved")
        else:
            found[name] = told
    lines, is_met = report(found, not_run)
    if options.stand_in:
        lines.append("A STAND-IN DEVICE: these figures say that it works, and nothing of any GPU")
    lines += [f"FAILED: {name}: {reason}" for name, reason in failed.items()]
    print("\n".join(lines))
    if options.json is not None:
        everything = {"options": vars(options), "found": found, "not_run": not_run}
        Path(options.json).write_text(json.dumps(everything | {"failed": failed}, indent=1))
    return FAILED if failed else NOT_RUN if not_run else 0 if is_met else MISSED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
