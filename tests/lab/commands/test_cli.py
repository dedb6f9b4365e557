"""The command line: what it lists, writes and prints, and how it says no."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from muonsw.lab.studies.runner import Finished, Watch, run_all

from muonsw.lab.claims.claim import Outcome
from muonsw.lab.cli import main
from muonsw.lab.report import convergence
from muonsw.lab.studies.catalogue import STUDIES, find_study
from muonsw.lab.studies.experiment import Experiment, Study, seed_for
from muonsw.lab.studies.theory.chains import SWAPPED
from muonsw.registry import Registry
from tests.lab.small import SMALL

FIELDS = {
    "id", "statement", "reference", "hypothesis", "predicted", "measured",
    "comparison", "tolerance", "because", "interval", "limits", "verdict",
}  # fmt: skip


@pytest.fixture
def studies(monkeypatch):
    """A small study under the name of the real one, and one whose claims fail."""
    chosen: Registry[Study] = Registry("study")
    small = tuple(SMALL[name] for name in ("scalar", "scalar-figure", "matrix-figure", "fixed-rate"))
    broken = replace(SMALL["scalar"], settings=replace(SMALL["scalar"].settings, rules=SWAPPED))
    chosen.register("theory", Study("theory", "small", small, convergence.draw))
    chosen.register("broken", Study("broken", "swapped", (broken, SMALL["fixed-rate"]), convergence.draw))
    for module in ("muonsw.lab.studies.catalogue", "muonsw.lab.commands.reproduce"):
        monkeypatch.setattr(f"{module}.STUDIES", chosen)
    return chosen


@pytest.mark.usefixtures("studies")
def test_a_study_is_run_written_and_printed(tmp_path, capsys):
    assert main(["reproduce", "theory", "--out", str(tmp_path), "--processes", "1"]) == 0
    printed = capsys.readouterr().out
    data = json.loads((tmp_path / "claims.json").read_text())
    claims = [claim for experiment in data["experiments"] for claim in experiment["claims"]]
    assert data["claims_total"] == len(claims) > 10
    assert data["claims_failed"] == 0
    assert data["seed"] == 0
    assert all(set(claim) == FIELDS and claim["verdict"] == "holds" for claim in claims)
    assert {"muonsw", "python", "torch", "cpu_cores"} <= set(data["environment"])
    assert set(data["seconds"]) == {"scalar", "scalar-figure", "matrix-figure", "fixed-rate", "total"}
    assert data["experiments"][0]["settings"]["lam"] == 0.1
    assert f"All {len(claims)} claims hold" in printed
    for name in ("claims.json", "series.json", "convergence.png", "convergence.svg", "convergence.html"):
        assert (tmp_path / name).exists()
        assert f"wrote {tmp_path / name}" in printed
    for claim in claims:
        assert f"/{claim['id']}" in printed
    assert "\x1b" not in printed


@pytest.mark.usefixtures("studies")
def test_series_are_plain_data(tmp_path):
    assert main(["reproduce", "theory/matrix-figure", "--out", str(tmp_path), "--processes", "1"]) == 0
    series = json.loads((tmp_path / "series.json").read_text())
    assert [curves["rule"] for curves in series] == ["constant", "scaled"]
    assert all(len(values) == len(curves["steps"]) for curves in series for values in curves["values"])
    assert series[0]["level"] > 0


@pytest.mark.usefixtures("studies")
def test_a_failed_claim_is_shown_first_and_sets_the_exit_code(tmp_path, capsys):
    assert main(["reproduce", "broken", "--out", str(tmp_path), "--processes", "1"]) == 1
    printed = capsys.readouterr().out
    verdicts = [line.split()[-1] for line in printed.splitlines() if line.endswith(("holds", "fails"))]
    assert verdicts == sorted(verdicts)
    assert verdicts[0] == "fails"
    assert "claims FAILED" in printed
    assert json.loads((tmp_path / "claims.json").read_text())["claims_failed"] == verdicts.count("fails")
    assert not (tmp_path / "series.json").exists()


def test_results_do_not_depend_on_the_number_of_processes():
    experiments = [SMALL[name] for name in ("scalar-figure", "fixed-rate")]
    heard: list[str] = []
    watch = Watch(progress=lambda name, _: heard.append(name), finished=lambda name, _: heard.append(f"{name} done"))
    together = run_all(experiments, seed=3, processes=2, watch=watch)
    alone = run_all(experiments, seed=3, processes=1)
    assert list(together) == list(alone) == [experiment.name for experiment in experiments]
    assert {name: r.outcome for name, r in together.items()} == {name: r.outcome for name, r in alone.items()}
    assert {f"{name} done" for name in alone} < set(heard)


@pytest.mark.slow
def test_an_error_in_a_process_is_raised():
    bad = replace(SMALL["scalar"], settings=replace(SMALL["scalar"].settings, lam=-1.0))
    with pytest.raises(ValueError, match="lambda > 0"):
        run_all([bad, SMALL["scalar-figure"]], seed=0, processes=2)


def test_list_shows_every_experiment(capsys):
    assert main(["reproduce", "--list"]) == 0
    printed = capsys.readouterr().out
    for study in STUDIES.values():
        assert f"{study.name}: {study.title}" in printed
        for experiment in getattr(study, "experiments", ()):
            assert f"{study.name}/{experiment.name}" in printed
            assert experiment.title in printed
    assert {"theory", "coordinates", "main-table", "width-transfer"} <= set(STUDIES)
    assert all(f"scale {scale}: " in printed for scale in ("cpu", "mini", "paper"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["theroy"], "did you mean 'theory'"),
        (["theory/matrx"], "did you mean 'matrix'"),
        ([], "say what to reproduce: theory"),
        (["theory", "--processes", "0"], "at least 1"),
    ],
)
def test_usage_errors_are_one_line(arguments, message, tmp_path, capsys):
    assert main(["reproduce", *arguments, "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_an_unwritable_folder_is_refused_before_the_work(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["reproduce", "theory", "--out", str(tmp_path / "file" / "below")]) == 2
    error = capsys.readouterr().err
    assert f"cannot write to the folder {tmp_path / 'file' / 'below'}" in error
    assert "choose another" in error


@pytest.mark.parametrize("arguments", [[], ["reproduce", "--nonsense"], ["trian"]])
def test_a_malformed_command_line_exits_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


def test_a_missing_extra_is_said_in_one_line():
    code = (
        "import sys; sys.modules['tyro'] = None; sys.modules['rich'] = None\n"
        "from muonsw.lab.cli import main; sys.exit(main(['reproduce', '--list']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "pip install 'muonsw[lab]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_one_experiment_of_a_study():
    assert [experiment.name for experiment in find_study("theory/scalar").experiments] == ["scalar"]
    with pytest.raises(ValueError, match="unknown study"):
        find_study("nothing/scalar")


def test_each_experiment_has_random_numbers_of_its_own():
    assert len({seed_for(seed, name) for seed in range(3) for name in SMALL}) == 3 * len(SMALL)


def test_the_longest_experiment_starts_first():
    order: list[str] = []

    def note(setting, _context):
        order.append(setting)
        return Outcome([])

    experiments = [Experiment(name, "", (), name, note, cost) for name, cost in (("a", 1.0), ("b", 3.0), ("c", 2.0))]
    results = run_all(experiments, seed=0, processes=1)
    assert order == ["b", "c", "a"]
    assert list(results) == ["a", "b", "c"]
    assert all(isinstance(result, Finished) for result in results.values())


@pytest.mark.usefixtures("studies")
def test_the_default_folder_is_named_after_the_study(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", "theory/fixed-rate"]) == 0
    assert (Path("out") / "theory" / "claims.json").exists()
