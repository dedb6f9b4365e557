"""The worked tasks of `examples/tasks/` that need torch alone; the others are in `tests/integrations/test_tasks.py`."""

from pathlib import Path

from muonsw.lab.runs import load_run
from muonsw.lab.tasks.check import check_task
from muonsw.lab.tasks.functions import TaskConfig
from muonsw.lab.train.loop import train
from muonsw.lab.train.presets import task_run

EXAMPLES = Path(__file__).parents[3] / "examples" / "tasks"
TESTED_ELSEWHERE = {"text", "vision"}


def short_run(name, folder, options=(), **settings):
    """The run of a worked task, shortened, and what its check noted."""
    task = TaskConfig(str(EXAMPLES / f"{name}.py"), options, eval_batches=2)
    checked = check_task(task)
    train(task_run(task, checked, **{"threads": 1, **settings}), folder)
    return load_run(folder), checked.notes


def test_the_player_of_the_token_game_learns_from_rewards(tmp_path):
    options = ("batch=64", "depth=1", "width=32")
    run, notes = short_run("bandit", tmp_path / "run", options, steps=60, lr=0.01, eval_every=60, telemetry_every=20)
    assert notes == ()
    before, after = run.evals["reward"]
    assert before < 0.2  # six tokens, so chance is a sixth
    assert after > 0.25
    assert run.evals["loss"][-1] < run.evals["loss"][0] - 0.05  # minus the reward of moves that are drawn


def test_every_worked_task_is_tested():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {"bandit"} | TESTED_ELSEWHERE
