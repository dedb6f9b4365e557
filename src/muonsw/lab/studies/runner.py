"""Running experiments one after the other or in several processes, with the same results either way."""

from __future__ import annotations

import multiprocessing
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from muonsw.lab.claims.claim import Outcome
from muonsw.lab.studies.experiment import Experiment


@dataclass(frozen=True)
class Finished:
    """An experiment's outcome and how long it took."""

    outcome: Outcome
    seconds: float


@dataclass(frozen=True)
class Watch:
    """Who is told what happens while experiments run; every method is called in the parent process.

    Attributes:
        progress: An experiment's name and the fraction of it that is done.
        finished: An experiment's name and what came out.
    """

    progress: Callable[[str, float], None] = lambda _name, _fraction: None
    finished: Callable[[str, Finished], None] = lambda _name, _result: None


def run_all(
    experiments: Sequence[Experiment], *, seed: int, processes: int, watch: Watch | None = None
) -> dict[str, Finished]:
    """Run experiments, the longest first, and return what they found in the order given.

    Every experiment runs on one thread and draws from a generator of its own, so that neither the number of
    processes nor their order changes a bit of the result.

    Args:
        experiments: With names that differ.
        seed: The seed that all of them derive their own from.
        processes: How many run at a time; with 1 they run in this process.
        watch: Told about progress.
    """
    watch = watch or Watch()
    by_cost = sorted(experiments, key=lambda experiment: -experiment.cost)
    if min(processes, len(by_cost)) <= 1:
        results = _run_here(by_cost, seed, watch)
    else:
        results = _run_in_pool(by_cost, seed, min(processes, len(by_cost)), watch)
    return {experiment.name: results[experiment.name] for experiment in experiments}


def _run_here(experiments: Sequence[Experiment], seed: int, watch: Watch) -> dict[str, Finished]:
    results = {}
    with one_thread():
        for experiment in experiments:
            name = experiment.name
            results[name] = _timed(experiment, seed, partial(watch.progress, name))
            watch.finished(name, results[name])
    return results


def _run_in_pool(experiments: Sequence[Experiment], seed: int, processes: int, watch: Watch) -> dict[str, Finished]:
    # A forked child would inherit torch's thread pool in whatever state it is in.
    spawn = multiprocessing.get_context("spawn")
    news: Any = spawn.Queue()
    results: dict[str, Finished] = {}
    pool = ProcessPoolExecutor(processes, mp_context=spawn, initializer=_prepare_worker, initargs=(news,))
    try:
        waiting = {pool.submit(_work, experiment, seed): experiment.name for experiment in experiments}
        while waiting:
            done, _ = wait(waiting, timeout=0.2, return_when=FIRST_COMPLETED)
            _pass_on(news, watch)
            for future in done:
                _collect(future, waiting.pop(future), results, watch)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return results


def _collect(future: Future[Finished], name: str, results: dict[str, Finished], watch: Watch) -> None:
    results[name] = future.result()
    watch.finished(name, results[name])


def _pass_on(news: Any, watch: Watch) -> None:
    while True:
        try:
            name, fraction = news.get_nowait()
        except queue.Empty:
            return
        watch.progress(name, fraction)


_worker_news: Any = None


def _prepare_worker(news: Any) -> None:
    global _worker_news  # noqa: PLW0603  (a worker process has one queue for its whole life)
    _worker_news = news
    torch.set_num_threads(1)


def _work(experiment: Experiment, seed: int) -> Finished:
    return _timed(experiment, seed, lambda fraction: _worker_news.put((experiment.name, fraction)))


def _timed(experiment: Experiment, seed: int, progress: Callable[[float], None]) -> Finished:
    start = time.perf_counter()
    outcome = experiment.run(seed, progress=progress)
    return Finished(outcome, time.perf_counter() - start)


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use one thread, as the worker processes do, and give the others back afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
