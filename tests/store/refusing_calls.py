"""Run a program for which the kernel refuses system calls, each with an error number.

    python refusing_calls.py linkat=EOPNOTSUPP,renameat2=EINVAL bindfs FROM AT

A call that this processor does not have is left out. It exits with 77 where the kernel has no such
filters.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys

NUMBERS = {
    "x86_64": {"link": 86, "linkat": 265, "renameat2": 316},
    "aarch64": {"linkat": 37, "renameat2": 276},
}
# Linux's include/uapi/linux/prctl.h, seccomp.h and bpf_common.h.
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
LOAD_WORD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, ERRNO = 0x7FFF0000, 0x00050000
UNAVAILABLE = 77


class Instruction(ctypes.Structure):
    """One instruction of a filter."""

    _fields_ = (
        ("code", ctypes.c_ushort),
        ("if_true", ctypes.c_ubyte),
        ("if_false", ctypes.c_ubyte),
        ("value", ctypes.c_uint32),
    )


class Filter(ctypes.Structure):
    """A whole filter."""

    _fields_ = (("count", ctypes.c_ushort), ("instructions", ctypes.POINTER(Instruction)))


def refuse(calls: dict[str, int]) -> None:
    """Refuse `calls`, error numbers by name, in this process and all that it starts."""
    numbers = NUMBERS[platform.machine()]
    program = [Instruction(LOAD_WORD, 0, 0, 0)]
    for name in calls.keys() & numbers.keys():
        program.append(Instruction(JUMP_IF_EQUAL, 0, 1, numbers[name]))
        program.append(Instruction(RETURN, 0, 0, ERRNO | calls[name]))
    program.append(Instruction(RETURN, 0, 0, ALLOW))
    whole = Filter(len(program), (Instruction * len(program))(*program))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(whole), 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def main() -> None:
    pairs = (word.split("=") for word in sys.argv[1].split(","))
    try:
        refuse({name: getattr(errno, number) for name, number in pairs})
    except (OSError, KeyError) as error:
        print(f"system calls cannot be refused here: {error}", file=sys.stderr)
        sys.exit(UNAVAILABLE)
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
