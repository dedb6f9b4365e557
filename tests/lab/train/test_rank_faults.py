"""What may happen to one rank, done for real: every other one ends in time with a message, and the same command goes on
to the bits of a run to which nothing happened."""

import functools
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import warnings
from pathlib import Path

import pytest

from muonsw import NonFiniteGradientWarning
from muonsw.lab.train import checkpoint, world
from muonsw.lab.train.shared import SharedShelf
from muonsw.lab.train.state import Training
from tests.faults.folders import LONG
from tests.faults.killing import Counter, in_child, limit_files, mount_disk, set_read_only
from tests.lab.train.ranks import NEEDED, on_ranks, run, run_well, start
from tests.lab.train.small_runs import losses, small_run

pytestmark = NEEDED

LOST = "another rank has ended or cannot be reached"
AGAIN = "start the same command again to go on from the last checkpoint"
STEPS = 6


def config(strategy="fsdp", timeout=120.0, **settings):
    chosen = {"steps": STEPS, "batch": 4, "eval_every": 2, "checkpoint_every": 2, "keep": 2}
    return on_ranks(small_run(**{**chosen, **settings}), strategy=strategy, timeout=timeout)


@functools.cache
def undisturbed(ranks=2, strategy="fsdp"):
    folder = Path(tempfile.mkdtemp()) / "run"
    run_well(ranks, config(strategy), folder)
    return ending(folder)


def ending(folder, step=STEPS):
    """Everything that must not depend on what happened on the way, the weights as bytes."""
    saved = checkpoint.load(folder / "checkpoints" / f"step-{step:08d}")
    tensors = {
        f"{part}/{name}": tensor.numpy().tobytes()
        for part in ("model", "optimizer")
        for name, tensor in saved.tensors[part].items()
    }
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    result.pop("seconds")
    return tensors, losses(folder), result


def assert_goes_on(folder, ranks=2, strategy="fsdp"):
    run_well(ranks, config(strategy), folder)
    assert ending(folder) == undisturbed(ranks, strategy)
    assert [path.name for path in folder.rglob(".*") if path.name != ".lock"] == []


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
    ended = run(ranks, config(strategy), folder, at_update(6, victim, kill))
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
        found = world._is_lost

        def is_lost(error):
            os.kill(os.getpid(), signal.SIGTERM)
            return found(error)

        world._is_lost = is_lost

    ended = run(2, config(), tmp_path / "run", before)
    assert (ended[0].code, LOST in ended[0].text) == (3, True), ended[0]


@pytest.mark.slow
def test_a_rank_that_hangs_ends_itself_and_the_others_follow(tmp_path):
    def hang(training):
        training.world.watch(1.5)
        training.world.alive("update 4")
        time.sleep(1000)

    folder = tmp_path / "run"
    ended = run(2, config(), folder, at_update(4, 1, hang))
    assert [one.code for one in ended] == [3, 3], ended
    assert "rank 1 has made no progress for 1.5 s, in: update 4" in ended[1].text
    assert "raise parallel.timeout" in ended[1].text
    assert LOST in ended[0].text
    assert all(AGAIN in one.text for one in ended)
    assert_goes_on(folder)


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "named"), [(1, "rank 1 is behind"), (0, "rank 0 does not answer")])
def test_a_rank_whose_process_stands_still_is_named_by_the_others(victim, named, tmp_path):
    def stand_still(_training):
        os.kill(os.getpid(), signal.SIGSTOP)

    started = start(2, config(timeout=8.0), tmp_path / "run", at_update(4, victim, stand_still))
    time.sleep(0.2)
    other = 1 - victim
    started.children[other].join(60)
    assert started.children[other].exitcode is not None
    started.children[victim].kill()  # as torchrun does in the end
    started.children[victim].join()
    said = started.outputs[other].read_text(encoding="utf-8")
    assert f"rank {other} has made no progress for 8 s" in said
    assert named in said
    assert_goes_on(tmp_path / "run")


