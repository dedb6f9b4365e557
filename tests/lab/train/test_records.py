"""Records of a run: damaged lines, and TensorBoard."""

import pytest

from muonsw.lab.train.loop import Watch, train
from tests.lab.train.small_runs import assert_same_run, losses, small_run, stop_at, uninterrupted

BROKEN_LINES = [
    b"7\n",
    b'{"kind":"train","loss":1.0}\n',
    b'{"kind":"train","step":"3"}\n',
    b'{"kind":"train","st\n',
    b"\xff\xfe\n",
    b"[" * 5000 + b"\n",
    b"\n",
]


def test_damaged_lines_of_the_metrics_are_left_out_and_every_whole_record_stays(tmp_path):
    stop_at(8, small_run(), tmp_path)
    metrics = tmp_path / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines(keepends=True)
    damaged = b"".join([*BROKEN_LINES, *lines[:2], *BROKEN_LINES, *lines[2:], b'{"half": '])
    metrics.write_bytes(damaged)
    notes = []
    train(small_run(), tmp_path, Watch(note=notes.append))
    assert f"removed {2 * len(BROKEN_LINES)} damaged lines from {metrics}" in notes[1]
    assert (tmp_path / "metrics.jsonl.1").read_bytes() == damaged
    assert_same_run(uninterrupted(), tmp_path, 12)


def test_tensorboard_gets_every_scalar(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(small_run(steps=2, tensorboard=True), tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    expected = [record["loss"] for record in losses(tmp_path) if record["kind"] == "train"]
    assert [point.value for point in events.Scalars("train/loss")] == pytest.approx(expected)
    assert "telemetry/roles/experts/weight_rms" in events.Tags()["scalars"]
