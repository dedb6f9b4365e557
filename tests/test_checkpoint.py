"""Saving, loading, copying and pickling: training continues bit for bit."""

import copy
import pickle
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim.lr_scheduler import CosineAnnealingLR

from muonsw import DECAY_RULES, SGDSW, AdamWSW, MuonSW, PeakLRWarning
from tests.common.problems import (
    OPTIMIZERS,
    RULE_OPTIONS,
    assert_resumes,
    assert_same,
    clones,
    cosine,
    dion2,
    matrices,
    run,
    via_file,
)

OPTIONS = {"muon": {"ns_dtype": "float32"}, "adamw": {}, "sgd": {"momentum": 0.9}, "lion": {}, "dion2": {}}


def trained(algorithm, steps=10):
    params = matrices((4, 6), (6, 6), (4, 6))
    optimizer = OPTIMIZERS[algorithm](params, lr=0.05, weight_decay=0.3, **OPTIONS[algorithm])
    run(optimizer, params, steps, scheduler=CosineAnnealingLR(optimizer, 40))
    return params, optimizer


@pytest.mark.parametrize("decay", DECAY_RULES)
def test_every_decay_rule_resumes_bit_for_bit_below_its_peak(decay):
    options = {"decay": decay, "weight_decay": 0.01, **RULE_OPTIONS.get(decay, {})}
    build = partial(AdamWSW, lr=0.05, **options)
    params = matrices((4, 6), (5,))
    optimizer = build(params)
    run(optimizer, params, 10, scheduler=CosineAnnealingLR(optimizer, 40))
    assert_resumes(build, params, optimizer, start=10)


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
@pytest.mark.parametrize("algorithm", OPTIMIZERS)
def test_copies_train_like_the_original(algorithm, copier):
    params, optimizer = trained(algorithm)
    optimizer.nonfinite = "raise"
    other = copier(optimizer)
    assert (other.nonfinite, other.chunk_bytes) == ("raise", None)
    copied = other.param_groups[0]["params"]
    run(optimizer, params, 5, start=10)
    run(other, copied, 5, start=10)
    assert_same(copied, params)


@pytest.mark.parametrize("options", [{"heads": 2, "block_period": 2}, {"precondition": "soap"}])
def test_loading_a_state_of_torch_discards_all_earlier_state(options):
    params = matrices((4, 6), (6, 6))
    theirs = torch.optim.Muon(params, lr=0.05)
    run(theirs, params, 3)
    results = []
    for steps_before in (0, 3):
        ours = clones(params)
        optimizer = MuonSW(ours, lr=0.05, decay="constant", **options)
        run(optimizer, ours, steps_before)
        torch._foreach_copy_([param.data for param in ours], params)
        optimizer.load_state_dict(copy.deepcopy(theirs.state_dict()))
        run(optimizer, ours, 4, start=3)
        results.append(ours)
    assert_same(*results)


@pytest.mark.parametrize(("torchs", "ours"), [(None, "original"), ("spectral_unclamped", "spectral")])
def test_a_state_of_torchs_muon_sets_the_scale(torchs, ours):
    (param,) = matrices((4, 6))
    saved = torch.optim.Muon([param], lr=0.05).state_dict()
    saved["param_groups"][0]["adjust_lr_fn"] = torchs
    optimizer = MuonSW([param], lr=0.05)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["scale"] == ours
    run(optimizer, [param], 1)


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda saved, _: [group.update(resolved_peak_lr="none") for group in saved["param_groups"]], TypeError),
        (lambda _, optimizer: optimizer.register_load_state_dict_post_hook(lambda _: 1 // 0), ZeroDivisionError),
        (lambda *_: None, PeakLRWarning),  # a warning made an error
    ],
    ids=["peak", "hook of the user", "warning"],
)
def test_a_load_that_fails_late_is_undone(spoil, error):
    def trained(lr, peak_lr):
        params = matrices((4, 4), (3, 4))
        groups = [{"params": params[:1], "decay": "gradient_norm"}, {"params": params[1:], "decay": "log_time"}]
        optimizer = AdamWSW(groups, lr=lr, weight_decay=0.1, peak_lr=peak_lr)
        run(optimizer, params, 3)
        return optimizer, params

    (optimizer, params), (twin, expected) = trained(0.1, 0.1), trained(0.1, 0.1)
    saved = copy.deepcopy(trained(0.05, 0.4)[0].state_dict())
    spoil(saved, optimizer)
    with warnings.catch_warnings(action="error"), pytest.raises(error):
        optimizer.load_state_dict(saved)
    assert optimizer.state_dict()["param_groups"] == twin.state_dict()["param_groups"]
    run(optimizer, params, 2, start=3)
    run(twin, expected, 2, start=3)
    assert_same(params, expected)


