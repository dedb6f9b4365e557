"""Runs as jobs of a real Slurm: whatever befalls a job, the run ends with the numbers of one that nothing befell."""

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

from muonsw.lab.errors import Interrupted, UsageError
from muonsw.lab.studies.cluster import FOLDER, Cluster, Slurm, saved_step
from muonsw.lab.studies.workshop import ByArm, Workshop
from tests.lab.studies.small_comparisons import ARMS, comparison
from tests.lab.train.small_runs import losses, tokens

pytestmark = pytest.mark.slurm
NAME = f"{ARMS[0].name}-seed0"
SLURM = Cluster("slurm", {"time": 30, "partition": "spare", "additional_parameters": {"requeue": True}}, poll=1.0)
STEPS = 600


@pytest.fixture(autouse=True)
def queue():
    """An empty queue before and after."""
    yield Slurm(None)
    subprocess.run(["scancel", "--me"], check=True)
    wait_until(lambda: not Slurm(None).states())


@pytest.fixture(scope="module")
def at_home(tmp_path_factory):
    """What the run gives in this process, with nothing in between."""
    folder = tmp_path_factory.mktemp("home")
    Workshop(Console(quiet=True), 1, ByArm(folder)).train([one_run()])
    return losses(folder / NAME)


def one_run(steps=STEPS):
    settings = {"eval_every": 200, "checkpoint_every": 20, "telemetry_every": 0}
    return comparison(ARMS[:1], seeds=(0,), steps=steps, **settings)


def wait_until(true, seconds=300.0):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


def output_of(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def train(folder, during, cluster=SLURM):
    """Train one run, do something to its job once it has saved, and return the lines that were shown."""
    shown, done = StringIO(), []

    def befall():
        wait_until(lambda: saved_step(folder / NAME))
        (number,) = Slurm(None).states()
        during(number)
        done.append(number)

    thread = threading.Thread(target=befall, daemon=True)
    thread.start()
    shop = Workshop(Console(file=shown, width=300), 1, ByArm(folder), cluster=cluster)
    try:
        shop.train([one_run()])
    finally:
        thread.join(timeout=60)
    assert done, "nothing befell the run"
    return shown.getvalue()


def hurry(number):
    """Slurm lets a job that is queued again wait two minutes; this one need not."""
    wait_until(lambda: Slurm(None).states().get(number) == "PENDING")
    output_of("scontrol", "update", f"JobId={number}", "StartTime=now")


def jobs_in(folder):
    return sorted({int(path.name.split("_")[0]) for path in (folder / FOLDER).glob("*_submitted.pkl")})


def starts_of(folder, job):
    return (folder / FOLDER / f"{job}_0_log.out").read_text(encoding="utf-8").count("Starting with")


def worker_of(folder):
    (number,) = [
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if path.read_bytes().split(b"\0")[1:4] == [b"-u", b"-m", b"submitit.core._submit"]
        and str(folder).encode() in path.read_bytes()
    ]
    return number


def test_a_job_that_is_requeued_saves_and_goes_on_under_its_number(tmp_path, at_home):
    def requeue(number):
        output_of("scontrol", "requeue", number)
        hurry(number)

    train(tmp_path, requeue)
    (job,) = jobs_in(tmp_path)
    assert starts_of(tmp_path, job) == 2
    assert losses(tmp_path / NAME) == at_home


def test_a_job_that_is_preempted_by_a_more_urgent_one_waits_and_goes_on(tmp_path, at_home):
    def preempt(number):
        output_of("sbatch", "--partition=urgent", "--exclusive", "--output=/dev/null", "--wrap", "sleep 5")
        hurry(number)

    train(tmp_path, preempt)
    (job,) = jobs_in(tmp_path)
    assert starts_of(tmp_path, job) == 2
    assert losses(tmp_path / NAME) == at_home


def test_a_job_whose_time_is_nearly_up_saves_first_and_is_queued_again_by_submitit(tmp_path, at_home):
    def warn(number):
        output_of("scancel", "--signal=USR2", number)
        hurry(number)

    train(tmp_path, warn)
    (job,) = jobs_in(tmp_path)
    log = (tmp_path / FOLDER / f"{job}_0_log.out").read_text(encoding="utf-8")
    assert "Requeued job" in log
    assert starts_of(tmp_path, job) == 2
    assert losses(tmp_path / NAME) == at_home


def test_the_run_of_a_cancelled_job_is_taken_up_by_another_one(tmp_path, at_home):
    shown = train(tmp_path, lambda number: output_of("scancel", number))
    first, second = jobs_in(tmp_path)
    assert f"job {first} ended after update" in shown
    assert starts_of(tmp_path, second) == 1
    assert losses(tmp_path / NAME) == at_home


def test_the_run_of_a_killed_worker_is_taken_up_by_another_job(tmp_path, at_home):
    train(tmp_path, lambda _number: os.kill(worker_of(tmp_path), signal.SIGKILL))
    assert len(jobs_in(tmp_path)) == 2
    assert losses(tmp_path / NAME) == at_home


def test_a_stopped_command_leaves_its_job_which_the_next_one_collects(tmp_path, at_home):
    def stop(_number):
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted, match=r"1 job goes on \(scancel \d+ ends it\)"):
        train(tmp_path, stop)
    (job,) = jobs_in(tmp_path)
    assert str(job) in Slurm(None).states()
    shown = StringIO()
    Workshop(Console(file=shown, width=300), 1, ByArm(tmp_path), cluster=SLURM).train([one_run()])
    assert "1 jobs of another command, or an earlier one, go on" in shown.getvalue()
    assert jobs_in(tmp_path) == [job]
    assert starts_of(tmp_path, job) == 1
    assert losses(tmp_path / NAME) == at_home


