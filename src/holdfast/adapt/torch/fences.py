"""Fences: the places at which a training may change what a save still copies from a GPU.

A save on GPUs returns while weights and optimizer states are being copied; forward and backward run
beside the copy. The training stops at the fence until the copy has ended, if it has not by then.

See docs/decisions/0032.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook


class Fence:
    """A fence that the training passes by calling it.

    For trainings whose updates PyTorch does not report: replayed CUDA graphs, compiled optimizer
    steps, kernels of one's own, `.data`. Give it to the manager by
    `framework=TorchFramework(fence=...)`, and call it each time before weights or optimizer states
    are changed. It belongs to the training thread.
    """

    def __init__(self) -> None:
        self._waiting: list[Callable[[], None]] = []

    def __call__(self) -> None:
        """Wait until all copies of earlier saves have ended, however they ended."""
        while self._waiting:
            self._waiting.pop()()

    def add_loan(self, finish: Callable[[], None]) -> None:
        """Call `finish` when the fence is passed next."""
        self._waiting.append(finish)

    def covers_tensor(self, optimizer: Any) -> bool:
        """Return whether the training passes the fence before `optimizer` changes anything."""
        return True


class OptimizerFence(Fence):
    """The fence that each step of each optimizer passes, by PyTorch's global hook."""

    def __init__(self) -> None:
        super().__init__()
        # A compiled step would otherwise contain the wait, or the lack of one.
        hook = torch.compiler.disable(self._before_step)
        self._handle = register_optimizer_step_pre_hook(hook)

    def covers_tensor(self, optimizer: Any) -> bool:
        # Steps that are captured in CUDA graphs call no hook; these may be.
        is_hooked = getattr(type(optimizer).step, "hooked", False)
        return is_hooked and not any(of.get("capturable") for of in optimizer.param_groups)

    def _before_step(self, optimizer: Any, arguments: Any, named: Any) -> None:
        self()
