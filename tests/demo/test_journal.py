import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.demo.journal import Journal, Preempted, Step, Tail
from holdfast.errors import HoldfastError

_LOSS = 2.718281828
_STEP = Step(step=3, loss=_LOSS.hex(), batch="ab", secs=0.25)


def test_what_is_appended_is_read_once_and_in_order(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    tail = Tail(path)
    assert tail.read() == []
    preempted = Preempted(step=3)
    with Journal(path) as journal:
        journal.append(_STEP)
        assert tail.read() == [_STEP]
        journal.append(preempted)
    with Journal(path) as journal:
        journal.append(_STEP)
    assert tail.read() == [preempted, _STEP]
    assert tail.read() == []
    assert _STEP.loss_value == _LOSS


def test_half_a_line_waits_for_its_end(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal(path) as journal:
        journal.append(_STEP)
    line = path.read_bytes()
    path.write_bytes(line[:10])
    tail = Tail(path)
    assert tail.read() == []
    path.write_bytes(line)
    assert tail.read() == [_STEP]


def test_a_record_outlives_sigkill(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    program = (
        "import os, signal, sys; from pathlib import Path\n"
        "from holdfast.demo.journal import Journal, Preempted\n"
        "Journal(Path(sys.argv[1])).append(Preempted(step=1))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], check=False, timeout=240)
    assert done.returncode == -signal.SIGKILL
    assert Tail(path).read() == [Preempted(step=1)]


def test_a_line_that_is_no_record_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text('{"type": "stepped"}\n')
    with pytest.raises(HoldfastError, match="not a journal record"):
        Tail(path).read()
