"""Invalid options raise an error that names the fix, before anything is built."""

import numpy as np
import pytest
import torch
from torch import nn

from muonsw import SGDSW, AdamWSW, MuonSW


def weights():
    return [nn.Parameter(torch.ones(4, 4))]


# Invalid options, and the part of the message that names the fix, or "" if the option's name is enough.
WRONG = [
    ({"lr": -1.0}, "finite number of at least 0"),
    ({"lr": torch.ones(2)}, "one floating-point number"),
    ({"momentum": 1.0}, r"in \[0, 1\)"),
    ({"decay": "scale"}, "did you mean 'scaled'"),
    ({"ns_steps": 2001}, "at most 2000"),
    ({"split_sizes": 3}, ""),
    ({"peak_lr": 0.0}, "above 0"),
    ({"peak_lr": torch.tensor(1.0)}, "must be a float, None or 'running_max'"),
    ({"peak_lr": object()}, "must be a float, None or 'running_max'"),
    ({"nonfinite": "ignore"}, "'skip', 'raise', 'propagate'"),
    ({"replay": "never"}, "True or False"),
    ({"differentiable": True}, "steps are not differentiable"),
    ({"decya": "scaled"}, "did you mean 'decay'"),
    ({"wd": 0.0}, "did you mean 'weight_decay'"),
    ({"betas": (0.8, 0.9)}, "option of adamw.*, not of muon"),
    ({"preset": "soap"}, "pass it to for_model"),
    ({"use_muon": False}, "did you mean 'algorithm'"),
    ({"target_norm": 0.2}, "target_norm=0.2 needs norm='target' or norm='hyperball'"),
    ({"algorithm": "soap"}, "is an option of for_model and of a param group"),
    ({"normalize_beta2": 0.9}, "normalize_beta2=0.9 is an option of normalize='normuon'"),
    ({"block_period": 5}, "block_period=5 needs blocks: pass heads= or split_sizes="),
    ({"heads": 2, "block_period": 5, "norm": "hyperball"}, "norm='hyperball' .* combined with block_period"),
    ({"heads": 2, "block_period": 5, "normalize": "normuon"}, "block_period=5 and normalize='normuon'"),
]
OF_OTHER_CLASSES = [
    (AdamWSW, {"betas": 0.9}, "two numbers"),
    (AdamWSW, {"amsgrad": True}, "no AMSGrad variant"),
    (AdamWSW, {"momentum": 0.9}, "option of muon.*, not of adamw"),
    (MuonSW, {"state_dtype": "float16"}, "must be one of"),
    (SGDSW, {"nesterov": True}, "needs a momentum"),
]


@pytest.mark.parametrize(("cls", "options", "fix"), [*((MuonSW, *row) for row in WRONG), *OF_OTHER_CLASSES])
def test_invalid_options_are_refused_with_the_fix(cls, options, fix):
    with pytest.raises(ValueError, match=fix or next(iter(options))):
        cls(weights(), **options)


@pytest.mark.parametrize(
    ("group", "fix"),
    [
        ({"weight_deacy": 0.1}, "did you mean 'weight_decay'"),
        ({"nonfinite": "raise"}, "optimizer-level argument; pass it to the constructor"),
        ({"betas": (0.8, 0.9)}, "option of adamw, .*, not of muon; set it in"),
        ({"norm": "target", "cautious": True}, "cautious=True is for norm='free'"),
        ({"algorithm": "adamw", "ns_steps": 3}, "option of muon and dion2, not of adamw"),
        ({"algorithm": "soap", "eps": 0.0}, "eps=0: SOAP would divide by averages that start at zero"),
        ({"algorithm": "kl_shampoo", "eps": 0.0}, "eps=0: KL-Shampoo takes roots"),
        ({"algorithm": "kl_shampoo", "ns_dtype": "bfloat16"}, "ns_dtype='bfloat16' is too coarse"),
        ({"algorithm": "dion2", "fraction": 0.0}, r"fraction=0.0: must be in \(0, 1\]"),
    ],
)
def test_bad_groups_leave_the_optimizer_as_it_was(group, fix):
    optimizer = MuonSW(weights(), lr=0.1)
    with pytest.raises(ValueError, match=fix):
        optimizer.add_param_group({"params": weights(), **group})
    assert len(optimizer.param_groups) == 1


def test_groups_of_one_optimizer_keep_their_options_in_another():
    groups = [{"params": weights()}, {"params": weights(), "algorithm": "adamw"}]
    before = MuonSW(groups, lr=0.1, ns_steps=3).param_groups
    after = MuonSW(before, lr=0.2).param_groups
    assert [group["lr"] for group in after] == [0.1, 0.1]
    assert [(group["algorithm"], group.get("ns_steps")) for group in after] == [("muon", 3), ("adamw", None)]


@pytest.mark.parametrize(
    "options", [{"heads": 2, "norm": "hyperball"}, {"betas": (0.5, 0.6), "decay": "gradient_norm"}], ids=str
)
def test_options_that_norm_and_decay_rules_read_belong_to_every_algorithm(options):
    for algorithm in ("muon", "adamw", "sgd"):
        (group,) = MuonSW([{"params": weights(), "algorithm": algorithm, **options}], lr=0.1).param_groups
        assert {key: group[key] for key in options} == options


