"""Files are complete or absent, and a damaged file is refused by name."""

import pytest

from muonsw.lab.errors import MachineError, UsageError
from muonsw.lab.files import (
    locked,
    prepare_folder,
    read_object,
    replacing,
    require_writable,
    write_atomically,
)
from tests.faults.killing import files_no_larger_than


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    path = write_atomically(tmp_path / "a", "old")
    with files_no_larger_than(3), pytest.raises(MachineError, match=r"a cannot be written: File too large; make room"):
        write_atomically(path, "new content")

    def fail_halfway():
        with replacing(path) as file:
            file.write(b"half")
            raise KeyError("its own")

    with pytest.raises(KeyError, match="its own"):
        fail_halfway()
    assert path.read_text(encoding="utf-8") == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("check", [prepare_folder, require_writable])
def test_a_folder_that_cannot_be_written_is_refused(tmp_path, check):
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(UsageError, match=r"cannot write to .*link.*: No such file or directory"):
        check(tmp_path / "link" / "below")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "Expecting value"),
        (b"\xff\xfe\x00", "codec can't decode"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": NaN}', "NaN is not valid JSON"),
        (b"[1]", "does not hold a JSON object"),
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path, content, reason):
    path = tmp_path / "state.json"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=rf"state\.json.*{reason}"):
        read_object(path, remedy="delete the folder")
    with pytest.raises(UsageError, match="does not exist"):
        read_object(tmp_path / "nothing")


def test_a_locked_folder_is_busy_until_released(tmp_path):
    with locked(tmp_path / "new", "busy"), pytest.raises(UsageError, match="busy"), locked(tmp_path / "new", "busy"):
        pass
    with locked(tmp_path / "new", "busy"):
        pass
