"""Kill, resume, full disk and damage, on one process and on several ranks.

Every case ends in the same bits, or in a sentence that names the file and the fix. `make test-faults` runs the long
form: every file operation, every size, every damage.
"""

import functools
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from muonsw import NonFiniteGradientWarning
from muonsw.lab.base.errors import UsageError
from muonsw.lab.data.shards import verify_folder
from muonsw.lab.diagnose import as_data, diagnose
from muonsw.lab.runs import load_run
from muonsw.lab.train import checkpoint, world
from muonsw.lab.train.checkpoint import read_tensors, write_tensors
from muonsw.lab.train.export import export, load_model
from muonsw.lab.train.loop import Watch, train
from muonsw.lab.train.state import Training
from tests.faults.commands import GOOD, CommandResult, outcome, refused, run_command
from tests.faults.folders import LAST, LONG, NEWER, OLDER, config, digest, ending, fill_data, folders
from tests.faults.killing import (
    Counter,
    in_child,
    killed_at,
    killed_at_size,
    limit_files,
    mount_disk,
    operations,
    set_read_only,
)
from tests.lab.train.ranks import NEEDED, free_port, on_ranks, run, run_well, start, write_config
from tests.lab.train.small_runs import small_run

pytestmark = NEEDED
PLENTY, NO_DISK = 1 << 20, 77

# ---- Kills


def places(total: int, few: int) -> list[int]:
    """Every operation, or a few spread over all of them."""
    return list(range(1, total + 1)) if LONG else sorted({1 + round(n * (total - 1) / (few - 1)) for n in range(few)})


def hidden_files(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob(".*") if path.name != ".lock"]


def train_after_kills(record_property, kill, cases):
    """Train, be ended, train on; the cases that ended otherwise than a run that was never disturbed, bit for bit."""
    settings, folder = config(folders().data), folders().root / "killed"
    expected, ended, wrong = (ending(folders().whole), []), 0, []
    for case in cases:
        shutil.rmtree(folder, ignore_errors=True)
        ended += kill(case, lambda: train(settings, folder), folder)
        train(settings, folder)
        if (ending(folder), hidden_files(folder)) != expected:
            wrong.append(case)
    record_property("cases", ("training ended by SIGKILL", ended, "repaired: the same command goes on, same bits"))
    return ended, wrong


def test_training_that_is_ended_before_any_file_operation_goes_on_to_the_same_bits(record_property):
    folder = folders().root / "killed"
    shutil.rmtree(folder, ignore_errors=True)
    settings = config(folders().data)
    total = operations(lambda: train(settings, folder), folder)
    assert total > 60
    cases = places(total, 3)
    ended, wrong = train_after_kills(record_property, killed_at, cases)
    assert ended > len(cases) // 2
    assert wrong == []


def test_training_that_is_ended_inside_a_write_goes_on_to_the_same_bits(record_property):
    sizes = range(0, 56_000, 397) if LONG else (100, 30_000)
    ended, wrong = train_after_kills(
        record_property, lambda size, work, _folder: killed_at_size(size, work), list(sizes)
    )
    assert ended > len(sizes) // 2
    assert wrong == []


def test_preparing_data_that_is_ended_goes_on_to_the_same_folder(record_property):
    expected = {path.name: path.read_bytes() for path in folders().data.iterdir()}
    folder, ended = folders().root / "killed-data", 0
    total = operations(lambda: fill_data(folder), folder)
    for number in places(total, 6):
        shutil.rmtree(folder, ignore_errors=True)
        ended += killed_at(number, lambda: fill_data(folder), folder)
        if (folder / "data.json").exists():  # whatever is on record is there: unfinished is the only thing wrong
            problems = list(verify_folder(folder))
            assert all("not prepared to the end" in problem for problem in problems), problems
        fill_data(folder)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == expected, f"after an end at {number}"
    record_property("cases", ("`data prepare` ended by SIGKILL", ended, "repaired: goes on to the same files"))
    assert ended > 3


