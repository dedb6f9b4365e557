"""Runs as jobs: the same numbers as at home, taken up again when they die, submitted once, and honestly given up."""

import json
import os
import signal
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from muonsw import machine
from muonsw.lab.base.processes import Audience
from muonsw.lab.cli import main as cli
from muonsw.lab.commands.cluster import ClusterOptions
from muonsw.lab.commands.compare import Compare
from muonsw.lab.commands.reproduce import Reproduce
from muonsw.lab.errors import Diverged, Interrupted, MachineError, UsageError
from muonsw.lab.studies import cluster as module
from muonsw.lab.studies.cluster import FOLDER, FRUITLESS, Cluster, last_records, run_on_cluster, saved_step
from muonsw.lab.studies.program import main
from tests.lab.studies.small_comparisons import ARMS, WILD, by_arm, comparison
from tests.lab.train.small_runs import losses

STEPS = 120


def long_enough(**settings):
    """Runs that are still under way when they are interrupted a moment after they have begun."""
    return comparison(seeds=(0,), steps=STEPS, eval_every=30, checkpoint_every=10, telemetry_every=0, **settings)


def local_jobs(folder):
    return replace(by_arm(folder, workers=2), cluster=Cluster("local", {"timeout_min": 60}, poll=0.1))


def children_of(number):
    return [int(child) for child in Path(f"/proc/{number}/task/{number}/children").read_text(encoding="utf-8").split()]


def processes_of(folder):
    """The processes that look after the jobs of a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            line = path.read_bytes()
            if b"submitit" in line and str(folder).encode() in line:
                found.append(int(path.parent.name))
    return found


def once_saved(folder, name, *acts):
    """Do something to the process that trains a run, from another thread, each time that it has saved once more."""

    def wait():
        end, saved = time.monotonic() + 120.0, 0
        for act in acts:
            while saved_step(folder / name) <= saved:
                if time.monotonic() > end:
                    return
                time.sleep(0.01)
            job = json.loads((folder / FOLDER / f"{name}.json").read_text(encoding="utf-8"))["job"]
            process = children_of(job)[0]
            act(process)
            while Path(f"/proc/{process}").exists() and time.monotonic() < end:
                time.sleep(0.01)
            saved = saved_step(folder / name)

    threading.Thread(target=wait, daemon=True).start()


IN_PROC = pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="jobs are found in /proc")
NAMES = [f"{arm.name}-seed0" for arm in ARMS]


@pytest.mark.slow
@IN_PROC
def test_a_run_whose_jobs_are_killed_and_sent_away_ends_as_if_nothing_had_been(tmp_path):
    """Real jobs of submitit's local executor: the first dies, the second gets the signal that its time is up."""
    folder, harmed, one = tmp_path / "jobs", [], replace(long_enough(), arms=ARMS[:1])

    def harm_with(number):
        return lambda process: harmed.append((os.kill(process, number), number))

    once_saved(folder, NAMES[0], *map(harm_with, (signal.SIGKILL, signal.SIGUSR2)))
    local_jobs(folder).train([one])
    by_arm(tmp_path / "here").train([one])
    assert len(harmed) == 2
    assert not processes_of(folder)
    assert losses(folder / NAMES[0]) == losses(tmp_path / "here" / NAMES[0])
    logs = [path.read_text(encoding="utf-8") for path in (folder / FOLDER).glob("*_log.out")]
    assert len(logs) == 2, "the killed one was submitted again, the one that was sent away came back by itself"
    assert sum("Requeued job" in log for log in logs) == 1
    assert not list((folder / FOLDER).glob("*-seed0.json")), "a run that is done is no job's any more"


