"""Run by torchrun with two processes: a framework trains under DistributedDataParallel; rank 0 writes what came out."""

import json
import sys
import warnings
from pathlib import Path

import torch

from muonsw.lab.errors import end
from tests.models.packages import prepare


def with_transformers(folder):
    from muonsw.integrations.transformers import TelemetryCallback
    from tests.integrations.test_transformers import trainer_of

    trainer = trainer_of(folder, per_device_train_batch_size=2)
    callback = TelemetryCallback(trainer, every=2)
    trainer.add_callback(callback)
    trainer.train()
    logged = [entry["step"] for entry in trainer.state.log_history if "telemetry/hidden/weight_rms" in entry]
    return trainer.model, trainer.optimizer.optimizer, logged


def with_accelerate(_):
    from accelerate import Accelerator

    from muonsw import Telemetry
    from tests.integrations.test_accelerate import Run

    accelerator = Accelerator(cpu=True)
    run = Run(accelerator)
    telemetry = Telemetry(run.optimizer, every=2)
    run.go(0, 3)
    return run.model.module, run.plain, [record["step"] for record in telemetry.records]


def with_lightning(folder):
    from muonsw.integrations.lightning import TelemetryCallback
    from tests.integrations.test_lightning import fit

    callback = TelemetryCallback(every=2)
    trainer, module = fit(folder, callbacks=[callback], strategy="ddp", devices=2, max_steps=4)
    return module, trainer.optimizers[0], [record["step"] for record in callback.telemetry.records]


def main(framework, folder):
    warnings.simplefilter("ignore")
    prepare()
    torch.set_num_threads(1)
    model, optimizer, sampled = globals()[f"with_{framework}"](folder)
    here = torch.cat([param.detach().flatten() for param in model.parameters()])
    everywhere = [torch.empty_like(here) for _ in range(2)]
    torch.distributed.all_gather(everywhere, here)
    if torch.distributed.get_rank() == 0:
        result = {
            "ranks": torch.distributed.get_world_size(),
            "equal": bool(torch.equal(*everywhere)),
            "peaks": sorted({group["resolved_peak_lr"] for group in optimizer.param_groups}),
            "matrices": optimizer.summary().matrices,
            "sampled": sampled,
        }
        Path(folder, "result.json").write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
    end(0)  # threads of gloo may abort a Python that is being taken down
