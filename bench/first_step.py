"""How long the first step takes in a new process: with nothing compiled yet, then with Triton's cache filled.

    PYTHONPATH=src python bench/first_step.py --set w1024
    PYTHONPATH=src python bench/first_step.py --set w1024 --profile

Imports, the context of the GPU and the gradients are there before the clock starts. So is the optimizer, since
`--after` seconds: a first forward and backward pass takes as long, and kernels are prepared meanwhile.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import subprocess
import sys
import tempfile
import time


def main() -> None:
    args = arguments()
    if args.here:
        print_first_steps(args)
        return
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TRITON_CACHE_DIR": cache}
        for label in ("empty cache", "warm cache", "warm cache, again"):
            print(f"{label}:", flush=True)
            subprocess.run([sys.executable, *sys.argv, "--here"], env=environment, check=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", default="w1024")
    parser.add_argument("--only", default="muonsw", help="a contender of bench/step_time.py")
    parser.add_argument("--after", type=float, default=1.0, help="seconds between the optimizer and its first step")
    parser.add_argument("--one-by-one", action="store_true", help="compile kernels when they are launched")
    parser.add_argument("--profile", action="store_true", help="show where the host's time goes")
    parser.add_argument("--here", action="store_true", help="in this process, with the cache as it is")
    return parser.parse_args()


def print_first_steps(args: argparse.Namespace) -> None:
    import torch

    from muonsw.lab.bench.steps import SETS, MatrixSource, contenders

    optimizer, _ = contenders([args.only])[0][args.only](SETS[args.set], MatrixSource(torch.device("cuda", 0)))
    vars(optimizer)["_has_compiled"] = args.one_by_one
    time.sleep(args.after)
    profile = cProfile.Profile()
    seconds = []
    for number in range(3):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        if args.profile and number == 0:
            profile.runcall(optimizer.step)
        else:
            optimizer.step()
        torch.cuda.synchronize()
        seconds.append(round(time.perf_counter() - begin, 3))
    print(f"  {args.set} {args.only}: first steps took {seconds} s", flush=True)
    if args.profile:
        pstats.Stats(profile).sort_stats("cumtime").print_stats(45)


if __name__ == "__main__":
    main()
