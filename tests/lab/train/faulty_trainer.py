"""A trainer whose first start meets a fault: `torchrun ... -m tests.lab.train.faulty_trainer FAULT train ...`."""

import os
import signal
import sys
import time

from muonsw.lab.cli import main
from muonsw.lab.errors import end
from muonsw.lab.train.state import Training

FAULTS = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hang": lambda: time.sleep(1000),
    "slow": lambda: time.sleep(0.5),  # so that there is time to send a signal
}


def inject(fault: str) -> None:
    """Make rank 1 fail at its fourth step, or slow every rank down."""
    if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        return
    real = Training.update

    def update(self, *args, **kwargs):
        if fault == "slow" or (os.environ["RANK"] == "1" and self.step + 1 == 4):
            FAULTS[fault]()
        return real(self, *args, **kwargs)

    Training.update = update


if __name__ == "__main__":
    inject(sys.argv[1])
    end(main(sys.argv[2:]))
