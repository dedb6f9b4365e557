"""A pool of ranks that run one function after another.

They are forked from the server of `tests.common.children`, so a pool needs no import. A case that does not return in
time, such as a collective that hangs, fails; its pool is killed and the next case gets a new one.
"""

import contextlib
import tempfile
from multiprocessing.connection import wait
from pathlib import Path

from tests.common.children import SERVER

TIMEOUT = 60.0
# Seconds for the others to return once a rank has failed: they may be waiting for it.
GRACE = 5.0


class CaseError(AssertionError):
    """A function failed on a rank, or did not return."""


class Pool:
    """`size` ranks of one process group (gloo)."""

    def __init__(self, size):
        self.size = size
        self._folder = tempfile.TemporaryDirectory()
        self._started = 0
        self._start()

    def _start(self):
        from tests.distributed.worker import serve

        self._started += 1
        store = Path(self._folder.name) / f"store{self._started}"
        self._pipes, self._processes = [], []
        for rank in range(self.size):
            ours, theirs = SERVER.Pipe()
            process = SERVER.Process(target=serve, args=(rank, self.size, str(store), theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function, *args, timeout=TIMEOUT, **kwargs):
        """Return the results of `function(*args)` on each rank."""
        answers = self.attempt(function, *args, timeout=timeout, **kwargs)
        failed = [f"rank {rank}:\n{answer}" for rank, (ok, answer) in enumerate(answers) if not ok]
        if failed:
            raise CaseError("\n".join(failed))
        return [answer for _, answer in answers]

    def attempt(self, function, *args, timeout=TIMEOUT, **kwargs):
        """Return (True, result) or (False, traceback) for each rank."""
        for pipe in self._pipes:
            pipe.send((function, args, kwargs))
        answers = {}
        while len(answers) < self.size:
            failed = [f"rank {rank}:\n{answer}" for rank, (ok, answer) in answers.items() if not ok]
            waiting = [rank for rank in range(self.size) if rank not in answers]
            ready = wait([self._pipes[rank] for rank in waiting], GRACE if failed else timeout)
            if not ready:
                self._restart()
                raise CaseError("\n".join([f"ranks {waiting} did not return", *failed]))
            for pipe in ready:
                rank = self._pipes.index(pipe)
                try:
                    answers[rank] = pipe.recv()
                except EOFError:
                    self._restart()
                    raise CaseError(f"rank {rank} died") from None
        return [answers[rank] for rank in range(self.size)]

    def _restart(self):
        self._end()
        self._start()

    def _end(self):
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
            pipe.close()
        for process in self._processes:
            process.join(2)
            if process.is_alive():
                process.kill()
                process.join()

    def close(self):
        self._end()
        self._folder.cleanup()
