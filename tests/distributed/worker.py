"""The life of a rank, in a module that the pool's server imports once so that its ranks need not."""

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

# Warnings of torch about torch, which no test here is about.
TORCHS_OWN = (".*torch.jit.script.*", "FSDP2-wrapped module .* returned a view tensor")


def serve(rank, size, store, pipe):
    """The life of a rank."""
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    for message in TORCHS_OWN:
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
