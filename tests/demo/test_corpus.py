from pathlib import Path

import numpy as np
import pytest

from holdfast.demo.corpus import load_corpus
from holdfast.errors import StorageError


def _write(path: Path, text: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text)


def test_the_corpus_is_the_same_each_time_and_bounded() -> None:
    first = load_corpus(limit_bytes=1 << 20)
    assert first.dtype == np.uint8
    assert first.shape == (1 << 20,)
    assert np.array_equal(first, load_corpus(limit_bytes=1 << 20))


def test_a_lower_bound_is_a_beginning_of_the_same_corpus() -> None:
    assert np.array_equal(load_corpus(limit_bytes=300_000), load_corpus()[:300_000])


def test_source_files_come_in_the_order_of_their_paths_and_others_not_at_all(
    tmp_path: Path,
) -> None:
    piece = bytes(1 << 17)
    _write(tmp_path / "b.py", b"b" + piece)
    _write(tmp_path / "a.py", b"a" + piece)
    _write(tmp_path / "pkg" / "z.py", b"z" + piece)
    _write(tmp_path / "a.txt", b"t" + piece)
    _write(tmp_path / "pkg" / "tests" / "c.py", b"c" + piece)
    _write(tmp_path / "site-packages" / "d.py", b"d" + piece)
    assert load_corpus(tmp_path).tobytes() == b"a" + piece + b"b" + piece + b"z" + piece


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    _write(tmp_path / "a.py", b"pass")
    with pytest.raises(StorageError, match="found 4"):
        load_corpus(tmp_path)
