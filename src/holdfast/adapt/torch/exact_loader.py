"""A loader of torchdata that continues with the batches that would have come, in later epochs too.

`StatefulDataLoader` restores the order of the present epoch. The orders of later epochs come from
its generator, whose state it does not save; and the iterator that continues an epoch draws from
that generator, as the one that began the epoch did. So the generator has to be set after that.

Saved with the last batch of an epoch, it would continue with the rest of that epoch: with nothing.
A loop that counts epochs by steps would take that for an epoch. So the next epoch begins then.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from holdfast.errors import InvalidArgumentError

_END = object()
_WORDS = {"workers": "num_workers", "batch_size": "batch_size", "samples": "len(dataset)"}


class ExactLoader:
    """Wraps a `StatefulDataLoader`: iterate over this object, and put it into the state.

    ```python
    loader = holdfast.torch.ExactLoader(
        StatefulDataLoader(data, 32, shuffle=True, generator=torch.Generator().manual_seed(0))
    )
    state = {"model": model, "optimizer": optimizer, "data": loader}
    ```

    Random numbers that workers draw are in no state: derive those of a sample from its index.
    A state is continued with as many workers, samples and samples per batch as it was saved with.

    Args:
        loader: a loader with `state_dict` and a `generator` of its own.

    Raises:
        InvalidArgumentError: it has no state, or no generator: then its order comes from PyTorch's
            generator of all, which each of its iterators changes.
    """

    def __init__(self, loader: Any) -> None:
        if not hasattr(loader, "state_dict"):
            raise InvalidArgumentError(
                "ExactLoader(...): expected a loader with a state, found a "
                f"{type(loader).__name__}; pass a StatefulDataLoader of torchdata, which takes the "
                "same arguments"
            )
        if not isinstance(getattr(loader, "generator", None), torch.Generator):
            raise InvalidArgumentError(
                f"ExactLoader(...): expected a loader with a generator, found none in this "
                f"{type(loader).__name__}; pass generator=torch.Generator().manual_seed(0) to it"
            )
        self.loader = loader
        self._generator_state: torch.Tensor | None = None

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        """Yield the rest of the epoch after a restore, else an epoch.

        If the state was saved with the last batch of an epoch, that is the next epoch.
        """
        batches: Iterator[Any] = iter(self.loader)
        if self._generator_state is not None:
            self.loader.generator.set_state(self._generator_state)
            self._generator_state = None
            first = next(batches, _END)
            if first is _END:
                batches = iter(self.loader)
            else:
                yield first
        yield from batches

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the loader and of its generator, and what they depend on."""
        generator = self._generator_state
        if generator is None:
            generator = self.loader.generator.get_state()
        return {"loader": self.loader.state_dict(), "generator": generator, **self._shape()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the states; the next iterator continues from there.

        Raises:
            InvalidArgumentError: The state was saved with another number of workers, of samples,
                or of samples in a batch: its position would be one among other batches.
        """
        for name, found in self._shape().items():
            expected = state.get(name, found)
            if expected != found:
                what = _WORDS[name]
                raise InvalidArgumentError(
                    f"ExactLoader: expected a loader with {what}={expected}, as that of the saved "
                    f"state, found {found}; make it with {what}={expected}, or begin its data anew "
                    "by naming it in `partial`"
                )
        self.loader.load_state_dict(state["loader"])
        self._generator_state = state["generator"]

    def _shape(self) -> dict[str, int | None]:
        dataset = self.loader.dataset
        return {
            "workers": self.loader.num_workers,
            "batch_size": self.loader.batch_size,
            "samples": len(dataset) if hasattr(dataset, "__len__") else None,
        }
