"""Jobs on a real Slurm: whatever happens to a job, its run ends with the numbers of an undisturbed run."""

import os
import signal
import subprocess
import threading
import time
from dataclasses import replace

import pytest

from muonsw.lab import launch
from muonsw.lab.errors import Interrupted, MachineError, UsageError
from muonsw.lab.launch import JOBS, Cluster, Job, queued_jobs, saved_step
from tests.lab.studies.small_comparisons import ARMS, QUIET, tiny_run
from tests.lab.train.small_runs import losses

pytestmark = pytest.mark.slurm
SLURM = Cluster("slurm", time=30, slurm=("partition=spare",))
STEPS = 600


@pytest.fixture(autouse=True)
def queue(monkeypatch):
    """An empty queue afterwards."""
    monkeypatch.setattr(launch, "POLL_SLURM_SECONDS", 1.0)
    yield
    subprocess.run(["scancel", "--me"], check=True)
    wait_until(lambda: not queued_jobs())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The losses of the run in this process."""
    folder = tmp_path_factory.mktemp("home") / "run"
    train(folder, cluster=None)
    return losses(folder)


def train(folder, during=None, cluster=SLURM, **settings):
    """Train one run, and call `during` with its job number once it has saved."""
    done = []

    def disturb():
        wait_until(lambda: saved_step(folder))
        (number,) = queued_jobs()
        during(number)
        done.append(number)

    thread = threading.Thread(target=disturb, daemon=True)
    if during:
        thread.start()
    settings = {"steps": STEPS, "eval_every": 200, "checkpoint_every": 20, "telemetry_every": 0} | settings
    config = replace(tiny_run(**settings), optimizer=ARMS[0].optimizer, threads=1, device="cpu")
    try:
        launch.run([Job("a run", config, folder)], console=QUIET, workers=1, cluster=cluster)
    finally:
        if during:
            thread.join(timeout=60)
            assert done, "nothing happened to the job"


def wait_until(true, seconds=300.0):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


def call(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def hurry(number):
    """Let a requeued job start at once; Slurm would wait two minutes."""
    wait_until(lambda: queued_jobs().get(number) == "PENDING")
    call("scontrol", "update", f"JobId={number}", "StartTime=now")


def jobs_in(folder):
    return sorted({int(path.name.split("_")[0]) for path in (folder / JOBS).glob("*_submitted.pkl")})


def log_of(folder, job):
    return (folder / JOBS / f"{job}_0_log.out").read_text(encoding="utf-8")


def preempt(number):
    call("sbatch", "--partition=urgent", "--exclusive", "--output=/dev/null", "--wrap", "sleep 5")
    hurry(number)


def warn(number):
    """Send the signal that Slurm sends before the time limit."""
    call("scancel", "--signal=USR2", number)
    hurry(number)


@pytest.mark.parametrize("disturb", [preempt, warn])
def test_a_job_that_is_preempted_or_out_of_time_saves_and_resumes_under_its_number(tmp_path, undisturbed, disturb):
    train(tmp_path / "run", disturb)
    (job,) = jobs_in(tmp_path)
    assert log_of(tmp_path, job).count("Starting with") == 2
    assert ("Requeued job" in log_of(tmp_path, job)) == (disturb is warn), "Slurm itself requeues a preempted job"
    assert losses(tmp_path / "run") == undisturbed


def test_the_run_of_a_cancelled_job_is_resumed_by_the_same_command(tmp_path, undisturbed):
    with pytest.raises(MachineError, match=r"a run: job \d+ was cancelled.*rerun the same command to resume"):
        train(tmp_path / "run", lambda number: call("scancel", number))
    assert 0 < saved_step(tmp_path / "run") < STEPS
    train(tmp_path / "run")
    assert len(jobs_in(tmp_path)) == 2
    assert losses(tmp_path / "run") == undisturbed


def test_a_stopped_command_leaves_its_job_which_the_next_one_collects(tmp_path, undisturbed):
    with pytest.raises(Interrupted, match=r"1 job left in the queue \(scancel \d+\)"):
        train(tmp_path / "run", lambda _number: os.kill(os.getpid(), signal.SIGINT))
    train(tmp_path / "run")
    (job,) = jobs_in(tmp_path)
    assert log_of(tmp_path, job).count("Starting with") == 1
    assert losses(tmp_path / "run") == undisturbed


def test_a_job_of_two_ranks_saves_and_resumes(tmp_path):
    """Two ranks sum in another order than one, so the reference is another such job."""
    two = replace(SLURM, slurm=("partition=spare", "gres=none"), gpus_per_run=2)
    train(tmp_path / "run", warn, two)
    (job,) = jobs_in(tmp_path)
    assert log_of(tmp_path, job).count("Starting with") == 2
    train(tmp_path / "whole", None, two)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_what_cannot_be_submitted_or_trained_is_reported(tmp_path):
    with pytest.raises(UsageError, match=r"Slurm refused a run.*[Ii]nvalid partition.*check --time and --slurm"):
        train(tmp_path / "run", cluster=replace(SLURM, slurm=("partition=nowhere",)))
    with pytest.raises(UsageError, match=r"a run: .*vocabulary of 257 tokens, more than.* \(job \d+, see .*_0_log.err"):
        train(tmp_path / "run", model={"vocab": 64})
