"""Sealed JSON: no flipped bit, no missing and no added byte goes unseen."""

from __future__ import annotations

import json

import msgspec
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import CheckpointDamagedError, NewerFormatError
from holdfast.format.records import (
    AttemptRecord,
    Manifest,
    PartRecord,
    PartReference,
    RunRecord,
    decode_metrics,
    encode_metrics,
)
from holdfast.format.sealed import FORMAT_VERSION, seal, unseal
from tests.attempts import attempt_id, checkpoint_id
from tests.engine.making import RUN_ID, TIME, Made, checkpoints, random_array

RUN = RunRecord(run_id="run-1_A", time=TIME)
RUN_BYTES = seal(RUN)


def _part(made: Made, rank: int) -> PartRecord:
    return PartRecord(
        run_id=RUN_ID,
        step=made.id.step,
        attempt=made.id.attempt,
        rank=rank,
        part_count=made.part_count,
        image_size_bytes=4096,
        header_digest="0" * 32,
        blocks=("1" * 32, "2" * 32),
        values=(),
        checkpoint=made.spec if rank == 0 else None,
    )


def _records() -> dict[str, msgspec.Struct]:
    made = Made()
    made.add(("a", 1), random_array((2, 3), "float32", 1), (1, 3), ((0, 2),))
    part = PartReference(record_digest="3" * 32, image_size_bytes=4096)
    return {
        "run": RUN,
        "attempt": AttemptRecord(
            run_id=RUN_ID,
            attempt=attempt_id(2),
            origin=checkpoint_id(1),
            host="hé",
            pid=1,
            time=TIME,
        ),
        "part": _part(made, 0),
        "manifest": Manifest(
            run_id=RUN_ID, step=10, attempt=attempt_id(1), parts=(part,), checkpoint=made.spec
        ),
    }


@pytest.mark.parametrize("record", _records().values(), ids=_records())
def test_a_record_comes_back(record: msgspec.Struct) -> None:
    data = seal(record)
    assert unseal(data, type(record), "r") == record
    content = json.loads(data)
    assert list(content)[-1] == "digest"
    assert data.endswith(b',"digest":"%s"}\n' % content["digest"].encode())
    assert content["digest"] == xxhash.xxh3_128_hexdigest(data[:-46])


@given(checkpoints())
def test_a_part_record_of_any_arrays_comes_back(made: Made) -> None:
    part = _part(made, 0)
    assert unseal(seal(part), PartRecord, "part") == part


@pytest.mark.parametrize("record", _records().values(), ids=_records())
def test_every_flipped_bit_is_noticed(record: msgspec.Struct) -> None:
    data = seal(record)
    for bit in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CheckpointDamagedError):
            unseal(bytes(flipped), type(record), "r")


def test_every_truncation_is_noticed() -> None:
    for size in range(len(RUN_BYTES)):
        with pytest.raises(CheckpointDamagedError):
            unseal(RUN_BYTES[:size], RunRecord, "r")


@given(st.binary(min_size=1, max_size=60), st.booleans())
def test_every_extension_is_noticed(more: bytes, in_front: bool) -> None:
    with pytest.raises(CheckpointDamagedError):
        unseal(more + RUN_BYTES if in_front else RUN_BYTES + more, RunRecord, "r")


@given(st.binary(max_size=200))
def test_other_bytes_are_no_record(data: bytes) -> None:
    with pytest.raises(CheckpointDamagedError):
        unseal(data, RunRecord, "r")


def test_the_message_names_the_file_the_range_and_both_digests() -> None:
    changed = RUN_BYTES.replace(b"run_id", b"run-id")
    expected = json.loads(RUN_BYTES)["digest"]
    found = xxhash.xxh3_128_hexdigest(changed[:-46])
    with pytest.raises(CheckpointDamagedError) as error:
        unseal(changed, RunRecord, "runs/a/holdfast.json")
    message = str(error.value)
    for word in ("runs/a/holdfast.json", f"[0, {len(changed) - 46})", expected, found):
        assert word in message


NEWER = f'{{"format_version":{FORMAT_VERSION + 1},"other":1}}'


def _sealed_text(text: str) -> bytes:
    body = text.encode()[:-1]
    return body + b',"digest":"%s"}\n' % xxhash.xxh3_128_hexdigest(body).encode()


def test_a_newer_version_is_told_from_damage_even_where_its_members_differ() -> None:
    data = _sealed_text(NEWER)
    with pytest.raises(NewerFormatError, match="upgrade"):
        unseal(data, RunRecord, "r")


def test_a_damaged_record_of_a_newer_version_is_damaged() -> None:
    data = _sealed_text(NEWER)
    with pytest.raises(CheckpointDamagedError):
        unseal(data.replace(b"other", b"0ther"), RunRecord, "r")


def test_members_that_are_not_known_are_ignored() -> None:
    text = RUN_BYTES[:-46].decode() + ',"later":{"digest":1}}'
    assert unseal(_sealed_text(text), RunRecord, "r") == RUN


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        '{"format_version":1}',
        '{"run_id":"a","time":"2026-08-01T12:00:00Z"}',
        '{"format_version":"1","run_id":"a","time":"2026-08-01T12:00:00Z"}',
        '{"format_version":1,"run_id":1,"time":"2026-08-01T12:00:00Z"}',
        '{"format_version":1,"run_id":"a","time":"yesterday"}',
        '[{"format_version":1}]',
        "[" * 100_000 + "]" * 100_000,
    ],
    ids=lambda text: text[:40],
)
def test_a_sound_record_of_another_kind_is_refused(text: str) -> None:
    with pytest.raises(CheckpointDamagedError):
        unseal(_sealed_text(text), RunRecord, "r")


@given(st.none() | st.dictionaries(st.text(max_size=5), st.floats(), max_size=3))
def test_metrics_come_back(metrics: dict[str, float] | None) -> None:
    text = json.loads(json.dumps(encode_metrics(metrics), allow_nan=False))
    found = decode_metrics(text)
    assert (found is None) == (metrics is None)
    if metrics is not None:
        assert {k: repr(v) for k, v in found.items()} == {k: repr(v) for k, v in metrics.items()}
