"""Exports load without the run, and samples show what the model learned."""

import json
import shlex

import pytest
import torch
from safetensors.torch import load_file

from muonsw.lab.cli import main
from muonsw.lab.config import from_data
from muonsw.lab.data.prepare import prepare
from muonsw.lab.data.tokenizer import ByteTokenizer
from muonsw.lab.errors import UsageError
from muonsw.lab.model import Decoder, ModelConfig
from muonsw.lab.train.config import with_data
from muonsw.lab.train.export import export, load_model, sample
from muonsw.lab.train.loop import train
from tests.lab.train.small_runs import small_run

SENTENCE = "the quick brown fox jumps over the lazy dog. "


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on one sentence, which it memorizes."""
    folder = tmp_path_factory.mktemp("sentence")
    documents = [SENTENCE * 20 + str(number) for number in range(40)]
    prepare(documents, ByteTokenizer(), folder / "data", validation_fraction=0.2)
    config = small_run(steps=80, batch=8, eval_every=40, checkpoint_every=40, telemetry_every=0)
    train(with_data(config, folder / "data"), folder / "run")
    return folder / "run"


def test_an_export_is_the_model_of_the_run_and_loads_without_it(run, tmp_path):
    export(run, tmp_path)
    content = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert content["step"] == 80
    plain = Decoder(from_data(ModelConfig, content["model"]), seed=None)
    plain.load_state_dict(load_file(tmp_path / "model.safetensors"))
    ours, _ = load_model(run)
    (run.parent / "data").rename(run.parent / "elsewhere")
    try:
        exported, tokenizer = load_model(tmp_path)
    finally:
        (run.parent / "elsewhere").rename(run.parent / "data")
    assert tokenizer.identity == ByteTokenizer().identity
    tokens = torch.arange(20).view(1, 20)
    assert torch.equal(ours.logits(tokens), plain.logits(tokens))
    assert torch.equal(ours.logits(tokens), exported.logits(tokens))


def test_draws_depend_on_the_seed_alone(run):
    model, tokenizer = load_model(run)
    texts = [list(sample(model, tokenizer, "", tokens=30, temperature=2.0, top_k=50, seed=seed)) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
    assert all(token < tokenizer.vocab_size for text in texts for token in text)


def test_the_commands_export_a_model_that_continues_what_it_has_learned(run, tmp_path, capsys):
    assert main(["export", str(run), "--out", str(tmp_path / "my model")]) == 0
    suggested = shlex.split(capsys.readouterr().out.partition("with: muonsw ")[2])
    assert main([*suggested, "--prompt", "the quick brown ", "--tokens", "20", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.endswith("the quick brown fox jumps over the l\n")


def test_a_run_without_checkpoint_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(small_run().as_data()), encoding="utf-8")
    with pytest.raises(UsageError, match="has no intact checkpoint"):
        export(tmp_path, tmp_path / "export")
    assert main(["sample", str(tmp_path)]) == 2


def test_an_export_replaces_only_an_export(run, tmp_path):
    export(run, tmp_path)
    export(run, tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "config.json").write_text("of another program", encoding="utf-8")
    for folder in (tmp_path, run):
        with pytest.raises(UsageError, match="choose another folder with --out"):
            export(run, folder)
    assert (tmp_path / "model.safetensors").read_bytes() == before
