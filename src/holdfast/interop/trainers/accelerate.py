"""accelerate: `PreparedLoader(loader)` around a loader that `accelerator.prepare` has returned.

Such a loader shuffles each epoch by its number, `iteration`, which is in no state: after a restart
it counts from 0, and the batches of the epochs that follow are those of others. It reads one batch
ahead, and the iterator that continues an epoch draws a number from PyTorch's generator again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from holdfast.errors import InvalidArgumentError


class PreparedLoader:
    """Continues an epoch where it was left, and the later ones with their own batches.

    Iterate over this object, and put it into the state, with `holdfast.torch.RandomState()`:

    ```python
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    loader = PreparedLoader(loader)
    state = {"model": model, "optimizer": optimizer, "data": loader, "rng": RandomState()}
    ```

    The accelerator needs `DataLoaderConfiguration(use_stateful_dataloader=True,
    use_seedable_sampler=True)`, and the program `accelerate.utils.set_seed` before `prepare`. Save
    after steps of the optimizer: gradients that are accumulated are in no state. Random numbers
    that samples or workers draw from PyTorch's generator are not repeated: derive those of a sample
    from its index.

    Args:
        loader: what `accelerator.prepare` has returned for a `DataLoader`.

    Raises:
        InvalidArgumentError: it is another loader, or has no state.
    """

    def __init__(self, loader: Any) -> None:
        if not isinstance(getattr(loader, "iteration", None), int):
            raise InvalidArgumentError(
                "PreparedLoader(...): expected a loader that accelerator.prepare has returned, "
                f"found a {type(loader).__name__}; pass it to prepare first"
            )
        if not getattr(loader, "use_stateful_dataloader", False):
            raise InvalidArgumentError(
                "PreparedLoader(...): expected a loader with a state, found one without; give the "
                "Accelerator dataloader_config=DataLoaderConfiguration("
                "use_stateful_dataloader=True, use_seedable_sampler=True)"
            )
        if type(loader.get_sampler()) is torch.utils.data.RandomSampler:
            raise InvalidArgumentError(
                "PreparedLoader(...): expected a loader whose order follows from the epoch, found "
                "a RandomSampler; give the Accelerator dataloader_config="
                "DataLoaderConfiguration(use_stateful_dataloader=True, use_seedable_sampler=True)"
            )
        # accelerate has made an iterator for the first epoch: each is to draw its number alike.
        loader.load_state_dict({})
        self.loader = loader
        self._epoch: int = loader.iteration
        self._position: dict[str, Any] | None = None
        self._restored: dict[str, Any] | None = None

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        """Yield the rest of the epoch after a restore, else an epoch."""
        restored, self._restored = self._restored, None
        self._epoch, self._position = self.loader.iteration, None
        # The iterator of an epoch drew its number when that was begun, before what was saved.
        random = None if restored is None else torch.get_rng_state()
        self.loader.load_state_dict(restored or {})
        for batch in self.loader:
            if random is not None:
                torch.set_rng_state(random)
                random = None
            state = self.loader.state_dict()
            # With the last batch accelerate has not counted the epoch yet.
            is_last = state["_iterator_finished"]
            self._epoch = self.loader.iteration + is_last
            self._position = None if is_last else state
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Return the number of the epoch and the position in it, None at its beginning."""
        position = self._position if self._restored is None else self._restored
        return {"iteration": self._epoch, "position": position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set epoch and position; the next iterator continues from there."""
        self.loader.iteration = self._epoch = state["iteration"]
        self._position, self._restored = None, state["position"]
