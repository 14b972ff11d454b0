"""The frameworks that tests of whole jobs are run with; those with PyTorch are soak tests."""

from __future__ import annotations

import importlib.util

import pytest

TORCH = pytest.param(
    "torch",
    marks=[
        pytest.mark.soak,
        pytest.mark.skipif(
            importlib.util.find_spec("torch") is None, reason="PyTorch cannot be had here"
        ),
    ],
)
FRAMEWORKS = pytest.mark.parametrize("framework", ["jax", TORCH])
"""For tests that start jobs with `framework=framework`."""
