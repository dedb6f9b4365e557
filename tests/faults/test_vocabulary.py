"""Tokens outside the vocabulary on record: `data verify` finds them, and training names their shard."""

import hashlib
import json
import shutil

import numpy as np
import pytest

from muonsw.lab.cli import main
from muonsw.lab.data.shards import RECORD, read_record
from tests.lab.train.small_runs import tokens


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(tokens(), tmp_path / "data")
    return tmp_path / "data"


def forge(folder, token):
    """Make every training token this one, and their new checksum on record."""
    (shard,) = read_record(folder).paths(folder, "train")
    ids = np.memmap(shard, dtype="<u2", mode="r+")
    ids[:] = token
    ids.flush()
    fields = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    fields["groups"][0]["checksums"]["train"] = hashlib.sha256(shard.read_bytes()).hexdigest()
    (folder / RECORD).write_text(json.dumps(fields), encoding="utf-8")
    return shard


def test_a_token_outside_the_vocabulary_is_named_with_its_shard_by_verify_and_by_training(folder, tmp_path, capsys):
    shard = forge(folder, 300)  # the model has 320 rows, and the vocabulary 257 tokens
    assert main(["data", "verify", str(folder)]) == 1
    assert f"{shard}: token 300 at position 0 is outside the vocabulary of 257" in capsys.readouterr().out
    assert main(["train", "--data", str(folder), "--out", str(tmp_path / "run"), "--steps", "2"]) == 2
    said = capsys.readouterr().err
    assert f"{shard}: token 300 at position 0 is outside the vocabulary of 257: delete it and prepare" in said


@pytest.mark.parametrize("size", [200, 256, 258, 1 << 16, (1 << 16) + 1])
def test_another_vocabulary_on_record_is_not_well(folder, capsys, size):
    fields = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    (folder / RECORD).write_text(json.dumps({**fields, "vocab_size": size}), encoding="utf-8")
    assert main(["data", "verify", str(folder)]) == 1
    assert "all is well" not in capsys.readouterr().out
