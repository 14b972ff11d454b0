"""`python -m benchmarks.faults`: run all trials, and write docs/faults.json and its table."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.faults import trials
from benchmarks.faults.acts import FAULTS, NotTriedError
from benchmarks.faults.libraries import LIBRARIES
from holdfast.store.bucket.object_service import connect
from tests.buckets.fault_proxy import running_proxy
from tests.buckets.s3_server import BUCKET, running_server

DOCS = Path(__file__).parents[2] / "docs"
PAGE, RESULTS = DOCS / "reliability.md", DOCS / "faults.json"
BEGIN, END = "<!-- faults: made by `make faults` -->", "<!-- end of faults -->"
PACKAGES = ("orbax-checkpoint", "torch", "torch-checkpointing", "moonclip", "tensorstore")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the trials that were asked for; only all of them are written."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__)
    parser.add_argument("--library", action="append", choices=LIBRARIES)
    parser.add_argument("--fault", action="append", choices=FAULTS)
    options = parser.parse_args(arguments)
    libraries, faults = options.library or [*LIBRARIES], options.fault or [*FAULTS]
    found: dict[str, dict[str, Any]] = {}
    with _s3() as s3:
        for fault in faults:
            for library in libraries:
                try:
                    outcome = trials.run(library, fault, s3).as_json()
                except NotTriedError as error:
                    outcome = {"verdict": "–", "why": str(error)}
                print(f"{fault} | {library}: {outcome}", flush=True)
                found.setdefault(fault, {})[library] = outcome
    if options.library is None and options.fault is None:
        versions = {name: metadata.version(name) for name in PACKAGES}
        RESULTS.write_text(json.dumps({"versions": versions, "trials": found}, indent=1) + "\n")
        _write_table(found)


@contextlib.contextmanager
def _s3() -> Iterator[trials.S3]:
    """A server of S3 behind a proxy."""
    with (
        tempfile.TemporaryDirectory(prefix="holdfast-faults-") as folder,
        running_server(Path(folder)) as server,
        running_proxy(server.port) as proxy,
    ):
        variables = server.environment(proxy.address)
        os.environ |= variables
        # The server makes a bucket with its first object.
        connect(f"s3://{BUCKET}").put("first", [b"1"])
        yield trials.S3(proxy, variables, f"s3://{BUCKET}")


def _write_table(found: dict[str, dict[str, Any]]) -> None:
    names = [*LIBRARIES]
    rows = [["fault", *names], ["---"] * (len(names) + 1)]
    rows += [[fault, *(of[name]["verdict"] for name in names)] for fault, of in found.items()]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    before, _, rest = PAGE.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}")


if __name__ == "__main__":
    main()
