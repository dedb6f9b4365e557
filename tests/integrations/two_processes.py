"""Run by torchrun with two processes: a framework trains under DDP or FSDP2; rank 0 writes the result.

Accelerate, and with it the Trainer, turns its FSDP2 plugin on only where it finds an accelerator. Here that one
condition is lifted (`allow_on_cpu`); everything behind it is Accelerate's own code: sharding the model, swapping the
DTensors into the optimizer's groups, saving and loading.
"""

import json
import os
import sys
import warnings
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from muonsw.lab.errors import end
from tests.models.packages import prepare

LAYERS = ["LlamaDecoderLayer"]


def allow_on_cpu():
    from accelerate.state import AcceleratorState, DistributedType, PartialState

    original = AcceleratorState.__init__

    def init(self, *args, fsdp_plugin=None, **kwargs):
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.fsdp_plugin, self.distributed_type = fsdp_plugin, DistributedType.FSDP
            PartialState._shared_state["distributed_type"] = self.distributed_type

    AcceleratorState.__init__ = init


def whole(named):
    """Unsharded weights, under names without the prefix of a compiled module."""
    return {
        name.replace("_orig_mod.", ""): (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in named
    }


def of_both_ranks(batches):
    """For each step, the batches of both ranks as one."""
    everywhere = [None, None]
    torch.distributed.all_gather_object(everywhere, batches)
    return [
        {key: torch.cat([first[key], second[key]]) for key in first} for first, second in zip(*everywhere, strict=True)
    ]


def describe(optimizer, actual, expected, resumed, resumed_optimizer, sampled):
    peaks = [sorted({g["resolved_peak_lr"] for g in o.param_groups}) for o in (optimizer, resumed_optimizer)]
    return {
        "sharded": all(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"]),
        "off_by": max(float((actual[name] - w).abs().max() / w.abs().max()) for name, w in expected.items()),
        "resumed": all(torch.equal(actual[name], value) for name, value in resumed.items()),
        "peaks": peaks[0],
        "resumed_peaks": peaks[1],
        "matrices": optimizer.summary().matrices,
        "sampled": sampled,
    }


def with_transformers(folder, model="llama", layers="LlamaDecoderLayer"):
    """Six steps against a plain loop, and again from the checkpoint of the fourth."""
    from muonsw.integrations.transformers import TelemetryCallback
    from tests.integrations.test_transformers import batches_of, by_hand, trainer_of

    def trainer(place):
        sharding = {"fsdp": True, "fsdp_config": {"fsdp_version": 2, "transformer_layer_cls_to_wrap": [layers]}}
        saving = {"save_strategy": "steps", "save_steps": 4}
        return trainer_of(Path(folder, place), model, per_device_train_batch_size=2, **sharding, **saving)

    run = trainer("whole")
    callback = TelemetryCallback(run, every=2)
    run.add_callback(callback)
    batches = of_both_ranks(batches_of(run))
    actual = whole(run.model.named_parameters())
    again = trainer("resumed")
    again.train(resume_from_checkpoint=str(Path(folder, "whole", "checkpoint-4")))
    return describe(
        run.optimizer.optimizer,
        actual,
        by_hand(model, batches),
        whole(again.model.named_parameters()),
        again.optimizer.optimizer,
        [record["step"] for record in callback.telemetry.records],
    )


def with_accelerate(folder):
    """Four steps: two, a saved state, two more; then the last two again in a new run that loads the state."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    from muonsw import Telemetry, clip_optimizer_grads_
    from tests.integrations.test_accelerate import Run, by_hand

    def prepared():
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=LAYERS,
            state_dict_type="SHARDED_STATE_DICT",
        )
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        assert accelerator.is_fsdp2
        return Run(accelerator)

    def clip(run):
        clip_optimizer_grads_(run.optimizer, 0.5)

    run = prepared()
    telemetry = Telemetry(run.optimizer, every=2)
    run.go(0, 2, clip)
    run.accelerator.save_state(folder)
    run.go(2, 4, clip)
    actual = whole(run.model.named_parameters())
    batches = of_both_ranks([{key: value.clone() for key, value in batch.items()} for batch in run.batches][:4])
    again = prepared()
    again.accelerator.load_state(folder)
    again.go(2, 4, clip)
    resumed = whole(again.model.named_parameters())
    steps = [record["step"] for record in telemetry.records]
    return describe(run.plain, actual, by_hand(batches, clip=0.5, processes=2), resumed, again.plain, steps)


def with_lightning(folder):
    """Four steps against the same under DDP, and the last two again from a checkpoint."""
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    from muonsw.integrations.lightning import TelemetryCallback
    from tests.integrations.test_lightning import Regression, fit

    class Sharded(Regression):
        def configure_model(self):
            if not isinstance(self.hidden.weight, DTensor):
                for part in (self.embed, self.hidden, self.norm, self.head):  # the module's own forward is not called
                    fully_shard(part, mesh=self.device_mesh["data_parallel"])

    def run(place, module=Sharded, **options):
        callback = TelemetryCallback(every=2)
        saver = ModelCheckpoint(dirpath=Path(folder, place), every_n_train_steps=2, save_top_k=-1, filename="{step}")
        strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
        torch.manual_seed(0)
        options = {"callbacks": [callback, saver], "strategy": strategy, "devices": 2, "max_steps": 4, **options}
        trainer, trained = fit(folder, module(), **options)
        return trainer, whole(trained.named_parameters()), [r["step"] for r in callback.telemetry.records]

    trainer, actual, sampled = run("whole")
    checkpoint = next(Path(folder, "whole").glob("step=2*.ckpt"))
    again, resumed, _ = run("resumed", ckpt_path=str(checkpoint))
    _, expected, _ = run("plain", Regression, strategy="ddp")
    return describe(trainer.optimizers[0], actual, expected, resumed, again.optimizers[0], sampled)


def with_torchtitan(folder):
    """Six steps against a plain loop; the last three again from a checkpoint of its CheckpointManager."""
    from torch.distributed.fsdp import fully_shard
    from torchtitan.components.checkpoint import CheckpointManager

    from muonsw import Telemetry
    from tests.integrations.test_torchtitan import STEPS, Training, llama

    torch.distributed.init_process_group("gloo")

    def sharded():
        model = llama()
        for layer in model.layers.values():
            fully_shard(layer)
        fully_shard(model)
        training = Training([model])
        manager = CheckpointManager.Config(enable=True, interval=3, keep_latest_k=0).build(
            dataloader=None,
            model_parts=training.parts,
            optimizers=training.optimizers,
            lr_schedulers=training.schedulers,
            states={},
            sd_adapter=None,
            base_folder=folder,
        )
        return training, manager

    def whole_weights(training):
        return whole(training.parts[0].named_parameters())

    training, manager = sharded()
    telemetry = Telemetry(training.optimizers.optimizers[0], every=2)
    training.go(0, 3)
    manager.save(3)
    training.go(3, STEPS)
    again, manager = sharded()
    assert manager.load(3)
    again.go(3, STEPS)
    actual, resumed = whole_weights(training), whole_weights(again)
    expected = Training([llama()]).go(0, STEPS)
    steps = [record["step"] for record in telemetry.records]
    optimizers = training.optimizers.optimizers[0], again.optimizers.optimizers[0]
    result = describe(optimizers[0], actual, expected, resumed, optimizers[1], steps)
    torch.distributed.destroy_process_group()
    return result


def ddp_transformers(folder):
    from tests.integrations.test_transformers import trainer_of

    trainer = trainer_of(folder, per_device_train_batch_size=2)
    trainer.train()
    return copies(trainer.model, trainer.optimizer.optimizer)


def ddp_accelerate(_):
    from accelerate import Accelerator

    from tests.integrations.test_accelerate import Run

    run = Run(Accelerator(cpu=True))
    run.go(0, 3)
    return copies(run.model.module, run.plain)


def ddp_lightning(folder):
    from tests.integrations.test_lightning import fit

    trainer, module = fit(folder, strategy="ddp", devices=2, max_steps=4)
    return copies(module, trainer.optimizers[0])


def copies(model, optimizer):
    here = torch.cat([param.detach().flatten() for param in model.parameters()])
    everywhere = [torch.empty_like(here) for _ in range(2)]
    torch.distributed.all_gather(everywhere, here)
    return {
        "equal": bool(torch.equal(*everywhere)),
        "peaks": sorted({group["resolved_peak_lr"] for group in optimizer.param_groups}),
        "matrices": optimizer.summary().matrices,
    }


RUNS = {
    "transformers": with_transformers,
    "transformers-experts": lambda folder: with_transformers(folder, "mixtral", "MixtralDecoderLayer"),
    "accelerate": with_accelerate,
    "lightning": with_lightning,
    "torchtitan": with_torchtitan,
    "ddp-transformers": ddp_transformers,
    "ddp-accelerate": ddp_accelerate,
    "ddp-lightning": ddp_lightning,
}


def main(framework, folder):
    warnings.simplefilter("ignore")
    prepare()
    if not framework.startswith("ddp"):
        allow_on_cpu()
    torch.set_num_threads(1)
    result = RUNS[framework](folder)
    if os.environ["RANK"] == "0":
        Path(folder, "result.json").write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
    end(0)  # gloo's threads may abort Python while it shuts down