def group_update(**options):
    return lambda saved: saved["param_groups"][0].update(options)


def test_load_hooks_of_the_user_see_and_change_the_state():
    _, optimizer = trained("muon")
    (param, *_), other = trained("muon", steps=0)
    seen = []
    other.register_load_state_dict_pre_hook(
        lambda _, saved: {**saved, "param_groups": [{**saved["param_groups"][0], "nesterov": False}]}
    )
    other.register_load_state_dict_post_hook(lambda loaded: seen.append("momentum_buffer" in loaded.state[param]))
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["nesterov"] is False
    assert seen == [True]


UNFIT = [
    (lambda s: s["param_groups"].append(copy.deepcopy(s["param_groups"][0])), "param groups of 3 and 3 parameters"),
    (lambda s: s["param_groups"][0]["params"].pop(), "param groups of 2 parameters and this optimizer of 3; build"),
    (lambda s: s.pop("param_groups"), r"pass the result of optimizer.state_dict\(\)"),
    (group_update(orthogonalizer="mine"), "unknown orthogonalizer 'mine'"),
    (group_update(momentum=1.5), "momentum=1.5"),
    (group_update(decay="cosine"), "pass total_steps"),
    (group_update(norm="target", cautious=True), "cautious=True is for norm='free'"),
    (
        lambda saved: saved["state"][1].update(momentum_buffer=torch.zeros(())),
        r"momentum_buffer of parameter 1 of group 0 has shape \(\), but \(6, 6\) is needed",
    ),
]


@pytest.mark.parametrize(("spoil", "message"), UNFIT)
def test_states_that_do_not_fit_are_refused_with_nothing_changed(spoil, message):
    _, optimizer = trained("muon")
    saved = copy.deepcopy(optimizer.state_dict())
    spoil(saved)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for index in before["state"]:
        assert_same(after["state"][index].values(), before["state"][index].values())


OF_OTHER_RULES = [
    (AdamWSW, "Adam", {"weight_decay": 0.1}, r"from Adam with weight_decay=0\.1, added"),
    *((SGDSW, name, {}, "start with fresh state") for name in ("RMSprop", "ASGD", "Adagrad", "Adafactor")),
    (AdamWSW, "RAdam", {"weight_decay": 0.1, "decoupled_weight_decay": True}, "start with fresh state"),
    (AdamWSW, "NAdam", {}, "start with fresh state"),
    (AdamWSW, "AdamW", {"amsgrad": True}, "amsgrad=True, which has no counterpart"),
    (MuonSW, "Muon", {"ns_coefficients": (3.0, -3.0, 1.0)}, "Newton-Schulz coefficients"),
    (SGDSW, "SGD", {"momentum": 0.9, "dampening": 0.5}, "dampening"),
    (MuonSW, "SGD", {"momentum": 0.9}, "has algorithm='muon', but the saved state is from torch's sgd"),
    (MuonSW, "AdamW", {}, "has algorithm='muon', but the saved state is from torch's adamw"),
    (dion2, "Muon", {}, "has algorithm='dion2', but the saved state is from torch's muon"),
]


@pytest.mark.parametrize(("kind", "theirs", "options", "message"), OF_OTHER_RULES)
def test_states_of_other_rules_are_refused(kind, theirs, options, message):
    """Averages of the same name may differ in meaning."""
    params = matrices((4, 4))
    optimizer = getattr(torch.optim, theirs)(params, lr=0.1, **options)
    run(optimizer, params, 2)
    ours = kind(matrices((4, 4)), lr=0.2)
    with pytest.raises(ValueError, match=message):
        ours.load_state_dict(optimizer.state_dict())
    assert not ours.state
    assert ours.param_groups[0]["lr"] == 0.2


