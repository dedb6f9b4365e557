"""Hand-written models, each with an expected table."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils.parametrize import ParametrizationList

from muonsw import AdamWSW, MuonSW
from muonsw.routing import classify
from tests.models.idioms import MODELS
from tests.models.tables import differences, read_tables
from tests.models.views import MATRICES, seen_as

TABLES = read_tables("idioms")


def routing_of(model):
    return {entry.name: (entry.role, seen_as(entry.role, entry.view, entry.param.shape)) for entry in classify(model)}


def test_every_idiom_has_a_table():
    assert set(TABLES) == set(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_an_idiom_is_routed_as_its_table_says(name):
    with torch.device("meta"):
        model = MODELS[name]()
    assert differences(TABLES[name], routing_of(model)) == []


def wrap_parts(module, wrap):
    """Wrap every part of a module separately, down to single layers."""
    for name, part in list(module.named_children()):
        if not isinstance(part, ParametrizationList):
            wrap_parts(part, wrap)
            if not isinstance(part, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict):
                module._modules[name] = wrap(part)
    return module


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("wrap", [torch.compile, checkpoint_wrapper, nn.DataParallel])
def test_wrappers_change_no_role(name, wrap):
    with torch.device("meta"):
        models = MODELS[name](), wrap_parts(MODELS[name](), wrap), wrap(MODELS[name]())
    plain, in_parts, as_a_whole = map(routing_of, models)
    assert in_parts == as_a_whole == plain


@pytest.mark.filterwarnings("ignore:MuonSW.for_model found no matrix", "ignore:no param group decays")
@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_of_every_model_takes_a_step(name):
    """Shapes and views are accepted, and each role gets its algorithm."""
    torch.manual_seed(0)
    model = MODELS[name]()
    for param in model.parameters():
        torch.nn.init.normal_(param)
        param.grad = torch.randn_like(param)
    for cls in (MuonSW, AdamWSW):
        optimizer = cls.for_model(model, lr=0.02)
        before = {n: p.detach().clone() for g in optimizer.param_groups for n, p in named(g)}
        optimizer.step()
        for group in optimizer.param_groups:
            expected = cls.algorithm if group["role"] in MATRICES or cls is AdamWSW else "adamw"
            assert group["algorithm"] == expected
            assert all(not torch.equal(p, before[n]) for n, p in named(group))


def named(group):
    return zip(group["param_names"], group["params"], strict=True)


def test_wrong_roles_and_views_and_missing_names_are_reported():
    table = read_tables("idioms")["recurrent"]
    actual = {"lstm.weight_ih_l0": ("hidden", ""), "rnn.weight_ih_l0": ("head", None), "new": ("bias", None)}
    report = "\n".join(differences(table, actual))
    assert "lstm.weight_ih_l0: hidden seen as 'a matrix', expected 'split=8,8,8,8'" in report
    assert "rnn.weight_ih_l0: head, expected hidden" in report
    assert "new: the table does not mention it" in report
    assert "out.weight: matches no parameter" in report