def test_ranks_whose_folder_is_deleted_do_not_make_it_again(tmp_path):
    folder = tmp_path / "run"
    ended = run(2, config(), folder, at_update(2, 0, lambda _training: shutil.rmtree(folder)))
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
    ended = run(2, config(strategy), folder, spoil(1, 4, nan_loss))
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

    ended = run(2, config(strategy), folder, before)
    assert [one.code for one in ended] == [0, 0], ended
    assert json.loads((folder / "result.json").read_text(encoding="utf-8"))["skipped"] == 1
    saved = checkpoint.load(folder / "checkpoints" / "step-00000006").tensors
    assert all(tensor.isfinite().all() for tensor in saved["model"].values())


class Operations(Counter):
    """Counts without a profile, which would slow a whole run down: audit events, waits for the disk, tensor files."""

    def start(self):
        sys.addaudithook(self._audit)
        os.fsync = self._counted(os.fsync)
        checkpoint.save_file = self._counted(checkpoint.save_file)

    def _counted(self, function):
        def call(*given):
            self._tick()
            return function(*given)

        return call


def killed_at_operation(victim, number, folder):
    return lambda rank: Operations(folder, number).start() if rank == victim else None


@functools.cache
def operations(victim):
    """How many a rank takes for the whole run."""
    folder = Path(tempfile.mkdtemp())
    log = folder / "log"

    class Noted(Operations):
        def _tick(self):
            log.open("a", encoding="utf-8").write(".")

    run(2, config(), folder / "run", lambda rank: Noted(folder / "run", 0).start() if rank == victim else None)
    return len(log.read_text(encoding="utf-8"))


def cases():
    """Every operation of each rank with `make test-faults`; else a dozen, spread over all of them."""
    for victim, few in ((0, 12), (1, 6)):
        step = 1 if LONG else operations(victim) // few
        yield from ((victim, number) for number in range(2, operations(victim) + 1, step))


@pytest.mark.slow
@pytest.mark.parametrize("many", [False, True], ids=["two", "many"])
def test_a_rank_that_is_killed_before_any_file_operation_leaves_nothing_that_is_taken_for_whole(
    many, tmp_path, record_property
):
    killed = 0
    for victim, number in cases() if many else [(0, 35), (1, 4)]:
        folder = tmp_path / f"run-{victim}-{number}"
        ended = run(2, config(), folder, killed_at_operation(victim, number, folder))
        assert ended[victim].code in (0, -signal.SIGKILL), ended[victim].text
        assert ended[1 - victim].code in (0, 3), ended[1 - victim].text
        killed += ended[victim].code != 0
        for path in checkpoint.newest_first(folder / "checkpoints"):
            checkpoint.load(path)  # whatever has the name is whole
        assert_goes_on(folder)
        shutil.rmtree(folder)
    record_property("cases", ("one of two ranks ended by SIGKILL", killed, "repaired: goes on, same bits"))
    assert killed > 1


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_in_the_middle_of_a_write_leaves_nothing_that_is_taken_for_whole(victim, tmp_path):
    """By the signal that the system sends when a file becomes too large."""
    for size in range(3_000, 160_000, 7_000 if LONG else 50_000):
        folder = tmp_path / str(size)

        def before(rank, size=size):
            if rank == victim:
                signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                limit_files(size)

        ended = run(2, config(), folder, before)
        assert ended[victim].code == (0 if ended[1 - victim].code == 0 else -signal.SIGXFSZ), ended
        for path in checkpoint.newest_first(folder / "checkpoints"):
            checkpoint.load(path)
        assert_goes_on(folder)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(20_000,), range(500, 160_000, 7_000 if LONG else 40_000)])
def test_a_disk_that_is_full_for_one_rank_ends_all_with_the_file_and_the_remedy(sizes, tmp_path, record_property):
    full = 0
    for size in sizes:
        folder = tmp_path / str(size)
        ended = run(2, config(), folder, lambda rank, size=size: limit_files(size) if rank == 1 else None)
        if ended[1].code == 0:
            continue
        full += 1
        assert [one.code for one in ended] == [3, 3], ended
        (line,) = [line for line in ended[0].text.splitlines() if "cannot be written" in line]
        assert f"{folder}/checkpoints/.step-00000002.2-ranks/" in line
        assert "-00001-of-00002.safetensors" in line
        assert "make room on the disk; no checkpoint had been saved (on rank 1)" in line
        assert_goes_on(folder)
    record_property("cases", ("one of two ranks with files that may not grow", full, "refused with 3, then same bits"))
    assert full


