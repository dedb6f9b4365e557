"""Random files for every reader: it returns a value or raises a UsageError, and takes no more memory than is stated."""

import json
import re
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from muonsw.lab.base.errors import UsageError
from muonsw.lab.base.storage import read_object
from muonsw.lab.diagnose import as_data, diagnose
from muonsw.lab.runs import load_run
from muonsw.lab.train import checkpoint
from muonsw.lab.train.export import load_model
from muonsw.lab.train.folder import read_config_file
from muonsw.lab.train.state import Training, with_fingerprint
from tests.faults.folders import LONG, NEWER, config, digest, folders

# What a reader may take: a fixed part, and for each byte of the file the Python objects that it becomes.
FIXED_BYTES, FOR_EACH_BYTE = 64 << 20, 300

# Numbers at which programs break, and texts that are no names.
EDGES = [
    0,
    -1,
    1,
    2**31,
    2**53,
    2**63,
    2**64,
    10**39,
    1e-320,
    1e308,
    -1e308,
    0.5,
    True,
    None,
    "",
    "a",
    "\udcff",
    "\x1b[2J",
]
VALUES = st.recursive(
    st.sampled_from(EDGES) | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


PLACES = st.integers(0, 1 << 20)
KNOWN = [b"[" * 100_000, b"9" * 5_000, b'{"a":' * 3_000, b"\x00" * 1000, b"\xff\xfe", b"NaN", b"1e999", b""]
# Bytes replaced, a stretch left out or doubled, cut, or something else altogether.
BYTE_CHANGES = st.one_of(
    st.lists(st.tuples(PLACES, st.integers(0, 255)), min_size=1, max_size=4),
    st.tuples(PLACES, PLACES, st.sampled_from([0, 2])),
    PLACES,
    st.binary(max_size=64),
    st.sampled_from(range(len(KNOWN))).map(str),
)
# A value somewhere replaced, removed, or put under another name.
JSON_CHANGES = st.tuples(PLACES, PLACES, VALUES | st.sampled_from(EDGES) | st.sampled_from(["gone", "renamed"]))


def with_bytes(content: bytes, change) -> bytes:
    size = len(content)
    match change:
        case list():
            altered = bytearray(content)
            for place, value in change:
                altered[place % size] = value
            return bytes(altered)
        case (first, second, repeat):
            low, high = sorted((first % size, second % size))
            return content[:low] + content[low:high] * repeat + content[high:]
        case int():
            return content[: change % size]
        case bytes():
            return change
    return KNOWN[int(change)]


def with_value(content: bytes, change, *, lines: bool = False) -> bytes:
    line, place, value = change
    texts = content.splitlines() if lines else [content]
    data = json.loads(texts[line % len(texts)])
    places = list(_places(data))
    parent, key = places[place % len(places)]
    if value == "renamed" and isinstance(parent, dict):
        parent["renamed"] = parent.pop(key)
    elif value == "gone":
        del parent[key]
    else:
        parent[key] = value
    texts[line % len(texts)] = json.dumps(data).encode()
    return b"\n".join(texts) + b"\n"


def _places(data):
    for key, value in data.items() if isinstance(data, dict) else enumerate(data):
        yield data, key
        if isinstance(value, dict | list):
            yield from _places(value)


def fuzzed(few: int = 40, many: int = 600):
    return settings(
        max_examples=many if LONG else few,
        deadline=None,
        derandomize=not LONG,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def memory_share(read: Callable[[Path], object], folder: Path, file: str, content: bytes) -> float:
    """Put the content where the file is, read, put the file back: the memory that this took, over what it may take.

    A usage error is an answer like any other; whatever else the reader raises is raised.
    """
    path = folder / file
    before = path.read_bytes()
    path.write_bytes(content)
    try:
        return _traced_bytes(read, folder, len(content)) / (FIXED_BYTES + FOR_EACH_BYTE * len(content))
    finally:
        path.write_bytes(before)


def _traced_bytes(read: Callable[[Path], object], folder: Path, size: int) -> int:
    # Tracing makes everything slow, and most readers take what JSON takes; so the short form looks at each tenth.
    traced = LONG or size % 10 == 0
    if traced:
        tracemalloc.start()
    try:
        with suppress(UsageError):
            read(folder)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def read_run(folder: Path) -> None:
    """Everything that reports and diagnoses ask of a run, short of drawing."""
    run = load_run(folder)
    for _ in (run.rule, run.steps, run.tokens, run.seconds, run.losses, run.training_losses, run.lost_losses):
        pass
    for _ in (run.final_loss, run.best_loss, run.norms, run.norm_change, run.predicted_norms):
        pass
    json.dumps(as_data(diagnose(run)), allow_nan=False)


RUN, EXPORT = (lambda: folders().copy("whole")), (lambda: folders().copy("export"))
READERS = {
    "config": (RUN, "config.json", lambda folder: read_config_file(folder / "config.json"), True),
    "config of a report": (RUN, "config.json", read_run, True),
    "environment": (RUN, "environment.json", read_run, True),
    "result": (RUN, "result.json", read_run, True),
    "export": (EXPORT, "config.json", load_model, True),
    "record of an export": (EXPORT, "tokenizer/data.json", load_model, True),
    "a JSON object": (RUN, "result.json", lambda folder: read_object(folder / "result.json"), True),
}
_folders: dict[str, Path] = {}


def prepared(name: str) -> tuple[Path, str, Callable[[Path], object]]:
    make, file, read, _ = READERS[name]
    if name not in _folders:
        _folders[name] = make()
    return _folders[name], file, read


@pytest.mark.parametrize("name", READERS)
def test_a_json_file_is_a_value_or_a_usage_error(name):
    folder, file, read = prepared(name)
    content = (folder / file).read_bytes()

    @fuzzed(20)
    @given(JSON_CHANGES)
    @example((0, 1, "\udcff"))
    @example((0, 10**6, "a"))
    def any_value(change):
        assert memory_share(read, folder, file, with_value(content, change)) < 1

    @fuzzed(12)
    @given(BYTE_CHANGES)
    def any_bytes(change):
        assert memory_share(read, folder, file, with_bytes(content, change)) < 1

    any_value()
    any_bytes()


def test_metrics_and_telemetry_are_values_or_a_usage_error():
    folder = folders().copy("whole")
    content = (folder / "metrics.jsonl").read_bytes()

    @fuzzed(40)
    @given(JSON_CHANGES)
    def any_value(change):
        assert memory_share(read_run, folder, "metrics.jsonl", with_value(content, change, lines=True)) < 1

    @fuzzed(15)
    @given(BYTE_CHANGES)
    def any_bytes(change):
        assert memory_share(read_run, folder, "metrics.jsonl", with_bytes(content, change)) < 1

    any_value()
    any_bytes()


@pytest.mark.parametrize("key", ["decay", "lr", "update_rms", "alignment_update"])
def test_telemetry_near_the_largest_float_is_diagnosed_without_a_warning(key):
    path = folders().copy("whole") / "metrics.jsonl"
    text, count = re.subn(rf'"{key}": ?[^,}}]+', f'"{key}": 1e308', path.read_text(encoding="utf-8"))
    assert count
    path.write_text(text, encoding="utf-8")
    read_run(path.parent)


def with_damaged_sample(key: str, value: float) -> Path:
    """A run whose last sample of telemetry has another value."""
    path = folders().copy("whole") / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines()
    last = max(place for place, line in enumerate(lines) if json.loads(line)["kind"] == "telemetry")
    lines[last], count = re.subn(rf'"{key}": ?[^,}}]+', f'"{key}": {value}', lines[last])
    assert count
    path.write_text("\n".join(lines), encoding="utf-8")
    return path.parent


@pytest.mark.parametrize(("key", "value"), [("step", 10**8), ("decay", -1e9)])
def test_a_damaged_sample_costs_neither_memory_nor_a_warning(key, value):
    """The norm is predicted update by update."""
    folder = with_damaged_sample(key, value)
    read_run(folder)
    assert load_run(folder).predicted_norms[0].max() < 10**7


@pytest.mark.parametrize("step", [-1, -(10**9)])
def test_a_step_below_zero_is_none(step):
    """From there on the norm would be predicted update by update: a billion of them took all memory."""
    with pytest.raises(UsageError, match=r"metrics\.jsonl: the record in line \d+ has no step"):
        read_run(with_damaged_sample("step", step))


def test_the_tensors_of_an_export_are_a_model_or_a_usage_error_even_with_the_right_checksum():
    folder = folders().copy("export")
    content, settings = (
        (folder / "model.safetensors").read_bytes(),
        (folder / "config.json").read_text(encoding="utf-8"),
    )
    header = 8 + int.from_bytes(content[:8], "little")
    whole = digest(folder / "model.safetensors")

    def read(folder):
        (folder / "config.json").write_text(
            settings.replace(whole, digest(folder / "model.safetensors")), encoding="utf-8"
        )
        load_model(folder)

    @fuzzed(30)
    @given(BYTE_CHANGES)
    def any_header(change):
        assert (
            memory_share(read, folder, "model.safetensors", with_bytes(content[:header], change) + content[header:]) < 1
        )

    any_header()


@pytest.mark.filterwarnings("ignore::muonsw.PeakLRWarning")
def test_a_state_with_the_right_checksum_is_resumed_from_or_put_aside():
    """As only an attacker would write it; a peak that the run was not built for is warned of."""
    run = folders().copy("stopped")
    training = Training(with_fingerprint(config(folders().data)))
    path = run / NEWER / checkpoint.STATE
    content = path.read_bytes()

    def read(run):
        data = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(data, dict):
            data.pop("checksum", None)
            path.write_text(json.dumps({**data, "checksum": checkpoint._digest(data)}), encoding="utf-8")
        try:
            training.load(checkpoint.load(run / NEWER))
        except checkpoint.CheckpointError as error:
            raise UsageError(str(error)) from error

    @fuzzed(25)
    @given(JSON_CHANGES)
    def any_state(change):
        assert memory_share(read, run, f"{NEWER}/{checkpoint.STATE}", with_value(content, change)) < 1

    any_state()


@pytest.mark.parametrize(
    "settings",
    [{"layers": 10**9}, {"sequence": 10**12}, {"width": 8 * 10**9}, {"vocab": 10**11}, {"experts": 10**10},
     {"ff": 10**15}, {"layers": 10**30}, {"width": 8 * 10**30, "head_dim": 8 * 10**30}],
    ids=str,
)  # fmt: skip
def test_an_export_that_asks_for_all_memory_gets_none(settings):
    folder = folders().copy("export")
    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    content["model"] |= settings
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    tracemalloc.start()
    try:
        with pytest.raises(UsageError, match=r"config\.json describes another model .* export the run again"):
            load_model(folder)
        assert tracemalloc.get_traced_memory()[1] < FIXED_BYTES
    finally:
        tracemalloc.stop()
