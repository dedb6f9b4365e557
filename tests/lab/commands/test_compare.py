"""`muonsw compare`: from a text file to a verdict, and what is refused before anything is trained."""

import json
import math
import random
import re

import pytest

from muonsw.lab.advise import more_decay
from muonsw.lab.arms import decay_factors
from muonsw.lab.cli import main
from muonsw.lab.data.loader import read_record
from muonsw.lab.runs import load_run
from tests.lab.train.small_runs import tokens

SHORT = ["--steps", "2", "--seeds", "2", "--workers", "1"]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    """`out/data` is below the folder in which a command runs."""
    monkeypatch.chdir(tmp_path)


def words(characters, vocabulary=400, seed=0):
    """Lines of made-up words, some far more frequent than others."""
    chosen = random.Random(seed)
    made = ["".join(chosen.choices("etaoinshrdlu", k=chosen.randint(2, 9))) for _ in range(vocabulary)]
    text = " ".join(chosen.choices(made, weights=[1 / (rank + 1) for rank in range(vocabulary)], k=characters // 4))
    return re.sub("(.{60,80}) ", "\\1\n", text)[:characters]


def test_a_text_file_becomes_a_verdict(tmp_path, capsys):
    (tmp_path / "my notes.txt").write_text(words(60_000), encoding="utf-8")
    assert main(["compare", "--text", "my notes.txt", "--out", "out/compare", *SHORT]) == 0
    (folder,) = (tmp_path / "out/data").iterdir()
    record, printed = read_record(folder), " ".join(capsys.readouterr().out.split())
    assert folder.name.startswith("my-notes-bpe1024-")
    share = record.tokens("validation") / (record.tokens("train") + record.tokens("validation"))
    assert 0.04 < share < 0.15
    assert f"{record.documents} documents, 60.0 kB of text, {record.tokens('train'):,} train" in printed
    assert f"({share:.1%} held out for validation), vocabulary of {record.vocab_size:,}, in out/data" in printed
    page = (tmp_path / "out/compare/report.html").read_text(encoding="utf-8")
    assert "<title>Decay rules on my notes.txt</title>" in page
    assert len(json.loads((tmp_path / "out/compare/outcome.json").read_text(encoding="utf-8"))["arms"]) == 2


def test_the_same_text_is_prepared_once_and_another_one_again(tmp_path):
    (tmp_path / "a.txt").write_text(words(60_000), encoding="utf-8")
    train = ["train", "--text", "a.txt", "--steps", "1", "--batch", "4", "--out"]
    assert main([*train, "one"]) == main([*train, "two"]) == 0
    (folder,) = (tmp_path / "out/data").iterdir()
    (tmp_path / "a.txt").write_text(words(60_000, seed=1), encoding="utf-8")
    assert main([*train, "three"]) == 0
    assert len(list((tmp_path / "out/data").iterdir())) == 2
    assert folder.exists()


@pytest.mark.parametrize(
    "characters", [200, *(pytest.param(number, marks=pytest.mark.slow) for number in (3_000, 8_000))]
)
def test_a_text_that_is_too_small_says_how_much_is_enough(tmp_path, characters, capsys):
    (tmp_path / "a.txt").write_text(words(characters), encoding="utf-8")
    assert main(["compare", "--text", "a.txt", *SHORT]) == 2
    message = capsys.readouterr().err
    assert "one document" in message or "the text is too small" in message
    assert not (tmp_path / "out/compare").exists()
    if found := re.search(r"give ([\d,]+) kB of text", message):
        enough = 1000 * int(found[1].replace(",", ""))
        assert characters < enough < 20_000
        (tmp_path / "a.txt").write_text(words(enough), encoding="utf-8")
        assert main(["compare", "--text", "a.txt", *SHORT]) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seeds", "0"], "--seeds must be at least 1"),
        (["--arms", "scaled"], "at least two different arms"),
        (["--arms", "constant", "scled"], "did you mean 'scaled'"),
        (["--arms", "constant", "squared", "--control"], "needs a scaled arm"),
        (["--preset", "w3"], "unknown preset 'w3'"),
        (["--precision", "fp8"], "precision"),
        (["--workers", "0"], "--workers must be at least 1"),
        (["--weight-decay", "1", "--arms", "scaled", "constant,lr=3"], "would take 3 times the weight"),
        (["--weight-decay", "600", "--tune-lambda"], "weight_decay=60 at lr=0.02 would take 1.2 times the weight"),
        (["--weight-decay", "0", "--control"], "give --weight-decay above zero"),
        (["--weight-decay", "0", "--tune-lambda"], "give --weight-decay above zero"),
        (["--telemetry-every", "-1"], "telemetry_every=-1 must be at least 0"),
    ],
)
def test_a_wrong_option_is_explained_before_text_is_prepared(options, message, tmp_path, capsys):
    (tmp_path / "a.txt").write_text(words(60_000), encoding="utf-8")
    assert main(["compare", "--text", "a.txt", *options]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["compare", "train"])