@IN_PROC
@pytest.mark.slow
def test_jobs_of_this_machine_are_saved_and_ended_with_the_command_and_go_on_with_the_next(tmp_path):
    """Of two runs one may be over by then: only those under way get it."""
    folder = tmp_path / "jobs"
    once_saved(folder, NAMES[-1], lambda _process: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Interrupted, match=r"(1 job was|2 jobs were) asked to save and end"):
        local_jobs(folder).train([long_enough()])
    assert not processes_of(folder)
    assert 0 < saved_step(folder / NAMES[-1]) < STEPS
    local_jobs(folder).train([long_enough()])
    by_arm(tmp_path / "here").train([long_enough()])
    for name in NAMES:
        assert losses(folder / name) == losses(tmp_path / "here" / name)


@IN_PROC
@pytest.mark.slow
def test_a_run_on_two_ranks_is_saved_and_goes_on_when_its_job_is_sent_away(tmp_path):
    """A job of two ranks, as with two GPUs; losses are those of one process to rounding."""
    folder, harmed = tmp_path / "jobs", []
    once_saved(folder, NAMES[0], lambda process: harmed.append(os.kill(process, signal.SIGUSR2)))
    shop = local_jobs(folder)
    shop = replace(shop, cluster=replace(shop.cluster, ranks=2))
    one = replace(long_enough(), arms=ARMS[:1])
    shop.train([one])
    by_arm(tmp_path / "here").train([one])
    assert harmed
    (log,) = (folder / FOLDER).glob("*_log.out")
    assert "Requeued job" in log.read_text(encoding="utf-8")
    here, there = ([record["loss"] for record in losses(path / NAMES[0])] for path in (tmp_path / "here", folder))
    assert there == pytest.approx(here, rel=1e-3)


def test_a_rank_says_why_it_failed_or_that_its_run_diverged(tmp_path):
    """The program of a rank, on its own."""
    jobs = {**jobs_of(tmp_path, (WILD,), steps=20, diverged=1.0), **jobs_of(tmp_path, ARMS[:1], model={"vocab": 64})}
    config, note = tmp_path / "config.json", tmp_path / "note.json"
    for job, code in zip(jobs.values(), (0, 2), strict=True):
        config.write_text(json.dumps(job.config.as_data()), encoding="utf-8")
        assert main([str(config), str(job.folder), str(note)]) == code
        assert note.exists() == bool(code)
    assert "diverged" in json.loads((tmp_path / "wild-seed0" / "result.json").read_text(encoding="utf-8"))
    assert json.loads(note.read_text(encoding="utf-8"))["final"] is True


@dataclass
class Desk:
    """A queue whose jobs the test ends as it likes; what they do, they really do, in this process."""

    queue: dict = field(default_factory=dict)
    orders: dict = field(default_factory=dict)
    answers: bool = True
    cancelled: tuple = ()

    def submit(self, order, name):
        number = str(len(self.orders) + 1)
        self.orders[number], self.queue[number] = order, "PENDING"
        assert name == f"muonsw-{order.job.folder.name}"
        return number

    def states(self):
        return dict(self.queue) if self.answers else None

    def cancel(self, jobs):
        self.cancelled = tuple(jobs)
        self.queue.clear()

    def close(self):
        assert not self.queue

    def work_off(self, number):
        self.orders[number]()
        del self.queue[number]


@pytest.fixture
def desk(monkeypatch):
    desk = Desk()
    monkeypatch.setattr(module, "scheduler_of", lambda _cluster, _folder: desk)
    return desk


def jobs_of(folder, arms=ARMS, **settings):
    shop = by_arm(folder)
    short = {"steps": 2, "eval_every": 2, "checkpoint_every": 2, "telemetry_every": 0}
    one = comparison(arms, seeds=(0,), **(short | settings))
    return {job.name: job for job in shop.jobs([one]).values()}


@dataclass
class RecordingAudience:
    """An audience that remembers, and does something at the given looks at the queue."""

    at: dict = field(default_factory=dict)
    said: list = field(default_factory=list)
    done: dict = field(default_factory=dict)
    failed: dict = field(default_factory=dict)

    def __call__(self, **changes):
        return Audience(
            message=lambda name, content: self.said.append((name, content)),
            finished=self.done.__setitem__,
            **{"failed": self.failed.__setitem__, **changes},
        )