def test_keys_of_other_libraries_are_kept_saved_and_loaded():
    """torch takes any key in a group; frameworks write names, layer scales and hints into them, early or late."""
    extra = {"name": "matrices", "lr_scale": 0.5, "fused": True, "weight_decay_mult": 2.0, "lr_mult": 1}
    early = MuonSW([{"params": weights(), **extra}], lr=0.1)
    late = MuonSW(weights(), lr=0.1)
    late.param_groups[0].update(extra)
    for optimizer in (early, late):
        fresh = MuonSW(weights(), lr=0.1)
        fresh.load_state_dict(optimizer.state_dict())
        assert {key: fresh.param_groups[0][key] for key in extra} == extra


@pytest.mark.parametrize("cls", [MuonSW, AdamWSW, SGDSW])
def test_fused_false_asks_for_plain_operations(cls, monkeypatch):
    (plain,), (fused,) = weights(), weights()
    plain.grad = fused.grad = torch.ones(4, 4)
    torchs = {"fused": True, "foreach": True, "amsgrad": False, "differentiable": False}  # accepted without effect
    cls([fused], lr=0.1, **torchs).step()
    for name in ("_fused_adamw_", "_fused_sgd_"):
        monkeypatch.delattr(torch, name)
    cls([plain], lr=0.1, fused=False).step()
    torch.testing.assert_close(plain, fused, rtol=1e-6, atol=1e-7)


def test_numbers_of_numpy_are_numbers():
    optimizer = MuonSW(weights(), lr=np.float32(0.1), weight_decay=np.float64(0.2), ns_steps=np.int64(5))
    group = optimizer.param_groups[0]
    assert type(group["lr"]) is float
    group["lr"] = np.float32(0.05)
    group["params"][0].grad = torch.zeros(4, 4)
    optimizer.step()
    assert type(group["lr"]) is float
    assert group["params"][0][0, 0].item() == pytest.approx(1 - 0.2 * 0.05**2 / np.float32(0.1), rel=1e-6)


def test_a_model_is_not_accepted_as_parameters_nor_parameters_as_a_model():
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"MuonSW takes parameters, not a model; call MuonSW\.for_model"):
        MuonSW(model)
    for not_a_model in (model.parameters(), AdamWSW(model.parameters()), [model]):
        with pytest.raises(TypeError, match=r"MuonSW\.for_model takes the model itself.*not model\.parameters\(\)"):
            MuonSW.for_model(not_a_model, lr=0.1)


@pytest.mark.parametrize(
    "weight",
    [
        torch.zeros(4, 4).to(torch.float8_e4m3fn),
        torch.zeros(2, 2, dtype=torch.complex64),
        torch.zeros(2, 2, dtype=torch.int64),
        torch.ones(1, 4).expand(4, 4),
    ],
    ids=["8 bits", "complex", "integer", "expanded"],
)
def test_unsupported_parameters_are_refused_by_name(weight):
    optimizer = AdamWSW([("a", *weights())], lr=0.1)
    with pytest.raises(ValueError, match=r"w (has dtype|is expanded)"):
        optimizer.add_param_group({"params": [("w", weight)]})
    assert len(optimizer.param_groups) == 1


def test_stepping_weights_on_the_meta_device_is_refused():
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    optimizer = MuonSW.for_model(model, lr=0.1)
    for param in model.parameters():
        param.grad = torch.empty_like(param)
    with pytest.raises(ValueError, match=r"weight is on the meta device, .*to_empty"):
        optimizer.step()


def test_parameters_may_be_passed_in_every_way_that_torch_takes():
    model = nn.Linear(4, 4, bias=False)
    group = {"params": model.weight, "lr": 0.1}
    for params in (
        model.parameters(),
        list(model.parameters()),
        model.named_parameters(),
        [{"params": model.parameters(), "lr": 0.1}],
        [{"params": list(model.named_parameters())}],
        [group],
    ):
        assert MuonSW(params, lr=0.2).param_groups[0]["params"] == [model.weight]
    assert list(group) == ["params", "lr"]  # the caller's group is not changed


def test_groups_inherit_what_fits_their_algorithm():
    groups = [{"params": weights(), "algorithm": name} for name in ("muon", "sgd", "adamw")]
    optimizer = MuonSW(groups, lr=0.2, momentum=0.8, decay="constant", weight_decay=0.7)
    muon, sgd, adamw = optimizer.param_groups
    assert (muon["momentum"], muon["nesterov"]) == (0.8, True)
    assert (sgd["momentum"], sgd["nesterov"], sgd["momentum_form"]) == (0.0, False, "heavy_ball")
    assert adamw["betas"] == (0.9, 0.95)
    for group in optimizer.param_groups:
        assert (group["lr"], group["decay"], group["weight_decay"]) == (0.2, "constant", 0.7)
        assert {"momentum", "betas"} <= set(group)
