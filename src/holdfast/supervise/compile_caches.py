"""Choose where the compilers of JAX and PyTorch keep their results between attempts.

A folder belongs to one host: both compilers use the instructions of the processor at hand. Sibling
runs share it, because entries are found by their content.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import xxhash

from holdfast.store.location import RunLocation

FOLDER = ".holdfast-compiled"


def cache_variables(environment: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Return the variables that `environment` lacks, for caches in `folder`.

    JAX then keeps also what is compiled quickly. A cache that the user has chosen is left alone.
    """
    variables = {}
    if "JAX_COMPILATION_CACHE_DIR" not in environment:
        variables = {
            "JAX_COMPILATION_CACHE_DIR": str(folder / "jax"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
    variables["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    return {name: value for name, value in variables.items() if name not in environment}


def compile_folder(directory: str | None, program: Path, host: str) -> Path:
    """Return the folder of the caches of this host.

    Args:
        directory: The run's directory or URL, if it is known.
        program: The folder of the program's files, for a run without a directory.
        host: The host's name.
    """
    if directory is None or (location := RunLocation.parse(directory)).is_url:
        return program / "compiled" / host
    return Path(location.text).parent / FOLDER / host


def program_folder(environment: Mapping[str, str], identity: Sequence[str]) -> Path:
    """Return this user's folder for what is kept of the program with this identity."""
    root = environment.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    key = xxhash.xxh3_64_hexdigest("\0".join(identity).encode(errors="surrogateescape"))
    return Path(root) / "holdfast" / "programs" / key