def look_by_look(monkeypatch, *acts):
    """Let the test act between two looks at the queue."""
    left = list(acts)

    def between(_seconds, _request):
        assert left, "the watcher still waits"
        left.pop(0)()

    monkeypatch.setattr(module, "_sleep", between)
    return left


SLURM = Cluster("slurm")


def nothing():
    pass


def test_a_job_that_is_gone_is_submitted_again_once_its_files_have_had_time_to_arrive(desk, tmp_path, monkeypatch):
    heard, gone = RecordingAudience(), lambda: desk.queue.pop("1")
    look_by_look(monkeypatch, lambda: desk.work_off("2"), gone, nothing, nothing, lambda: desk.work_off("3"))
    run_on_cluster(jobs_of(tmp_path), heard(), SLURM)
    assert list(desk.orders) == ["1", "2", "3"]
    assert set(heard.done) == {"constant, seed 0", "scaled, seed 0"}
    assert heard.done["constant, seed 0"] == json.loads(
        (tmp_path / "constant-seed0" / "result.json").read_text(encoding="utf-8")
    )
    sentences = [content for _, content in heard.said if isinstance(content, str)]
    assert len(sentences) == 1
    assert "job 1 ended after update 0" in sentences[0]


def test_a_queue_that_does_not_answer_says_nothing_about_its_jobs(desk, tmp_path, monkeypatch):
    def silent():
        desk.answers = False
        desk.queue.clear()

    def speaks():
        desk.answers = True
        desk.queue.update(dict.fromkeys(desk.orders, "RUNNING"))
        desk.work_off("1")
        desk.work_off("2")

    heard = RecordingAudience()
    look_by_look(monkeypatch, silent, *[nothing] * 5, speaks)
    run_on_cluster(jobs_of(tmp_path), heard(), SLURM)
    assert len(desk.orders) == len(heard.done) == 2
    desk.answers = False
    with pytest.raises(MachineError, match="submitted twice"):
        run_on_cluster(jobs_of(tmp_path / "other"), heard(), SLURM)


def test_a_run_that_never_moves_is_given_up_and_the_others_are_not(desk, tmp_path, monkeypatch):
    def end_first():
        for number, order in list(desk.orders.items()):
            if number in desk.queue and order.job.name.startswith("constant"):
                del desk.queue[number]

    acts = [act for _ in range(FRUITLESS) for act in (end_first, nothing, nothing)]
    look_by_look(monkeypatch, *acts, lambda: desk.work_off("2"))
    heard = RecordingAudience()
    with pytest.raises(MachineError, match=rf"constant, seed 0: {FRUITLESS} jobs ended without an update.*_0_log\.err"):
        run_on_cluster(jobs_of(tmp_path), Audience(finished=heard.done.__setitem__), SLURM)
    assert set(heard.done) == {"scaled, seed 0"}
    assert len(desk.orders) == FRUITLESS + 1


def test_what_cannot_be_done_is_not_tried_again_and_a_divergence_is_an_outcome(desk, tmp_path, monkeypatch):
    def work():
        for number in ("1", "2", "3"):
            try:
                desk.work_off(number)
            except UsageError:
                del desk.queue[number]

    odd = {
        **jobs_of(tmp_path, (ARMS[0], WILD), steps=20, diverged=1.0),
        **jobs_of(tmp_path, ARMS[1:], model={"vocab": 64}),
    }
    heard = RecordingAudience()
    look_by_look(monkeypatch, work, nothing, nothing)
    run_on_cluster(odd, heard(), SLURM)
    assert len(desk.orders) == 3
    assert isinstance(heard.failed["wild, seed 0"], Diverged)
    assert "vocabulary of 257 tokens, more than" in str(heard.failed["scaled, seed 0"])
    note = json.loads((tmp_path / FOLDER / "scaled-seed0.failed.json").read_text(encoding="utf-8"))
    assert note["final"] is True
    assert "with_fingerprint" in note["trace"]


