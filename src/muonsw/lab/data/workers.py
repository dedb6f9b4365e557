"""Groups encoded here or by several processes, a bounded number of them at a time, with the same shards either way."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait as wait_for_end

from muonsw.lab.data.groups import Job
from muonsw.lab.data.record import Group
from muonsw.lab.data.tokenizers import Tokenizer
from muonsw.lab.errors import UsageError

_ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


def write_groups(
    jobs: Iterable[Job | tuple[int, Group]], tokenizer: Tokenizer, *, processes: int, threads: int
) -> Iterator[tuple[int, Group, bool]]:
    """Number and outcome of every group, and whether it was written now, in the order in which they finish.

    Args:
        jobs: Groups to write, or the number and outcome of those that are there already; read no further ahead than
            one group beyond those at work.
        tokenizer: Is pickled for the processes.
        processes: With 1 the work is done here; more are spawned when there is a group to write, one thread each.
        threads: How many threads encode when the work is done here.
    """
    if processes <= 1:
        for job in jobs:
            yield _present(job) if isinstance(job, tuple) else (job.number, job.write(tokenizer, threads), True)
        return
    yield from _in_processes(jobs, tokenizer, processes)


def _in_processes(
    jobs: Iterable[Job | tuple[int, Group]], tokenizer: Tokenizer, processes: int
) -> Iterator[tuple[int, Group, bool]]:
    # a forked child would inherit the threads of torch and of the tokenizers in whatever state they are
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, mp_context=spawn, initializer=_begin, initargs=(tokenizer,))
    working: dict[Future[Group], int] = {}
    try:
        for job in jobs:
            if isinstance(job, tuple):
                yield _present(job)
                continue
            working[pool.submit(_write, job)] = job.number
            while len(working) > processes:
                yield from _finished(working)
        while working:
            yield from _finished(working)
    except BrokenProcessPool as error:
        fix = "use fewer processes or smaller groups; finished shards are kept, and the same command goes on"
        raise UsageError(f"a process that encodes died, perhaps for want of memory: {fix}") from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _present(job: tuple[int, Group]) -> tuple[int, Group, bool]:
    number, group = job
    return number, group, False


def _finished(working: dict[Future[Group], int]) -> Iterator[tuple[int, Group, bool]]:
    done, _ = wait(working, return_when=FIRST_COMPLETED)
    for future in sorted(done, key=lambda one: working[one]):
        yield working.pop(future), future.result(), True


_tokenizer: Tokenizer


def _begin(tokenizer: Tokenizer) -> None:
    global _tokenizer  # noqa: PLW0603  (a worker process has one tokenizer for its whole life)
    _tokenizer = tokenizer
    os.environ.update(_ONE_THREAD)
    # an interrupt at the keyboard reaches every process: these have nothing to say about it
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A worker must not outlive a killed parent: the next run takes over its folder."""
    if (parent := multiprocessing.parent_process()) is not None:
        wait_for_end([parent.sentinel])
        os._exit(1)


def _write(job: Job) -> Group:
    return job.write(_tokenizer, threads=1)
