import subprocess
import sys

import pytest
from click.testing import CliRunner

from holdfast.cli.main import commands, main

PRINTING = [name for name in commands.commands if name != "run"]


@pytest.mark.parametrize("name", commands.commands)
def test_every_command_tells_how_it_is_used(name: str) -> None:
    result = CliRunner().invoke(commands, [name, "--help"])
    assert result.exit_code == 0
    assert result.output.startswith("Usage: ")
    assert all(len(line) <= 80 for line in result.output.splitlines())


@pytest.mark.parametrize("name", PRINTING)
def test_every_command_that_prints_takes_json(name: str) -> None:
    assert "--json" in CliRunner().invoke(commands, [name, "--help"]).output


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["ls"],
        ["ls", "--no-such-flag", "run"],
        ["no-such-command"],
        ["ls", "run", "--limit", "0"],
        ["show", "run", "minus-one"],
        ["verify", "run", "--", "-1"],
        ["save", "run", "--timeout", "-1"],
        ["stop", "run", "--all"],
        ["rm", "run"],
        ["rm", "run", "one"],
        ["demo", "--hosts", "0"],
        ["demo", "--hosts", "100"],
        ["demo", "--hosts", "x"],
        ["demo", "--interval-secs", "0"],
        ["run"],
        ["run", "--max-restarts", "many", "--", "true"],
        ["run", "--drain-secs", "-1", "--", "true"],
        ["run", "--drain-secs", "nan", "--", "true"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_exit_code_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Usage: " in captured.err


@pytest.mark.parametrize("name", ["ls", "show", "verify", "save", "status", "stop"])
def test_a_folder_that_is_no_run_is_one_line_and_exit_code_1(
    name: str, tmp_path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([name, str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert str(tmp_path) in captured.err


def test_no_framework_is_imported() -> None:
    code = "import sys, holdfast.cli.main; sys.exit('jax' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_demo_that_cannot_be_carried_out_says_so_on_stderr(
    tmp_path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--steps", "3", "--directory", str(tmp_path / "new"), "--json"]) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "at least" in captured.err


def test_the_shell_completes_commands() -> None:
    completing = {"COMP_WORDS": "holdfast st", "COMP_CWORD": "1"}
    result = CliRunner().invoke(
        commands,
        prog_name="holdfast",
        env=completing | {"_HOLDFAST_COMPLETE": "bash_complete"},
    )
    assert result.output.split() == ["plain,status", "plain,stats", "plain,stop"]
