"""The command line: `muonsw COMMAND ...`.

A command is a frozen dataclass whose fields are its options and whose `run` returns an exit code, or a union of such
classes. To add one, add an entry to `COMMANDS`. Only the command that runs is imported, so `muonsw --help` needs
neither torch nor tyro.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence

from muonsw import __version__
from muonsw.lab.console import harmless, print_any_character
from muonsw.lab.errors import INTERRUPTED, MACHINE, OK, USAGE, Ending, UsageError, end, needed
from muonsw.registry import unknown

# The module and class of each command, and what `muonsw --help` says about it.
COMMANDS: Mapping[str, tuple[str, str, str]] = {
    "compare": ("commands.training", "Compare", "train a model under several decay rules and compare the results"),
    "reproduce": ("commands.reproduce", "Reproduce", "run a study of the paper and check its claims"),
    "plan": ("plan", "Plan", "compute size, FLOPs, memory, hours and traffic of a run"),
    "advise": ("advise", "Advise", "predict whether decay matters in a run, and which lambda to try"),
    "data": ("commands.data", "Data", "prepare training data, or verify it"),
    "train": ("commands.training", "Train", "train a model, or resume a run that was stopped"),
    "task": ("commands.training", "TaskCommand", "check your own task, or write a file to start from"),
    "report": ("report", "Report", "write one HTML page about one or more runs"),
    "diagnose": ("diagnose", "Diagnose", "show what decay did to the weights of a run, and what went wrong"),
    "export": ("commands.data", "Export", "write the model of a run as safetensors"),
    "sample": ("commands.data", "Sample", "let a trained model continue a text"),
}
ABOUT = """
Train with Muon-SW, compare decay rules, and reproduce the paper.

commands:
{commands}

`muonsw COMMAND --help` lists the options of a command, `muonsw --version`
prints the version. Exit codes: 0 success; 1 a claim failed, a run diverged or
data is damaged; 2 usage error; 3 the machine failed (disk full, process
killed); 128 plus the signal if stopped by one (130 for Ctrl-C).
"""
TASK_PREFIX = "--task."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; `muonsw --help` lists the codes."""
    print_any_character()
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        return run(words)
    except Ending as error:
        print(f"muonsw: {harmless(error)}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # such as `muonsw train --help | head`: discard the remaining output
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except MemoryError:
        print("muonsw: out of memory: choose something smaller, or stop other programs", file=sys.stderr)
        return MACHINE
    except KeyboardInterrupt:
        print("muonsw: interrupted", file=sys.stderr)
        return INTERRUPTED


def run(words: Sequence[str]) -> int:
    """Parse a command line and run its command; tyro exits with 2 on a usage error."""
    if list(words) == ["--version"]:
        print(f"muonsw {__version__}")
        return OK
    if not words or words[0] in ("-h", "--help"):
        listed = "\n".join(f"  {name:<9}  {summary}" for name, (*_, summary) in COMMANDS.items())
        usage = f"usage: muonsw COMMAND [OPTIONS]\n{ABOUT.rstrip().format(commands=listed)}"
        print(usage, file=sys.stdout if words else sys.stderr)
        return OK if words else USAGE
    name, *options = words
    if name not in COMMANDS:
        raise UsageError(unknown("command", name, list(COMMANDS)))
    for before, word in zip(words, options, strict=False):
        # An unset shell variable; as a path it would be the current folder.
        if not word or (word.startswith("--") and word.endswith("=")):
            option = word.rstrip("=") or before
            raise UsageError(f"an argument is empty after {option}: give a value or leave it out")
    tyro = needed("tyro", "the lab needs", "lab")
    module, kind, summary = COMMANDS[name]
    command = getattr(needed(f"muonsw.lab.{module}", "the lab needs", "lab"), kind)
    # A class brings its own description; the unions `data` and `task` have none.
    about = None if isinstance(command, type) else f"{summary.capitalize()}."
    # `--lr FLOAT` instead of `--lr {None}|FLOAT`, and no `--no-control` for `--control`.
    markers = (tyro.conf.DisallowNone, tyro.conf.FlagCreatePairsOff)
    words = with_task_options(options)
    code: int = tyro.cli(command, prog=f"muonsw {name}", description=about, args=words, config=markers).run()
    return code


def with_task_options(words: Sequence[str]) -> list[str]:
    """Collect `--task.depth 6 --task.flip` as `--task.NAME depth=6 flip=true`, which tyro can parse.

    Examples:
        >>> with_task_options(["--task", "vit.py", "--task.depth", "6", "--steps", "9"])
        ['--task', 'vit.py', '--steps', '9', '--task.NAME', 'depth=6']
    """
    plain, options, waiting = [], [], list(words)
    while waiting:
        word = waiting.pop(0)
        if not word.startswith(TASK_PREFIX):
            plain.append(word)
            continue
        name, equals, value = word.removeprefix(TASK_PREFIX).partition("=")
        if not equals:
            value = waiting.pop(0) if waiting and not waiting[0].startswith("--") else "true"
        options.append(f"{name.replace('-', '_')}={value}")
    return [*plain, "--task.NAME", *options] if options else plain


if __name__ == "__main__":
    end(main())
