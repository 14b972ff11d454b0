"""Train the demo's transformer with PyTorch; see `holdfast.demo.learner`.

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
    ModelConfig,
    StateDigests,
    TrainerOptions,
    digest_arrays,
)
from holdfast.torch import RandomState

INITIAL_DEVIATION = 0.02


class TorchLearner:
    """See `holdfast.demo.learner.Learner`. The model is trained in place, as PyTorch does."""

    def __init__(self, options: TrainerOptions) -> None:
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


class Transformer(nn.Module):  # type: ignore[misc, unused-ignore]
    """A decoder: int64 text of shape (windows, context) to logits (windows, context, 256)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=INITIAL_DEVIATION)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.embedding(text) + self.position.weight[: text.shape[1]]
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


class _Layer(nn.Module):  # type: ignore[misc, unused-ignore]
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.width
        self._heads = config.heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self._attention(self.attention_norm(x)))
        hidden = nn.functional.gelu(self.up(self.mlp_norm(x)))
        summed: torch.Tensor = x + self.dropout(self.down(hidden))
        return summed

    def _attention(self, x: torch.Tensor) -> torch.Tensor:
        windows, context, width = x.shape
        pieces = self.qkv(x).view(windows, context, 3, self._heads, width // self._heads)
        query, key, value = pieces.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        output: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(windows, context, width))
        return output
