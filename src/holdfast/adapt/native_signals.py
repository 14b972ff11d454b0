"""Read and set signal handlers that frameworks installed in C, such as that of `jax.distributed`.

Python's `signal.getsignal` does not report them, so this module calls `sigaction(2)`. The layouts
of its structures are glibc's on Linux, on x86-64 and AArch64.
"""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

_SA_SIGINFO = 4
_libc = ctypes.CDLL(None, use_errno=True)


class _Action(ctypes.Structure):
    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_byte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


class _Symbol(ctypes.Structure):
    _fields_ = (
        ("library", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


class NativeHandler:
    """A signal handler implemented in C."""

    def __init__(self, number: signal.Signals, action: _Action) -> None:
        self._number = number
        self._action = action

    @property
    def is_preemption_notifier(self) -> bool:
        """Whether the handler makes a framework's processes agree on a last step by themselves.

        That of `jax.distributed` does; a process that exits before they have agreed blocks in
        `jax.distributed.shutdown()`.
        """
        return "jaxlib" in Path(self._library()).parts

    def _library(self) -> str:
        """Return the path of the library that contains its code; empty if unknown."""
        symbol = _Symbol()
        if _libc.dladdr(ctypes.c_void_p(self._action.handler), ctypes.byref(symbol)) == 0:
            return ""
        return os.fsdecode(symbol.library or b"")

    def invoke(self) -> None:
        """Call the handler as a plain function.

        A handler with `SA_SIGINFO` is not called, because it needs the kernel's arguments.
        """
        if self._action.flags & _SA_SIGINFO == 0:
            ctypes.CFUNCTYPE(None, ctypes.c_int)(self._action.handler)(self._number)

    def put_back(self) -> None:
        """Install the handler again."""
        _libc.sigaction(int(self._number), ctypes.byref(self._action), None)


def native_handler(number: signal.Signals) -> NativeHandler | None:
    """Return the C handler of a signal without a Python handler; None if there is none."""
    if signal.getsignal(number) not in (signal.SIG_DFL, None):
        return None
    action = _Action()
    if _libc.sigaction(int(number), None, ctypes.byref(action)) != 0:
        return None
    # 0 is SIG_DFL, the default action; 1 is SIG_IGN.
    return NativeHandler(number, action) if (action.handler or 0) > 1 else None
