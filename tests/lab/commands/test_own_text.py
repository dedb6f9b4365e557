"""From a text file to a verdict in one command: `--text` of `muonsw compare` and `muonsw train`."""

import json
import random
import re

import pytest

from muonsw.lab.cli import main
from muonsw.lab.data.shards import read_record

SHORT = ["--steps", "2", "--seeds", "2", "--workers", "1"]


def words(characters, vocabulary=400, seed=0):
    """Lines of made-up words, some far more frequent than others."""
    chosen = random.Random(seed)
    made = ["".join(chosen.choices("etaoinshrdlu", k=chosen.randint(2, 9))) for _ in range(vocabulary)]
    text = " ".join(chosen.choices(made, weights=[1 / (rank + 1) for rank in range(vocabulary)], k=characters // 4))
    return re.sub("(.{60,80}) ", "\\1\n", text)[:characters]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    """`out/data` is below the folder in which a command runs."""
    monkeypatch.chdir(tmp_path)


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
    "options",
    [
        ["compare", "--arms", "constant", "scled"],
        ["compare", "--precision", "fp8"],
        ["compare", "--control", "--weight-decay", "0"],
        ["compare", "--tune-lambda", "--weight-decay", "0"],
        ["train", "--decay", "scled"],
        ["train", "--steps", "0"],
    ],
)
def test_a_wrong_setting_is_refused_before_text_is_prepared(options, tmp_path):
    (tmp_path / "a.txt").write_text(words(60_000), encoding="utf-8")
    assert main([*options, "--text", "a.txt"]) == 2
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", [["compare", "--text"], ["data", "prepare", "out", "--source", "text", "--files"]])
def test_an_empty_text_is_not_called_a_document(command, tmp_path, capsys):
    (tmp_path / "a.txt").touch()
    assert main([*command, "a.txt"]) == 2
    assert "gave no document: check its path, and whether its files are empty" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


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


@pytest.mark.parametrize("command", ["compare", "train"])
def test_a_file_in_place_of_a_folder_of_tokens_suggests_the_option_for_text(tmp_path, command, capsys):
    (tmp_path / "notes.txt").write_text(words(20_000), encoding="utf-8")
    assert main([command, "--data", "notes.txt"]) == 2
    assert "--text notes.txt" in capsys.readouterr().err
    assert main([command, "--data", "."]) == 2
    assert "--text ." in capsys.readouterr().err
    assert main([command, "--data", "nowhere"]) == 2
    assert "`muonsw data prepare nowhere` makes some there" in capsys.readouterr().err
    assert main([command, "--data", "nowhere", "--text", "notes.txt"]) == 2
    assert "give --text or --data, not both" in capsys.readouterr().err
    assert main([command, "--text", "absent.txt"]) == 2
    assert "no file matches absent.txt" in capsys.readouterr().err