def test_a_loaded_state_gets_the_strides_of_its_parameter():
    """A channels_last checkpoint in a contiguous model; state of other strides cannot be cut into chunks."""

    def stepped(memory_format):
        param = nn.Parameter(matrices((6, 4, 3, 5))[0].detach().to(memory_format=memory_format))
        optimizer = AdamWSW([param], lr=0.05, weight_decay=0.3, chunk_bytes=64)
        run(optimizer, [param], 2)
        return optimizer, param

    (theirs, param), (ours, contiguous) = stepped(torch.channels_last), stepped(torch.contiguous_format)
    contiguous.data.copy_(param)
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    assert {tensor.stride() for tensor in ours.state[contiguous].values() if tensor.dim()} == {contiguous.stride()}
    run(ours, [contiguous], 2, start=2)
    run(theirs, [param], 2, start=2)
    torch.testing.assert_close(contiguous, param)


def named(order):
    """Three parameters, two of them of equal shape, in the given order."""
    tensors = dict(zip("abc", matrices((4, 6), (4, 6), (6, 6)), strict=True))
    return [(name, tensors[name]) for name in order]


class Layers(nn.Module):
    """A GRU, whose matrices are split, and two Linear layers, as attributes in the given order."""

    def __init__(self, order):
        super().__init__()
        torch.manual_seed(0)
        parts = {"gru": nn.GRU(6, 6), "up": nn.Linear(6, 18), "down": nn.Linear(18, 6), "norm": nn.LayerNorm(6)}
        for name in order:
            setattr(self, name, parts[name])
        self.head = nn.Linear(6, 11)  # else the role of the last Linear layer would depend on the order


