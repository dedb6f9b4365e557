"""Run as a separate process: the guide's code for DeepSpeed and Megatron-Core, with DeepSpeed on the CPU."""

import json
import sys
import warnings
from pathlib import Path

from tests.integrations.launching import deepspeed_on_the_cpu, sections


def main(_, folder):
    warnings.simplefilter("ignore")
    deepspeed_on_the_cpu()
    scope = {}
    for code in sections()["DeepSpeed"] + sections()["Megatron-Core"]:
        exec(compile(code, "frameworks.md", "exec"), scope)
    result = {
        "stage_0": scope["optimizer"].summary().matrices,
        "driven": [group["base_weight_decay"] for group in scope["handle"].optimizer.param_groups],
        "megatron": sorted({group["weight_decay"] for group in scope["ours"].param_groups}),
        "peaks": sorted({group["resolved_peak_lr"] for group in scope["ours"].param_groups}),
    }
    Path(folder, "result.json").write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
