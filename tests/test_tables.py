"""Tables of addresses: their rows are checked, and they are filled before they are read."""

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
    cache = TensorCache()
    first = cache.get("a", CUDA, make)
    assert cache.get("a", CUDA, make) is first
    device.stream = 2
    assert cache.get("a", CUDA, make) is not first


def test_a_map_made_under_a_capture_is_computed_by_the_graph_and_not_cached(monkeypatch):
    monkeypatch.setattr(tables, "_maps", TensorCache())
    graph = GraphTables([], CPU, 64)
    graph._entries[:2] = torch.tensor([2, 1])  # which a graph computes before anything reads them
    with in_graph(graph):
        assert block_map((5, 1), 4, CUDA).tolist() == [[0, 0, 1], [0, 1, 0]]
    assert graph._numbers[:2] == [2, 1]
    assert not tables._maps._made


def test_a_graph_holds_the_cached_tensors_that_it_reads(device):
    cache, graph = TensorCache(), GraphTables([], CPU, 0)
    cached = cache.get("a", CUDA, make)
    device.stream = 2
    with in_graph(graph):
        assert cache.get("a", CUDA, make) is cached
    assert graph.held == [cached]


def test_tables_that_do_not_fit_are_refused():
    with in_graph(GraphTables([], CPU, 64)):
        table(((1, 2), (3, 4)), CPU)
        with pytest.raises(TooManyEntriesError):
            table(((5,), (6,)), CPU)


def test_kernels_are_not_probed_under_a_capture(device, monkeypatch):
    """Nothing can be compiled then, and the wrong answer would be cached for the whole process."""
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