def options_by_name(optimizer):
    return {
        name: {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for group in optimizer.param_groups
        for name in group["param_names"]
    }


def state_by_name(optimizer):
    return {
        name: optimizer.state[param]
        for group in optimizer.param_groups
        for name, param in zip(group["param_names"], group["params"], strict=True)
    }


@pytest.mark.parametrize("prefix", ["", "_orig_mod.", "module."])
def test_reordered_and_divided_groups_are_matched_by_name(prefix):
    """torch matches by position, and would load the momentum of `b` into `a`."""
    params = [(prefix + name, param) for name, param in named("abc")]
    saved = MuonSW([{"params": params[:1], "weight_decay": 0.7}, {"params": params[1:]}], lr=0.05, weight_decay=0.2)
    run(saved, [param for _, param in params], 2)
    a, b, c = named("abc")
    loaded = MuonSW([{"params": [c]}, {"params": [a], "nesterov": False}, {"params": [b]}], lr=0.01, peak_lr=0.05)
    loaded.load_state_dict(via_file(saved.state_dict()))
    options, states = options_by_name(saved), state_by_name(saved)
    assert options_by_name(loaded) == {name.removeprefix(prefix): options[name] for name in options}
    for name, state in states.items():
        assert_same(state_by_name(loaded)[name.removeprefix(prefix)], state)
    with pytest.raises(ValueError, match="b was saved in another param group"):
        MuonSW([b, c, a], lr=0.05).load_state_dict(saved.state_dict())


@pytest.mark.parametrize(("saved", "built"), [
    ({"normalize": "normuon"}, {}), ({}, {"precondition": "soap", "precondition_frequency": 5}),
    ({"orthogonalizer": "polar_express"}, {}), ({"norm": "hyperball"}, {}), ({}, {"norm": "hyperball"}),
    ({"heads": 2}, {}), ({}, {"heads": 2}), ({}, {"split_sizes": (2, 4)}),
])  # fmt: skip
def test_a_load_continues_with_the_saved_rule_and_matrices(saved, built):
    """Also where a group does not store an option because it has its default; another rule is a warning."""
    options = {"lr": 0.05, "weight_decay": 0.3, "ns_dtype": "float32"}
    params = matrices((6, 4))
    optimizer = MuonSW(params, **options, **saved)
    run(optimizer, params, 3)
    resumed = clones(params)
    other = MuonSW(resumed, **options, **built)
    with warnings.catch_warnings(record=True, action="always") as caught:
        other.load_state_dict(optimizer.state_dict())
    is_other_rule = not {"heads", "split_sizes"} & {*saved, *built}
    assert ["was built with" in str(entry.message) for entry in caught] == [True] * is_other_rule
    run(optimizer, params, 3, start=3)
    run(other, resumed, 3, start=3)
    assert_same(resumed, params)


@pytest.mark.parametrize("offload", [False, True])
def test_a_load_keeps_the_optimizers_offload_setting(offload):
    optimizer = MuonSW(matrices((4, 6)), lr=0.05, offload=offload)
    optimizer.load_state_dict(MuonSW(matrices((4, 6)), lr=0.05, offload=not offload).state_dict())
    assert optimizer.param_groups[0]["offload"] is offload


def test_a_state_of_torch_past_its_peak_does_not_warn():
    """Its groups do not record the highest rate, so a falling rate must not warn."""
    params = matrices((4, 6))
    theirs = torch.optim.AdamW(params, lr=0.05)
    scheduler = CosineAnnealingLR(theirs, 20)
    run(theirs, params, 10, scheduler=scheduler)
    optimizer = AdamWSW(params, lr=0.05)
    optimizer.load_state_dict(theirs.state_dict())
    run(optimizer, params, 10, schedule=cosine(0.05, 20, final=0.0), start=10)
    assert optimizer.summary().groups[0].highest_lr == 0.05


def test_names_and_positions_must_not_contradict_each_other():
    """Only a new name in the same position is unambiguous."""
    optimizer = MuonSW(named("abc"), lr=0.05)
    run(optimizer, optimizer.param_groups[0]["params"], 2)
    saved = optimizer.state_dict()
    b, a, c = named("bac")
    for second in (a, ("other", a[1])):
        with pytest.raises(ValueError, match="b would get the state of a"):
            MuonSW([b, second, ("new", c[1])], lr=0.05).load_state_dict(saved)
    with pytest.raises(ValueError, match="new would get the state of b"):
        MuonSW([a, ("new", b[1]), ("b", c[1])], lr=0.05).load_state_dict(saved)
    for names in (["a", "b", "new"], ["new.a", "new.b", "new.c"]):
        renamed = MuonSW(list(zip(names, clones([a[1], b[1], c[1]]), strict=True)), lr=0.05)
        renamed.load_state_dict(copy.deepcopy(saved))
        assert renamed.param_groups[0]["param_names"] == names
        for old, new in zip(state_by_name(optimizer).values(), state_by_name(renamed).values(), strict=True):
            assert_same(old, new)


def in_another_order_by_checkpoint(flat, patterns, other_patterns):
    """Save by `get_optimizer_state_dict` and load into a model whose attributes are in another order."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    models = [Layers(("gru", "up", "down", "norm")), Layers(("norm", "down", "up", "gru"))]
    before, after = (
        MuonSW.for_model(model, lr=0.02, weight_decay=0.1, patterns=patterns_of_model, decay="constant")
        for model, patterns_of_model in zip(models, (patterns, other_patterns), strict=True)
    )
    run(before, list(models[0].parameters()), 2)
    saved = get_optimizer_state_dict(models[0], before, options=options)
    set_optimizer_state_dict(models[1], after, saved, options=options)
    return before, after


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
def test_distributed_checkpoints_keep_names_and_options_together(flat):
    """They keep `param_names` as it was saved and order `params` as they are now."""
    patterns = {"down.weight": {"weight_decay": 0.4}}
    before, after = in_another_order_by_checkpoint(flat, patterns, patterns)
    assert options_by_name(after) == options_by_name(before)
    states = state_by_name(after)
    for name, state in state_by_name(before).items():
        assert_same(states[name], state)


ONE_GROUP, TWO_GROUPS = {}, {"down.weight": {"weight_decay": 0.4}}


@pytest.mark.parametrize(
    ("flat", "saved", "built"),
    [(False, ONE_GROUP, TWO_GROUPS), (False, TWO_GROUPS, ONE_GROUP), (True, TWO_GROUPS, ONE_GROUP)],
    ids=["nested divided", "nested joined", "flat joined"],
)
def test_distributed_checkpoints_of_other_groups_are_refused(flat, saved, built):
    """If groups are joined, torch passes the options of one of them; if a group is divided, it passes none."""
    with pytest.raises(ValueError, match="was saved in another param group"):
        in_another_order_by_checkpoint(flat, saved, built)


def test_a_saved_step_count_may_be_a_number_and_is_not_rounded():
    """bfloat16, as the default dtype, would round odd counts above 256."""
    (param,) = matrices((4, 4))
    theirs = torch.optim.AdamW([param], lr=0.01)
    run(theirs, [param], 1)
    saved = theirs.state_dict()
    saved["state"][0]["step"] = 1001.0
    ours = AdamWSW(clones([param]), lr=0.01, peak_lr=0.01)
    torch.set_default_dtype(torch.bfloat16)
    try:
        ours.load_state_dict(saved)
    finally:
        torch.set_default_dtype(torch.float32)
    step = ours.state[ours.param_groups[0]["params"][0]]["step"]
    assert (float(step), step.dtype) == (1001.0, torch.float32)
