"""Proofs of programs of the tests and the examples, whose processes are forked."""

from __future__ import annotations

import json
from pathlib import Path

from tests.hosts import ROOT, Host

DRIVER = Path(__file__).with_name("driver.py")
EXAMPLES = ROOT / "examples" / "exactness"
SECS_MAX = 3000.0


def proof_of(
    host: Host, folder: Path, program: Path, *arguments: str, stem: str, **options: object
) -> dict:
    """The result of a proof as JSON shows it."""
    process = host.start(
        DRIVER, folder / "proof", json.dumps(options), program, *arguments, stem=stem
    )
    out, err = process.communicate(timeout=SECS_MAX)
    logs = "".join(log.read_text() for log in (folder / "proof").glob("*/output.log"))
    assert process.returncode == 0, f"{out}\n{err}\n{logs}"
    document: dict = json.loads(out)
    document["notes"], document["logs"] = err, logs
    return document
