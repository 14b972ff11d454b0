"""The states of PyTorch that are saved, and the training steps that change them in place.

- `adam`: a model of layers of 4 MiB matrices, with AdamW's two moments.
- `many`: 20,000 tensors of 4 KB.
"""

from __future__ import annotations

import contextlib
from typing import Any, Protocol

import torch

GB = 10**9
SIDE = 1024
MANY_COUNT = 20_000
MANY_SIZE = 1024
BATCH_ROWS = 128

Guard = contextlib.AbstractContextManager[Any]


class TorchState(Protocol):
    """A state in training.

    Attributes:
        objects: what a training loop gives to Holdfast.
    """

    objects: dict[str, Any]

    def state_dicts(self) -> dict[str, Any]:
        """What a training loop gives to the others: the same tensors, not copied."""
        ...

    def load(self, state_dicts: dict[str, Any]) -> None:
        """Takes what was loaded: for those that do not fill the tensors in place."""
        ...

    def step(self, guard: Guard) -> None:
        """One step of training; all that changes the state is done within `guard`."""
        ...


class AdamState:
    """A model and its AdamW, after one step: the optimizer's state is there."""

    def __init__(self, size_gb: float, seed: int) -> None:
        torch.manual_seed(seed)
        count = max(1, round(size_gb * GB / (3 * 4 * SIDE * SIDE)))
        layers = [torch.nn.Linear(SIDE, SIDE, bias=False) for _ in range(count)]
        self._model = torch.nn.Sequential(*layers)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4, foreach=True)
        # Of random targets the loss stays: with none left, gradients become denormal and slow.
        self._batch, self._target = torch.randn(2, BATCH_ROWS, SIDE)
        self.objects = {"model": self._model, "optimizer": self._optimizer}
        self.step(contextlib.nullcontext())

    def state_dicts(self) -> dict[str, Any]:
        return {name: of.state_dict() for name, of in self.objects.items()}

    def load(self, state_dicts: dict[str, Any]) -> None:
        for name, of in self.objects.items():
            of.load_state_dict(state_dicts[name])

    def step(self, guard: Guard) -> None:
        x = self._batch
        for layer in self._model:
            x = layer(x).tanh()
        (x - self._target).square().mean().backward()
        with guard:
            self._optimizer.step()
        self._optimizer.zero_grad()


class ManyState:
    """A dict of small tensors, all changed by a step that computes next to nothing."""

    def __init__(self, size_gb: float, seed: int) -> None:
        torch.manual_seed(seed)
        count = max(3, round(MANY_COUNT * size_gb / 0.08))
        self._leaves = {f"leaf_{i:05d}": torch.rand(MANY_SIZE) for i in range(count)}
        self.objects = {"leaves": self._leaves}

    def state_dicts(self) -> dict[str, Any]:
        return dict(self.objects)

    def load(self, state_dicts: dict[str, Any]) -> None:
        for name, tensor in self._leaves.items():
            tensor.copy_(state_dicts["leaves"][name])

    def step(self, guard: Guard) -> None:
        with guard:
            torch._foreach_mul_(list(self._leaves.values()), 0.999)


def make(kind: str, size_gb: float, seed: int = 0) -> TorchState:
    """A state of about `size_gb` (10^9 bytes); of `many` it is the number of tensors that counts.

    Raises:
        ValueError: no state is called `kind`.
    """
    if kind not in ("adam", "many"):
        raise ValueError(f"no state is called {kind!r}")
    return AdamState(size_gb, seed) if kind == "adam" else ManyState(size_gb, seed)


def tensors_of(node: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], torch.Tensor]:
    """All tensors of nested dicts, by their paths."""
    if isinstance(node, torch.Tensor):
        return {path: node}
    found: dict[tuple[str, ...], torch.Tensor] = {}
    for key, child in node.items() if isinstance(node, dict) else ():
        found |= tensors_of(child, (*path, str(key)))
    return found


def size_bytes(state: TorchState) -> int:
    """The bytes of all tensors."""
    return sum(tensor.nbytes for tensor in tensors_of(state.state_dicts()).values())


def fingerprint(state: TorchState) -> str:
    """A digest over all bytes, in the order of the paths: dicts may come back in another one."""
    import xxhash

    digest = xxhash.xxh3_128()
    for _, tensor in sorted(tensors_of(state.state_dicts()).items()):
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
