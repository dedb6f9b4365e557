"""The workshop: every run once, the same bits in any number of processes, resumable, and no arm ends the others."""

from dataclasses import replace

import pytest
import torch
from torch._dynamo.utils import counters

from muonsw.lab.stats import Evidence
from muonsw.lab.studies import main_table
from muonsw.lab.studies.workshop import Workshop, describe
from muonsw.lab.theory.experiment import Experiment
from muonsw.lab.train.state import Training, with_fingerprint
from tests.lab.small_experiments import SMALL
from tests.lab.studies.small_comparisons import (
    QUIET,
    by_settings,
    tiny_run,
    tiny_scale,
)
from tests.lab.train.small_runs import tokens


def test_equal_runs_are_one_job_and_different_data_or_settings_another(tmp_path):
    shop, scale = by_settings(tmp_path), tiny_scale()
    table = main_table.all_rows(scale)
    jobs = shop.jobs([*main_table.sampled_row(scale), *table])
    assert len(jobs) == len(shop.jobs(table)) == (3 + 5) * 2
    assert len({job.name for job in jobs.values()}) == len(jobs)
    ready = shop.places.ready(scale.rows[16])
    assert ready.data.path == tokens()
    assert ready.threads == 1
    one = table[0]
    job, other = (shop.places.job(replace(one, base=base), one.arms[0], 0) for base in (ready, changed(ready)))
    assert job.folder != other.folder
    assert describe(job.config) in job.folder.name


def changed(config):
    return replace(config, eval_every=3)


@pytest.mark.slow
def test_experiments_do_not_depend_on_the_number_of_processes():
    fixed, scalar = SMALL["fixed-rate"], SMALL["scalar-figure"]
    experiments = [
        replace(fixed, settings=replace(fixed.settings, steps=10, fixed_steps=5)),
        replace(scalar, settings=replace(scalar.settings, steps=50, points=5)),
    ]
    together, alone = (Workshop(QUIET, workers).experiment(experiments, seed=3) for workers in (2, 1))
    assert list(together) == list(alone) == [experiment.name for experiment in experiments]
    assert {name: own for name, (own, _) in together.items()} == {name: own for name, (own, _) in alone.items()}


def test_the_longest_experiment_starts_first():
    order: list[str] = []

    def note(setting, _generator):
        order.append(setting)
        return Evidence([])

    experiments = [Experiment(name, "", name, note, cost) for name, cost in (("a", 1.0), ("b", 3.0), ("c", 2.0))]
    assert list(Workshop(QUIET, 1).experiment(experiments, seed=0)) == ["a", "b", "c"]
    assert order == ["b", "c", "a"]


@pytest.mark.slow
# the compiler of torch makes an instance of our autograd function, which torch itself warns about
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
