"""Train the demo's model with PyTorch; see `holdfast.demo.learner`.

Invariant: equal inputs give equal bits in every process on one machine.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn

from holdfast.demo.learner import (
    BETA_2,
    END_RATE,
    GRADIENT_NORM_MAX,
    JOIN_SECS,
    PEAK_RATE,
    WEIGHT_DECAY,
    LearnerOptions,
    StateDigests,
    digest_arrays,
)
from holdfast.demo.torch_model import Transformer
from holdfast.torch import RandomState


class TorchLearner:
    """See `holdfast.demo.learner.Learner`. The model is trained in place, as PyTorch does."""

    def __init__(self, options: LearnerOptions) -> None:
        self._options = options
        torch.use_deterministic_algorithms(True)
        if options.hosts > 1:
            # The hosts are processes of one machine.
            torch.set_num_threads(1)
            dist.init_process_group(
                "gloo",
                init_method=f"tcp://{options.coordinator}",
                world_size=options.hosts,
                rank=options.host,
                timeout=timedelta(seconds=JOIN_SECS),
            )

    def initial_state(self) -> dict[str, Any]:
        steps, seed = self._options.steps, self._options.seed
        torch.manual_seed(seed)
        model = Transformer(self._options.config)
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=PEAK_RATE, betas=(0.9, BETA_2), weight_decay=WEIGHT_DECAY
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: _rate_share(step, steps)
        )
        # The same parameters on all hosts, and another dropout on each of them.
        torch.manual_seed(seed + 1 + self._options.host)
        # They are part of the state too.
        random.seed(seed)
        np.random.seed(seed)
        return {
            "model": model,
            "optimizer": optimizer,
            "scheduler": scheduler,
            "rng": RandomState(),
        }

    def train_step(
        self, state: dict[str, Any], batch: NDArray[np.uint8]
    ) -> tuple[dict[str, Any], float]:
        model, optimizer = state["model"], state["optimizer"]
        text = torch.from_numpy(batch.astype(np.int64))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(text[:, :-1]).transpose(1, 2), text[:, 1:])
        loss.backward()
        mean = self._average(model, loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM_MAX)
        optimizer.step()
        state["scheduler"].step()
        return state, mean

    def _average(self, model: nn.Module, loss: torch.Tensor) -> float:
        """Average the gradients over the hosts, and return the average of the losses.

        `DistributedDataParallel` sums in another order after its first step, so that a resumed run
        would differ in the last bits.
        """
        if self._options.hosts > 1:
            tensors = [loss.reshape(1), *(_gradients(model))]
            flat = torch.cat([piece.reshape(-1) for piece in tensors])
            dist.all_reduce(flat)
            flat /= self._options.hosts
            averaged = flat.split([piece.numel() for piece in tensors])
            for gradient, of_all in zip(tensors[1:], averaged[1:], strict=True):
                gradient.copy_(of_all.view_as(gradient))
            loss = averaged[0]
        return float(loss)

    def state_digests(self, state: dict[str, Any]) -> StateDigests:
        return StateDigests(
            params=digest(state["model"].state_dict()),
            opt_state=digest([state["optimizer"].state_dict(), state["scheduler"].state_dict()]),
            rng=digest(state["rng"].state_dict()),
        )

    def leave_job(self) -> None:
        if self._options.hosts > 1:
            # Rank 0 holds the key-value store, which the others may still be using.
            dist.barrier()
            dist.destroy_process_group()


def digest(tree: Any) -> str:
    """Return a digest over the paths and bits of all tensors and values of a tree."""
    return digest_arrays(_arrays(tree, "."))


def _arrays(tree: Any, name: str) -> Iterator[tuple[str, NDArray[Any]]]:
    if isinstance(tree, dict):
        for key in sorted(tree, key=str):
            yield from _arrays(tree[key], f"{name}/{key}")
    elif isinstance(tree, list | tuple):
        for index, item in enumerate(tree):
            yield from _arrays(item, f"{name}/{index}")
    elif isinstance(tree, torch.Tensor):
        yield name, tree.detach().numpy()
    else:
        text = tree.hex() if isinstance(tree, float) else repr(tree)
        yield f"{name}={text}", np.zeros(0)


def _gradients(model: nn.Module) -> Iterator[torch.Tensor]:
    for parameter in model.parameters():
        assert parameter.grad is not None
        yield parameter.grad


def _rate_share(step: int, steps: int) -> float:
    """Return the learning rate of a step as a share of the peak: warm-up, then cosine decay."""
    warm_up = max(1, steps // 12)
    if step < warm_up:
        return step / warm_up
    done = min(1.0, (step - warm_up) / max(1, steps - warm_up))
    end = END_RATE / PEAK_RATE
    return end + (1 - end) * 0.5 * (1 + math.cos(math.pi * done))
