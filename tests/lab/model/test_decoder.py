"""The decoder as a whole: causal, muP multipliers in place, and usable by the optimizer's router."""

from fnmatch import fnmatchcase

import pytest
import torch
from torch.nn import functional

from muonsw import MuonSW
from muonsw.lab.model import Decoder, MuP
from muonsw.lab.model.decoder import rotary_table
from tests.lab.model.small_models import small, tokens


@pytest.mark.parametrize("config", [small(), small().dense()], ids=["moe", "dense"])
def test_a_later_token_does_not_change_earlier_logits(config):
    model = Decoder(config).double()
    ids = tokens(config)
    changed = ids.clone()
    changed[:, 9] = (changed[:, 9] + 1) % config.vocab
    before, after = model.logits(ids), model.logits(changed)
    torch.testing.assert_close(after[:, :9], before[:, :9], rtol=1e-12, atol=1e-14)
    assert (after[:, 9:] - before[:, 9:]).abs().amax(dim=(0, 2)).min() > 1e-9


def test_losses_are_those_of_the_logits_and_add_up():
    config = small()
    model = Decoder(config).double()
    ids = tokens(config, length=9)
    losses = model(ids[:, :-1], ids[:, 1:])
    plain = functional.cross_entropy(model.logits(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(losses.cross_entropy, plain)
    torch.testing.assert_close(losses.total, plain + 0.1 * losses.balance + 0.01 * losses.z)


def test_router_losses_are_means_over_layers():
    config = small(layers=3)
    model = Decoder(config)
    seen = []
    for layer in model.layers:
        layer.moe.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    out = model.hidden(tokens(config))
    torch.testing.assert_close(out.balance, torch.stack([o.balance for o in seen]).mean())
    torch.testing.assert_close(out.z, torch.stack([o.z for o in seen]).mean())


def test_every_parameter_gets_a_gradient_and_the_loss_falls():
    config = small()
    model = Decoder(config)
    ids = tokens(config, batch=4, length=13)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(30):
        loss = model(ids[:, :-1], ids[:, 1:]).total
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 1


def test_forward_applies_the_multipliers_of_the_table():
    config = small(width=512, head_dim=64, layers=1, ff=8)
    model = Decoder(config).double()
    with torch.no_grad():
        model.layers[0].attention.out.weight.zero_()
        model.layers[0].moe.down.zero_()
    ids = tokens(config, length=3)
    rows = model.embedding.weight[ids] * 10
    normed = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + 1e-5)
    torch.testing.assert_close(model.logits(ids), normed @ model.embedding.weight.T / 2)


def test_branches_are_added_with_1_4_over_root_depth():
    block = Decoder(small(layers=4)).double().layers[0]
    branches = []
    block.attention.register_forward_hook(lambda _module, _inputs, output: branches.append(output))
    block.moe.register_forward_hook(lambda _module, _inputs, output: branches.append(output.x))
    x = torch.randn(1, 4, 16, dtype=torch.float64)
    rotary = rotary_table(4, 8, 10000.0)
    torch.testing.assert_close(block(x, rotary).x, x + 0.7 * branches[0] + 0.7 * branches[1])


def test_standard_parametrization_is_mup_at_base_width():
    ids = tokens(small())
    at_base = small(mup=MuP(base_width=16))
    standard = small(mup=MuP(enabled=False))
    assert torch.equal(Decoder(at_base).logits(ids), Decoder(standard).logits(ids))
    assert not torch.equal(Decoder(small()).logits(ids), Decoder(standard).logits(ids))


def test_bfloat16_autocast_stays_near_float32():
    config = small(width=64, head_dim=32, ff=64)
    model = Decoder(config)
    ids = tokens(config, length=9)
    exact = model(ids[:, :-1], ids[:, 1:])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = model(ids[:, :-1], ids[:, 1:])
    assert rounded.total.dtype == torch.float32
    torch.testing.assert_close(rounded.total, exact.total, rtol=0.02, atol=0)
    rounded.total.backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters())


def test_fused_projections_cover_the_rows_of_the_matrices_they_name():
    for config in (small(), small().dense()):
        model = Decoder(config)
        for pattern, sizes in model.fused_projections().items():
            shapes = [p.shape for name, p in model.named_parameters() if fnmatchcase(name, pattern)]
            assert len(shapes) == config.layers
            assert all(shape[-2] == sum(sizes) for shape in shapes)


def test_on_the_meta_device_a_step_gives_shapes_so_it_never_reads_a_value():
    config = small()
    with torch.device("meta"):
        model = Decoder(config, seed=None)
        ids = torch.zeros(2, 8, dtype=torch.long)
    assert model.logits(ids).shape == (2, 8, config.vocab)
    model(ids, ids).total.backward()
    assert all(p.grad.shape == p.shape for p in model.parameters())


# torch's own tracer makes an instance of each autograd function it meets
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_traced_without_a_break_it_gives_the_same_losses_and_gradients():
    config = small(layers=1, experts=2)
    eager, traced = Decoder(config).double(), Decoder(config).double()
    ids = tokens(config, length=9)
    expected = eager(ids[:, :-1], ids[:, 1:])
    got = torch.compile(traced, backend="aot_eager", fullgraph=True)(ids[:, :-1], ids[:, 1:])
    torch.testing.assert_close(tuple(got), tuple(expected))
    expected.total.backward()
    got.total.backward()
    for a, b in zip(eager.parameters(), traced.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("config", [small(), small().dense()], ids=["moe", "dense"])
def test_the_library_finds_the_roles_and_takes_the_fused_projections(config):
    model = Decoder(config)
    patterns = {pattern: {"split_sizes": sizes} for pattern, sizes in model.fused_projections().items()}
    optimizer = MuonSW.for_model(model, lr=0.01, weight_decay=0.1, patterns=patterns)
    found = {
        name.removeprefix("layers.0."): group["role"]
        for group in optimizer.param_groups
        for name in group["param_names"]
        if not name.startswith("layers.1.")
    }
    experts = "experts" if config.experts > 1 else "hidden"
    expected = {
        "embedding.weight": "embedding",
        "norm.weight": "norm",
        "attention_norm.weight": "norm",
        "moe_norm.weight": "norm",
        "attention.qkv.weight": "hidden",
        "attention.out.weight": "hidden",
        "moe.gate_up": experts,
        "moe.down": experts,
    }
    assert found == ({**expected, "moe.router.weight": "router"} if config.experts > 1 else expected)
    ids = tokens(config)
    model(ids, ids).total.backward()
    optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters())