def test_an_export_that_is_ended_is_whole_the_next_time_and_never_taken_for_whole_before(record_property):
    trained, folder, ended = folders().whole, folders().root / "killed-export", 0
    whole, _ = load_model(folders().export)
    shutil.rmtree(folder, ignore_errors=True)
    expected = {path.name: path.read_bytes() for path in folders().export.rglob("*") if path.is_file()}
    size = len(expected["model.safetensors"])
    ends = [partial(killed_at_size, one) for one in (size // 2, size - 1)]
    ends += [
        partial(killed_at, one, folder=folder) for one in places(operations(lambda: export(trained, folder), folder), 4)
    ]
    for killed in ends:
        shutil.rmtree(folder, ignore_errors=True)
        if killed(work=lambda: export(trained, folder)):
            ended += 1
            with suppress(UsageError):  # a whole model, or none
                model, _ = load_model(folder)
                assert all(map(torch.equal, model.state_dict().values(), whole.state_dict().values()))
        export(trained, folder)
        assert {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == expected
    record_property("cases", ("`export` ended by SIGKILL", ended, "repaired: written again whole"))
    assert ended > 2


# ---- A full disk


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


# ---- Damage


PARTS = ("state.json", "model.safetensors", "optimizer.safetensors", "random.safetensors")
RUN_FILES = (
    "config.json",
    "environment.json",
    "result.json",
    "metrics.jsonl",
    *(f"{NEWER}/{part}" for part in PARTS),
    NEWER,
)
EXPORT_FILES = ("config.json", "model.safetensors", "tokenizer/data.json", "tokenizer/tokenizer.json")
DATA_FILES = ("data.json", "tokenizer.json", "train-00000", "validation-00001")


def flip(path: Path, _other: Path) -> None:
    """The highest bit of a byte in the middle: in text no character begins with it, in numbers it is a sign."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x80
    path.write_bytes(content)


def cut(path: Path, _other: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path, _other: Path) -> None:
    path.write_bytes(b"")


def remove(path: Path, _other: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def folder(path: Path, other: Path) -> None:
    remove(path, other)
    path.mkdir()


def link(path: Path, _other: Path) -> None:
    """Moved elsewhere, and a link in its place: nothing is lost."""
    elsewhere = path.with_name(f"moved-{path.name}")
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def dangling_link(path: Path, other: Path) -> None:
    remove(path, other)
    path.symlink_to(path.with_name("nowhere"))


def another(path: Path, other: Path) -> None:
    remove(path, other)
    shutil.copytree(other, path) if other.is_dir() else shutil.copyfile(other, path)


DAMAGES: dict[str, Callable[[Path, Path], None]] = {
    "flipped": flip, "cut": cut, "emptied": empty, "missing": remove, "a folder": folder, "a link": link,
    "a dangling link": dangling_link, "another run's": another,
}  # fmt: skip
ON_FOLDERS = ("missing", "a folder", "a link", "a dangling link", "another run's")


def cases(files):
    """Every file with every damage; in the short form each file with one of them in turn."""
    for place, file in enumerate(files):
        damages = [name for name in DAMAGES if "." in file or "-0000" in file.rpartition("/")[2] or name in ON_FOLDERS]
        # A checkpoint that was deleted is no fault: the one before it is then the newest.
        damages = [name for name in damages if file != NEWER or name in ON_FOLDERS[1:]]
        chosen = damages if LONG else [damages[place % len(damages)]]
        yield from (pytest.param(file, damage, id=f"{file}-{damage}") for damage in chosen)


def noted(record_property, file: str, damage: str, command: str, result: str) -> None:
    record_property("outcome", (file, damage, command, result))


@pytest.mark.parametrize(("file", "damage"), list(cases(RUN_FILES)))
def test_a_run_with_a_broken_file(file, damage, record_property):
    for command, tried in {"train": resumed, "export": exported, "sample": sampled, "diagnose": diagnosed}.items():
        run = folders().copy("whole" if command == "diagnose" or file == "result.json" else "stopped")
        DAMAGES[damage](run / file, folders().other / file)
        said, same = tried(run)
        unseen = (file, damage, command) in UNSEEN
        found = "not found" if unseen else outcome(said, run / file, same=same)
        assert unseen or found in GOOD, f"{command}: {found}"
        noted(record_property, file, damage, command, found)


def resumed(run: Path) -> tuple[CommandResult, bool]:
    # The settings of a run that lost its own file are those that the user gives again.
    said = run_command("train", "--config", folders().whole / "config.json", "--out", run)
    return said, said.code == 0 and ending(run) == ending(folders().whole)


def exported(run: Path) -> tuple[CommandResult, bool]:
    said = run_command("export", run, "--out", run / "export")
    newest = LAST if (run / LAST).exists() else NEWER
    return said, said.code == 0 and digest(run / "export/model.safetensors") == weights(folders().whole / newest)


def sampled(run: Path) -> tuple[CommandResult, bool]:
    known = folders().whole if (run / LAST).exists() else folders().stopped
    said, whole = (run_command("sample", path, "--tokens", "3", "--prompt", "a") for path in (run, known))
    return said, said.text == whole.text


# No record says which run it is of. A run that goes on knows its own validation loss; a reader has nothing to compare.
UNSEEN = {("metrics.jsonl", "another run's", "diagnose")}


def diagnosed(run: Path) -> tuple[CommandResult, bool]:
    """Without the figures, which take seconds and read nothing more."""
    try:
        found, whole = (as_data(diagnose(load_run(path))) for path in (run, folders().whole))
    except UsageError as error:
        return CommandResult(error.exit_code, str(error)), False
    said = [f"{run}: {finding['text']}" for finding in found["findings"] if finding not in whole["findings"]]
    return CommandResult(0, "\n".join(said)), {**found, "path": "", "name": ""} == {**whole, "path": "", "name": ""}


def weights(checkpoint: Path) -> str:
    beside = folders().root / "weights.safetensors"
    write_tensors(beside, read_tensors(checkpoint / "model.safetensors"), {"format": "pt"})
    return digest(beside)


@pytest.mark.parametrize(("file", "damage"), list(cases(EXPORT_FILES)))
def test_an_export_with_a_broken_file(file, damage, record_property):
    export = folders().copy("export")
    DAMAGES[damage](export / file, folders().other_export / file)
    said, whole = (run_command("sample", path, "--tokens", "3", "--prompt", "a") for path in (export, folders().export))
    found = outcome(said, export / file, same=said == whole)
    assert found in GOOD
    noted(record_property, f"export/{file}", damage, "sample", found)


@pytest.mark.parametrize(("file", "damage"), list(cases(DATA_FILES)))
def test_tokens_with_a_broken_file(file, damage, record_property):
    data = folders().copy("data")
    path, other = (next(one.glob(f"{file}*")) for one in (data, folders().other_data))
    DAMAGES[damage](path, other)
    said = run_command("data", "verify", data)
    verified = outcome(said, path, same="all is well" in said.text)
    assert verified in GOOD
    config = folders().root / "on-broken-tokens.json"
    shutil.copyfile(folders().whole / "config.json", config)
    config.write_text(config.read_text(encoding="utf-8").replace(str(folders().data), str(data)), encoding="utf-8")
    run = data.parent / "run"
    said = run_command("train", "--config", config, "--out", run)
    same = said.code == 0 and ending(run)[0]["model"] == ending(folders().whole)[0]["model"]
    trained = outcome(said, path, same=same)
    assert trained in GOOD
    for command, found in (("data verify", verified), ("train", trained)):
        noted(record_property, f"data/{file}", damage, command, found)


@pytest.mark.skipif(not LONG, reason="`make test-faults`")
@pytest.mark.parametrize("file", [*(f"{NEWER}/{part}" for part in PARTS)])
def test_every_flipped_bit_of_a_checkpoint_is_found(file, record_property):
    """A bit in each of many bytes: the checkpoint before it is taken, and the bad one is named."""
    run = folders().copy("stopped")
    content = (run / file).read_bytes()
    for place in range(0, len(content), max(1, len(content) // 200)):
        broken = bytearray(content)
        broken[place] ^= 1 << place % 8
        (run / file).write_bytes(broken)
        said, same = exported(run)
        assert not same
        assert said.code == 0
        assert f"{run / NEWER}" in said.text
    record_property(
        "cases", (f"one bit of {file.rpartition('/')[2]} flipped", 200, "repaired: the one before is taken")
    )


class Trap:
    """Leaves a file behind if anything unpickles it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize(
    "write", [torch.save, lambda trap, path: path.write_bytes(pickle.dumps(trap))], ids=["torch", ""]
)
def test_a_pickle_in_the_place_of_tensors_is_never_run(write, tmp_path):
    export, run = folders().copy("export"), folders().copy("stopped")
    write(Trap(tmp_path / "sprung"), export / "model.safetensors")
    config_file = export / "config.json"
    content = json.loads(config_file.read_text(encoding="utf-8")) | {"sha256": digest(export / "model.safetensors")}
    config_file.write_text(json.dumps(content), encoding="utf-8")
    assert "is not a whole file of tensors" in refused("sample", export)
    shutil.copyfile(export / "model.safetensors", run / NEWER / "optimizer.safetensors")
    state = json.loads((run / NEWER / "state.json").read_text(encoding="utf-8"))
    state["checksums"]["optimizer"] = content["sha256"]
    state.pop("checksum")
    (run / NEWER / "state.json").write_text(
        json.dumps({**state, "checksum": checkpoint._digest(state)}), encoding="utf-8"
    )
    assert "damaged checkpoint left out" in run_command("train", "--config", run / "config.json", "--out", run).text
    assert ending(run) == ending(folders().whole)
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("content", ["[1]", "[" * 10_000, '{"a":' * 10_000, "9" * 400, '{"step": NaN}', ""], ids=len)
def test_a_state_that_is_no_state_is_put_aside_and_named(content):
    run = folders().copy("stopped")
    (run / NEWER / "state.json").write_text(content, encoding="utf-8")
    said = run_command("train", "--config", run / "config.json", "--out", run)
    assert said.code == 0
    assert f"damaged checkpoint left out: {run / NEWER / 'state.json'}" in said.text
    assert ending(run) == ending(folders().whole)


def test_a_link_to_a_checkpoint_is_used_and_only_the_link_is_deleted():
    run = folders().copy("stopped")
    elsewhere = run.parent / "elsewhere"
    (run / OLDER).rename(elsewhere)
    (run / OLDER).symlink_to(elsewhere)
    shutil.rmtree(run / NEWER)
    notes = []
    settings = config(folders().data, keep=1)
    train(settings, run, Watch(note=notes.append))
    assert f"going on after update 2, from {run / OLDER}" in notes
    assert not (run / OLDER).exists()
    assert checkpoint.load(elsewhere.rename(elsewhere.with_name("step-00000002"))).step == 2


@pytest.mark.parametrize("command", ["export", "sample"])
def test_an_older_checkpoint_is_not_taken_without_a_word(command):
    run = folders().copy("whole")
    (run / LAST / "model.safetensors").write_bytes(b"")
    said = run_command(command, run)
    assert said.code == 0
    assert f"damaged checkpoint left out, an older one is taken if there is one: {run / LAST}" in said.text


def test_a_run_whose_name_is_not_utf8_is_trained_shown_and_exported():
    run = folders().copy("stopped")
    named = run.with_name(os.fsdecode(b"run-\xff\xfe"))
    run.rename(named)
    assert "going on after update 4" in run_command("train", "--config", named / "config.json", "--out", named).text
    assert ending(named) == ending(folders().whole)
    assert run_command("export", named).code == 0
    assert run_command("sample", named / "export", "--tokens", "2", "--prompt", os.fsdecode(b"\xff")).code == 0
    page = named.parent / "page.html"
    assert run_command("report", named, "-o", page, "--no-images").code == 0
    assert "run-\\udcff\\udcfe" in page.read_text(encoding="utf-8")


def test_changed_settings_do_not_resume_though_the_config_is_gone():
    run = folders().copy("stopped")
    (run / "config.json").unlink()
    changed = run.parent / "changed.json"
    text = (folders().whole / "config.json").read_text(encoding="utf-8")
    changed.write_text(text.replace('"lr": 0.02', '"lr": 0.03'), encoding="utf-8")
    assert "optimizer.lr: 0.02 there, 0.03 now" in refused("train", "--config", changed, "--out", run)
    assert not (run / "config.json").exists()
    assert run_command("train", "--config", folders().whole / "config.json", "--out", run).code == 0
    assert ending(run) == ending(folders().whole)


def test_tokens_may_move_but_not_change():
    run, data = folders().copy("stopped"), folders().copy("data")
    train(config(data), run)
    assert ending(run) == ending(folders().whole)
    with pytest.raises(UsageError, match=r"data\.fingerprint: '.*' there, '.*' now"):
        train(config(folders().other_data), run)


@pytest.mark.parametrize("kind", ["folder", "link"])
def test_a_lock_that_is_none_is_named(kind):
    run = folders().copy("stopped")
    (run / ".lock").unlink(missing_ok=True)
    (run / ".lock").mkdir() if kind == "folder" else (run / ".lock").symlink_to(run / "config.json")
    said = refused("train", "--config", run / "config.json", "--out", run)
    assert f"{run / '.lock'} is not a lock of ours: delete it" in said


# ---- Signals


RUN_TWICE = """
import os, signal, sys
from muonsw.lab.train import loop
real = loop.Training.update
def update(self, *arguments, **options):
    for _ in range(TIMES):
        os.kill(os.getpid(), signal.SIGINT)
    return real(self, *arguments, **options)
loop.Training.update = update
from muonsw.lab.run import main
sys.exit(main())
"""


AT_START = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # programs that a script starts with & ignore it
class Finder:
    def find_spec(self, name, *_):
        if name == "muonsw.lab.train.loop":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
from ENTRY import main
sys.exit(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "said"),
    [
        (RUN_TWICE.replace("TIMES", "1"), "stopped after 1 of 6 updates, saved"),
        (RUN_TWICE.replace("TIMES", "2"), "interrupted"),
        (AT_START.replace("ENTRY", "muonsw.lab.run"), "interrupted"),
        (AT_START.replace("ENTRY", "muonsw.lab.cli"), "interrupted"),
    ],
    ids=["once", "twice", "while run loads", "while the command line loads"],
)
def test_an_interrupt_at_any_time_is_reported_in_a_line(program, said, tmp_path):
    arguments = [folders().whole / "config.json", tmp_path / "run"]
    if "cli" in program:
        arguments = ["train", "--config", arguments[0], "--out", arguments[1]]
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 128 + signal.SIGINT
    assert done.stderr.startswith(f"muonsw: {said}")
    assert done.stderr.count("\n") == 1


# ---- Several ranks

LOST = "another rank has ended or cannot be reached"
AGAIN = "start the same command again to go on from the last checkpoint"
STEPS = 6


def ranks_config(strategy="fsdp", timeout=120.0, **settings):
    chosen = {"steps": STEPS, "batch": 4, "eval_every": 2, "checkpoint_every": 2, "keep": 2}
    return on_ranks(small_run(**{**chosen, **settings}), strategy=strategy, timeout=timeout)


def rank_ending(folder):
    """All but the state of the generators, which torchrun's processes do not seed."""
    tensors, records, result = ending(folder)
    return {part: tensors[part] for part in ("model", "optimizer")}, records, result


@functools.cache
def undisturbed(ranks=2, strategy="fsdp"):
    folder = Path(tempfile.mkdtemp()) / "run"
    run_well(ranks, ranks_config(strategy), folder)
    return rank_ending(folder)


def assert_goes_on(folder, ranks=2, strategy="fsdp"):
    run_well(ranks, ranks_config(strategy), folder)
    assert rank_ending(folder) == undisturbed(ranks, strategy)
    assert hidden_files(folder) == []


def at_update(number, victim, deed):
    """Do something on one rank when it takes its n-th update."""

    def before(rank):
        if rank == victim:
            taken = Training.update

            def update(self, *given, **more):
                if self.step + 1 == number:
                    deed(self)
                return taken(self, *given, **more)

            Training.update = update

    return before


def kill(_training=None):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("ranks", "strategy", "victim"),
    [
        (2, "fsdp", 1),
        pytest.param(2, "ddp", 0, marks=pytest.mark.slow),
        pytest.param(4, "ddp", 2, marks=pytest.mark.slow),
        pytest.param(4, "fsdp", 3, marks=pytest.mark.slow),
    ],
)
def test_the_others_of_a_killed_rank_stop_and_say_so_and_the_run_goes_on(ranks, strategy, victim, tmp_path):
    folder = tmp_path / "run"
    ended = run(ranks, ranks_config(strategy), folder, at_update(6, victim, kill))
    assert ended[victim].code == -signal.SIGKILL
    for rank, one in enumerate(ended):
        if rank != victim:
            assert one.code == 3, one.text
            assert LOST in one.text
            assert AGAIN in one.text
            assert one.seconds - ended[victim].seconds < 10
    # That of update 4 may have been on its way to the disk.
    assert (folder / "checkpoints" / "step-00000002").exists()
    assert_goes_on(folder, ranks, strategy)


def test_a_rank_that_is_asked_to_end_while_it_fails_still_says_why(tmp_path):
    """torchrun looks every 0.1 s for ranks that have ended, and sends SIGTERM to the others."""

    def before(rank):
        at_update(4, 1, kill)(rank)
        error = world.MachineError

        def asked_to_end(*given):
            os.kill(os.getpid(), signal.SIGTERM)
            return error(*given)

        world.MachineError = asked_to_end

    ended = run(2, ranks_config(), tmp_path / "run", before)
    assert (ended[0].code, LOST in ended[0].text) == (3, True), ended[0]


@pytest.mark.parametrize(
    ("ranks", "replicas", "victim"),
    [(2, 1, 1), pytest.param(2, 1, 0, marks=pytest.mark.slow), pytest.param(4, 2, 1, marks=pytest.mark.slow)],
)
def test_a_rank_that_stands_still_ends_the_others_after_the_timeout(ranks, replicas, victim, tmp_path):
    def stand_still(_training):
        os.kill(os.getpid(), signal.SIGSTOP)

    chosen = ranks_config(timeout=8.0)
    chosen = replace(chosen, parallel=replace(chosen.parallel, replicas=replicas))
    started = start(ranks, chosen, tmp_path / "run", at_update(4, victim, stand_still))
    others = [rank for rank in range(ranks) if rank != victim]
    for rank in others:
        started.children[rank].join(60)
    started.children[victim].kill()  # as torchrun does in the end
    started.children[victim].join()
    for rank in others:
        assert started.children[rank].exitcode == 3
        said = started.outputs[rank].read_text(encoding="utf-8")
        assert all(text in said for text in (LOST, AGAIN))
    if replicas == 1:  # other replicas add up in another order
        assert_goes_on(tmp_path / "run", ranks)


def test_ranks_whose_folder_is_deleted_do_not_make_it_again(tmp_path):
    folder = tmp_path / "run"
    ended = run(2, ranks_config(), folder, at_update(2, 0, lambda _training: shutil.rmtree(folder)))
    assert [one.code for one in ended] == [2, 2], ended
    assert "was deleted or replaced" in ended[0].text
    assert not folder.exists()


def spoil(victim, number, how):
    def before(rank):
        warnings.simplefilter("ignore", NonFiniteGradientWarning)
        at_update(number, victim, how)(rank)

    return before


def nan_loss(training):
    forward = training.forward

    def spoiled(*given):
        values = forward(*given)
        return values._replace(total=values.total * float("nan"))

    training.forward = spoiled


def infinite_gradient(training):
    param = training.model.norm.weight
    update = training.step
    param.register_hook(lambda grad: grad * float("inf") if training.step == update else grad)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_loss_that_is_nan_on_one_rank_ends_all_and_leaves_the_checkpoint(strategy, tmp_path):
    folder = tmp_path / "run"
    ended = run(2, ranks_config(strategy), folder, spoil(1, 4, nan_loss))
    assert [one.code for one in ended] == [1, 1], ended
    assert "loss of update 4 is nan" in ended[0].text
    assert f"last good checkpoint is {folder / 'checkpoints' / 'step-00000002'}" in ended[0].text
    assert ended[1].text == ""
    assert_goes_on(folder, strategy=strategy)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_gradient_that_is_infinite_on_one_rank_is_skipped_by_all(strategy, tmp_path):
    folder = tmp_path / "run"

    def before(rank):
        warnings.simplefilter("ignore", NonFiniteGradientWarning)
        if rank == 1:
            Training.clip = spoiled_clip if strategy == "fsdp" else Training.clip
            spoil(1, 4, infinite_gradient)(rank) if strategy == "ddp" else None

    clip = Training.clip

    def spoiled_clip(self):
        """After gradients have been reduced, so that one shard alone is bad."""
        if self.step == 3:
            self.model.norm.weight.grad.to_local().fill_(float("inf"))
        return clip(self)

    ended = run(2, ranks_config(strategy), folder, before)
    assert [one.code for one in ended] == [0, 0], ended
    assert json.loads((folder / "result.json").read_text(encoding="utf-8"))["skipped"] == 1
    saved = checkpoint.load(folder / "checkpoints" / "step-00000006").tensors
    assert all(tensor.isfinite().all() for tensor in saved["model"].values())


@pytest.mark.slow
def test_a_leader_that_is_killed_before_any_file_operation_leaves_nothing_that_is_taken_for_whole(
    tmp_path, record_property
):
    """Rank 0 writes every file; the other ranks write none."""
    cases = range(2, 120, 1 if LONG else 20)
    killed = 0
    for number in cases:
        folder = tmp_path / f"run-{number}"
        ended = run(2, ranks_config(), folder, killed_at_operation(number, folder))
        assert ended[0].code in (0, -signal.SIGKILL), ended[0].text
        assert ended[1].code in (0, 3), ended[1].text
        killed += ended[0].code != 0
        for path in checkpoint.newest_first(folder / "checkpoints"):
            checkpoint.load(path)  # whatever has the name is whole
        assert_goes_on(folder)
        shutil.rmtree(folder)
    record_property("cases", ("rank 0 of two ended by SIGKILL", killed, "repaired: goes on, same bits"))
    assert killed > 1


def killed_at_operation(number, folder):
    """Count without a profile, which would slow a whole run down: audit events, waits for the disk, tensor files."""

    class Operations(Counter):
        def start(self):
            sys.addaudithook(self._audit)
            os.fsync = self._counted(os.fsync)
            checkpoint.save_file = self._counted(checkpoint.save_file)

        def _counted(self, function):
            def call(*given):
                self._tick()
                return function(*given)

            return call

    return lambda rank: Operations(folder, number).start() if rank == 0 else None


def on_a_disk(tmp_path, pages, work):
    """Do something where a disk of so many pages is mounted, for this process and its ranks alone."""
    undisturbed()
    disk = tmp_path / "disk"
    disk.mkdir(exist_ok=True)

    def mounted():
        if not mount_disk(disk, pages):
            return NO_DISK
        work(disk)
        return 0

    code = in_child(mounted)
    if code == NO_DISK:
        pytest.skip("this system does not allow mounting a disk")
    assert code == 0


@pytest.mark.slow
@pytest.mark.parametrize("pages", [(150,), range(2, 400, 12 if LONG else 60)])
def test_a_full_disk_ends_all_ranks_and_the_run_goes_on_once_there_is_room(pages, tmp_path):
    for number in pages:

        def work(disk):
            ended = run(2, ranks_config(), disk / "run")
            codes = [one.code for one in ended]
            assert codes in ([3, 3], [0, 0]), ended
            if codes[0]:
                assert "make room" in "".join(one.text for one in ended)
                assert str(disk) in ended[0].text
            for path in checkpoint.newest_first(disk / "run" / "checkpoints"):
                checkpoint.load(path)
            assert mount_disk(disk, 1 << 20, again=True)
            assert_goes_on(disk / "run")

        on_a_disk(tmp_path, number, work)


@pytest.mark.slow
def test_a_folder_that_is_read_only_is_refused_on_all_ranks_and_nothing_is_lost(tmp_path):
    def work(disk):
        folder = disk / "run"
        run(2, ranks_config(), folder, at_update(4, 1, kill))
        assert set_read_only(disk, True)
        ended = run(2, ranks_config(), folder)
        assert [one.code for one in ended] == [2, 2], ended
        assert f"cannot write to the folder {folder}: Read-only file system; choose another" in ended[0].text
        assert set_read_only(disk, False)
        assert_goes_on(folder)

    on_a_disk(tmp_path, 1 << 20, work)


def test_a_damaged_file_is_named_on_all_ranks_and_the_checkpoint_before_it_taken(tmp_path):
    folder = tmp_path / "run"
    run(2, ranks_config(), folder, at_update(6, 0, kill))
    file = folder / NEWER / "optimizer.safetensors"
    flip(file, file)
    ended = run(2, ranks_config(), folder)
    assert [one.code for one in ended] == [0, 0], ended
    assert "damaged checkpoint left out" in ended[0].text
    assert f"it is now {folder}/checkpoints/damaged-step-00000004.1" in ended[0].text
    assert "going on after update 2" in ended[0].text
    assert rank_ending(folder) == undisturbed()


def test_a_checkpoint_in_the_format_of_an_earlier_version_is_refused_by_name():
    """Several ranks wrote one file each, and an index of their pieces."""
    run_folder = folders().copy("stopped")
    path = run_folder / NEWER / "state.json"
    content = {**checkpoint.read_state(run_folder / NEWER), "ranks": 2, "index": {}}
    path.write_text(json.dumps({**content, "checksum": checkpoint._digest(content)}), encoding="utf-8")
    said = refused("train", "--config", run_folder / "config.json", "--out", run_folder)
    assert "was written by 2 ranks with a muonsw 0.1.0 that kept one file for each rank" in said
    assert (run_folder / NEWER).exists()


def test_a_rank_that_fails_on_its_own_is_heard_and_the_others_do_not_hang(tmp_path):
    """Its data cannot be read, say; the others know only that it is gone."""
    from muonsw.lab.base.errors import UsageError

    def fail(_training):
        raise UsageError("shard 7 cannot be read: prepare it again")

    ended = run(2, ranks_config(), tmp_path / "run", at_update(3, 1, fail))
    assert [one.code for one in ended] == [3, 2], ended
    assert "muonsw: rank 1: shard 7 cannot be read: prepare it again" in ended[1].text
    assert LOST in ended[0].text


# ---- torchrun

ROOT = Path(__file__).parents[2]


def torchrun(*arguments, options=("--standalone",), ranks=2):
    """Start the launcher; what it and all its ranks print is read together."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, "-m", "torch.distributed.run", *options, f"--nproc-per-node={ranks}", "-m"]
    return subprocess.Popen(
        [*command, *map(str, arguments)],
        env=environment,
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def finished(launcher, seconds=240):
    said, _ = launcher.communicate(timeout=seconds)
    return launcher.returncode, said


@pytest.mark.slow
def test_a_run_through_torchrun_is_that_of_its_ranks(tmp_path):
    code, said = finished(torchrun("muonsw.lab.run", write_config(ranks_config()), tmp_path / "run"))
    assert code == 0, said
    assert said.count("validation loss") == 1, "one rank speaks"
    assert rank_ending(tmp_path / "run") == undisturbed()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_killed_rank_is_started_again_and_the_run_ends_with_the_same_bits(strategy, tmp_path):
    options = ("--standalone", "--max-restarts=1")
    chosen = write_config(ranks_config(strategy))
    code, said = finished(torchrun("tests.lab.train.faulty_trainer", "kill", chosen, tmp_path / "run", options=options))
    assert code == 0, said
    assert "another rank has ended or cannot be reached" in said
    assert rank_ending(tmp_path / "run") == undisturbed(strategy=strategy)


@pytest.mark.slow
def test_a_rank_that_hangs_is_ended_and_started_again(tmp_path):
    options = ("--standalone", "--max-restarts=1")
    chosen = write_config(ranks_config(timeout=30.0))
    code, said = finished(torchrun("tests.lab.train.faulty_trainer", "hang", chosen, tmp_path / "run", options=options))
    assert code == 0, said
    assert "raise parallel.timeout" in said
    assert rank_ending(tmp_path / "run") == undisturbed()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_to_the_launcher_saves_the_run(number, tmp_path):
    folder = tmp_path / "run"
    launcher = torchrun("tests.lab.train.faulty_trainer", "slow", write_config(ranks_config()), folder)
    while not (folder / "metrics.jsonl").exists() or '"step":1,' not in (folder / "metrics.jsonl").read_text(
        encoding="utf-8"
    ):
        assert launcher.poll() is None, launcher.stdout.read()
        time.sleep(0.05)
    launcher.send_signal(number)
    code, said = finished(launcher)
    assert code != 0
    assert f"of {STEPS} updates, saved; run the same command again" in said
    assert not (folder / "result.json").exists()
    code, said = finished(torchrun("muonsw.lab.run", write_config(ranks_config()), folder))
    assert code == 0, said
    assert "going on after update" in said
    assert rank_ending(folder) == undisturbed()


@pytest.mark.slow
def test_two_nodes(tmp_path):
    """Two launchers with one rank each, which find each other as on two machines; one rank is killed."""
    options = ("--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=two")
    given = ("tests.lab.train.faulty_trainer", "kill", write_config(ranks_config()), tmp_path / "run")
    launchers = [torchrun(*given, options=(*options, "--max-restarts=2"), ranks=1) for _ in range(2)]
    answers = [finished(launcher) for launcher in launchers]
    assert [code for code, _ in answers] == [0, 0], answers
    assert rank_ending(tmp_path / "run") == undisturbed()


@pytest.mark.slow
def test_a_users_error_is_the_last_thing_that_is_read(tmp_path):
    code, said = finished(torchrun("muonsw.lab.run", write_config(ranks_config(batch=5)), tmp_path / "run"))
    assert code != 0
    assert "batch=5 does not split into accumulation=1 micro-batches on each of 2 ranks" in last_words(said)


def last_words(said):
    """The last line that says something; torchrun closes its report with a rule."""
    return [line for line in said.splitlines() if line.strip("= ")][-1]


@pytest.mark.slow
def test_a_complete_run_of_four_ranks_ends_well_each_time(tmp_path):
    """One of eight used to end in SIGABRT after its result was written."""
    for number in range(8):
        code, said = finished(
            torchrun("muonsw.lab.run", write_config(ranks_config()), tmp_path / f"run{number}", ranks=4)
        )
        assert code == 0, said