NO_DISK = 77


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
            ended = run(2, config(), disk / "run")
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
        run(2, config(), folder, at_update(4, 1, kill))
        assert set_read_only(disk, True)
        ended = run(2, config(), folder)
        assert [one.code for one in ended] == [2, 2], ended
        assert f"cannot write to the folder {folder}: Read-only file system; choose another" in ended[0].text
        assert set_read_only(disk, False)
        assert_goes_on(folder)

    on_a_disk(tmp_path, 1 << 20, work)


def truncated(path):
    os.truncate(path, path.stat().st_size - 1)


def altered(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@functools.cache
def stopped_after_four():
    """A run with two whole checkpoints, killed on the way to the third."""
    folder = Path(tempfile.mkdtemp()) / "run"

    def before(rank):
        SharedShelf.look = SharedShelf.finish  # else a slow disk might still be at work on the second
        at_update(6, 0, kill)(rank)

    run(2, config(), folder, before)
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-00000002", "step-00000004"]
    return folder


FILES = [f"{part}-0000{rank}-of-00002.safetensors" for part in ("model", "optimizer") for rank in (0, 1)]


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        (FILES[1], truncated),
        *(
            pytest.param(name, harm, marks=pytest.mark.slow)
            for name in (*FILES, "random.safetensors", "state.json")
            for harm in (truncated, altered, Path.unlink)
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_damaged_file_is_named_and_the_checkpoint_before_it_taken(name, harm, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(stopped_after_four(), folder)
    harm(folder / "checkpoints" / "step-00000004" / name)
    with pytest.raises(checkpoint.CheckpointError, match=name):  # by one process, too
        checkpoint.load(folder / "checkpoints" / "step-00000004")
    ended = run(2, config(), folder)
    assert [one.code for one in ended] == [0, 0], ended
    assert "damaged checkpoint left out" in ended[0].text
    assert name in ended[0].text
    assert f"it is now {folder}/checkpoints/damaged-step-00000004.1" in ended[0].text
    assert "going on after update 2" in ended[0].text
    assert ending(folder) == undisturbed()


@pytest.mark.parametrize(
    "harm",
    [
        lambda content: content["index"]["model"]["embedding.weight"]["pieces"].pop("1"),
        lambda content: content["index"]["model"]["embedding.weight"]["pieces"].update({"1": [0, 0]}),
        lambda content: content["index"]["model"]["embedding.weight"]["pieces"].update({"1": [1 << 40, 0]}),
        lambda content: content["index"]["model"]["embedding.weight"].update(shape=[1 << 40, 1 << 40]),
        lambda content: content["index"]["model"]["embedding.weight"].update(shape="wide"),
        lambda content: content["index"].update(model=7),
        lambda content: content.update(ranks="two"),
        lambda content: content.update(ranks=3),
    ],
    ids=["missing", "overlapping", "outside", "huge", "no shape", "no index", "no number", "other ranks"],
)
def test_an_index_that_does_not_fit_its_files_is_refused(harm, tmp_path):
    """With a right checksum: what another program may write."""
    path = tmp_path / "step-00000004"
    shutil.copytree(stopped_after_four() / "checkpoints" / "step-00000004", path)
    content = checkpoint.read_state(path)
    harm(content)
    content["checksum"] = checkpoint._digest(content)
    (path / "state.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(checkpoint.CheckpointError, match="step-00000004 is not one of ours"):
        checkpoint.load(path)


def test_a_rank_that_fails_on_its_own_is_heard_and_the_others_do_not_hang(tmp_path):
    """Its data cannot be read, say; the others know only that it is gone."""
    from muonsw.lab.base.errors import UsageError

    def fail(_training):
        raise UsageError("shard 7 cannot be read: prepare it again")

    ended = run(2, config(), tmp_path / "run", at_update(3, 1, fail))
    assert [one.code for one in ended] == [3, 2], ended
    assert "muonsw: rank 1: shard 7 cannot be read: prepare it again" in ended[1].text
    assert LOST in ended[0].text
