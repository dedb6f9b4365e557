"""Settings: strict, and the same after a round trip through JSON."""

import json

import pytest

from muonsw.lab.train.checkpoint import identity
from muonsw.lab.train.config import DEFAULTS, RunConfig, preset_run
from tests.lab.train.small_runs import small_run


@pytest.mark.parametrize("name", [*DEFAULTS, "normuon"])
def test_every_preset_survives_json(name):
    config = small_run(optimizer={"preset": name}) if name == "normuon" else preset_run(name, "tokens")
    assert RunConfig.from_data(json.loads(json.dumps(config.as_data()))) == config


def test_the_identity_of_a_run_never_changes():
    assert identity(preset_run("mini", "tokens")) == "5f79006e6e"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optimizer": {"learning_rate": 1}}, "optimizer: unknown setting 'learning_rate'"),
        ({"optimizer": {"decay": "scalled"}}, "optimizer.decay='scalled' must be one of"),
        ({"optimizer": {"preset": "soap", "algorithm": "adamw"}}, "preset='soap' decides algorithm"),
        ({"steps": "many"}, "steps='many' must be of type int"),
        ({"batch": 6, "accumulation": 4}, "does not split"),
        ({"version": 2}, "settings of version 2"),
        ({"schedule": "cosine"}, "schedule: expected an object"),
        ({"schedule": {"warmup_steps": 50}, "steps": 50}, "less than total_steps=50"),
        ({"model": {"width": 30}}, "must be a multiple of head_dim"),
    ],
)
def test_wrong_settings_are_named(change, message):
    data = small_run().as_data()
    for key, value in change.items():
        data[key] = {**data[key], **value} if isinstance(value, dict) else value
    with pytest.raises(ValueError, match=message):
        RunConfig.from_data(data)


@pytest.mark.parametrize(
    ("part", "name", "unset", "chosen"),
    [("parallel", "replicas", 1, 2), ("schedule", "warmup_shape", "linear", "cosine")],
)
def test_a_setting_that_no_longer_exists_is_ignored_at_its_default_and_refused_otherwise(part, name, unset, chosen):
    data = small_run().as_data()
    data[part][name] = unset
    assert RunConfig.from_data(data) == small_run()
    data[part][name] = chosen
    with pytest.raises(ValueError, match=rf"{part}\.{name}=.* needs an older muonsw"):
        RunConfig.from_data(data)