def test_jobs_of_an_earlier_command_are_watched_and_not_submitted_twice(desk, tmp_path, monkeypatch):
    def stop():
        os.kill(os.getpid(), signal.SIGINT)

    heard = RecordingAudience()
    look_by_look(monkeypatch, nothing, stop)
    with pytest.raises(Interrupted, match=r"1 job goes on \(scancel 1 ends it\); the same command") as stopped:
        run_on_cluster(jobs_of(tmp_path), heard(), Cluster("slurm", at_once=1))
    assert stopped.value.exit_code == 130
    look_by_look(monkeypatch, lambda: desk.work_off("1"), lambda: desk.work_off("2"))
    run_on_cluster(jobs_of(tmp_path), heard(), Cluster("slurm", at_once=1))
    assert list(desk.orders) == ["1", "2"]
    assert len(heard.done) == 2
    assert ("constant, seed 0", "1 jobs of another command, or an earlier one, go on") in heard.said
    assert ("constant, seed 0", {"kind": "job", "job": "1 pending"}) in heard.said


def test_two_commands_that_share_a_run_submit_it_once_when_its_job_dies(desk, tmp_path, monkeypatch):
    jobs = jobs_of(tmp_path, ARMS[:1])
    (job,) = jobs.values()

    def the_other_command_is_faster():
        number = desk.submit(desk.orders["1"], f"muonsw-{job.folder.name}")
        record = {"cluster": "slurm", "job": number, "step": 0}
        (tmp_path / FOLDER / f"{job.folder.name}.json").write_text(json.dumps(record), encoding="utf-8")

    acts = (lambda: desk.queue.pop("1"), nothing, the_other_command_is_faster, lambda: desk.work_off("2"))
    look_by_look(monkeypatch, *acts)
    heard = RecordingAudience()
    run_on_cluster(jobs, heard(), SLURM)
    assert list(desk.orders) == ["1", "2"]
    assert len(heard.done) == 1


def test_a_command_that_is_to_cancel_its_jobs_does(desk, tmp_path, monkeypatch):
    look_by_look(monkeypatch, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Interrupted, match="2 jobs were asked to save and end"):
        run_on_cluster(jobs_of(tmp_path), RecordingAudience()(), Cluster("slurm", cancel_on_stop=True))
    assert desk.cancelled == ("1", "2")


