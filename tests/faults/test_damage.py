"""Every file of a run, of prepared tokens and of an export, broken in every way, met by every command that reads it."""

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from muonsw.lab.base.errors import UsageError
from muonsw.lab.diagnose import as_data, diagnose
from muonsw.lab.runs import load_run
from muonsw.lab.train.checkpoint import read_tensors, write_tensors
from tests.faults.commands import GOOD, CommandResult, outcome, run_command
from tests.faults.folders import LAST, LONG, ending, folders

OLDER, NEWER = "checkpoints/step-00000002", "checkpoints/step-00000004"
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


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


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
