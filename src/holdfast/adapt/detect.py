"""Which framework a program uses. None is imported that the program did not import."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

from holdfast.adapt.contract import (
    Framework,
    HeldState,
    Outline,
    OwnProcess,
    Pinning,
    Processes,
    Restoration,
    RestoreRequest,
)
from holdfast.adapt.contract import Snapshot as Snapshot
from holdfast.adapt.tree import flatten
from holdfast.errors import InvalidArgumentError
from holdfast.format.records import CheckpointSpec

NAMES = ("jax", "numpy", "torch")

_CLASSES = {
    "jax": ("JAX", "holdfast.adapt.jax.state", "JaxFramework"),
    "numpy": ("NumPy", "holdfast.adapt.numpy_state", "NumpyFramework"),
    "torch": ("PyTorch", "holdfast.adapt.torch.state", "TorchFramework"),
}


def find_framework(name: str | Framework | None = None) -> Framework:
    """Return the framework of that name, or itself; None: the one that the program uses.

    That is the one whose distributed service was started, else the only one of JAX and PyTorch that
    was imported, else the one that the first state belongs to. NumPy's is for programs that
    imported neither; it refuses arrays of both by path.

    Raises:
        InvalidArgumentError: there is no framework of that name, or it is not installed; or the
            services of both are started.
    """
    if name is not None:
        is_made = not isinstance(name, type) and hasattr(name, "snapshot")
        return name if is_made else _framework(name)  # type: ignore[return-value, arg-type]
    started = [each for each in ("jax", "torch") if _is_started(each)]
    if len(started) > 1:
        raise InvalidArgumentError(
            "find the framework: jax.distributed and torch.distributed are both started; pass "
            "framework='jax' or framework='torch'"
        )
    imported = [each for each in ("jax", "torch") if sys.modules.get(each) is not None]
    names = started or imported or ["numpy"]
    return _framework(names[0]) if len(names) == 1 else FrameworkOfFirstState()


def _framework(name: str) -> Framework:
    if name not in NAMES:
        raise InvalidArgumentError(
            f"framework={name!r}: expected one of {', '.join(NAMES)}, or None to find it"
        )
    title, module, kind = _CLASSES[name]
    try:
        framework: Framework = getattr(importlib.import_module(module), kind)()
    except ImportError as error:
        hint = f"; install it with: pip install 'holdfast-checkpoint[{name}]'"
        raise InvalidArgumentError(
            f"framework={name!r}: {title} cannot be imported ({error})"
            f"{'' if _is_installed(name) else hint}"
        ) from error
    return framework


class FrameworkOfFirstState:
    """JAX or PyTorch, in a program of one process that imported both.

    The first state decides: PyTorch if it has a tensor or a module, else JAX.
    """

    def __init__(self) -> None:
        self._found: Framework | None = None
        self._is_of_manager = False
        self._report: Callable[[float], None] | None = None
        """To be called with compilations, once the framework is found."""
        self._end_watch: Callable[[], None] | None = None

    def processes(self) -> Processes:
        self._is_of_manager = True
        return OwnProcess()

    def snapshot(self, state: object) -> Snapshot:
        return self._of(state).snapshot(state)

    def hold(self, state: object) -> HeldState:
        return self._of(state).hold(state)

    def outline(self, state: object) -> Outline:
        return self._of(state).outline(state)

    def pinning(self, state: object) -> Pinning:
        return self._of(state).pinning(state)

    def watch_compilations(self, report: Callable[[float], None]) -> Callable[[], None]:
        self._report = report
        return self._end_reports

    def _end_reports(self) -> None:
        self._report = None
        if self._end_watch is not None:
            self._end_watch()

    def restoration(self, spec: CheckpointSpec, request: RestoreRequest) -> Restoration:
        if request.like is None and self._found is None:
            return _framework("numpy").restoration(spec, request)
        return self._of(request.like).restoration(spec, request)

    def _of(self, state: object) -> Framework:
        if self._found is None:
            leaves = flatten(state, "find the framework of").leaves
            is_of_torch = any(map(_is_of_torch, leaves))
            framework = _framework("torch" if is_of_torch else "jax")
            # Readers and `holdfast.save` work for a process alone; a manager works for a job.
            if is_of_torch and self._is_of_manager and framework.processes().count > 1:
                raise InvalidArgumentError(
                    "find the other processes: torch.distributed was started after the manager "
                    "was made, which therefore works for this process alone; start it before"
                )
            self._found = framework
            if self._report is not None:
                self._end_watch = framework.watch_compilations(self._report)
        return self._found


def _is_of_torch(leaf: object) -> bool:
    torch: Any = sys.modules["torch"]
    kinds = torch.Tensor, torch.nn.Module, torch.optim.Optimizer, torch.Generator
    return isinstance(leaf, kinds)


def _is_started(name: str) -> bool:
    """Return whether the program has started a framework's distributed service."""
    if name == "torch":
        distributed: Any = sys.modules.get("torch.distributed")
        return bool(distributed and distributed.is_available() and distributed.is_initialized())
    jax_distributed: Any = sys.modules.get("jax._src.distributed")
    return jax_distributed is not None and jax_distributed.global_state.client is not None


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False
