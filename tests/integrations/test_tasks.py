"""The worked tasks of `examples/tasks/` with models of timm and transformers, shortened to seconds."""

from itertools import islice

import pytest

from muonsw.lab.data.prepare import prepare
from muonsw.lab.data.tokenizer import ByteTokenizer
from tests.lab.test_worked_tasks import short_run
from tests.lab.texts import markov_texts


@pytest.mark.parametrize(("kind", "steps"), [("vit", 60), ("resnet", 30)])
def test_digits_are_learned(kind, steps, tmp_path):
    for package in ("timm", "sklearn"):
        pytest.importorskip(package, reason="needs timm and scikit-learn")
    settings = {"steps": steps, "lr": 0.01, "eval_every": steps, "telemetry_every": 20, "warmup_steps": 3}
    run = short_run("vision", tmp_path / "run", ("batch=32", "depth=2", f"kind={kind}"), **settings)
    before, after = run.evals["loss"]
    assert after < before - 0.1
    assert run.evals["accuracy"][-1] > run.evals["accuracy"][0] + 0.1


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokens")
    prepare(islice(markov_texts(seed=0), 60), ByteTokenizer(), folder, validation_fraction=0.2)
    return folder


@pytest.mark.parametrize("kind", ["gpt2", "moe", "mamba2", "deltanet"])
def test_language_models_of_transformers_learn(kind, tokens, tmp_path):
    pytest.importorskip("transformers")
    options = (f"kind={kind}", "batch=4", "sequence=32", f"data={tokens}")
    run = short_run("text", tmp_path / "run", options, steps=15, eval_every=15)
    before, after = run.evals["loss"]
    assert after < before - 0.5
