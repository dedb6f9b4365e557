"""Arms: what the command line says becomes a config, and the control has the total of its arm."""

import math
from dataclasses import replace

import pytest

from muonsw.decay import DECAY_RULES
from muonsw.lab.arms import Arm, decay_factors, parse_arm, same_total
from muonsw.lab.errors import UsageError
from muonsw.lab.train.config import OptimizerConfig, ScheduleConfig
from muonsw.presets import PRESETS
from tests.lab.studies.small_comparisons import ARMS
from tests.lab.train.small_runs import small_run


def test_an_arm_has_one_name_and_one_config():
    base = OptimizerConfig(lr=0.01)
    texts = ("normuon", "normuon/scaled", "soap/constant, lr=0.1", "scaled,algorithm=adamw")
    arms = [parse_arm(text, base) for text in texts]
    assert arms[0] == arms[1] == Arm("normuon/scaled", replace(base, preset="normuon"))
    assert arms[2] == Arm("soap/constant, lr=0.1", replace(base, preset="soap", decay="constant", lr=0.1))
    assert arms[3] == Arm("scaled, algorithm=adamw", replace(base, algorithm="adamw"))
    assert not set(PRESETS) & set(DECAY_RULES)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("scalled", r"unknown decay rule or preset 'scalled' \(did you mean 'scaled'\?\); known: .*normuon"),
        ("", "unknown decay rule or preset ''"),
        ("soap/costant", r"unknown decay rule 'costant' \(did you mean 'constant'\?\)"),
        ("saop/constant", r"unknown preset 'saop' \(did you mean 'soap'\?\)"),
        ("/constant,preset=soap", "setting=value"),
        ("soap,momentum=0.9", "optimizer.preset='soap' has its own momentum: leave optimizer.momentum=0.9 out"),
        ("scaled,weight_decay", "setting=value"),
        ("scaled,betas=0.9", "settings algorithm, lr"),
        ("scaled,lr=fast", "lr must be a number"),
        ("scaled,algorithm=adam", "must be one of muon, adamw"),
    ],
)
def test_a_wrong_arm_is_explained(text, message):
    with pytest.raises(UsageError, match=message):
        parse_arm(text, OptimizerConfig())


def test_total_decay_of_the_control_is_that_of_the_scaled_arm():
    config = small_run(steps=2000)
    control = same_total(config, ARMS[1])
    scaled, constant = (math.fsum(decay_factors(config, arm)) for arm in (ARMS[1].optimizer, control.optimizer))
    assert constant == pytest.approx(scaled, rel=1e-12)
    flat = replace(config, schedule=ScheduleConfig(warmup_steps=0))
    # half a cosine from 1 to 0.1 has mean 0.55 and mean square 0.55^2 + 0.45^2/2
    assert same_total(flat, ARMS[1]).optimizer.weight_decay == pytest.approx((0.55**2 + 0.45**2 / 2) / 0.55, rel=2e-3)
    with pytest.raises(UsageError, match="has no decay"):
        same_total(config, Arm("idle", replace(ARMS[1].optimizer, weight_decay=0.0)))
