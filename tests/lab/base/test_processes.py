"""The pool of worker processes: every job is heard of, and no process outlives the one that started it."""

import os
import signal
import subprocess
import sys
import time
from itertools import chain, count
from pathlib import Path
from pickle import PicklingError

import pytest
import torch

from muonsw import machine
from muonsw.lab.base.processes import VISIBLE, Audience, next_device, run_jobs, stop_requests, visible_gpus
from muonsw.lab.errors import Diverged, Interrupted, MachineError, UsageError

IN_PROC = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the children are found in /proc")


def work(task, tell):
    """A job for the tests: does what its task says, and tells of it once it listens to what it waits for."""
    if task in ("save", "save in vain", "die while saving"):
        with stop_requests() as request:
            tell(f"doing {task}")
            while request.signal is None:
                time.sleep(0.01)
        match task:
            case "save":
                raise Interrupted("saved", request.signal)
            case "save in vain":
                raise MachineError("no room")
        os.kill(os.getpid(), signal.SIGKILL)
    tell(f"doing {task}")
    match task:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "diverge":
            raise Diverged("the loss is nan", 7)
        case "fault":
            raise ZeroDivisionError("by zero")
        case "sleep" | "dream":
            time.sleep(60)
        case "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            tell("deaf now")
            time.sleep(60)
    return os.getpid(), torch.get_num_threads(), os.environ.get("RAYON_NUM_THREADS"), os.environ.get(VISIBLE)


def is_running(process):
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_jobs_in_processes_are_done_reported_of_and_pinned_to_their_threads():
    """An endless stream of jobs, read one ahead of those at work; the audience ends it by raising."""
    messages, found, failed, taken = {}, {}, {}, []
    before = os.environ.get(VISIBLE)
    odd = [("killed", "kill"), ("wild", "diverge"), ("broken", "fault")]

    def jobs():
        for job in chain(odd, ((str(number), number) for number in count())):
            taken.append(job[0])
            yield job

    def finish(name, result):
        found[name] = result
        assert len(taken) <= len(found) + len(failed) + 2
        if len(failed) == len(odd):
            raise KeyError("enough")

    audience = Audience(messages.__setitem__, finish, failed.__setitem__)
    with pytest.raises(KeyError, match="enough"):
        run_jobs(work, jobs(), audience, workers=2, threads=1, devices=("7", "GPU-ab"))
    assert {name: messages[name] for name in (*found, *failed)} == {
        name: f"doing {dict(odd).get(name, name)}" for name in (*found, *failed)
    }
    assert all(rest == [1, "1"] for _, *rest, _device in found.values())
    seats = {(process, device) for process, *_, device in found.values()}
    assert len(seats) == len({process for process, _ in seats}), "a process sees one device for its whole life"
    assert {device for _, device in seats} <= {"7", "GPU-ab"}
    assert os.environ.get(VISIBLE) == before
    assert os.getpid() not in {process for process, *_ in found.values()}
    assert isinstance(failed["wild"], Diverged)
    assert failed["wild"].step == 7
    assert isinstance(failed["killed"], MachineError)
    assert "ended from outside (signal 9)" in str(failed["killed"])
    assert str(failed["broken"]) == "ZeroDivisionError: by zero"
    assert "in work" in failed["broken"].__notes__[0]


def test_a_failure_ends_all_jobs_unless_the_audience_says_otherwise():
    heard = []
    audience = Audience(message=lambda name, _content: heard.append(name))
    with pytest.raises(UsageError, match="wild: the loss is nan"):
        run_jobs(work, [("wild", "diverge"), ("never", "save")], audience, workers=1)
    assert heard == ["wild"]


def test_in_this_process_torch_has_its_threads_back_afterwards():
    before, found = torch.get_num_threads(), {}
    run_jobs(work, [("a", 1)], Audience(finished=found.__setitem__), workers=8, threads=before + 2)
    assert found["a"][:2] == (os.getpid(), before + 2)
    assert torch.get_num_threads() == before


