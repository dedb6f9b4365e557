"""Kill, resume, full disk and damage, on one process and on several ranks.

Every case ends in the same bits, or in a sentence that names the file and the fix. `make test-faults` runs the long
form: every file operation, every size, every damage.
"""

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch

from muonsw import NonFiniteGradientWarning
from muonsw.lab.data.loader import verify_folder
from muonsw.lab.errors import UsageError
from muonsw.lab.train import checkpoint
from muonsw.lab.train.export import export, load_model
from muonsw.lab.train.loop import train
from tests.faults.commands import CommandResult, assert_good, refused, run_command
from tests.faults.folders import LONG, NEWER, config, digest, ending, fill_data, flip, folders
from tests.faults.killing import files_no_larger_than, killed_at, killed_at_size, operations
from tests.lab.train.ranks import NEEDED, Started, at_step, on_ranks, run, run_well, training, write_config
from tests.lab.train.small_runs import small_run, wait_for_records

pytestmark = NEEDED


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def hidden_files(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob(".*") if path.name != ".lock"]


def places(total: int, few: int) -> list[int]:
    """Every file operation, or a few spread over all of them."""
    return list(range(1, total + 1)) if LONG else sorted({1 + round(n * (total - 1) / (few - 1)) for n in range(few)})


# ---- Kills


@pytest.mark.parametrize("inside", ["operation", "write"])
def test_training_that_is_killed_anywhere_resumes_to_the_same_bits(inside):
    settings, folder, ended = config(folders().data), folders().root / f"killed-{inside}", 0
    if inside == "operation":
        total = operations(lambda: train(settings, folder), folder)
        assert total > 60
        kills = [partial(killed_at, number, folder=folder) for number in places(total, 3)]
    else:
        kills = [partial(killed_at_size, size) for size in (range(0, 56_000, 397) if LONG else (100, 30_000))]
    for kill_it in kills:
        shutil.rmtree(folder, ignore_errors=True)
        ended += kill_it(work=lambda: train(settings, folder))
        train(settings, folder)
        assert ending(folder) == ending(folders().whole), kill_it
        assert hidden_files(folder) == []
    assert ended > len(kills) // 2


def test_preparing_data_that_is_killed_resumes_to_the_same_folder():
    folder, ended = folders().root / "killed-data", 0
    total = operations(lambda: fill_data(folder), folder)
    for number in places(total, 6):
        shutil.rmtree(folder, ignore_errors=True)
        ended += killed_at(number, lambda: fill_data(folder), folder)
        if (folder / "data.json").exists():  # everything recorded exists; it is only incomplete
            assert all("not prepared to the end" in problem for problem in verify_folder(folder))
        fill_data(folder)
        assert files_of(folder) == files_of(folders().data), f"after a kill at {number}"
    assert ended > 3


def test_an_export_that_is_killed_is_refused_until_it_is_made_again():
    trained, folder, ended = folders().whole, folders().root / "killed-export", 0
    expected, _ = load_model(folders().export)
    total = operations(lambda: export(trained, folder), folder)
    for number in places(total, 5):
        shutil.rmtree(folder, ignore_errors=True)
        if killed_at(number, lambda: export(trained, folder), folder):
            ended += 1
            with suppress(UsageError):  # the complete model, or none
                model, _ = load_model(folder)
                assert all(map(torch.equal, model.state_dict().values(), expected.state_dict().values()))
        export(trained, folder)
        assert files_of(folder) == files_of(folders().export)
    assert ended > 2


# ---- A full disk


def no_room(output: CommandResult, folder: Path) -> bool:
    """Whether a command failed because the disk is full; its message must name a file and a remedy."""
    if output.code == 0:
        return False
    assert output.code == 3, output
    assert "Traceback" not in output.text
    last = output.text.splitlines()[-1]
    assert str(folder) in last, last
    assert "make room" in last, last
    return True


def resumed(folder: Path) -> CommandResult:
    return run_command(*training(folders().whole / "config.json", folder))


