"""A disk that fills at one place after the other: exit code 3, the file and the remedy, and nothing lost."""

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.commands import run_command
from tests.faults.folders import LAST, LONG, ending, fill_data, folders
from tests.faults.killing import in_child, limit_files, mount_disk

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs limits and mounts of Linux")
PLENTY, NO_DISK = 1 << 20, 77


def checked(said, folder: Path) -> bool:
    """Whether a command was refused for want of room, which it must say with a file and a remedy."""
    if said.code == 0:
        return False
    assert said.code == 3, said
    assert "Traceback" not in said.text, said.text
    last = said.text.splitlines()[-1]
    assert str(folder) in last, last
    assert "make room" in last, last
    return True


def training(settings: Path, folder: Path):
    return run_command("train", "--config", settings, "--out", folder)


def test_training_on_a_disk_of_any_size_says_so_and_goes_on_once_there_is_room(record_property):
    """A disk of the kernel's, of so many pages; made larger in the end, as one makes room."""
    settings, disk = folders().whole / "config.json", folders().root / "disk"
    disk.mkdir(exist_ok=True)
    expected, full = ending(folders().whole), 0
    for pages in range(1, 110) if LONG else (6, 60):

        def work(pages: int = pages) -> int:
            if not mount_disk(disk, pages):
                return NO_DISK
            refused = checked(training(settings, disk / "run"), disk)
            assert mount_disk(disk, PLENTY, again=True)
            assert training(settings, disk / "run").code == 0
            assert ending(disk / "run") == expected
            return 10 + refused

        code = in_child(work)
        if code == NO_DISK:
            pytest.skip("this system does not allow mounting a disk")
        assert code in (10, 11), f"a disk of {pages} pages"
        full += code == 11
    record_property(
        "cases", ("training on a full disk (every number of pages)", full, "refused with 3, then same bits")
    )
    assert full


def test_a_disk_without_room_for_one_checkpoint_is_refused_before_the_first_update():
    settings, disk = folders().whole / "config.json", folders().root / "small-disk"
    disk.mkdir()
    size = sum((folders().whole / LAST / f"{name}.safetensors").stat().st_size for name in ("model", "optimizer"))

    def work() -> int:
        if not mount_disk(disk, size // 4096 + 1):  # config.json and the lock take a page each
            return NO_DISK
        said = training(settings, disk / "run")
        assert checked(said, disk)
        assert "run has no room for a checkpoint: a checkpoint takes " in said.text
        assert not (disk / "run" / "metrics.jsonl").exists()
        return 10

    code = in_child(work)
    if code == NO_DISK:
        pytest.skip("this system does not allow mounting a disk")
    assert code == 10


def test_training_with_files_of_any_size_says_so_and_goes_on(record_property):
    """The system refuses to write beyond a number of bytes, in whichever file."""
    settings, expected = folders().whole / "config.json", ending(folders().whole)
    folder, full = folders().root / "limited", 0
    for size in range(0, 56_000, 397) if LONG else (1, 20_000):
        shutil.rmtree(folder, ignore_errors=True)

        def work(size: int = size) -> int:
            limit_files(size)
            return 10 + checked(training(settings, folder), folder)

        code = in_child(work)
        assert code in (10, 11), f"files of {size} bytes"
        full += code == 11
        assert training(settings, folder).code == 0
        assert ending(folder) == expected
    record_property("cases", ("training with files that may not grow", full, "refused with 3, then same bits"))
    assert full


def commands(folder: Path):
    """What else writes: each with the folder that it writes to."""
    text = folder.parent / "text.txt"
    return {
        "data prepare": ("data", "prepare", folder, "--source", "text", "--files", text, "--tokenizer", "bytes",
                         "--validation-fraction", "0"),
        "export": ("export", folders().whole, "--out", folder),
        "report": ("report", folders().whole, "-o", folder / "page.html", "--no-images"),
        "diagnose": ("diagnose", folders().whole, "--out", folder),
        "compare": ("compare", "--data", folders().data, "--out", folder, "--seeds", "1", "--steps", "1", "--workers",
                    "1"),
    }  # fmt: skip


@pytest.mark.parametrize(
    "name", ["data prepare", "export", "report", "diagnose", "compare"] if LONG else ["data prepare", "export"]
)
def test_every_command_that_writes_says_that_there_is_no_room(name, record_property):
    folder, full = folders().root / f"full-{name.replace(' ', '-')}", 0
    (folders().root / "text.txt").write_text("what is written here\n" * 500, encoding="utf-8")
    for size in (0, 1, 100, 1_000, 5_000, 10_000, 30_000) if LONG else (1, 100):
        shutil.rmtree(folder, ignore_errors=True)
        arguments = commands(folder)[name]

        def work(size: int = size, arguments: tuple = arguments) -> int:
            limit_files(size)
            return 10 + checked(run_command(*arguments), folder)

        code = in_child(work)
        assert code in (10, 11), f"files of {size} bytes"
        full += code == 11
    assert run_command(*commands(folder)[name]).code == 0
    record_property("cases", (f"`{name}` on a full disk", full, "refused with 3"))
    assert full


def test_a_limit_on_files_leaves_no_module_cut_short(tmp_path):
    """Else every later import in a fresh checkout fails: "marshal data too short"."""
    for name in ("here", "below"):
        (tmp_path / f"{name}.py").write_text(f"text = {'long ' * 100!r}\n", encoding="utf-8")

    def work() -> int:
        sys.dont_write_bytecode = False
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        limit_files(100)
        sys.path.insert(0, str(tmp_path))
        importlib.import_module("here")
        return subprocess.run([sys.executable, "-c", "import below"], cwd=tmp_path, check=False).returncode

    assert in_child(work) == 0
    assert not (tmp_path / "__pycache__").exists()


def test_a_new_task_that_finds_no_room_leaves_no_file_in_its_own_way(tmp_path):
    def work() -> int:
        limit_files(100)
        return 10 + checked(run_command("task", "new", tmp_path / "mine.py"), tmp_path)

    assert in_child(work) == 11
    assert run_command("task", "new", tmp_path / "mine.py").code == 0


def test_preparing_data_on_a_full_disk_goes_on_to_the_same_folder():
    folder = folders().root / "limited-data"
    expected = {path.name: path.read_bytes() for path in folders().data.iterdir()}
    for size in range(0, 8_000, 250) if LONG else (50, 2_000):

        def work(size: int = size) -> int:
            limit_files(size)
            try:
                fill_data(folder)
            except Exception as error:
                return 11 if type(error).__name__ == "MachineError" and str(folder) in str(error) else 1
            return 10

        assert in_child(work) in (10, 11)
        fill_data(folder)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == expected
