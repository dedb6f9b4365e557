"""The launcher trains every run once, with the same bits in any number of processes, and loses nothing when stopped."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from muonsw import machine
from muonsw.lab import launch
from muonsw.lab.commands.reproduce import Reproduce
from muonsw.lab.commands.training import Compare
from muonsw.lab.errors import Interrupted, MachineError, UsageError, stop_requests
from muonsw.lab.launch import VISIBLE, Cluster, Job, gpus_for, last_records, run_tasks, saved_step
from muonsw.lab.train.config import OptimizerConfig
from tests.lab.studies.small_comparisons import ARMS, QUIET, WILD, tiny_run
from tests.lab.train.small_runs import assert_same_run

IN_PROC = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="children are listed in /proc")
STEPS = 120


def jobs_in(folder, optimizers=None, **settings):
    chosen = {arm.name: arm.optimizer for arm in ARMS} if optimizers is None else optimizers
    settings = {"steps": STEPS, "eval_every": 50, "checkpoint_every": 20, "telemetry_every": 0} | settings
    run = tiny_run(**settings)
    return [
        Job(name, replace(run, optimizer=optimizer, arm=name, threads=1), folder / name)
        for name, optimizer in chosen.items()
    ]


def run(jobs, workers=2, console=QUIET, **settings):
    launch.run(jobs, console=console, workers=workers, **settings)


def assert_same_bits(folder, other):
    for name in (arm.name for arm in ARMS):
        assert_same_run(folder / name, other / name, STEPS)


def result_of(folder):
    return json.loads((folder / "result.json").read_text(encoding="utf-8"))


def once_saved(folder, act, enough=all):
    """Call a function from another thread once all runs, or enough of them, have saved."""

    def wait():
        end = time.monotonic() + 120.0
        while time.monotonic() < end and not enough(saved_step(folder / arm.name) for arm in ARMS):
            time.sleep(0.005)
        act()

    threading.Thread(target=wait, daemon=True).start()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Both runs, one after the other, in this process."""
    folder = tmp_path_factory.mktemp("undisturbed")
    run(jobs_in(folder), workers=1)
    return folder


def test_workers_train_the_same_bits_and_show_them(tmp_path, undisturbed):
    shown = StringIO()
    jobs = jobs_in(tmp_path)
    run(jobs, console=Console(file=shown, width=200))
    assert_same_bits(tmp_path, undisturbed)
    assert f"constant: validation loss {result_of(tmp_path / 'constant')['final_loss']:.4f}" in shown.getvalue()
    run(jobs, console=Console(file=shown, width=200))
    assert shown.getvalue().endswith("2 of 2 runs are complete already\n")
    with pytest.raises(UsageError, match="other settings"):
        run(jobs_in(tmp_path, steps=STEPS + 1))


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_stopped_runs_are_saved_and_resume_to_the_same_bits(tmp_path, undisturbed, number):
    jobs = jobs_in(tmp_path)
    once_saved(tmp_path, lambda: os.kill(os.getpid(), number))
    with pytest.raises(Interrupted, match="runs are saved; rerun the same command to resume") as stopped:
        run(jobs)
    assert stopped.value.exit_code == 128 + number
    assert any(saved_step(job.folder) < STEPS for job in jobs)
    run(jobs)
    assert_same_bits(tmp_path, undisturbed)


@IN_PROC
def test_a_killed_worker_ends_the_command_and_the_next_one_resumes(tmp_path, undisturbed):
    once_saved(tmp_path, lambda: os.kill(launch.multiprocessing.active_children()[0].pid, signal.SIGKILL), any)
    with pytest.raises(MachineError, match=r"(constant|scaled): the worker was killed.*rerun the same command"):
        run(jobs_in(tmp_path))
    assert not launch.multiprocessing.active_children()
    assert any(saved_step(tmp_path / arm.name) for arm in ARMS)
    run(jobs_in(tmp_path))
    assert_same_bits(tmp_path, undisturbed)


def test_a_run_that_diverges_does_not_end_the_others_and_is_not_tried_again(tmp_path):
    settings = {"steps": 20, "diverged": 1.0}
    jobs = jobs_in(tmp_path, {"wild": WILD.optimizer, "tame": OptimizerConfig(ns_dtype="float32")}, **settings)
    run(jobs)
    assert 1 <= result_of(tmp_path / "wild")["diverged"] <= 20
    assert "lower the learning rate" in result_of(tmp_path / "wild")["reason"]
    assert result_of(tmp_path / "tame")["steps"] == 20

    def written():
        return {job.name: (job.folder / "metrics.jsonl").stat().st_mtime_ns for job in jobs}

    before, shown = written(), StringIO()
    run(jobs, console=Console(file=shown, width=200))
    assert "1 of 2 runs diverged earlier" in shown.getvalue()
    assert written() == before


def test_a_run_that_cannot_start_is_named_and_the_others_are_saved(tmp_path):
    (good,) = jobs_in(tmp_path, {"good": ARMS[0].optimizer}, steps=10**6)
    (short,) = jobs_in(tmp_path, {"short": ARMS[0].optimizer}, steps=20)
    (bad,) = jobs_in(tmp_path, {"bad": ARMS[0].optimizer}, model={"vocab": 64})
    with pytest.raises(UsageError, match=r"^bad: .* has a vocabulary of 257 tokens, more than"):
        run([good, short, bad])
    assert not bad.folder.exists()
    assert saved_step(good.folder) > 0
    assert result_of(short.folder)["steps"] == 20


# ---- Worker processes