@pytest.mark.parametrize("name", ["train", "data prepare", "export"])
def test_a_full_disk_is_reported_and_a_rerun_writes_the_same_files(name):
    """The system refuses to write beyond a number of bytes, in whichever file."""
    folder, text, full = folders().root / f"full-{name}", folders().root / "text.txt", False
    text.write_text("what is written here\n" * 500, encoding="utf-8")
    command = {
        "train": ("train", "--config", folders().whole / "config.json", "--out", folder),
        "data prepare": ("data", "prepare", folder, "--source", "text", "--files", text, "--tokenizer", "bytes"),
        "export": ("export", folders().whole, "--out", folder),
    }[name]
    command += ("--validation-fraction", "0") if name == "data prepare" else ()
    expected = folders().root / f"whole-{name}"
    assert run_command(*(expected if part == folder else part for part in command)).code == 0
    for size in range(0, 56_000, 397) if LONG else (1, 20_000):
        shutil.rmtree(folder, ignore_errors=True)
        with files_no_larger_than(size):
            full |= no_room(run_command(*command), folder)
        assert run_command(*command).code == 0
        assert ending(folder) == ending(expected) if name == "train" else files_of(folder) == files_of(expected)
    assert full


# ---- Damage

MODEL = "model.safetensors"
PARTS = ("state.json", "model.safetensors", "optimizer.safetensors", "random.safetensors")
RUN_FILES = ("config.json", "environment.json", "result.json", "metrics.jsonl", *(f"{NEWER}/{part}" for part in PARTS))
EXPORT_FILES = ("config.json", "model.safetensors", "tokenizer/data.json", "tokenizer/tokenizer.json")
DATA_FILES = ("data.json", "tokenizer.json", "train-00000", "validation-00001")


DAMAGES: dict[str, Callable[[Path, Path], object]] = {
    "flipped": lambda path, _other: flip(path),
    "cut": lambda path, _other: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "emptied": lambda path, _other: path.write_bytes(b""),
    "missing": lambda path, _other: path.unlink(),
    "another run's": lambda path, other: shutil.copyfile(other, path),
}


def cases(files):
    """Every file with every kind of damage; in the short form, with two kinds each."""
    for place, file in enumerate(files):
        chosen = DAMAGES if LONG else [list(DAMAGES)[(2 * place + turn) % len(DAMAGES)] for turn in (0, 1)]
        yield from (pytest.param(file, damage, id=f"{file}-{damage}") for damage in chosen)


@functools.cache
def whole_export(name: str) -> str:
    """The checksum of the model that a run exports while its files are whole."""
    return digest(export(getattr(folders(), name), folders().root / f"export-{name}") / MODEL)


@pytest.mark.parametrize(("file", "damage"), list(cases(RUN_FILES)))
def test_a_run_with_a_broken_file_is_refused_or_repaired_by_name(file, damage):
    name = "whole" if file == "result.json" else "stopped"
    run = folders().copy(name)
    DAMAGES[damage](run / file, folders().other / file)
    output = run_command("export", run, "--out", run / "export")
    assert_good(output, run / file, same=output.code == 0 and digest(run / "export" / MODEL) == whole_export(name))
    output = resumed(run)
    # Lines of records have no checksum: the tensors and the result must be the same.
    ours, theirs = (ending(each)[::2] if output.code == 0 else None for each in (run, folders().whole))
    assert_good(output, run / file, same=output.code == 0 and ours == theirs)


@pytest.mark.parametrize(("file", "damage"), list(cases(EXPORT_FILES)))
def test_an_export_with_a_broken_file_is_refused_by_name(file, damage):
    export = folders().copy("export")
    DAMAGES[damage](export / file, folders().other_export / file)
    output, whole = (
        run_command("sample", path, "--tokens", "3", "--prompt", "a") for path in (export, folders().export)
    )
    assert_good(output, export / file, same=output == whole)


@pytest.mark.parametrize(("file", "damage"), list(cases(DATA_FILES)))
def test_tokens_with_a_broken_file_are_refused_by_name(file, damage):
    data = folders().copy("data")
    path, other = (next(one.glob(f"{file}*")) for one in (data, folders().other_data))
    DAMAGES[damage](path, other)
    output = run_command("data", "verify", data)
    assert_good(output, path, same="all is well" in output.text)
    settings, run = data.parent / "config.json", data.parent / "run"
    text = (folders().whole / "config.json").read_text(encoding="utf-8")
    settings.write_text(text.replace(str(folders().data), str(data)), encoding="utf-8")
    output = run_command("train", "--config", settings, "--out", run)
    assert_good(output, path, same=output.code == 0 and ending(run)[0] == ending(folders().whole)[0])


