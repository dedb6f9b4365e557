"""The worked tasks of `examples/tasks/` that need torch alone; the others are in `tests/integrations/test_tasks.py`."""

import math
import wave
from pathlib import Path

import numpy as np
import pytest

from muonsw.lab.errors import UsageError
from muonsw.lab.runs import load_run
from muonsw.lab.tasks import TaskConfig, check_task
from muonsw.lab.train.config import task_run
from muonsw.lab.train.loop import train
from tests.lab.train.small_runs import small_run

EXAMPLES = Path(__file__).parents[2] / "examples" / "tasks"


def short_run(name, folder, options=(), **settings):
    """A short run of a worked task, about which the check has nothing to note."""
    task = TaskConfig(str(EXAMPLES / f"{name}.py"), options)
    checked = check_task(task)
    assert checked.notes == ()
    train(task_run(task, checked, **{"threads": 1, **settings}), folder)
    return load_run(folder)


def test_the_player_of_the_token_game_learns_from_rewards(tmp_path):
    options = ("batch=64", "depth=1", "width=32")
    run = short_run("bandit", tmp_path / "run", options, steps=60, lr=0.01, eval_every=60, telemetry_every=20)
    before, after = run.evals["reward"]
    assert before < 0.2  # six tokens, so chance is a sixth
    assert after > 0.25
    assert run.evals["loss"][-1] < run.evals["loss"][0] - 0.05  # minus the reward of moves that are drawn


def chirp(path, seed, rate=8000, seconds=4):
    """A WAV file with a tone that glides and swells."""
    chosen, time = np.random.default_rng(seed), np.arange(rate * seconds) / rate
    first, speed, beat = chosen.uniform(200, 1500), chosen.uniform(50, 300), chosen.uniform(1, 4)
    tone = np.sin(2 * np.pi * (first + speed * time) * time) * np.sin(np.pi * beat * time) ** 2
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, rate, 0, "NONE", ""))
        file.writeframes((8000 * tone + 300 * chosen.normal(size=len(time))).astype("<i2").tobytes())


def test_masked_frames_of_recordings_are_filled_in(tmp_path):
    for seed in range(10):
        chirp(tmp_path / f"{seed}.wav", seed, seconds=4 if seed else 1)
    with pytest.raises(UsageError, match=r"has 9 files .* of at least 64 frames"):
        check_task(TaskConfig(str(EXAMPLES / "audio.py"), (f"folder={tmp_path}",)))
    chirp(tmp_path / "ten.wav", 10)
    options, often = ("batch=8", "depth=1", f"folder={tmp_path}"), {"eval_every": 60, "telemetry_every": 20}
    run = short_run("audio", tmp_path / "run", options, steps=60, lr=0.01, **often)
    assert run.evals["loss"][-1] < 0.7 * run.evals["loss"][0]


@pytest.fixture(scope="module")
def pre_trained(tmp_path_factory):
    """Options: a run of the decoder for each seed, and another text."""
    folder = tmp_path_factory.mktemp("pre-trained")
    train(small_run(steps=8), folder / "start-0")
    (folder / "new.txt").write_text("the cat sat on the mat and ate. " * 300, encoding="utf-8")
    return ("batch=4", f"start={folder / 'start-{seed}'}", f"text={folder / 'new.txt'}")


def test_a_pre_trained_decoder_learns_another_text(pre_trained, tmp_path):
    often = {"steps": 30, "eval_every": 30, "telemetry_every": 20}
    run = short_run("finetune", tmp_path / "run", pre_trained, lr=0.01, **often)
    assert run.evals["loss"][-1] < run.evals["loss"][0] - 0.5
    start = load_run(pre_trained[1].removeprefix("start=").replace("{seed}", "0"))
    assert run.evals["old"][0] == pytest.approx(start.final_loss, rel=0.05)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_pre_trained_decoder_learns_preferences(rank, pre_trained, tmp_path):
    options, often = (*pre_trained, "length=32", f"rank={rank}"), {"steps": 20, "eval_every": 20, "telemetry_every": 10}
    run = short_run("preferences", tmp_path / "run", options, lr=0.03 if rank else 0.01, **often)
    assert run.evals["loss"][0] == pytest.approx(math.log(2))  # it is its own reference
    assert run.evals["loss"][-1] < math.log(2) - 0.003
    assert run.evals["preferred"][-1] > 0.6
    trained = run.environment["trained"]["parameters"]
    assert ("lora (muon, decayed)" in trained) == (rank > 0)


def test_every_worked_task_is_tested():
    here, with_integrations = {"audio", "bandit", "finetune", "preferences"}, {"text", "vision"}
    assert {path.stem for path in EXAMPLES.glob("*.py")} == here | with_integrations
