"""The states of the process's random number generators, as one object of a state."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


class RandomState:
    """The generators of PyTorch (of the CPU and of each CUDA device), Python and NumPy.

    Each rank saves its own. CUDA's are saved once it is used, and restored on as many devices.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the states."""
        uses_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
        return {
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if uses_cuda else [],
            "python": random.getstate(),
            "numpy": np.random.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the states."""
        torch.set_rng_state(state["torch"])
        for device, of_device in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(of_device, device)
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
