"""docs/format.md is true: Holdfast writes its example, and its numbers are the code's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from holdfast.format import check, digests, layout, names, sealed, values
from tests.format.example import write_example
from tests.format.stranger import read_checkpoint, read_newest

TEXT = (Path(__file__).parents[2] / "docs" / "format.md").read_text()
EXAMPLE = TEXT.partition("## An example")[2]


def _documented() -> dict[str, bytes]:
    """The files of the example as the document shows them."""
    found = {}
    shown = r"^`(\S+)`(?:, and the same in `(\S+)`)?\n\n```(\w+)\n(.*?)\n```$"
    for path, twin, kind, body in re.findall(shown, EXAMPLE, re.M | re.S):
        if kind == "json":
            found[path] = body.encode() + b"\n"
            if twin:
                found[str(Path(path).with_name(twin))] = found[path]
            continue
        data = b""
        for line in body.splitlines():
            start, stop, content = re.fullmatch(r"bytes \[(\d+), (\d+)\) +(.*)", line).groups()
            assert int(start) == len(data)
            if content == "spaces":
                data += b" " * (int(stop) - int(start))
            elif content.startswith("{"):
                data += content.encode()
            else:
                data += bytes.fromhex(content)
            assert int(stop) == len(data)
        found[path] = data
    for path, other in re.findall(r"^`(\S+)` is `(\S+)` under one more name\.$", EXAMPLE, re.M):
        found[path] = found[other]
    return found


def test_the_example_is_what_holdfast_writes(tmp_path: Path) -> None:
    write_example(tmp_path)
    written = {
        str(p.relative_to(tmp_path)): p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()
    }
    assert _documented() == written


def test_a_stranger_reads_the_example_as_the_document_says(tmp_path: Path) -> None:
    for path, data in _documented().items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(data)
    found = read_newest(tmp_path)
    assert (found.step, found.attempt) == (130, (1, "9f2c41ab"))
    assert found.arrays["params/w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert found.arrays["params/scale"].tolist() == 0x4020
    assert read_checkpoint(tmp_path, 120, found.attempt).arrays["params/scale"].tolist() == 0x3FC0
    assert found.values == {("epoch",): 7}
    assert [v[("data",)] for v in found.rank_values] == [
        {"file": ("a.bin", rank), "left": 2**70} for rank in range(2)
    ]


@pytest.mark.parametrize(
    ("row", "value"),
    [
        ("step | 10¹⁵", names.STEP_MAX == 10**15),
        ("number of an attempt | 999 999 999", names.ATTEMPT_MAX == 999_999_999),
        ("parts | 10⁶", names.PART_COUNT_MAX == 10**6),
        ("reused images of a part | 16", check.REUSED_COUNT_MAX == 16),
        ("axes of an array | 64", check.AXES_MAX == 64),
        ("bytes of an array | 2⁶⁰", check.ARRAY_SIZE_MAX_BYTES == 2**60),
        ("chunks of a checkpoint | 2²⁷", check.CHUNK_COUNT_MAX == 2**27),
        ("bytes of a sealed record | 2³⁰", sealed.RECORD_SIZE_MAX_BYTES == 2**30),
        ("blocks of 8 MiB (8 388 608 bytes)", digests.BLOCK_SIZE_BYTES == 8_388_608),
        ("smallest multiple of 4096", layout.DATA_ALIGNMENT_BYTES == 4096),
        ("up to 64, that divides", layout.CHUNK_ALIGNMENT_BYTES == 64),
        ("at most 100 levels", values.DEPTH_MAX == 100),
        ("The format, version 1\n", sealed.FORMAT_VERSION == 1),
    ],
)
def test_the_documented_number_is_the_codes(row: str, value: bool) -> None:
    assert row in TEXT
    assert value
