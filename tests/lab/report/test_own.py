"""Reports replace only what a report wrote."""

import pytest

from muonsw.lab.errors import UsageError
from muonsw.lab.report.own import is_own, require_own, require_own_folder
from muonsw.lab.report.report import write_report


def test_what_a_report_wrote_may_be_written_again(written):
    assert all(map(is_own, written))
    require_own(written)
    require_own_folder(written[0].with_suffix(""))


@pytest.mark.parametrize("foreign", ["report.html", "report/notes.txt", "report/validation-loss.png", "report"])
def test_a_report_takes_the_place_of_nothing_that_it_did_not_write(runs, tmp_path, foreign):
    (tmp_path / foreign).parent.mkdir(exist_ok=True)
    (tmp_path / foreign).write_text("of another program", encoding="utf-8")
    with pytest.raises(UsageError, match=rf"{tmp_path / foreign}|report, which holds .* choose another name"):
        write_report(tmp_path / "report.html", "A report", runs)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / foreign]
    assert (tmp_path / foreign).read_text(encoding="utf-8") == "of another program"


def test_figures_do_not_go_into_the_folder_of_a_run(runs):
    """`muonsw report runs/a -o runs/a.html` would put them among its checkpoints."""
    folder = runs[0].path
    before = sorted(folder.rglob("*"))
    with pytest.raises(UsageError, match=rf"figures would go into {folder}, which holds config.json .* --no-images"):
        write_report(folder.with_name(f"{folder.name}.html"), "A report", runs)
    assert sorted(folder.rglob("*")) == before
    assert not folder.with_name(f"{folder.name}.html").exists()