def test_data_that_cannot_be_used_is_explained(tmp_path, command, capsys):
    (tmp_path / "notes.txt").write_text(words(20_000), encoding="utf-8")
    (tmp_path / "empty.txt").touch()
    for options, message in (
        (["--data", "notes.txt"], "--text notes.txt"),
        (["--data", "."], "--text ."),
        (["--data", "nowhere"], "`muonsw data prepare nowhere` makes some there"),
        (["--data", "nowhere", "--text", "notes.txt"], "give --text or --data, not both"),
        (["--text", "absent.txt"], "no file matches absent.txt"),
        (["--text", "empty.txt"], "gave no document"),
    ):
        assert main([command, *options]) == 2
        assert message in capsys.readouterr().err
        assert not (tmp_path / "out").exists()


def test_a_foreign_report_is_noticed_before_any_training(tmp_path, capsys):
    (tmp_path / "report.html").write_text("of another program", encoding="utf-8")
    assert main(["compare", "--out", str(tmp_path), "--data", tokens(), "--device", "cpu"]) == 2
    assert "report.html was not written by muonsw" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_without_a_lambda_the_formula_gives_one(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(
        "muonsw.lab.commands.compare.answer", lambda question, *_, **__: asked.append(question) or 1 / 0
    )

    def run(*words):
        with pytest.raises(ZeroDivisionError):
            main(["compare", "--data", tokens(), "--seeds", "1", "--workers", "1", "--device", "cpu", *words])
        return asked[-1], capsys.readouterr().out

    chosen, printed = run()
    total = math.fsum(decay_factors(chosen.base, chosen.base.optimizer))
    assert total == pytest.approx(more_decay("scaled", chosen.epochs), rel=0.05)
    assert f"lambda {chosen.base.optimizer.weight_decay:g}, by the formula" in printed
    given, printed = run("--weight-decay", "5")
    assert given.base.optimizer.weight_decay == 5.0
    assert printed.startswith("lambda 5, as given, is ")
    short, printed = run("--steps", "4")
    assert short.base.optimizer.weight_decay == 1.0, "no lambda acts in four steps, so that the preset's stays"
    assert "Decay does nothing" in printed


def test_the_command_prints_the_verdict_one_table_and_where_the_files_are(tmp_path, capsys):
    options = ["--seeds", "1", "--steps", "2", "--workers", "1", "--device", "cpu", "--telemetry-every", "1"]
    assert main(["compare", "--data", tokens(), "--out", str(tmp_path), *options]) == 0
    *_, sentence, _, title, heading, one, other, legend, _, files = capsys.readouterr().out.splitlines()
    assert "one seed gives no error bar" in sentence
    assert title == "Arms"
    assert [line.split()[0] for line in (heading, one, other)] == ["arm", "constant", "scaled"]
    assert "Total decay: the sum over all steps" in legend
    assert files.startswith("wrote outcome.json, report.html and")
    assert files.endswith(f"figures to {tmp_path}")
    assert load_run(tmp_path / "runs" / "scaled-seed0").telemetry.step.tolist() == [1, 2]