def work(task):
    """A task that does what its name says, after creating a file of that name."""
    kind, folder = task
    (folder / kind).touch()
    match kind:
        case "save":
            with stop_requests() as request:
                while request.signal is None:
                    time.sleep(0.01)
            raise Interrupted("saved", request.signal)
        case "fault":
            raise ZeroDivisionError("by zero")
        case "deaf" | "deaf too":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            (folder / f"{kind} now").touch()
            time.sleep(60)
    return os.getpid(), os.environ.get(VISIBLE)


def test_workers_are_used_again_and_each_sees_one_gpu(tmp_path):
    results, before = {}, os.environ.get(VISIBLE)
    run_tasks(
        work, {name: (name, tmp_path) for name in "abcdef"}, results.__setitem__, workers=2, devices=("7", "GPU-ab")
    )
    seats = set(results.values())
    assert len(seats) == 2, "a process keeps its GPU"
    assert {device for _, device in seats} == {"7", "GPU-ab"}
    assert os.environ.get(VISIBLE) == before


def test_a_fault_of_the_program_is_raised_with_the_trace_of_its_worker(tmp_path):
    with pytest.raises(ZeroDivisionError, match="by zero") as raised:
        run_tasks(work, {kind: (kind, tmp_path) for kind in ("fault", "save")}, print, workers=2)
    assert "in work" in str(raised.value.__cause__)


def test_gpus_keep_the_names_of_the_environment(monkeypatch):
    monkeypatch.setattr(machine, "gpus", lambda: 2)
    monkeypatch.setattr(launch, "resolve_device", launch.torch.device)
    for visible, names in {"": ("0", "1"), "3, GPU-ab": ("3", "GPU-ab")}.items():
        monkeypatch.setenv(VISIBLE, visible)
        assert gpus_for("cuda") == names
        assert gpus_for("cuda:1") == gpus_for("cpu") == ()


PARENT = """
import sys
from pathlib import Path
from muonsw.lab.launch import run_tasks
from tests.lab.test_launch import work

if __name__ == "__main__":
    run_tasks(work, {kind: (kind, Path(sys.argv[1])) for kind in sys.argv[2:]}, print, workers=2)
"""


def is_running(process):
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@IN_PROC
@pytest.mark.slow
@pytest.mark.parametrize("signals", [(signal.SIGKILL,), (signal.SIGINT, signal.SIGINT)], ids=["killed", "Ctrl-C twice"])
def test_no_worker_outlives_its_parent(tmp_path, signals):
    """These tasks ignore SIGTERM: only a second Ctrl-C or the death of the parent ends them."""
    script = tmp_path / "parent.py"
    script.write_text(PARENT, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, script, tmp_path, "deaf", "deaf too"], env=environment) as parent:
        while not all((tmp_path / f"{kind} now").exists() for kind in ("deaf", "deaf too")):
            assert parent.poll() is None
            time.sleep(0.01)
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text(encoding="utf-8").split()
        for number in signals:
            assert parent.poll() is None
            parent.send_signal(number)
            time.sleep(1.0)
        parent.wait(timeout=10)
    deadline = time.monotonic() + 10.0
    while any(map(is_running, children)):
        assert time.monotonic() < deadline, "a worker outlives its parent"
        time.sleep(0.01)


def test_the_last_records_are_found_in_a_file_that_is_still_written(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert last_records(path) == []
    records = [{"kind": "eval", "step": 0, "loss": 3.0}]
    records += [{"kind": "train", "step": step, "loss": 2.0} for step in range(1, 40)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + '{"kind": "tr', encoding="utf-8")
    assert last_records(path) == [records[-1], records[0]]


# ---- Options of Slurm; tests/slurm runs jobs on a real one


@pytest.mark.parametrize(
    ("options", "device", "message"),
    [
        ({"slurm": ("partition=gpu",)}, "auto", "--slurm needs --cluster slurm"),
        ({"cluster": "slurm"}, "auto", "needs --time"),
        ({"cluster": "slurm", "time": 60, "gpus_per_run": 1}, "cpu", "does not go with --device cpu"),
    ],
)
def test_options_that_slurm_cannot_take_are_refused_before_anything_is_prepared(options, device, message, tmp_path):
    for command in (Compare(data=tmp_path / "none"), Reproduce(name="headline")):
        with pytest.raises(UsageError, match=message):
            replace(command, cluster=Cluster(**options), device=device, out=tmp_path / "out").run()
    assert not list(tmp_path.iterdir())


def test_slurm_gets_the_options_and_the_gpus_of_a_run():
    options = ("partition=gpu", "cpus-per-task=8", "exclusive")
    cluster = Cluster(cluster="slurm", time=240, slurm=options, setup=("module load cuda",))
    assert cluster.parameters("auto") == {
        "time": 240, "gpus_per_node": 1, "ntasks_per_node": 1, "setup": ["module load cuda"],
        "additional_parameters": {"requeue": True, "partition": "gpu", "cpus-per-task": "8", "exclusive": True},
    }  # fmt: skip
    bare = Cluster(cluster="slurm", time=10)
    assert "gpus_per_node" not in bare.parameters("cpu")
    assert "gpus_per_node" not in replace(bare, slurm=("gres=gpu:h100:1",)).parameters("cuda")
    four = replace(bare, gpus_per_run=4).parameters("auto")
    assert (four["ntasks_per_node"], four["gpus_per_node"]) == (4, 4)
    assert bare.device_type("auto") == "cuda", "a cluster has GPUs where this machine has none"
