"""The launcher itself: faults, signals and restarts through torchrun, on one node and on two."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.lab.train.ranks import NEEDED, free_port, write_config
from tests.lab.train.test_rank_faults import STEPS, config, ending, undisturbed

pytestmark = [pytest.mark.slow, *NEEDED]
ROOT = Path(__file__).parents[3]


def torchrun(*arguments, options=("--standalone",), ranks=2):
    """Start the launcher; what it and all its ranks print is read together."""
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
    said, _ = launcher.communicate(timeout=seconds)
    return launcher.returncode, said


def test_a_run_through_torchrun_is_that_of_its_ranks(tmp_path):
    code, said = finished(torchrun("muonsw.lab.run", write_config(config()), tmp_path / "run"))
    assert code == 0, said
    assert said.count("validation loss") == 1, "one rank speaks"
    assert ending(tmp_path / "run") == undisturbed()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_killed_rank_is_started_again_and_the_run_ends_with_the_same_bits(strategy, tmp_path):
    options = ("--standalone", "--max-restarts=1")
    chosen = write_config(config(strategy))
    code, said = finished(torchrun("tests.lab.train.faulty_trainer", "kill", chosen, tmp_path / "run", options=options))
    assert code == 0, said
    assert "another rank has ended or cannot be reached" in said
    assert ending(tmp_path / "run") == undisturbed(strategy=strategy)


def test_a_rank_that_hangs_is_ended_and_started_again(tmp_path):
    options = ("--standalone", "--max-restarts=1")
    chosen = write_config(config(timeout=10.0))
    code, said = finished(torchrun("tests.lab.train.faulty_trainer", "hang", chosen, tmp_path / "run", options=options))
    assert code == 0, said
    assert "has made no progress for 10 s" in said
    assert ending(tmp_path / "run") == undisturbed()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_to_the_launcher_saves_the_run(number, tmp_path):
    folder = tmp_path / "run"
    launcher = torchrun("tests.lab.train.faulty_trainer", "slow", write_config(config()), folder)
    while not (folder / "metrics.jsonl").exists() or '"step":1,' not in (folder / "metrics.jsonl").read_text(
        encoding="utf-8"
    ):
        assert launcher.poll() is None, launcher.stdout.read()
        time.sleep(0.05)
    launcher.send_signal(number)
    code, said = finished(launcher)
    assert code != 0
    assert f"of {STEPS} updates, saved; run the same command again" in said
    assert not (folder / "result.json").exists()
    code, said = finished(torchrun("muonsw.lab.run", write_config(config()), folder))
    assert code == 0, said
    assert "going on after update" in said
    assert ending(folder) == undisturbed()


def test_two_nodes(tmp_path):
    """Two launchers with one rank each, which find each other as on two machines; one rank is killed."""
    options = ("--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=two")
    given = ("tests.lab.train.faulty_trainer", "kill", write_config(config()), tmp_path / "run")
    launchers = [torchrun(*given, options=(*options, "--max-restarts=2"), ranks=1) for _ in range(2)]
    answers = [finished(launcher) for launcher in launchers]
    assert [code for code, _ in answers] == [0, 0], answers
    assert ending(tmp_path / "run") == undisturbed()


def test_a_users_error_is_the_last_thing_that_is_read(tmp_path):
    code, said = finished(torchrun("muonsw.lab.run", write_config(config(batch=5)), tmp_path / "run"))
    assert code != 0
    assert "batch=5 does not split into accumulation=1 micro-batches on each of 2 ranks" in last_words(said)


def last_words(said):
    """The last line that says something; torchrun closes its report with a rule."""
    return [line for line in said.splitlines() if line.strip("= ")][-1]


def test_a_complete_run_of_four_ranks_ends_well_each_time(tmp_path):
    """One of eight used to end in SIGABRT after its result was written."""
    for number in range(24):
        code, said = finished(torchrun("muonsw.lab.run", write_config(config()), tmp_path / f"run{number}", ranks=4))
        assert code == 0, said
