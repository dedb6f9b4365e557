"""Studies: every run once, the same bits in any number of processes, runs that diverge, and tokens that do not fit."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from muonsw.lab.compare import jobs_of
from muonsw.lab.errors import UsageError
from muonsw.lab.studies import main_table
from muonsw.lab.studies.catalogue import STUDIES
from muonsw.lab.studies.scales import SCALES, find_data
from muonsw.lab.studies.study import by_settings, run_experiments, usable_results
from muonsw.lab.train.state import Training, with_fingerprint
from tests.lab.small_experiments import SMALL
from tests.lab.studies.made_runs import pair
from tests.lab.studies.small_comparisons import KEY, QUIET, WILD, comparison, tiny_run, tiny_scale, train_in
from tests.lab.train.small_runs import tokens


def test_paper_scale_refuses_other_tokens():
    with pytest.raises(UsageError, match="needs GPT-2 tokens"):
        find_data(SCALES["paper"], Path(tokens()))
    assert find_data(SCALES["cpu"], Path(tokens())) == Path(tokens())


@pytest.mark.slow
def test_an_arm_that_diverges_takes_its_claims_with_it_and_a_sweep_counts_it_as_worst(tmp_path):
    scale = tiny_scale(rates=(0.01, 0.02, 9.0), seeds=1)
    scale = replace(scale, sweep=replace(scale.sweep, diverged=1.0))
    report = STUDIES["width-transfer"].conduct(tmp_path, scale, console=QUIET, train=train_in(tmp_path / "runs"))
    assert "'adamw, lr 9' diverged at step" in report.sentence
    assert report.tables[0].rows[0][2] != "9"
    first = main_table.row(tiny_scale(seeds=1), 16)
    arms = tuple(replace(WILD, name="scaled") if arm.name == "scaled" else arm for arm in first.arms)
    wild = replace(first, base=replace(first.base, diverged=1.0), arms=arms)
    study = replace(STUDIES["main-table"], comparisons=lambda _scale: [wild])
    report = study.conduct(tmp_path, scale, console=QUIET, train=train_in(tmp_path / "runs"))
    assert report.claims == {"main-table": []}
    assert report.sentence.startswith("No claim is made. 'scaled' diverged at step")


@pytest.mark.parametrize(("seeds", "left"), [((0, 1, 2), [2]), ((0, 1), None)])
def test_only_seeds_that_every_arm_completed_are_judged(seeds, left):
    """Each rule loses another seed."""
    lost = {"constant": 0, "scaled": 1}
    arms = {
        rule: [replace(run, result={"diverged": 7}) if run.seed == lost[rule] else run for run in runs[: len(seeds)]]
        for rule, runs in pair().items()
    }
    usable = usable_results([comparison(seeds=seeds)], {KEY: arms})
    if left is None:
        assert not usable
    else:
        assert {rule: [run.seed for run in runs] for rule, runs in usable[KEY].items()} == dict.fromkeys(arms, left)
        claims = main_table.judge_rows({"width 32": usable[KEY]}, SCALES["cpu"])
        assert claims[0].measured == pytest.approx(-0.05)


def test_equal_runs_are_one_job_and_different_data_or_settings_another(tmp_path):
    place, scale = by_settings(tmp_path, Path(tokens()), "cpu"), tiny_scale()
    table = STUDIES["main-table"].comparisons(scale)
    jobs = jobs_of([*main_table.headline_row(scale), *table], place)
    assert len(jobs) == len(jobs_of(table, place)) == (3 + 5) * 2
    assert len({job.name for job in jobs.values()}) == len(jobs)
    first = table[0]
    job = place(first, first.arms[0], 0)
    assert (job.config.data.path, job.config.threads) == (tokens(), 1)
    assert job.config.arm in job.folder.name
    other = replace(first, base=replace(first.base, eval_every=3))
    assert place(other, first.arms[0], 0).folder != job.folder


@pytest.mark.slow
def test_experiments_do_not_depend_on_the_number_of_processes():
    experiments = [
        replace(SMALL["fixed-rate"], steps=10, fixed_steps=5),
        replace(SMALL["scalar-figure"], steps=50, points=5),
    ]
    together, alone = (run_experiments(experiments, console=QUIET, workers=workers, seed=3) for workers in (2, 1))
    assert list(together) == list(alone) == [experiment.name for experiment in experiments]
    assert together == alone


@pytest.mark.slow
# torch's compiler instantiates our autograd function, which torch warns about
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_runs_of_one_model_in_one_process_share_their_compiled_code(monkeypatch):
    """The compiler sees the model once for all arms and seeds, and again for a model of another shape."""
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model: real(model, backend="eager"))
    graphs = []
    for seed, width in ((0, 16), (1, 16), (2, 16), (0, 32)):
        config = tiny_run(compile="on", seed=seed, steps=1)
        training = Training(with_fingerprint(replace(config, model=replace(config.model, width=width))))
        counters.clear()
        training.forward_backward(next(training.batches()))
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[1:3] == [0, 0]
    assert graphs[0] > 0
    assert graphs[3] > 0