class Trap:
    """Leaves a file behind if anything unpickles it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_pickle_in_the_place_of_tensors_is_never_run(tmp_path):
    export, run = folders().copy("export"), folders().copy("stopped")
    torch.save(Trap(tmp_path / "sprung"), export / MODEL)
    content = json.loads((export / "config.json").read_text(encoding="utf-8")) | {"sha256": digest(export / MODEL)}
    (export / "config.json").write_text(json.dumps(content), encoding="utf-8")
    assert "is not a complete safetensors file" in refused("sample", export)
    shutil.copyfile(export / MODEL, run / NEWER / "optimizer.safetensors")
    state = json.loads((run / NEWER / "state.json").read_text(encoding="utf-8"))
    del state["checksum"]
    state["checksums"]["optimizer"] = content["sha256"]
    text = json.dumps({**state, "checksum": checkpoint._digest(state)})
    (run / NEWER / "state.json").write_text(text, encoding="utf-8")
    assert "skipping a damaged checkpoint" in resumed(run).text
    assert ending(run) == ending(folders().whole)
    assert not (tmp_path / "sprung").exists()


def test_changed_settings_do_not_resume_though_the_config_is_gone():
    run = folders().copy("stopped")
    (run / "config.json").unlink()
    changed = run.parent / "changed.json"
    text = (folders().whole / "config.json").read_text(encoding="utf-8")
    changed.write_text(text.replace('"lr": 0.02', '"lr": 0.03'), encoding="utf-8")
    assert "optimizer.lr: 0.02 there, 0.03 now" in refused("train", "--config", changed, "--out", run)
    assert not (run / "config.json").exists()
    assert resumed(run).code == 0
    assert ending(run) == ending(folders().whole)


def test_tokens_may_move_but_not_change():
    run, data = folders().copy("stopped"), folders().copy("data")
    train(config(data), run)
    assert ending(run) == ending(folders().whole)
    with pytest.raises(UsageError, match=r"data\.fingerprint: '.*' there, '.*' now"):
        train(config(folders().other_data), run)


# ---- Signals

INTERRUPTED = """
import os, signal, sys
from muonsw.lab.train import loop
real = loop.Training.update
def update(self, *arguments, **options):
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGINT)
    return real(self, *arguments, **options)
