"""Names of what is in a run: one name for each thing, and nothing else is a name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.format import names
from holdfast.format.names import NO_ATTEMPT, AttemptId, CheckpointId
from holdfast.store.contract import check_key
from tests.attempts import checkpoint_id

TOKENS = st.from_regex(r"\A[0-9a-f]{8}\Z")
ATTEMPTS = st.builds(AttemptId, st.integers(1, 999_999_999), TOKENS)
IDS = st.builds(CheckpointId, st.integers(0, names.STEP_MAX), ATTEMPTS)
COUNTS = st.integers(1, names.PART_COUNT_MAX)


@given(IDS)
def test_a_checkpoint_name_parses_to_what_it_was_made_of(checkpoint: CheckpointId) -> None:
    name = names.checkpoint_name(checkpoint)
    assert names.parse_checkpoint_name(name) == checkpoint
    step, attempt = name.split(".")
    assert (step, attempt) == (str(checkpoint.step).zfill(9), checkpoint.attempt.name)


@given(IDS, COUNTS, st.data())
def test_a_part_name_parses_to_what_it_was_made_of(
    checkpoint: CheckpointId, count: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, count - 1))
    key = names.part_key(checkpoint, rank, count)
    assert names.parse_part_name(key.split("/")[-1]) == (rank, count)
    image = names.image_key(checkpoint, rank, count)
    assert image == key.replace("/part-", "/image-").replace(".json", ".safetensors")


@given(IDS, IDS, COUNTS, st.data())
def test_a_reused_images_name_parses_to_what_it_was_made_of(
    checkpoint: CheckpointId, origin: CheckpointId, count: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, count - 1))
    key = names.reused_image_key(checkpoint, rank, count, origin)
    assert check_key(key) == key
    folder, name = key.rsplit("/", 1)
    assert names.parse_reused_image_name(name) == (rank, count, origin)
    assert folder == names.checkpoint_folder(checkpoint)
    own = names.image_key(checkpoint, rank, count).rsplit("/", 1)[1]
    assert name == own.replace(".safetensors", f".from-{origin}.safetensors")
    assert names.parse_reused_image_name(own) is None
    assert names.parse_part_name(name) is None


@given(
    st.from_regex(
        r"\Aimage-0*[0-9]{1,7}-of-0*[0-9]{1,7}\.from-0*[0-9]{1,17}\.0*[0-9]{1,10}-[0-9a-f]{8}\.safetensors\n?"
    )
)
def test_what_parses_as_a_reused_image_is_its_one_name(name: str) -> None:
    found = names.parse_reused_image_name(name)
    if found is not None:
        rank, count, origin = found
        assert 0 <= rank < count
        assert names.reused_image_key(checkpoint_id(0), rank, count, origin).endswith("/" + name)


@pytest.mark.parametrize(
    "name",
    [
        "image-00000-of-00001.safetensors",
        "image-00000-of-00001.from-000000001.1-0000000a.json",
        "image-00000-of-00001.from-000000001.safetensors",
        "image-00000-of-00001.from-000000001.01-0000000a.safetensors",
        "image-00000-of-00001.from-0000000001.1-0000000a.safetensors",
        "image-00000-of-00001.from-000000001.1-0000000a.safetensors\n",
        "image-00000-of-00001.from-000000001.1-0000000axsafetensors",
        "image-00000-of-00001xfrom-000000001.1-0000000a.safetensors",
        "image-00001-of-00001.from-000000001.1-0000000a.safetensors",
        "image-000000-of-00001.from-000000001.1-0000000a.safetensors",
        ".image-00000-of-00001.from-000000001.1-0000000a.safetensors",
        "image-00000-of-00001.from-1000000000000001.1-0000000a.safetensors",
    ],
)
def test_other_names_are_no_reused_image(name: str) -> None:
    assert names.parse_reused_image_name(name) is None


@given(st.integers(1, 999_999_999))
def test_an_attempt_name_parses_to_what_it_was_made_of(attempt: int) -> None:
    for key in names.attempt_keys(attempt):
        assert names.parse_attempt_name(key.split("/")[-1]) == attempt


def test_the_last_attempt_that_a_checkpoint_may_name_has_a_record_name_too() -> None:
    assert names.parse_checkpoint_name(f"000000001.{names.ATTEMPT_MAX}-0000000a") is not None
    record = names.attempt_keys(names.ATTEMPT_MAX)[0].split("/")[-1]
    assert names.parse_attempt_name(record) == names.ATTEMPT_MAX


@given(IDS, COUNTS)
def test_every_key_stays_in_the_folder(checkpoint: CheckpointId, count: int) -> None:
    for key in (
        names.image_key(checkpoint, count - 1, count),
        names.part_key(checkpoint, count - 1, count),
        names.manifest_key(checkpoint),
        *names.attempt_keys(checkpoint.attempt.number),
    ):
        assert check_key(key) == key


@given(IDS)
def test_a_manifest_has_one_key(checkpoint: CheckpointId) -> None:
    key = names.manifest_key(checkpoint)
    assert names.parse_manifest_key(key) == checkpoint
    assert names.parse_object_key(key) is None
    for other in (f"{key}\n", key.replace("-", "-0", 1), key.replace("/0", "/00"), key[:-5]):
        assert other == key or names.parse_manifest_key(other) is None


@given(IDS, IDS)
def test_manifests_are_sorted_the_newest_step_first(one: CheckpointId, other: CheckpointId) -> None:
    if one.step < other.step:
        assert names.manifest_key(one) > names.manifest_key(other)


@given(
    st.text("0123456789.-ab", max_size=30)
    | st.from_regex(r"\A0*[0-9]{1,12}\.0*[0-9]{1,11}-[0-9a-fA-F]{7,9}\n?")
)
def test_what_parses_as_a_checkpoint_is_its_one_name(name: str) -> None:
    found = names.parse_checkpoint_name(name)
    assert found is None or names.checkpoint_name(found) == name


@given(st.from_regex(r"\Apart-0*[0-9]{1,7}-of-0*[0-9]{1,7}\.json\n?"))
def test_what_parses_as_a_part_is_its_one_name(name: str) -> None:
    found = names.parse_part_name(name)
    if found is not None:
        rank, count = found
        assert 0 <= rank < count
        assert names.part_key(checkpoint_id(0), rank, count).endswith("/" + name)


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "120.3-9f2c41ab",
        "000000120",
        "000000120.3",
        "000000120.3-",
        "000000120.3-9f2c41a",
        "000000120.3-9f2c41abc",
        "000000120.3-9F2C41AB",
        "000000120.",
        "000000120.0-9f2c41ab",
        "000000120.03-9f2c41ab",
        "0000000120.3-9f2c41ab",
        "000000120.3-9f2c41ab\n",
        " 000000120.3-9f2c41ab",
        ".000000120.3-9f2c41ab",
        "000000120.3.4-9f2c41ab",
        "-00000120.3-9f2c41ab",
        "+00000120.3-9f2c41ab",
        "0000_0120.3-9f2c41ab",
        "٠٠٠٠٠٠١٢٠.3-9f2c41ab",
        "1000000000000001.1-9f2c41ab",
        "000000120.9999999999-9f2c41ab",
        "../000000120.3-9f2c41ab",
        "000000120.3-9f2c41ab/",
    ],
)
def test_other_names_are_no_checkpoint(name: str) -> None:
    assert names.parse_checkpoint_name(name) is None


@given(ATTEMPTS)
def test_an_attempts_own_name_parses_to_what_it_was_made_of(attempt: AttemptId) -> None:
    assert names.parse_attempt_id(attempt.name) == attempt
    for other in (
        f"{attempt.name}\n",
        f"0{attempt.name}",
        attempt.name[:-1],
        str(attempt),
        "0-",
        "",
    ):
        assert names.parse_attempt_id(other) is None


def test_an_attempt_is_ordered_by_its_number_and_shown_by_it() -> None:
    older, newer = AttemptId(9, "ffffffff"), AttemptId(10, "00000000")
    assert NO_ATTEMPT < older < newer
    assert (bool(NO_ATTEMPT), bool(older), f"attempt {newer}") == (False, True, "attempt 10")


def test_two_starts_of_one_number_are_two_attempts() -> None:
    one, other = (AttemptId.of_start(2, token) for token in ("a1b2c3", "a1b2c4"))
    assert one != other
    assert one == AttemptId.of_start(2, "a1b2c3")
    assert one.is_valid


@pytest.mark.parametrize(
    "name",
    [
        "part-00000-of-00000.json",
        "part-00001-of-00001.json",
        "part-00002-of-00001.json",
        "part-0-of-1.json",
        "part-000000-of-00001.json",
        "part-00000-of-000001.json",
        "part-00000-of-1000001.json",
        "part-00000-of-00001.json\n",
        "part-00000-of-00001xjson",
        ".part-00000-of-00001.json",
        "image-00000-of-00001.safetensors",
        "part-0000٠-of-00001.json",
    ],
)
def test_other_names_are_no_part(name: str) -> None:
    assert names.parse_part_name(name) is None


@pytest.mark.parametrize(
    "name", ["000000000.json", "1.json", "0000000001.json", "000000001.json~", "000000001"]
)
def test_other_names_are_no_attempt(name: str) -> None:
    assert names.parse_attempt_name(name) is None
