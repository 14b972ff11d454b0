"""What each extra is for, as a program that works with the extra and fails without it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.dist.outcome import ROOT

PROGRAM = re.compile(r"<!-- run -->\n```python\n(.*?)```", re.DOTALL)


@dataclass(frozen=True)
class Extra:
    """An extra's program; `constraints` replaces those of the repository."""

    program: str
    constraints: str | None = None


def first_program(page: str) -> str:
    """Return the first program of a page of the documentation."""
    match = PROGRAM.search((ROOT / page).read_text())
    assert match is not None, page
    return match[1]


BUCKETS = """
from holdfast import errors, open_run

try:
    open_run("s3://bucket/run")
except errors.StorageUnreachableError as error:
    assert "127.0.0.1:9" in str(error), error
else:
    raise AssertionError("a bucket where no service listens was opened")
"""
ENDPOINT = """
import os

os.environ |= {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_ALLOW_HTTP": "true"}
os.environ |= {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1"}
"""
AWS = """
from holdfast.store.bucket.aws_profile import ProfileCredentials

ProfileCredentials("read a profile")
"""
CUDA = """
from holdfast.adapt.devices.cuda import open_cuda
from holdfast.errors import DeviceError

try:
    open_cuda()
except DeviceError as error:  # the bindings are there, and this machine may have no GPU
    assert "can be imported" not in str(error), error
"""
METRICS = """
import socket
import urllib.request

import numpy as np

import holdfast

with socket.create_server(("127.0.0.1", 0)) as server:
    port = server.getsockname()[1]
network = holdfast.HostNetwork(prometheus_port=port)
with holdfast.CheckpointManager("runs/one", network=network) as manager:
    manager.save(0, {"w": np.zeros(10)}, force=True)
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
assert "holdfast_" in text, text
"""
EXTRAS = {
    "buckets": Extra(ENDPOINT + BUCKETS),
    "jax": Extra(first_program("README.md")),
    "aws": Extra(AWS),
    "torch": Extra(first_program("docs/pytorch.md")),
    "transformers": Extra("import accelerate\nimport holdfast.interop.trainers.transformers\n"),
    "lightning": Extra("import holdfast.interop.trainers.lightning\n"),
    # It needs older versions of some packages than the repository's environment.
    "torchtitan": Extra("import holdfast.interop.trainers.torchtitan\n", constraints="torch==2.13.0\n"),
    "orbax": Extra(
        "import orbax.checkpoint\n"
        "import holdfast.interop.orbax\n"
        "import holdfast.interop.orbax.orbax_export\n"
        "import holdfast.interop.orbax.orbax_import\n"
    ),
    "prometheus": Extra(METRICS),
    "cuda": Extra(CUDA),
    "demo": Extra(
        "import holdfast.demo.data\n"
        "import holdfast.demo.jax_learner\n"
    ),
    "bench": Extra("import s3torchconnector\nimport torch_checkpointing\nimport holdfast\n"),
    "docs": Extra("import material\nimport mkdocs_click\nimport mkdocstrings_handlers.python\n"),
    "dev": Extra("import flax\nimport holdfast\nimport moto\nimport pytest\nimport ruff\n"),
}