loop.Training.update = update
from muonsw.lab.cli import main
sys.exit(main())
"""


@pytest.mark.slow
def test_a_second_interrupt_ends_at_once_and_is_reported_in_a_line(tmp_path):
    words = training(folders().whole / "config.json", tmp_path / "run")
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, *words], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 128 + signal.SIGINT
    assert done.stderr == "muonsw: interrupted\n"


# ---- Several ranks

LOST = "another rank has ended or cannot be reached"
AGAIN = "rerun the same command to resume from the last checkpoint"
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


def assert_resumes(folder, ranks=2, strategy="fsdp"):
    run_well(ranks, ranks_config(strategy), folder)
    assert rank_ending(folder) == undisturbed(ranks, strategy)
    assert hidden_files(folder) == []


def kill(_training=None):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("ranks", "strategy", "victim"),
    [
        (2, "fsdp", 1),
        pytest.param(2, "ddp", 0, marks=pytest.mark.slow),
        pytest.param(4, "fsdp", 3, marks=pytest.mark.slow),
    ],
)
def test_the_other_ranks_stop_when_one_is_killed_and_the_run_resumes(ranks, strategy, victim, tmp_path):
    folder = tmp_path / "run"
    ended = Started(ranks, ranks_config(strategy), folder, at_step(6, victim, kill)).wait(seconds=90)  # < timeout
    assert ended[victim].code == -signal.SIGKILL
    for rank, result in enumerate(ended):
        if rank != victim:
            assert result.code == 3, result.text
            assert LOST in result.text
            assert AGAIN in result.text
    # The checkpoint of step 4 may not have reached the disk.
    assert (folder / "checkpoints" / "step-00000002").exists()
    assert_resumes(folder, ranks, strategy)


@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_stuck_rank_ends_the_other_after_the_timeout(victim, tmp_path):
    def stand_still(_training):
        os.kill(os.getpid(), signal.SIGSTOP)

    started, waiting = (
        Started(2, ranks_config(timeout=8.0), tmp_path / "run", at_step(4, victim, stand_still)),
        1 - victim,
    )
    started.children[waiting].join(60)
    started.children[victim].kill()  # as torchrun does in the end
    started.children[victim].join()
    assert started.children[waiting].exitcode == 3
    output = started.outputs[waiting].read_text(encoding="utf-8")
    assert all(text in output for text in (LOST, AGAIN))
    assert_resumes(tmp_path / "run")


def nan_loss(training):
    warnings.simplefilter("ignore", NonFiniteGradientWarning)
    forward = training.forward

    def spoiled(*args):
        values = forward(*args)
        return values._replace(total=values.total * float("nan"))

    training.forward = spoiled


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_loss_that_is_nan_on_one_rank_ends_all_and_leaves_the_checkpoint(strategy, tmp_path):
    folder = tmp_path / "run"
    ended = run(2, ranks_config(strategy), folder, at_step(4, 1, nan_loss))
    assert [rank.code for rank in ended] == [1, 1], ended
    assert "loss of step 4 is nan" in ended[0].text
    assert f"last good checkpoint is {folder / 'checkpoints' / 'step-00000002'}" in ended[0].text
    assert ended[1].text == ""
    assert_resumes(folder, strategy=strategy)


def test_a_damaged_file_is_named_on_all_ranks_and_the_checkpoint_before_it_taken(tmp_path):
    folder = tmp_path / "run"
    run(2, ranks_config(), folder, at_step(6, 0, kill))
    flip(folder / NEWER / "optimizer.safetensors")
    ended = run_well(2, ranks_config(), folder)
    assert "skipping a damaged checkpoint" in ended[0].text
    assert f"it is now {folder}/checkpoints/damaged-step-00000004.1" in ended[0].text
    assert "resuming after step 2" in ended[0].text
    assert rank_ending(folder) == undisturbed()


def test_the_error_of_one_rank_is_reported_and_the_others_end(tmp_path):
    """The other ranks only know that it is gone."""

    def fail(_training):
        raise UsageError("shard 7 cannot be read: prepare it again")

    ended = run(2, ranks_config(), tmp_path / "run", at_step(3, 1, fail))
    assert [rank.code for rank in ended] == [3, 2], ended
    assert "muonsw: rank 1: shard 7 cannot be read: prepare it again" in ended[1].text
    assert LOST in ended[0].text


# ---- torchrun

ROOT = Path(__file__).parents[2]


def torchrun(*arguments, options=("--standalone",), ranks=2):
    """Start torchrun; its output includes that of all ranks."""
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
    output, _ = launcher.communicate(timeout=seconds)
    return launcher.returncode, output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "strategy", "timeout", "message"),
    [("kill", "ddp", 120.0, LOST), ("kill", "fsdp", 120.0, LOST), ("hang", "fsdp", 30.0, "raise parallel.timeout")],
)
def test_a_rank_that_dies_or_hangs_is_started_again_and_the_run_ends_with_the_same_bits(
    fault, strategy, timeout, message, tmp_path
):
    words = (fault, *training(write_config(ranks_config(strategy, timeout)), tmp_path / "run"))
    options = ("--standalone", "--max-restarts=1")
    code, output = finished(torchrun("tests.lab.train.faulty_trainer", *words, options=options))
    assert code == 0, output
    assert message in output
    assert rank_ending(tmp_path / "run") == undisturbed(strategy=strategy)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_to_the_launcher_saves_the_run(number, tmp_path):
    folder = tmp_path / "run"
    launcher = torchrun("tests.lab.train.faulty_trainer", "slow", *training(write_config(ranks_config()), folder))
    wait_for_records(launcher, folder, 1)
    launcher.send_signal(number)
    code, output = finished(launcher)
    assert code != 0
    assert f"of {STEPS} steps, saved; rerun the same command" in output
    assert not (folder / "result.json").exists()
    code, output = finished(torchrun("muonsw", *training(write_config(ranks_config()), folder)))
    assert code == 0, output
    assert "resuming after step" in output
    assert rank_ending(folder) == undisturbed()
