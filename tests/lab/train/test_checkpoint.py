"""Which checkpoints of a run are kept, and which are moved aside."""

import math
import shutil

from muonsw.lab.train import checkpoint
from muonsw.lab.train.loop import Watch, train
from muonsw.lab.train.state import Training, with_fingerprint
from tests.faults.folders import flip
from tests.lab.train.small_runs import assert_same_run, losses, small_run, stop_at, uninterrupted


def test_damaged_checkpoints_of_later_steps_do_not_displace_good_ones(tmp_path):
    """Otherwise they would stay the newest, and every new checkpoint would be deleted as the oldest."""
    stop_at(4, small_run(keep=1), tmp_path)
    good = tmp_path / "checkpoints" / "step-00000004"
    for step in (20, 30):
        shutil.copytree(good, damaged := good.with_name(f"step-{step:08d}"))
        flip(damaged / "model.safetensors")
    notes = []
    train(small_run(keep=1), tmp_path, Watch(note=notes.append))
    assert [note.partition(":")[0] for note in notes[:2]] == ["skipping a damaged checkpoint"] * 2
    kept = sorted(path.name for path in good.parent.iterdir())
    assert kept == ["damaged-step-00000020.1", "damaged-step-00000030.1", "step-00000012"]
    assert_same_run(uninterrupted(), tmp_path, 12)


def test_a_run_with_only_damaged_checkpoints_starts_over_and_keeps_its_records(tmp_path):
    stop_at(4, small_run(), tmp_path)
    before = losses(tmp_path)
    flip(tmp_path / "checkpoints" / "step-00000004" / "model.safetensors")
    notes = []
    train(small_run(), tmp_path, Watch(note=notes.append))
    assert f"was moved to {tmp_path / 'metrics.jsonl.1'}: there is no checkpoint to resume from" in notes[1]
    assert losses(tmp_path, "metrics.jsonl.1") == before
    assert_same_run(uninterrupted(), tmp_path, 12)


def test_a_validation_loss_of_nan_survives_a_checkpoint(tmp_path):
    """A validation loss may overflow though the training losses are fine; the run continues, and resumes."""
    whole = Training(with_fingerprint(small_run()))
    whole.evaluate()
    whole.best = whole.latest = whole.latest._replace(loss=math.nan)
    path = checkpoint.save(tmp_path, whole.checkpoint())
    resumed = Training(with_fingerprint(small_run()))
    resumed.load(checkpoint.load(path))
    assert math.isnan(resumed.latest.loss)
    resumed.evaluate()
    assert resumed.best == resumed.latest
    assert math.isfinite(resumed.best.loss)
