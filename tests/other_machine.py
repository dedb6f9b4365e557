"""Answers of `muonsw.machine` that differ from this machine's, for `make test-again`.

`python -m tests.other_machine` prints them as `name=number` words, which conftest.py reads from TEST_MACHINE. Tests can
run as if a GPU or Triton were missing, but not as if one were there.
"""

from muonsw import machine


def other_answers() -> dict[str, int]:
    return {
        "fast_bfloat16": int(not machine.fast_bfloat16()),
        "cores": 1 if machine.cores() > 1 else 3,
        "triton": 0,
        "gpus": 0,
    }


def pretend(answers: str, monkeypatch) -> None:
    """Patch the functions of `muonsw.machine` that `name=number` words name."""
    for name, _, value in (word.partition("=") for word in answers.split()):
        monkeypatch.setattr(machine, name, lambda *_, answer=int(value): answer)


if __name__ == "__main__":
    print(" ".join(f"{name}={value}" for name, value in other_answers().items()))