def test_a_stopped_command_that_is_to_cancel_its_jobs_saves_them_first(tmp_path, at_home):
    with pytest.raises(Interrupted, match="1 job was asked to save and end"):
        train(tmp_path, lambda _: os.kill(os.getpid(), signal.SIGTERM), replace(SLURM, cancel_on_stop=True))
    assert not Slurm(None).states()
    assert 0 < saved_step(tmp_path / NAME) < STEPS
    train_to_the_end(tmp_path)
    assert losses(tmp_path / NAME) == at_home


def train_to_the_end(folder, cluster=SLURM):
    Workshop(Console(quiet=True), 1, ByArm(folder), cluster=cluster).train([one_run()])


def test_a_job_of_two_ranks_that_is_requeued_saves_and_goes_on(tmp_path):
    """As on two GPUs of a machine; against another job of two, since ranks add up in another order than one process."""
    both = replace(SLURM, ranks=2, parameters={**SLURM.parameters, "cpus_per_task": 2})

    def requeue(number):
        output_of("scontrol", "requeue", number)
        hurry(number)

    train(tmp_path, requeue, both)
    (job,) = jobs_in(tmp_path)
    assert starts_of(tmp_path, job) == 2
    train_to_the_end(tmp_path / "whole", both)
    assert losses(tmp_path / NAME) == losses(tmp_path / "whole" / NAME)


def test_what_slurm_does_not_take_is_said_in_its_words(tmp_path):
    nowhere = replace(SLURM, parameters={**SLURM.parameters, "partition": "nowhere"})
    with pytest.raises(UsageError, match=r"Slurm did not take the job.*[Ii]nvalid partition.*check --partition"):
        Workshop(Console(quiet=True), 1, ByArm(tmp_path), cluster=nowhere).train([one_run()])


def test_the_whole_command_on_slurm_gives_the_numbers_of_the_command_at_home(tmp_path):
    """The command line as a user types it: every run a job, two at a time, and then the same without a cluster."""
    compare = [sys.executable, "-m", "muonsw.lab.cli", "compare", "--preset", "demo", "--seeds", "2", "--steps", "3"]
    compare += ["--telemetry-every", "0", "--data", tokens(), "--device", "cpu"]
    on_slurm = ["--cluster", "slurm", "--partition", "spare", "--time", "10", "--workers", "2"]
    for name, more in (("slurm", on_slurm), ("home", [])):
        command = [*compare, "--out", str(tmp_path / name), *more]
        ended = subprocess.run(command, check=False, capture_output=True, text=True)
        assert ended.returncode in (0, 1), ended.stderr
    outcomes = [
        json.loads((tmp_path / name / "outcome.json").read_text(encoding="utf-8")) for name in ("slurm", "home")
    ]
    assert outcomes[0] == outcomes[1]
    assert len(jobs_in(tmp_path / "slurm" / "runs")) == 4
