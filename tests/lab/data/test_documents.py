"""Documents come in a fixed order, each once, and what cannot be read is named."""

import gzip
import json
import lzma
import math
from collections import Counter
from itertools import islice, pairwise

import numpy as np
import pytest

from muonsw.lab.base.errors import UsageError
from muonsw.lab.data.corpus import python_roots, source_files, text_documents
from muonsw.lab.data.synthetic import MarkovSource


def write(root, files):
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


def test_python_files_are_sorted_and_without_tests_and_copies(tmp_path):
    root = write(
        tmp_path,
        {
            "b.py": "b",
            "a.py": "a",
            "pkg/copy_of_a.py": "a",
            "pkg/c.py": "c",
            "pkg/tests/test_c.py": "t",
            "test/t.py": "t",
            "site-packages/p.py": "p",
            "empty.py": "",
            "note.txt": "n",
            "latin.py": b"# coding: latin-1\n# \xe9",
            "broken.py": b"# \xe9",
            "unknown.py": b"# coding: nothing-known\n",
        },
    )
    assert list(source_files([root])) == ["a", "b", "# coding: latin-1\n# é", "c"]
    assert list(source_files([root, root / "site-packages"])) == ["a", "b", "# coding: latin-1\n# é", "c", "p"]


def test_the_standard_library_is_there_and_its_order_is_fixed():
    first, second = (list(islice(source_files(python_roots()), 40)) for _ in range(2))
    assert first == second
    assert len(set(first)) == 40
    assert any("abstract base classes" in text.lower() for text in first)


def test_text_files_of_every_kind_are_read_in_order(tmp_path):
    lines = "\n".join(json.dumps({"text": text}) for text in ("one", "", "zwö\nlines")) + "\n\n"
    write(
        tmp_path,
        {
            "b.txt": "plain",
            "a.md": "# mark",
            "empty.txt": "",
            "c.jsonl": lines,
            "d.jsonl.xz": lzma.compress(b'{"text": "x", "id": 1}'),
            "deep/er/e.txt.gz": gzip.compress(b"zipped"),
            "[odd].txt": "odd",
        },
    )
    every = text_documents([f"{tmp_path}/**/*.*"])
    assert list(every) == ["odd", "# mark", "plain", "one", "zwö\nlines", "x", "zipped"]
    assert list(text_documents([tmp_path / "b.txt", f"{tmp_path}/*.txt"])) == ["plain", "odd"]
    assert list(text_documents([tmp_path / "[odd].txt"])) == ["odd"]


def test_patterns_are_checked_before_the_first_document(tmp_path):
    write(tmp_path, {"a.txt": "a", "b.pdf": "b", "c.pdf.gz": "c"})
    with pytest.raises(UsageError, match=r"no file matches .*\.md"):
        text_documents([tmp_path / "a.txt", f"{tmp_path}/*.md"])
    for name in ("b.pdf", "c.pdf.gz"):
        with pytest.raises(UsageError, match=rf"{name} is of no known kind: give \.txt"):
            text_documents([tmp_path / "a.txt", tmp_path / name])


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("a.jsonl", '{"text": "fine"}\n{"txt": 1}\n', "a.jsonl, line 2: not a JSON object with a `text` field"),
        ("a.jsonl", '{"text": "fine"}\n["text"]\n', "a.jsonl, line 2: not a JSON object"),
        ("a.jsonl", '{"text": "fine"}\n' + "[" * 100_000, "a.jsonl, line 2: not a JSON object"),
        ("a.jsonl", '{"text": "fine"}\n{"text": "cu', "a.jsonl, line 2: not a JSON object"),
        ("a.jsonl", '{"text": "fine"}\n{"text": 3}', "a.jsonl, line 2: its `text` field is not a string"),
        ("a.txt", b"\xff\xfe", "a.txt cannot be read"),
        ("a.txt.gz", gzip.compress(b"whole", mtime=0)[:-4], "a.txt.gz cannot be read"),
        ("a.txt.xz", b"not compressed", "a.txt.xz cannot be read"),
        ("a.txt.xz", lzma.compress(b"whole")[:-4], "a.txt.xz cannot be read"),
    ],
    ids=["no-text", "a-list", "deep", "cut", "not-a-string", "not-utf8", "cut-gzip", "not-xz", "cut-xz"],
)
def test_what_cannot_be_read_is_named(tmp_path, name, content, match):
    write(tmp_path, {name: content})
    with pytest.raises(UsageError, match=match):
        list(text_documents([tmp_path / name]))


def test_the_synthetic_source_is_endless_and_pure():
    source = MarkovSource(seed=3)
    documents = list(islice(source, 5))
    assert documents == list(islice(MarkovSource(seed=3), 5)) == [source.document(n) for n in range(5)]
    assert documents != list(islice(MarkovSource(seed=4), 5))
    assert len(set(documents)) == 5
    assert set("".join(documents)) <= set(source.alphabet)
    assert all(documents)


def test_the_chain_is_a_chain():
    source = MarkovSource(seed=3, mean_length=20.0)
    assert np.allclose(source.transitions.sum(axis=1), 1.0)
    assert (source.transitions >= 0.0).all()
    assert source.transitions[-1, -1] == 0.0, "no document is empty"


def test_known_entropies():
    assert MarkovSource(0, "a", mean_length=1.0).entropy_rate() == pytest.approx(0.0, abs=1e-12)
    uniform = MarkovSource(0, "abcd", sharpness=0.0, mean_length=1e12)
    assert uniform.entropy_rate() == pytest.approx(math.log(4.0), rel=1e-9)
    sharp = [MarkovSource(0, sharpness=sharpness).entropy_rate() for sharpness in (0.0, 1.0, 2.0, 4.0)]
    assert sharp == sorted(sharp, reverse=True)


@pytest.mark.parametrize("seed", [0, 1])
def test_the_entropy_of_what_is_drawn_matches_the_rate(seed):
    """Conditional entropy from counts of pairs, by someone who knows nothing of the chain.

    Documents are independent, so the deviation of the mean log-likelihood comes from document to document; counting
    pairs instead of knowing them lowers the estimate by (free parameters) / (2 tokens) to first order (Miller 1955).
    """
    source, documents = MarkovSource(seed, "abcde", mean_length=50.0), 3000
    pairs, cross, lengths = Counter(), [], []
    costs = -np.log(source.transitions, out=np.zeros_like(source.transitions), where=source.transitions > 0.0)
    for text in islice(source, documents):
        states = [5, *("abcde".index(character) for character in text), 5]
        pairs.update(pairwise(states))
        cross.append(costs[states[:-1], states[1:]].sum())
        lengths.append(len(states) - 1)
    tokens, rate = sum(lengths), source.entropy_rate()
    totals = Counter()
    for (before, _), number in pairs.items():
        totals[before] += number
    empirical = -sum(number * math.log(number / totals[before]) for (before, _), number in pairs.items()) / tokens
    bias = (np.count_nonzero(source.transitions) - 6) / (2 * tokens)
    deviation = float(np.std(np.array(cross) - rate * np.array(lengths))) * documents**0.5 / tokens
    assert abs(sum(cross) / tokens - rate) < 5.0 * deviation
    assert abs(empirical + bias - rate) < 5.0 * deviation + bias
    assert 5.0 * deviation + bias < 0.02 * rate, "the test can fail"
    assert np.mean(lengths) - 1 == pytest.approx(50.0, abs=5.0 * 50.0 / documents**0.5)
