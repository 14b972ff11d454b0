"""Signal handlers that were not set through Python, such as the one that `jax.distributed` sets.

Python's `signal.getsignal` does not know of them, so the C library is asked (`sigaction(2)`). The
layouts below are glibc's on Linux, on x86-64 and AArch64.
"""

from __future__ import annotations

import ctypes
import os
import signal

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
    """A handler of C code, to be called and to be put back."""

    def __init__(self, number: signal.Signals, action: _Action) -> None:
        self._number = number
        self._action = action

    @property
    def library(self) -> str:
        """The file that its code was loaded from; empty where that is not known."""
        symbol = _Symbol()
        if _libc.dladdr(ctypes.c_void_p(self._action.handler), ctypes.byref(symbol)) == 0:
            return ""
        return os.fsdecode(symbol.library or b"")

    def invoke(self) -> None:
        """Calls it as a plain function. One that wants to know the sender cannot be called so."""
        if self._action.flags & _SA_SIGINFO == 0:
            ctypes.CFUNCTYPE(None, ctypes.c_int)(self._action.handler)(self._number)

    def put_back(self) -> None:
        """Sets it again."""
        _libc.sigaction(int(self._number), ctypes.byref(self._action), None)


def native_handler(number: signal.Signals) -> NativeHandler | None:
    """The C handler of a signal that Python has no handler for, or None."""
    if signal.getsignal(number) not in (signal.SIG_DFL, None):
        return None
    action = _Action()
    if _libc.sigaction(int(number), None, ctypes.byref(action)) != 0:
        return None
    # 0 and 1 stand for the default action and for ignoring.
    return NativeHandler(number, action) if (action.handler or 0) > 1 else None
