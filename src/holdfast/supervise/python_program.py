"""Parse a command that runs a Python program, as the interpreter parses it.

The result says from where the program's modules are imported, and which program it is. Commands
that run anything else before the program are refused, because a standby process runs the command
too, up to the first line of the program.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.errors import InvalidArgumentError

_INTERPRETER = re.compile(r"(python|pypy)[0-9.]*(-dbg|d|t)?")
_LINE_BYTES = 256
"""How much of a script's first line Linux reads."""
_FLAGS = "bBdOPqRsuvx"
_WITH_VALUE = "WX"
_NO_STARTUP = "EIS"
"""With these, the interpreter ignores PYTHONPATH or imports no `sitecustomize`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonProgram:
    """A program that Python runs.

    Attributes:
        interpreter: The path of the interpreter.
        kind: `script`, `-m` or `-c`.
        name: The script's path as given, the module's name, or the code.
    """

    interpreter: str
    kind: str
    name: str

    def search_path(self) -> str:
        """Return the entry that Python puts first on `sys.path`, for the present directory."""
        if self.kind != "script":
            return os.getcwd() if self.kind == "-m" else ""
        script = os.path.realpath(self.name)
        # Python also runs folders and zip archives; their own path is the entry.
        is_source = os.path.isfile(script) and not _starts_with(script, b"PK")
        return os.path.dirname(script) if is_source else script

    def identity(self) -> tuple[str, ...]:
        """Return what tells programs apart; their arguments do not matter."""
        if self.kind == "script":
            return self.interpreter, os.path.realpath(self.name)
        return self.interpreter, self.kind, self.name, os.getcwd()


def parse_command(command: Sequence[str]) -> PythonProgram:
    """Return the Python program that a command runs.

    Args:
        command: An interpreter with its arguments, or a script whose first line names one.

    Raises:
        InvalidArgumentError: It runs another program, or Python with an option that a standby
            process cannot have. The message is the reason alone.
    """
    path = shutil.which(command[0])
    if path is None:
        raise InvalidArgumentError(f"{command[0]} is not found, or not executable")
    line = _first_line(path)
    if line is None:
        if not _INTERPRETER.fullmatch(os.path.basename(path)):
            raise InvalidArgumentError(f"{command[0]} is not a Python interpreter")
        return parse_arguments(path, command[1:])
    words = line.split()
    if words and os.path.basename(words[0]) == "env":
        words = words[2:] if words[1:2] == ["-S"] else words[1:]
    interpreter = shutil.which(words[0]) if words else None
    if interpreter is None or not _INTERPRETER.fullmatch(os.path.basename(words[0])):
        raise InvalidArgumentError(f"{command[0]} is a script of {words[0] if words else '?'}")
    return parse_arguments(interpreter, [*words[1:], path, *command[1:]])


def parse_arguments(interpreter: str, arguments: Sequence[str]) -> PythonProgram:
    """Return the program that `interpreter` runs with these arguments.

    Raises:
        InvalidArgumentError: It runs none, or an option cannot be kept.
    """
    rest = list(arguments)
    while rest and rest[0].startswith("-") and rest[0] not in ("-", "--"):
        word = rest.pop(0)
        if word.startswith("--"):
            if word != "--check-hash-based-pycs":
                raise InvalidArgumentError(f"the option {word} of Python runs no program")
            rest = rest[1:]
            continue
        for index, letter in enumerate(word[1:], start=1):
            value = [word[index + 1 :]] if word[index + 1 :] else rest[:1]
            if letter in "cm":
                if not value:
                    raise InvalidArgumentError(f"the option -{letter} of Python has no value")
                return PythonProgram(interpreter=interpreter, kind=f"-{letter}", name=value[0])
            if letter in _WITH_VALUE:
                rest = rest if word[index + 1 :] else rest[1:]
                break
            if letter in _NO_STARTUP:
                raise InvalidArgumentError(f"the option -{letter} of Python ignores PYTHONPATH")
            if letter not in _FLAGS:
                raise InvalidArgumentError(f"the option -{letter} of Python is for interactive use")
    if rest[:1] == ["--"]:
        rest = rest[1:]
    if not rest or rest[0] == "-":
        raise InvalidArgumentError("Python reads the program from standard input")
    return PythonProgram(interpreter=interpreter, kind="script", name=rest[0])


def _first_line(path: str) -> str | None:
    """Return the interpreter line of a script, without `#!`; None for another file."""
    try:
        with open(path, "rb") as file:
            head = file.read(_LINE_BYTES)
    except OSError:
        return None
    return os.fsdecode(head[2:].partition(b"\n")[0]) if head.startswith(b"#!") else None


def _starts_with(path: str, magic: bytes) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(len(magic)) == magic
    except OSError:
        return False
