"""Run in a process of its own: the guide's code for DeepSpeed and Megatron-Core, with DeepSpeed on the CPU."""

import json
import os
import sys
import warnings
from pathlib import Path

from tests.integrations.launching import sections


def main(_, folder):
    warnings.simplefilter("ignore")
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    os.environ.update({**alone, "DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo", "TORCHDYNAMO_DISABLE": "1"})
    from deepspeed.comm.comm import TorchBackend

    sys.modules[TorchBackend.__module__].build_shm_op = lambda: None  # deepspeed.comm.torch is torch itself
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
