"""Prints, for MUONSW_MACHINE, another answer to every question than this machine's own, where it can be lived with.

A GPU and Triton can be done without, and not made up; what a GPU is like matters to the tests of GPUs alone.
"""

from muonsw import machine


def other_answers() -> dict[str, int]:
    return {
        "fast_bfloat16": int(not machine.fast_bfloat16()),
        "cores": 1 if machine.cores() > 1 else 3,
        "triton": 0,
        "gpus": 0,
    }


if __name__ == "__main__":
    print(" ".join(f"{name}={value}" for name, value in other_answers().items()))
