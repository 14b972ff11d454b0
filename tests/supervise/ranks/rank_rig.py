"""A launcher whose ranks are forks of this process. Argument: a `Plan`, as JSON.

Each rank trains a small model with its own data and sums gradients by one `all_reduce`, so that the
bits of the state do not depend on how often the training was interrupted. Faults of the plan happen
at named moments. Every rank prints a line of JSON for each step, with the time.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import holdfast
import holdfast.torch
from holdfast import save_decision_policy
from holdfast.adapt.torch import groups
from holdfast.adapt.torch.groups import GroupStore
from holdfast.clock import SystemClock
from holdfast.peers.config import listen
from holdfast.supervise.own_folder import own_folder
from holdfast.supervise.ranks.launcher import Hosts, Launcher
from holdfast.supervise.ranks.membership import Settings
from tests.supervise.ranks.rank_plan import Fault, Plan

PLAN = msgspec.json.decode(sys.argv[1], type=Plan)


def say(**words: object) -> None:
    """Print one line whole: ranks share the output."""
    os.write(1, json.dumps(words | {"pid": os.getpid(), "secs": time.monotonic()}).encode() + b"\n")


class Training:
    """One call of `train`."""

    def __init__(self, job: holdfast.torch.Job) -> None:
        self.job = job
        torch.manual_seed(7)
        layers = [torch.nn.Linear(PLAN.width, PLAN.width) for _ in range(3)]
        self.model = torch.nn.Sequential(*layers).to(job.device)
        self.wrapped: torch.nn.Module = self.model
        if PLAN.kind == "ddp":
            self.wrapped = DistributedDataParallel(self.model)
        elif PLAN.kind == "fsdp":
            fully_shard(self.model, mesh=job.mesh(-1, names=("shard",)))
        elif PLAN.kind == "hsdp":
            fully_shard(self.model, mesh=job.mesh(-1, 2, names=("replicate", "shard")))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.state = {"model": self.model, "optimizer": self.optimizer}

    def fault(self, step: int, moment: str) -> None:
        job = self.job
        for fault in PLAN.faults:
            place = fault.generation or job.generation, fault.rank, fault.step, fault.moment
            if place != (job.generation, job.rank, step, moment) or not is_first(fault):
                continue
            say(event="fault", rank=job.rank, action=fault.action, step=step, moment=moment)
            if fault.action == "raise":
                raise ValueError(f"bad batch {step}")
            number = signal.SIGKILL if fault.action == "kill" else signal.SIGSTOP
            os.kill(os.getpid(), number)

    def step(self, step: int) -> None:
        time.sleep(PLAN.pause_secs)
        generator = torch.Generator().manual_seed(1000 * step + self.job.rank)
        batch = torch.randn(4, PLAN.width, generator=generator).to(self.job.device)
        loss = self.wrapped(batch).square().mean()
        self.fault(step, "forward")
        self.optimizer.zero_grad()
        if PLAN.kind == "plain":
            loss.register_hook(lambda gradient: self.fault(step, "backward"))
        loss.backward()
        if PLAN.kind == "plain":
            gradients = [parameter.grad for parameter in self.model.parameters()]
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            dist.all_reduce(flat)
            for gradient, piece in zip(
                gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True
            ):
                gradient.copy_(piece.view_as(gradient) / self.job.world_size)
        self.fault(step, "optimizer")
        self.optimizer.step()

    def run(self) -> str:
        job = self.job
        policy = save_decision_policy.FixedIntervalPolicy(PLAN.interval)
        self.fault(-1, "open")
        ram = holdfast.RamTier(copies=2 if PLAN.addresses else 1)
        with holdfast.CheckpointManager(
            PLAN.directory, save_decision_policy=policy, ram=ram
        ) as manager:
            self.fault(-1, "restore")
            start, _ = manager.resume(self.state)
            report = manager.last_restore
            sources = report.sources if report is not None else None
            say(
                event="resumed",
                rank=job.rank,
                generation=job.generation,
                step=start,
                sources=sources,
                lost=job.lost_ranks,
                size=job.world_size,
            )
            for step in range(start, PLAN.steps):
                self.step(step)
                self.fault(step, "save")
                manager.save(step, self.state)
                say(event="step", rank=job.rank, generation=job.generation, step=step)
            self.fault(PLAN.steps, "finish")
            manager.finish(PLAN.steps - 1, self.state)
        return digest(self.model, self.optimizer)


def digest(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return a digest of all bits of the training's state."""
    held = [*model.parameters()]
    held += [own["momentum_buffer"] for own in optimizer.state.values()]
    own = [t.full_tensor() if hasattr(t, "full_tensor") else t for t in held]
    return hashlib.sha256(b"".join(t.detach().cpu().numpy().tobytes() for t in own)).hexdigest()


def is_first(fault: Fault) -> bool:
    """Return whether a fault has not happened yet, and note that it does."""
    name = f"{PLAN.faults.index(fault)}.fault"
    try:
        os.close(os.open(f"{PLAN.directory}-{name}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def train(job: holdfast.torch.Job) -> str:
    result = Training(job).run()
    say(event="returned", rank=job.rank, generation=job.generation, digest=result)
    return result


def share_one_gpu() -> None:
    """Let NCCL take this process for one of another host: it refuses two ranks on one device.

    The order in which it sums must be the same in each generation, for equal bits.
    """
    of_nccl = {"HOSTID": str(os.getpid()), "SOCKET_IFNAME": "lo", "ALGO": "Ring", "PROTO": "Simple"}
    os.environ.update({f"NCCL_{name}": value for name, value in of_nccl.items()})
    if not PLAN.notes_aborts:
        groups.note_abort = lambda: None


def own_place() -> Hosts | None:
    """Listen for the launchers of the other hosts, if there are any."""
    if not PLAN.addresses:
        return None
    own = int(sys.argv[2])
    listener = listen(os.environ["HOLDFAST_INTERFACE"], PLAN.addresses[own][1])
    return Hosts(addresses=PLAN.addresses, own=own, listener=listener)


def start_rank(variables: Mapping[str, str], kept_fd: int) -> int:
    """Fork a rank, which ends as a program does."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.environ.update(variables)
        if PLAN.is_on_gpu:
            share_one_gpu()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        torch.set_num_threads(1)
        result = holdfast.torch.surviving(train, keep_last=PLAN.keep_last)
        say(event="survived", digest=result)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    # Forks would copy the memory that the collector marks.
    gc.collect()
    gc.freeze()
    size = Settings(
        ranks=PLAN.ranks,
        spares=PLAN.spares,
        ranks_min=PLAN.ranks_min,
        leave_secs=PLAN.leave_secs,
        hosts=max(1, len(PLAN.addresses)),
        spare_hosts=PLAN.spare_hosts,
    )
    with own_folder() as folder:
        launcher = Launcher(
            start_rank,
            size,
            lambda: GroupStore,
            SystemClock(),
            lambda text: print(text, file=sys.stderr, flush=True),
            folder,
            own_place(),
        )
        sys.exit(launcher.run())
