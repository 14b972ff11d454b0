"""`python -m benchmarks`: measures Holdfast beside its peers, and writes docs/performance.md."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import page
from benchmarks.bench import bench
from benchmarks.figures import Figure
from benchmarks.rows import ROWS


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the rows that were asked for; 0 whether or not the figures are met."""
    options = _parse(arguments)
    figures: list[Figure] = []
    is_written = options.scale == 1 and not options.dry
    if is_written and options.rows == list(ROWS):
        page.clear()
    with bench(options.rounds, options.scale, options.disk) as made:
        for name in options.rows:
            started = time.monotonic()
            found = list(ROWS[name](made))
            figures += found
            print(f"{name}: {time.monotonic() - started:.0f} s", flush=True)
            for figure in found:
                verdict = "met" if figure.is_met else "MISSED"
                sign = "<=" if figure.at_most else ">="
                print(
                    f"  {figure.row} ({figure.state}): {figure.reached:.3g} {figure.unit} "
                    f"(wanted {sign} {figure.wanted:.3g}) {verdict}",
                    flush=True,
                )
            if is_written:
                page.write(found, options.rounds)
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("rows", nargs="*", choices=[*ROWS, []], help=f"of {', '.join(ROWS)}")
    parser.add_argument("--rounds", type=int, default=5, help="how often each is measured")
    parser.add_argument("--scale", type=float, default=1.0, help="of the states; 1 for real")
    parser.add_argument("--dry", action="store_true", help="writes no page")
    parser.add_argument(
        "--disk", type=Path, default=Path("build/bench"), help="a folder on the disk to measure"
    )
    found = parser.parse_args(arguments)
    found.rows = found.rows or list(ROWS)
    return found


if __name__ == "__main__":
    sys.exit(main())
