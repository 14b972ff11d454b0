"""A trainer of another version than the supported one is refused by what it lacks.

The packages here are what such versions leave to be found; the trainers' own tests need the real
ones.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax", reason="JAX cannot be had here", exc_type=ImportError)

AXLEARN, MAXTEXT, TUNIX = (
    "import holdfast.interop.trainers.axlearn",
    "from holdfast.interop.trainers import maxtext; maxtext.install()",
    "from holdfast.interop.trainers import tunix; tunix.install()",
)
OLD_MAXTEXT = {
    "maxtext/common/checkpointing.py": "def create_orbax_checkpoint_manager(directory): ...",
    "maxtext/common/emergency_checkpointing.py": "",
    "maxtext/utils/train_utils.py": "",
}
OLD_AXLEARN = {
    "tensorflow/__init__.py": "",
    "axlearn/common/checkpointer.py": "class Checkpointer: ...",
}
OLD_TUNIX = {
    "tunix/sft/checkpoint_manager.py": "class CheckpointManager:\n    def save(self, step): ...",
}


@pytest.mark.parametrize(
    ("program", "files", "expected"),
    [
        (MAXTEXT, OLD_MAXTEXT, "create_orbax_checkpoint_manager(... enable_continuous_checkpoint"),
        (MAXTEXT, {}, "found that maxtext.common.checkpointing cannot be imported"),
        (AXLEARN, OLD_AXLEARN, "cannot import name 'BaseCheckpointer'"),
        (TUNIX, OLD_TUNIX, "checkpoint_manager.CheckpointManager.save(... custom_metadata ...)"),
    ],
    ids=["maxtext", "no maxtext", "axlearn", "tunix"],
)
def test_another_version_is_refused_by_what_it_lacks(
    program: str, files: dict[str, str], expected: str, tmp_path: Path
) -> None:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {program}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: holdfast.interop."), done.stderr
    assert expected in last
