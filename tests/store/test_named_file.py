"""A file that the user names is replaced as a whole, and what is no regular file is kept."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from holdfast.errors import InvalidArgumentError, StorageError
from holdfast.store.files.named_file import check_file_name, new_content


def write(path: Path, content: bytes = b"new") -> None:
    with new_content(path, "write the report") as file:
        file.write(content)


def test_a_pipe_is_written_into_and_stays_a_pipe(tmp_path: Path) -> None:
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    write(pipe)
    reader.join(10)
    assert read == [b"new"]
    assert stat.S_ISFIFO(os.lstat(pipe).st_mode)
    assert os.listdir(tmp_path) == ["pipe"]


def test_a_link_stays_and_its_target_is_replaced_with_its_mode(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    link.symlink_to("target")
    write(link, b"first")
    assert stat.S_IMODE(target.stat().st_mode) == 0o644
    target.chmod(0o600)
    write(link, b"second")
    assert link.is_symlink()
    assert target.read_bytes() == b"second"
    assert stat.S_IMODE(target.stat().st_mode) == 0o600


def test_a_failure_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "report"
    path.write_bytes(b"old")
    big = tmp_path / "big"

    def fail() -> None:
        with new_content(path, "write the report") as file:
            file.write(b"half")
            big.read_bytes()

    with pytest.raises(StorageError, match=f"write the report to {path}: No such file"):
        fail()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["report"]


@pytest.mark.parametrize("name", ["", "-", "."])
def test_no_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"expected the name of a file.*/dev/stdout"):
        check_file_name(name, "write the report")


def test_a_directory_and_a_name_in_none_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=f"to {tmp_path}: it is a directory"):
        write(tmp_path)
    missing = tmp_path / "nope"
    with pytest.raises(InvalidArgumentError, match=f"there is no directory {missing}; make it"):
        write(missing / "report")
    (tmp_path / "link").symlink_to(missing / "report")
    with pytest.raises(StorageError, match=f"write the report to {tmp_path}/link: No such file"):
        write(tmp_path / "link")


def test_the_output_of_the_process_gets_the_content_in_its_place(tmp_path: Path) -> None:
    program = (
        "from pathlib import Path\n"
        "from holdfast.store.files.named_file import new_content\n"
        "print('before')\n"
        "with new_content(Path('/dev/stdout'), 'write') as file: file.write(b'content\\n')\n"
        "print('after')\n"
    )
    output = tmp_path / "output"
    with output.open("wb") as file:
        subprocess.run([sys.executable, "-c", program], stdout=file, check=True)
    assert output.read_text() == "before\ncontent\nafter\n"
