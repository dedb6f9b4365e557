"""Threads change nothing, and a folder survives whatever happens to the process that fills it."""

import json
import os
import resource
import signal
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

from muonsw.lab.base.errors import UsageError
from muonsw.lab.base.storage import LOCK
from muonsw.lab.data.prepare import RECORD, locked, open_split, prepare, read_record
from muonsw.lab.data.shards import ShardError, open_shard
from muonsw.lab.data.synthetic import MarkovSource
from muonsw.lab.data.tokenizers import BPETokenizer, ByteTokenizer
from tests.faults.killing import files_no_larger_than
from tests.lab.data.test_prepare import Counting

DOCUMENTS = list(islice(MarkovSource(seed=5, mean_length=300.0), 300))
SETTINGS = {"validation_fraction": 0.1, "group_characters": 5000}


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != LOCK}


def test_the_number_of_threads_changes_no_byte(tmp_path):
    tokenizer = BPETokenizer.train(DOCUMENTS, 300)
    alone = prepare(DOCUMENTS, tokenizer, tmp_path / "alone", **SETTINGS)
    assert alone == prepare(DOCUMENTS, tokenizer, tmp_path / "threads", **SETTINGS, threads=3)
    assert contents(tmp_path / "alone") == contents(tmp_path / "threads")


KILLED = """
import sys
from pathlib import Path
from muonsw.lab.data.prepare import prepare
from muonsw.lab.data.tokenizers import ByteTokenizer
from tests.lab.data.test_prepare_faults import DOCUMENTS, SETTINGS

def documents():
    yield from DOCUMENTS[:200]
    print("waiting", flush=True)
    sys.stdin.read()

if __name__ == "__main__":
    prepare(documents(), ByteTokenizer(), Path(sys.argv[1]), **SETTINGS)
"""


@pytest.mark.slow
def test_a_killed_run_goes_on(tmp_path):
    script, folder = tmp_path / "killed.py", tmp_path / "data"
    script.write_text(KILLED, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, script, folder], env=environment, text=True, **pipes) as run:
        assert run.stdout.readline() == "waiting\n"
        with pytest.raises(UsageError, match="is being prepared by another process"):
            prepare(DOCUMENTS, ByteTokenizer(), folder, **SETTINGS)
        run.send_signal(signal.SIGKILL)
    assert not read_record(folder).complete
    kept, counting = sum(group.documents for group in read_record(folder).groups), Counting()
    prepare(DOCUMENTS, counting, folder, **SETTINGS)
    assert counting.encoded == len(DOCUMENTS) - kept < len(DOCUMENTS)
    prepare(DOCUMENTS, ByteTokenizer(), tmp_path / "whole", **SETTINGS)
    assert contents(folder) == contents(tmp_path / "whole")


def test_a_hole_in_the_record_is_all_that_is_encoded_again(tmp_path):
    """Earlier versions encoded in several processes, of which the one with the later group could finish first."""
    record, before = prepare(DOCUMENTS, ByteTokenizer(), tmp_path, **SETTINGS), contents(tmp_path)
    fields = json.loads((tmp_path / RECORD).read_text(encoding="utf-8"))
    fields["groups"][3] = {"digest": "", "documents": 0, "tokens": {}, "checksums": {}}
    (tmp_path / RECORD).write_text(json.dumps({**fields, "complete": False}), encoding="utf-8")
    counting = Counting()
    prepare(DOCUMENTS, counting, tmp_path, **SETTINGS)
    assert counting.encoded == record.groups[3].documents
    assert contents(tmp_path) == before


def test_two_runs_do_not_share_a_folder(tmp_path):
    with locked(tmp_path), pytest.raises(UsageError, match="is being prepared by another process: wait for it"):
        prepare(DOCUMENTS, ByteTokenizer(), tmp_path)
    assert prepare(DOCUMENTS, ByteTokenizer(), tmp_path).complete


def test_what_a_killed_run_left_half_written_is_removed(tmp_path):
    leftovers = [".train-00000.tokens.4711", ".data.json.12", ".vocab.bpe.9", ".tokenizer.json.9"]
    others = ["notes.txt", ".train-00000.tokens", "train-00000.tokens.4711", ".hidden.12"]
    for name in leftovers + others:
        (tmp_path / name).write_text("half", encoding="utf-8")
    prepare(DOCUMENTS, ByteTokenizer(), tmp_path, **SETTINGS)
    names = {path.name for path in tmp_path.iterdir()}
    assert names.isdisjoint(leftovers)
    assert names >= set(others)


@pytest.mark.parametrize(("size", "name"), [(3000, "train-00000"), (0, "data.json")])
def test_a_disk_without_room_is_said_and_the_run_goes_on(tmp_path, size, name):
    with files_no_larger_than(size), pytest.raises(UsageError, match=rf"{name}.* cannot be written: File too large"):
        prepare(DOCUMENTS, ByteTokenizer(), tmp_path / "data", **SETTINGS)
    assert [path.name for path in (tmp_path / "data").glob(".*")] in ([], [LOCK])
    prepare(DOCUMENTS, ByteTokenizer(), tmp_path / "data", **SETTINGS)
    prepare(DOCUMENTS, ByteTokenizer(), tmp_path / "whole", **SETTINGS)
    assert contents(tmp_path / "data") == contents(tmp_path / "whole")


def test_more_shards_than_files_may_be_open(tmp_path):
    """A mapped shard counts as an open file: the soft limit is raised for a split, and where it is reached, said."""
    record = prepare(DOCUMENTS[:80], ByteTokenizer(), tmp_path, validation_fraction=0.0, group_characters=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").exists() else 64
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 40, hard))
        with pytest.raises(ShardError, match="Too many open files"):
            [
                open_shard(*each, "train", record)
                for each in zip(record.paths(tmp_path, "train"), record.groups, strict=True)
            ]
        assert len(open_split(tmp_path, "train")) == 80
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
