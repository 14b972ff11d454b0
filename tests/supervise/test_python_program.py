import os
import sys
from pathlib import Path

import pytest

from holdfast.errors import InvalidArgumentError
from holdfast.supervise.python_program import PythonProgram, parse_arguments, parse_command

PYTHON = sys.executable


def script(path: Path, line: str) -> str:
    path.write_text(f"{line}\nprint(1)\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("arguments", "kind", "name"),
    [
        (["train.py", "-m", "x"], "script", "train.py"),
        (["-u", "-O", "train.py", "-c"], "script", "train.py"),
        (["-uOO", "-Wignore", "-X", "dev", "train.py"], "script", "train.py"),
        (["-W", "error", "--", "-train.py"], "script", "-train.py"),
        (["--check-hash-based-pycs", "always", "train.py"], "script", "train.py"),
        (["-m", "package.train", "--lr", "1"], "-m", "package.train"),
        (["-mpackage.train"], "-m", "package.train"),
        (["-um", "package.train"], "-m", "package.train"),
        (["-c", "import train", "-I"], "-c", "import train"),
        (["-Bcpass"], "-c", "pass"),
    ],
)
def test_the_program_is_found_as_python_finds_it(
    arguments: list[str], kind: str, name: str
) -> None:
    program = parse_arguments("python", arguments)
    assert (program.kind, program.name) == (kind, name)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["-I", "train.py"], "-I of Python ignores PYTHONPATH"),
        (["-uE", "train.py"], "-E of Python ignores PYTHONPATH"),
        (["-S", "-m", "train"], "-S of Python ignores PYTHONPATH"),
        (["-i", "train.py"], "-i of Python is for interactive use"),
        (["--version"], "--version of Python runs no program"),
        (["-c"], "-c of Python has no value"),
        ([], "from standard input"),
        (["-u", "-"], "from standard input"),
    ],
)
def test_what_a_standby_process_cannot_have_is_refused(arguments: list[str], reason: str) -> None:
    with pytest.raises(InvalidArgumentError, match=reason):
        parse_arguments("python", arguments)


def test_a_script_with_an_interpreter_line_of_python_is_a_program(tmp_path: Path) -> None:
    for line in (f"#!{PYTHON}", f"#!{PYTHON} -u", "#!/usr/bin/env python3"):
        path = script(tmp_path / "train", line)
        program = parse_command([path, "--lr", "1"])
        assert (program.kind, program.name) == ("script", path)


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (["env", "X=1", PYTHON, "train.py"], "env is not a Python interpreter"),
        (["no-such-command"], "no-such-command is not found"),
        ([PYTHON, "-I", "train.py"], "-I of Python"),
    ],
)
def test_a_command_that_runs_another_program_first_is_refused(
    command: list[str], reason: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=reason):
        parse_command(command)


def test_a_script_of_a_shell_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="is a script of /bin/sh"):
        parse_command([script(tmp_path / "train", "#!/bin/sh")])


def test_modules_are_found_where_python_looks_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "train.py").touch()
    (tmp_path / "train.py").symlink_to("real/train.py")
    (tmp_path / "train.zip").write_bytes(b"PK")
    monkeypatch.chdir(tmp_path)
    for kind, name, expected in [
        ("script", "train.py", str(tmp_path / "real")),
        ("script", "real", str(tmp_path / "real")),
        ("script", "train.zip", str(tmp_path / "train.zip")),
        ("-m", "train", os.getcwd()),
        ("-c", "pass", ""),
    ]:
        program = PythonProgram(interpreter="python", kind=kind, name=name)
        assert program.search_path() == expected


def test_programs_differ_by_their_file_and_not_by_their_arguments(tmp_path: Path) -> None:
    first, second = (script(tmp_path / name, f"#!{PYTHON}") for name in ("a", "b"))
    assert parse_command([first, "1"]).identity() == parse_command([first, "2"]).identity()
    assert parse_command([PYTHON, first]).identity() == parse_command([first]).identity()
    assert parse_command([first]).identity() != parse_command([second]).identity()