def test_no_gpu_is_given_to_a_second_process_before_all_have_one():
    assert next_device(("0", "1"), []) == "0"
    assert next_device(("0", "1"), ["0"]) == "1"
    assert next_device(("0", "1"), ["0", "1"]) == "0"
    assert next_device(("0", "1", "2"), ["0", "2", "0"]) == "1"
    assert next_device(("0", "1"), ["1", "1", "0"]) == "0", "the seat of a process that died is free again"
    assert next_device((), []) is None


@pytest.mark.parametrize(
    ("environment", "number", "names"),
    [
        (None, 0, ()),
        (None, 2, ("0", "1")),
        ("", 0, ()),
        ("3, 5", 2, ("3", "5")),
        ("GPU-ab,GPU-cd", 2, ("GPU-ab", "GPU-cd")),
        ("2,9", 1, ("2",)),
    ],
)
def test_the_gpus_of_this_process_keep_the_names_that_it_was_given(environment, number, names, monkeypatch):
    monkeypatch.setattr(machine, "gpus", lambda: number)
    if environment is None:
        monkeypatch.delenv(VISIBLE, raising=False)
    else:
        monkeypatch.setenv(VISIBLE, environment)
    assert visible_gpus() == names


PARENT = """
import sys
from muonsw.lab.errors import Interrupted
from muonsw.lab.base.processes import Audience, run_jobs
from tests.lab.base.test_processes import work

if __name__ == "__main__":
    said = Audience(message=lambda name, _content: print(name, flush=True))
    try:
        run_jobs(work, [(task, task) for task in sys.argv[1:]], said, workers=2)
    except Interrupted as stop:
        print(stop, flush=True)
        sys.exit(stop.exit_code)
"""


def started(script, tasks):
    """A process of its own that runs the tasks in two others."""
    script.write_text(PARENT, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, script, *tasks], env=environment, text=True, **pipes)


def children_of(parent):
    return Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text(encoding="utf-8").split()


def assert_gone(children):
    deadline = time.monotonic() + 10.0
    while any(is_running(child) for child in children):
        assert time.monotonic() < deadline, "a worker outlives its parent"
        time.sleep(0.01)


KILLED = "stopped, die while saving was not saved: its process was ended from outside (signal 9); the same"


@IN_PROC
@pytest.mark.parametrize(
    ("number", "tasks", "end", "code"),
    [
        (signal.SIGKILL, ("sleep", "save"), "", -9),
        pytest.param(signal.SIGHUP, ("sleep", "dream"), "stopped; the same command", 129, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, ("save", "die while saving"), KILLED, 143, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, ("save", "sleep"), "stopped, all runs saved; the", 143, marks=pytest.mark.slow),
        pytest.param(
            signal.SIGTERM,
            ("save", "save in vain"),
            "stopped, save in vain was not saved: no room; the same",
            143,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_no_process_outlives_its_parent_and_the_end_is_reported_as_it_was(tmp_path, number, tasks, end, code):
    with started(tmp_path / "parent.py", tasks) as parent:
        assert {parent.stdout.readline().strip() for _ in tasks} == set(tasks)
        children = children_of(parent)
        parent.send_signal(number)
        printed = parent.stdout.read()
    assert printed.startswith(end)
    assert parent.returncode == code
    assert len(children) >= 2
    assert_gone(children)


@IN_PROC
@pytest.mark.slow
def test_a_second_interrupt_does_not_wait_for_a_job_that_does_not_listen(tmp_path):
    with started(tmp_path / "parent.py", ("deaf", "deaf")) as parent:
        assert [parent.stdout.readline() for _ in range(4)] == ["deaf\n"] * 4
        children = children_of(parent)
        parent.send_signal(signal.SIGINT)
        time.sleep(1.0)
        assert parent.poll() is None
        parent.send_signal(signal.SIGINT)
        parent.communicate(timeout=10)
    assert parent.returncode == -signal.SIGINT
    assert_gone(children)


def test_why_a_worker_cannot_be_started_is_not_hidden():
    with pytest.raises((PicklingError, AttributeError), match="<lambda>"):  # the rest of the words is Python's
        run_jobs(lambda task, _tell: task, [("one", 1), ("two", 2)], Audience(), workers=2)
