"""Prints, after the long form, the tables of docs/reliability.md."""

from collections import defaultdict

from tests.faults.commands import REFUSED, REPAIRED, UNAFFECTED
from tests.faults.folders import LONG

SIGNS = {UNAFFECTED: "=", REPAIRED: "+", REFUSED: "!", "not found": "?"}


def pytest_terminal_summary(terminalreporter):
    if not LONG:
        return
    properties = [one for report in terminalreporter.getreports("passed") for one in report.user_properties]
    for line in (*cases_table(properties), "", *outcomes_table(properties)):
        terminalreporter.write_line(line)


def cases_table(properties):
    """How often each deed was done, and how it ended."""
    yield from ("| deed | times | outcome |", "| --- | ---: | --- |")
    for deed, times, result in (tuple(value) for name, value in properties if name == "cases"):
        yield f"| {deed} | {times} | {result} |"


def outcomes_table(properties):
    """A row for each file, a column for each damage, and in each cell a sign for every command that met it."""
    cells, commands, damages = defaultdict(list), defaultdict(dict), {}
    for file, damage, command, result in (tuple(value) for name, value in properties if name == "outcome"):
        cells[file, damage].append(SIGNS[result])
        commands[file][command] = damages[damage] = True
    yield f"| file | commands | {' | '.join(damages)} |"
    yield "| --- | --- |" + " :---: |" * len(damages)
    for file, met in commands.items():
        row = [" ".join(cells.get((file, damage), [])) for damage in damages]
        yield f"| `{file}` | {', '.join(met)} | {' | '.join(f'`{signs}`' if signs else '' for signs in row)} |"
