"""The table of what works where: written from the tests that passed, so that the guide claims nothing else.

A test says what it shows with `@pytest.mark.works(framework, capability)`. `make test-integrations` fails where the
page says something else; `WORKS_TABLE=write make test-integrations` writes it.
"""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "frameworks.md"
BETWEEN = re.compile(r"(?<=<!-- works -->\n).*?(?=<!-- end -->)", re.DOTALL)
FRAMEWORKS = (
    "Trainer",
    "Accelerate",
    "Lightning",
    "timm",
    "PEFT LoRA",
    "TRL SFTTrainer",
    "torchtitan",
    "DeepSpeed stage 0",
)
CAPABILITIES = (
    "one process",
    "two processes (DDP)",
    "FSDP2",
    "torch.compile",
    "resume",
    "bf16",
    "accumulation",
    "clipping",
    "telemetry",
)
# Why a test cannot show it here.
REASONS = {
    ("timm", "FSDP2"): "not in timm",
    ("torchtitan", "torch.compile"): "needs Triton",
    ("DeepSpeed stage 0", "FSDP2"): "has ZeRO instead",
}


class Results:
    """Whether every test that shows a capability of a framework has passed."""

    def __init__(self):
        self.passed = {}

    def add(self, report):
        for name, value in report.user_properties:
            if name == "works" and (report.when == "call" or report.outcome != "passed"):
                cell = tuple(value)
                self.passed[cell] = self.passed.get(cell, True) and report.outcome == "passed"

    def render(self):
        unknown = [cell for cell in self.passed if cell[0] not in FRAMEWORKS or cell[1] not in CAPABILITIES]
        assert not unknown, f"not in the table: {unknown}"
        rows = ["| | " + " | ".join(FRAMEWORKS) + " |", "| --- |" + " --- |" * len(FRAMEWORKS)]
        for what in CAPABILITIES:
            cells = (
                "tested" if self.passed.get((framework, what)) else REASONS.get((framework, what), "")
                for framework in FRAMEWORKS
            )
            rows.append(f"| {what} | " + " | ".join(cells) + " |")
        return "\n" + "\n".join(rows) + "\n\n"


def settle(results, wish):
    """Write the table into its page, or say that the page claims something else; the exit status."""
    text, fresh = PAGE.read_text(encoding="utf-8"), results.render()
    if wish == "write":
        PAGE.write_text(BETWEEN.sub(lambda _: fresh, text), encoding="utf-8")
        return 0
    if BETWEEN.search(text)[0] == fresh:
        return 0
    print(
        f"\n{PAGE.name} does not say what these tests show; WORKS_TABLE=write make test-integrations writes:\n{fresh}"
    )
    return 1
