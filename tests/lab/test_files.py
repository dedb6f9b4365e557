"""Files are whole or not there, and a file that is not ours is refused by name."""

import os

import pytest

from muonsw.lab.errors import MachineError, UsageError
from muonsw.lab.files import (
    locked,
    prepare_folder,
    read_object,
    replacing,
    require_writable,
    write_atomically,
    write_json,
)
from tests.faults.killing import files_no_larger_than


def test_what_is_written_is_read_back_without_what_json_has_no_number_for(tmp_path):
    write_json(tmp_path / "a.json", {"loss": float("inf"), "steps": (1, 2)})
    assert read_object(tmp_path / "a.json") == {"loss": None, "steps": [1, 2]}


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


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_is_read_only_is_named(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(MachineError, match=r"a cannot be written: Permission denied; make room"):
        write_atomically(tmp_path / "a", "x")


@pytest.mark.parametrize("check", [prepare_folder, require_writable])
@pytest.mark.parametrize("below", ["", "below"])
def test_a_folder_that_is_a_link_to_nowhere_is_refused_before_the_work(tmp_path, check, below):
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(UsageError, match=r"cannot write to the folder .*link.*: No such file or directory"):
        check(tmp_path / "link" / below)
    assert not (tmp_path / "gone").exists()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"a": ', "Expecting value"),
        (b"\xff\xfe\x00", "codec can't decode"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": NaN}', "NaN is not valid JSON"),
        (b"", "Expecting value"),
    ],
)
def test_whatever_a_file_holds_it_is_data_or_an_error_with_its_name(tmp_path, content, reason):
    path = tmp_path / "state.json"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=rf"state\.json cannot be read: .*{reason}.*; delete the folder"):
        read_object(path, remedy="delete the folder")


def test_what_is_no_json_object_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"state\.json does not hold a JSON object"):
        read_object(write_json(tmp_path / "state.json", [1]))
    with pytest.raises(UsageError, match="does not exist"):
        read_object(tmp_path / "nothing")
    with pytest.raises(UsageError, match="Is a directory"):
        read_object(tmp_path)


def test_a_folder_is_held_by_one_and_given_back(tmp_path):
    with locked(tmp_path / "new", "busy"), pytest.raises(UsageError, match="busy"), locked(tmp_path / "new", "busy"):
        pass
    with locked(tmp_path / "new", "busy"):
        pass
