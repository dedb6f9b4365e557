"""The README's two diffs run as they stand, and the design page knows every module."""

import re
from pathlib import Path

import torch

README = Path(__file__).parents[1] / "README.md"


def applied(diff):
    """The code after the change."""
    return "\n".join(line[2:] for line in diff.splitlines() if not line.startswith("-"))


def test_both_diffs_give_scaled_decay(capsys):
    keep, switch = re.findall(r"```diff\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    for diff in (keep, switch):
        model = torch.nn.Sequential(torch.nn.Embedding(16, 8), torch.nn.Linear(8, 8), torch.nn.RMSNorm(8))
        scope = {"model": model}
        exec(compile(applied(diff), "README.md", "exec"), scope)
        optimizer, group = scope["optimizer"], scope["optimizer"].param_groups[0]
        group["lr"] /= 2
        before = model[1].weight.detach().clone()
        model(torch.arange(4)).sum().backward()
        model[1].weight.grad.zero_()  # so that decay alone moves the weight
        optimizer.step()
        torch.testing.assert_close(model[1].weight.detach(), before * (1 - 0.1 * 1.5e-3**2 / 3e-3))
    assert "hidden" in capsys.readouterr().out


def test_the_design_page_names_every_module():
    text = (README.parent / "docs" / "design.md").read_text(encoding="utf-8")
    source = README.parent / "src" / "muonsw"
    for path in source.iterdir():
        if path.name.startswith("_") or path.name == "py.typed":
            continue
        assert path.name + ("/" if path.is_dir() else "") in text, path.name
