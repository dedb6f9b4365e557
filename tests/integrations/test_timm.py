"""timm: its models, layer decay, schedulers and registry."""

import copy

import pytest
import torch

pytest.importorskip("timm")
import timm
from timm.optim import create_optimizer_v2, list_optimizers, param_groups_layer_decay
from timm.scheduler import create_scheduler_v2

from muonsw import SGDSW, AdamWSW, MuonSW
from muonsw.integrations.timm import register

LR, STEPS = 0.01, 8


def vit():
    torch.manual_seed(0)
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=32, embed_dim=24, depth=2, num_heads=2, num_classes=5, patch_size=16
    )


def resnet():
    torch.manual_seed(0)
    return timm.create_model("resnet10t", num_classes=5)


def layer_decayed(model, **options):
    register(model)
    return create_optimizer_v2(model, opt="muonsw", **{"lr": LR, "weight_decay": 0.1, "layer_decay": 0.5, **options})


def train(model, optimizer, scheduler, start, end):
    for step in range(start, end):
        generator = torch.Generator().manual_seed(step)
        images, labels = torch.randn(2, 3, 32, 32, generator=generator), torch.tensor([step % 5, 1])
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step_update(step + 1)


def cosine(optimizer, warmup=2):
    scheduler, _ = create_scheduler_v2(
        optimizer,
        "cosine",
        num_epochs=STEPS,
        warmup_epochs=warmup,
        warmup_lr=1e-4,
        step_on_epochs=False,
        updates_per_epoch=1,
    )
    return scheduler


@pytest.mark.parametrize("build", [vit, resnet])
def test_its_cosine_with_warmup_finds_the_peak(build):
    model = build()
    optimizer = MuonSW.for_model(model, lr=LR, weight_decay=0.1)
    rates = []
    optimizer.register_step_pre_hook(lambda o, *_: rates.append(o.param_groups[0]["lr"]))
    train(model, optimizer, cosine(optimizer), 0, STEPS)
    assert rates[0] == 1e-4
    assert max(rates) <= LR
    assert {group["resolved_peak_lr"] for group in optimizer.param_groups} == {LR}


@pytest.mark.parametrize("build", [vit, resnet])
def test_layer_decay_gives_each_depth_its_own_rate_and_peak(build):
    model = build()
    decayed = layer_decayed(model, peak_lr=2 * LR)
    assert all(group["peak_lr"] == 2 * LR * group["lr_scale"] for group in decayed.param_groups)
    optimizer = layer_decayed(model)
    expected = {}
    for group in param_groups_layer_decay(model, weight_decay=0.1, layer_decay=0.5):
        expected |= {id(param): group["lr_scale"] for param in group["params"]}
    scheduler = cosine(optimizer, warmup=0)
    train(model, optimizer, scheduler, 0, 2)
    scales = set()
    for group in optimizer.param_groups:
        assert {expected[id(param)] for param in group["params"]} == {group["lr_scale"]}
        assert group["resolved_peak_lr"] == pytest.approx(LR * group["lr_scale"])
        scales.add(group["lr_scale"])
    assert scales == set(expected.values())
    assert len({group["name"] for group in optimizer.param_groups}) == len(optimizer.param_groups)
    plain = MuonSW.for_model(build(), lr=LR)
    role = {name: group["role"] for group in plain.param_groups for name in group["param_names"]}
    for group in optimizer.param_groups:
        assert {role[name] for name in group["param_names"]} == {group["role"]}


def test_layer_decay_keeps_the_options_of_the_class_and_of_for_model():
    options = {"nonfinite": "raise", "chunk_bytes": 4096, "decay": "constant", "nesterov": False}
    options |= {"patterns": {"blocks.0.mlp.fc1.weight": {"weight_decay": 0.3}}, "adamw": {"betas": (0.8, 0.9)}}
    optimizer = layer_decayed(vit(), **options)
    plain = MuonSW.for_model(vit(), lr=LR, **options)
    assert (optimizer.nonfinite, optimizer.chunk_bytes) == ("raise", 4096)
    assert optimizer.defaults == plain.defaults
    actual, expected = (
        {
            name: {
                key: value for key, value in group.items() if key not in ("params", "param_names", "name", "lr_scale")
            }
            for group in built.param_groups
            for name in group["param_names"]
        }
        for built in (optimizer, plain)
    )
    assert actual == expected
    assert layer_decayed(vit(), replay=True).replay
    assert optimizer.routing(reasons=True).count("\n") == plain.routing(reasons=True).count("\n")


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit():
    whole = vit()
    optimizer = layer_decayed(whole)
    scheduler = cosine(optimizer)
    train(whole, optimizer, scheduler, 0, 4)
    saved = copy.deepcopy((whole.state_dict(), optimizer.state_dict()))
    train(whole, optimizer, scheduler, 4, STEPS)

    resumed = vit()
    other = layer_decayed(resumed)
    resumed.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    again = cosine(other)
    again.step_update(4)  # as timm's train.py does
    train(resumed, other, again, 4, STEPS)
    for (name, a), b in zip(whole.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize(("name", "kind"), [("muonsw", MuonSW), ("adamwsw", AdamWSW), ("sgdsw", SGDSW)])
def test_its_registry_builds_what_for_model_does(name, kind):
    """`--opt muonsw` of timm's script calls this, always with a momentum."""
    model, options = vit(), {"momentum": 0.9} if kind is SGDSW else {}
    register(torch.compile(model))
    assert name in list_optimizers()
    built = create_optimizer_v2(model, opt=name, lr=LR, weight_decay=0.3, momentum=0.9)
    expected = kind.for_model(model, lr=LR, weight_decay=0.3, **options)
    assert type(built) is kind
    assert str(built.routing(reasons=True)) == str(expected.routing(reasons=True))
    assert [group["weight_decay"] for group in built.param_groups] == [g["weight_decay"] for g in expected.param_groups]
    assert built.param_groups[0].get("momentum") == expected.param_groups[0].get("momentum")


def test_its_registry_refuses_a_model_that_was_not_registered():
    model = vit()
    register(model)
    with pytest.raises(ValueError, match="another model"):
        create_optimizer_v2(vit(), opt="muonsw", lr=LR)


def test_parameters_instead_of_a_model_are_refused():
    with pytest.raises(TypeError, match="takes the model itself"):
        register(vit().parameters())