def test_the_last_records_are_found_in_a_file_that_is_still_written(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert last_records(path) == []
    kinds = [{"kind": "eval", "step": 0, "loss": 3.0}]
    kinds += [{"kind": "train", "step": step, "loss": 2.0} for step in range(1, 40)]
    path.write_text("".join(json.dumps(record) + "\n" for record in kinds) + '{"kind": "train", "st', encoding="utf-8")
    assert last_records(path) == [kinds[0], kinds[-1]]


@pytest.mark.parametrize(
    ("options", "device", "message"),
    [
        ({"partition": "gpu"}, "auto", "--partition needs --cluster slurm"),
        ({"gpus_per_run": 1}, "auto", "--gpus-per-run needs --cluster slurm"),
        ({"cluster": "slurm"}, "auto", "needs --time"),
        ({"cluster": "slurm", "time": "soon"}, "auto", "'soon' is no time"),
        ({"cluster": "slurm", "time": "0:00"}, "auto", "is no time"),
        ({"cluster": "slurm", "time": "60", "gpus_per_run": -1}, "auto", "must not be below 0"),
        ({"cluster": "slurm", "time": "60", "gpus_per_run": 2}, "cuda:1", "is one GPU"),
        ({"cluster": "slurm", "time": "60", "gpus_per_run": 1}, "cpu", "does not go with --device cpu"),
        ({"cluster": "slurm", "time": "60", "gpus_per_run": 0}, "cuda", "--device cuda needs a GPU"),
        ({"cluster": "slurm", "time": "60", "cpus_per_run": 0}, "auto", "at least 1"),
        ({"cluster": "slurm", "time": "60", "slurm": ("output=x",)}, "auto", "'output' is set by this command"),
        ({"cluster": "slurm", "time": "60", "slurm": ("rm -rf",)}, "auto", "is no option of sbatch"),
    ],
)
def test_options_that_cannot_be_are_named_before_anything_is_prepared(options, device, message, tmp_path):
    chosen = ClusterOptions(**options)
    with pytest.raises(UsageError, match=message):
        Compare(cluster=chosen, device=device, out=tmp_path / "out", data=tmp_path / "none").run()
    with pytest.raises(UsageError, match=message):
        Reproduce(name="headline", cluster=chosen, device=device, out=tmp_path / "out").run()
    assert not list(tmp_path.iterdir())


def test_the_command_line_takes_the_options_without_a_prefix(capsys):
    on_slurm = ["--cluster", "slurm", "--partition", "gpu", "--slurm", "constraint=h100", "exclusive"]
    for command in (["compare"], ["reproduce", "headline"]):
        assert cli([*command, *on_slurm]) == 2
        assert "--cluster slurm needs --time" in capsys.readouterr().err
        assert cli([*command, *on_slurm, "--time", "60", "--gpus-per-run", "-1"]) == 2
        assert "--gpus-per-run must not be below 0" in capsys.readouterr().err


def test_what_sbatch_is_asked_for():
    time_limits = [("90", 90), ("1:30", 2), ("1:30:00", 90), ("1-12", 2160), ("1-12:30", 2190), ("2-00:00:01", 2881)]
    assert [ClusterOptions(time=text).minutes() for text, _ in time_limits] == [minutes for _, minutes in time_limits]
    asked = ClusterOptions(
        cluster="slurm", partition="gpu", time="4:00:00", account="lab", qos="low", memory="32G", cpus_per_run=8,
        slurm=("constraint=h100", "exclusive"), setup=("module load cuda",), on_stop="cancel",
    )  # fmt: skip
    cluster = asked.cluster_for("auto", 5)
    assert (cluster.kind, cluster.at_once, cluster.ranks, cluster.cancel_on_stop) == ("slurm", 5, 1, True)
    assert cluster.parameters == {
        "time": 240, "partition": "gpu", "account": "lab", "qos": "low", "mem": "32G", "cpus_per_task": 8,
        "gpus_per_node": 1, "setup": ["module load cuda"],
        "additional_parameters": {"requeue": True, "constraint": "h100", "exclusive": True},
    }  # fmt: skip
    bare = ClusterOptions(cluster="slurm", time="10")
    assert bare.cluster_for("cpu", None).parameters == {"time": 10, "additional_parameters": {"requeue": True}}
    named = replace(bare, slurm=("gres=gpu:h100:1",)).cluster_for("cuda", None).parameters
    assert "gpus_per_node" not in named
    four = replace(bare, gpus_per_run=4).cluster_for("auto", None)
    assert (four.ranks, four.parameters["gpus_per_node"]) == (4, 4)
    rehearsal = ClusterOptions(cluster="local").cluster_for("cpu", 2)
    assert (rehearsal.kind, rehearsal.ranks, rehearsal.parameters["gpus_per_node"]) == ("local", 1, 0)
    assert ClusterOptions(cluster="local").gpus("auto") == min(1, machine.gpus())
    assert ClusterOptions(cluster="slurm").gpus("auto") == 1, "a cluster has GPUs where this machine has none"
    assert ClusterOptions().cluster_for("auto", None) is None
    with pytest.raises(UsageError, match="trains nothing"):
        Reproduce(name="theory", cluster=bare).run()
