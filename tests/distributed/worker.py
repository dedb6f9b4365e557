"""What a rank of the pool runs; the pool's server imports this module once for all ranks."""

import traceback
import warnings

import torch
import torch._dynamo  # DTensors import it at their first use
import torch.distributed as dist
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor

import muonsw

assert muonsw.MuonSW

# Warnings of torch about torch.
TORCH_WARNINGS = (".*torch.jit.script.*", "FSDP2-wrapped module .* returned a view tensor")


def serve(rank, size, store, pipe):
    """Run jobs from the pipe until None arrives."""
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    for message in TORCH_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    while (job := pipe.recv()) is not None:
        function, args, kwargs = job
        try:
            torch.manual_seed(0)
            pipe.send((True, function(*args, **kwargs)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
    dist.destroy_process_group()
