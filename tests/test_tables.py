"""Tables of addresses: their rows are checked, and a reader finds one filled. On any machine."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from muonsw import kernels
from muonsw.kernels import tables
from muonsw.kernels.tables import GraphTables, TensorCache, TooManyEntriesError, block_map, in_graph, table

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def test_a_ragged_table_is_refused():
    """Three rows of two, two and four numbers would fill four rows of two."""
    with pytest.raises(ValueError, match=r"one length, not \[2, 2, 4\]"):
        table(((16, 32), (48, 64), (1, 2, 3, 4)), CPU)
    assert table(((16, 32), (48, 64)), CPU).numbers.tolist() == [[16, 32], [48, 64]]


def test_a_map_names_the_tensor_and_the_block_of_each_program():
    assert block_map((5, 1, 0, 8), 4, CPU).tolist() == [[0, 0, 1, 3, 3], [0, 1, 0, 0, 1]]
    assert block_map((5, 1), 4, CPU).dtype == torch.int32


@pytest.fixture
def device(monkeypatch):
    """A CUDA device as far as the cache asks: a stream, and whether it is capturing."""
    state = SimpleNamespace(stream=1, capturing=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=state.stream))
    return state


def make(_):
    return object()


def test_a_stream_reads_what_was_made_in_it(device):
    """The copy that fills a table waits for its turn in one stream; another would not wait for it."""
    kept = TensorCache()
    first = kept.get("a", CUDA, make)
    assert kept.get("a", CUDA, make) is first
    device.stream = 2
    assert kept.get("a", CUDA, make) is not first


def test_what_is_made_under_a_capture_is_not_kept(device):
    """A graph fills it when it is replayed, so nothing else may read it."""
    kept = TensorCache()
    device.capturing = True
    inside = kept.get("a", CUDA, make)
    device.capturing = False
    assert kept.get("a", CUDA, make) is not inside


def test_maps_made_under_a_capture_are_copied_by_the_graph(device, monkeypatch):
    made = []
    monkeypatch.setattr(tables, "_in_graph", lambda numbers, _: made.append(numbers) or torch.tensor(numbers))
    monkeypatch.setattr(tables, "_maps", TensorCache())
    device.capturing = True
    assert block_map((5, 1), 4, CUDA).tolist() == [[0, 0, 1], [0, 1, 0]]
    assert made == [[2, 1]]
    assert not tables._maps._made


def test_who_captures_holds_what_the_graph_reads(device):
    kept, graph = TensorCache(), GraphTables([], CPU, 0)
    found = kept.get("a", CUDA, make)
    device.stream, device.capturing = 2, True
    with in_graph(graph):
        assert kept.get("a", CUDA, make) is found
    assert graph.held == [found]
    kept.get("a", CUDA, make)
    assert tables._for_ever.pop() is found


def test_tables_that_do_not_fit_are_refused():
    with in_graph(GraphTables([], CPU, 64)):
        table(((1, 2), (3, 4)), CPU)
        with pytest.raises(TooManyEntriesError):
            table(((5,), (6,)), CPU)


def test_whether_kernels_run_is_not_asked_under_a_capture(device, monkeypatch):
    """Nothing can be compiled then, and the answer would stay for the process."""
    monkeypatch.setattr(kernels, "_USABLE", {})
    monkeypatch.setattr(kernels, "_usable", lambda _: not device.capturing)
    device.capturing = True
    assert not kernels.available(CUDA)
    device.capturing = False
    assert kernels.available(CUDA)


@pytest.mark.parametrize("index", [0, 1])
def test_a_kernel_is_launched_on_the_device_of_its_tensors(index, monkeypatch):
    """Triton launches on the current device."""
    current, launches = [0], []

    @contextmanager
    def device(wanted):
        current.append(wanted.index)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", device)
    kernel = {(3,): lambda *given, **options: launches.append((current[-1], given, options))}
    kernels.launch_on(torch.device("cuda", index), kernel, (3,), "pointer", BLOCK=8)
    assert launches == [(index, ("pointer",), {"BLOCK": 8})]
    assert current == [0]
