"""Build the distribution and check it as its users get it; `make dist` runs this.

Each check prints a line. The first one that fails ends the program with exit code 1, after what was
expected and what was found. An extra that the index lacks for this machine is named, with a reason.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from tests.dist.artifacts import Artifacts
from tests.dist.environment import CleanEnvironment, UnavailableError
from tests.dist.extras import EXTRAS, first_program
from tests.dist.outcome import ROOT, CheckFailedError, expect, last_lines
from tests.dist.type_checks import check_types

WORK = ROOT / "build" / "dist"
README_STEPS = "200"


def main(chosen: list[str]) -> int:
    """Run all checks; of the extras the chosen ones, or all. Return the exit code."""
    names = list(EXTRAS) if chosen == ["all"] else chosen
    artifacts = Artifacts(WORK, ROOT / "dist")
    bare, full = CleanEnvironment(WORK / "bare"), CleanEnvironment(WORK / "full")
    unavailable: list[str] = []
    checks: list[tuple[str, Callable[[], str]]] = [
        ("extras", lambda: _choose(names)),
        ("build", artifacts.build),
        ("metadata", artifacts.check_metadata),
        ("wheel", artifacts.check_wheel),
        ("sdist", artifacts.check_sdist),
        ("description", artifacts.check_description),
        ("every extra", lambda: _compare_extras(artifacts)),
        ("no extra", lambda: _check_bare(bare, artifacts)),
        ("types", lambda: check_types(bare)),
        ("README.md", lambda: _check_readme(full, artifacts)),
        *((f"[{name}]", lambda name=name: _check_extra(name, bare, full, artifacts)) for name in names),
    ]
    for name, check in checks:
        began = time.monotonic()
        try:
            result = check()
        except UnavailableError as error:
            unavailable.append(name)
            print(f"NOT CHECKED  {name}: {error}", flush=True)
        except CheckFailedError as error:
            print(f"FAILED  {name}: {error}", flush=True)
            return 1
        else:
            print(f"ok  {name}: {result} ({time.monotonic() - began:.0f} s)", flush=True)
    full.remove()
    bare.remove()
    rest = f"; NOT CHECKED: {', '.join(unavailable)}" if unavailable else ""
    print(f"dist/{artifacts.wheel.name} and dist/{artifacts.sdist.name} are checked{rest}")
    return 0


def _choose(names: list[str]) -> str:
    unknown = sorted(set(names) - set(EXTRAS))
    if unknown or not names:
        raise CheckFailedError(f"EXTRAS of: all, {', '.join(EXTRAS)}", unknown)
    return ", ".join(names)


def _compare_extras(artifacts: Artifacts) -> str:
    provided = artifacts.metadata().get_all("Provides-Extra", [])
    expect(sorted(EXTRAS), sorted(provided), "extras with a program in tests/dist/extras.py")
    return f"{len(provided)} extras have a program"


def _check_bare(bare: CleanEnvironment, artifacts: Artifacts) -> str:
    """Check the wheel without extras: its command, a checkpoint, and where it is imported from."""
    bare.install(artifacts.wheel, "")
    version = artifacts.metadata()["Version"]
    program = (
        "import subprocess, sys\n"
        "from pathlib import Path\n"
        "import holdfast\n"
        "assert Path(holdfast.__file__).is_relative_to(sys.prefix), holdfast.__file__\n"
        "command = [str(Path(sys.prefix) / 'bin' / 'holdfast'), '--version']\n"
        "print(subprocess.run(command, check=True, capture_output=True, text=True).stdout)\n"
    )
    expect(True, version in bare.run_program(program), f"{version} in `holdfast --version`")
    bare.run_program(first_program("docs/installing.md"))
    return f"installs, holdfast {version} runs, and the program of docs/installing.md saves"


def _check_readme(full: CleanEnvironment, artifacts: Artifacts) -> str:
    """Check that README's first program trains, and that its second start repeats nothing."""
    full.install(artifacts.wheel, "jax")
    program = first_program("README.md") + "\nprint(start, int(state['w'][0]))\n"
    expect([f"0 {README_STEPS}", f"{README_STEPS} {README_STEPS}"], full.run_twice(program))
    return "its first program trains, continues, and `holdfast verify` finds no damage"


def _check_extra(
    name: str, bare: CleanEnvironment, full: CleanEnvironment, artifacts: Artifacts
) -> str:
    """Check that the extra's program works with the extra, and fails without it."""
    extra = EXTRAS[name]
    output = bare.run_program(extra.program, is_expected_to_fail=True)
    reason = last_lines(output).rpartition("\n")[2]
    full.install(artifacts.wheel, name, extra.constraints)
    full.run_program(extra.program)
    return f"its program works; without it: {reason[:120]}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
