"""Records of a run: damaged and missing lines, and TensorBoard."""

import os
import threading

import pytest

from muonsw.lab.base.errors import MachineError
from muonsw.lab.train.loop import Watch, train
from muonsw.lab.train.records import tensorboard_sink
from tests.lab.base.test_storage import files_no_larger_than
from tests.lab.train.small_runs import assert_same_run, losses, small_run, stop_at

FULL = "cannot be written: File too large; make room on the disk"


BROKEN_LINES = [
    b"7\n",
    b'{"kind":"train","loss":1.0}\n',
    b'{"kind":"train","step":"3"}\n',
    b'{"kind":"train","step":true}\n',
    b'{"kind":"train","step":1e400}\n',
    b'{"kind":"train","st\n',
    b"\xff\xfe\n",
    b"[" * 5000 + b"\n",
    b"\n",
]


def test_damaged_lines_of_the_metrics_are_moved_aside_and_every_whole_record_stays(uninterrupted, tmp_path):
    stop_at(8, small_run(), tmp_path)
    metrics = tmp_path / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines(keepends=True)
    metrics.write_bytes(b"".join([*BROKEN_LINES, *lines[:2], *BROKEN_LINES, *lines[2:], b'{"half": ']))
    notes = []
    train(small_run(), tmp_path, Watch(note=notes.append))
    aside = tmp_path / "metrics.jsonl.damaged.1"
    assert notes[1:] == [f"{2 * len(BROKEN_LINES)} damaged lines of {metrics} were moved to {aside}"]
    assert aside.read_bytes() == b"".join(BROKEN_LINES * 2)
    assert_same_run(uninterrupted, tmp_path, 12)


@pytest.mark.parametrize(
    ("harm", "note"),
    [
        (lambda path: path.unlink(), "of the updates 1 to 4, 4 have no training record"),
        (lambda path: os.truncate(path, path.stat().st_size // 2), "have no training record; the run itself is not"),
        (lambda path: (path.unlink(), path.mkdir()), "metrics.jsonl.1: it is no file of records"),
    ],
    ids=["missing", "cut", "folder"],
)
def test_records_that_are_gone_are_reported_and_the_run_goes_on(uninterrupted, tmp_path, harm, note):
    stop_at(4, small_run(), tmp_path)
    harm(tmp_path / "metrics.jsonl")
    notes = []
    train(small_run(), tmp_path, Watch(note=notes.append))
    assert note in "\n".join(notes)
    assert losses(tmp_path)[-9:] == losses(uninterrupted)[-9:]


def test_tensorboard_gets_every_scalar(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(small_run(steps=2, tensorboard=True), tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    expected = [record["loss"] for record in losses(tmp_path) if record["kind"] == "train"]
    assert [point.value for point in events.Scalars("train/loss")] == pytest.approx(expected)
    assert "telemetry/roles/experts/weight_rms" in events.Tags()["scalars"]


def test_events_of_tensorboard_that_cannot_be_written_are_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda _: None)  # its own thread dies of the same error
    before = threading.enumerate()
    sink = tensorboard_sink(tmp_path)

    def write_on():
        for step in range(10_000):
            sink({"kind": "train", "step": step, "loss": 1.0})

    with files_no_larger_than(500), pytest.raises(MachineError, match=rf"tensorboard {FULL}"):
        write_on()
    for thread in set(threading.enumerate()) - set(before):
        thread.join(10.0)
