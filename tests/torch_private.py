"""Every private name of torch that this project uses, overrides or asks for by a string, and why no public one does.

torch may change them in any release. `missing()` says which of them the installed torch no longer has; a test calls it,
and another one compares this table with the source.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType

import torch
from torch.distributed.tensor import DTensor

_FUSED = "torch's own fused step, with the decay of one step as a number; the public forms keep state of their own"
_FOREACH = "one kernel for a list of tensors; torch's own optimizers use it, and it has no public name"

NAMES: Mapping[str, str] = MappingProxyType(
    {
        "torch._foreach_add_": _FOREACH,
        "torch._foreach_addcmul_": _FOREACH,
        "torch._foreach_copy_": _FOREACH,
        "torch._foreach_div": _FOREACH,
        "torch._foreach_lerp": _FOREACH,
        "torch._foreach_lerp_": _FOREACH,
        "torch._foreach_mul": _FOREACH,
        "torch._foreach_mul_": _FOREACH,
        "torch._foreach_neg": _FOREACH,
        "torch._foreach_norm": _FOREACH,
        "torch._foreach_sign_": _FOREACH,
        "torch._foreach_sqrt": _FOREACH,
        "torch._foreach_zero_": _FOREACH,
        "torch._fused_adamw_": _FUSED,
        "torch._fused_sgd_": _FUSED,
        "torch._amp_foreach_non_finite_check_and_unscale_": "the check of a GradScaler, for all gradients at once",
        "torch.distributed.distributed_c10d._set_pg_timeout": "groups of a mesh are made without the run's timeout",
        "torch._utils._flatten_dense_tensors": "one vector of many tensors, without a Python call for each",
        "torch._utils._unflatten_dense_tensors": "the way back",
        "torch._C._cuda_endAllocateToPool": "the end of a capture that was invalidated, which torch leaves open",
        "torch._C._cuda_releasePool": "the same",
        "torch._compile._disable_dynamo": "as torch.compiler.disable, but the compiler is imported only when it runs",
        "torch.utils._python_dispatch.TorchDispatchMode": "sees each operation of a capture; no public module has it",
        "torch.nn.modules.batchnorm._NormBase": "the one parent of all batch and instance norms",
        "torch.nn.modules.conv._ConvNd": "the one parent of all convolutions, transposed ones included",
        "torch.nn.modules.conv._ConvTransposeNd": "the one parent of transposed convolutions: (in, out)",
    }
)
# Attributes of objects, by the object that has them.
ATTRIBUTES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "dtensor": {"_local_tensor": "as to_local, without the view that torch 2.13 makes of each parameter"},
        "optimizer": {"_optimizer_step_pre_hooks": "whether another hook runs before a step"},
        "module": {
            "_modules": "the children of a module under all their names, also where two names share one",
            "_parameters": "a module's own parameters under all their names, tied ones included",
        },
        "scheduler": {
            "_step_count": "a scheduler that resumes must not warn that it came before the optimizer",
        },
    }
)
# Methods of `torch.optim.Optimizer` that ours replaces.
OVERRIDDEN: Mapping[str, str] = MappingProxyType(
    {"_patch_step_function": "torch would wrap `step` again in every subclass, and run its hooks twice"}
)
# Asked for by a string, because an object or a torch may lack them: the class or module that has them, if torch does.
PROBED: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "_schedulers": ("torch.optim.lr_scheduler.SequentialLR", "the schedulers inside one, for their peaks"),
        "_is_amx_tile_supported": ("torch.cpu", "whether this CPU multiplies bfloat16"),
        "_is_avx512_bf16_supported": ("torch.cpu", "the same"),
        "_is_flat_param": ("torch.distributed.fsdp._flat_param.FlatParameter", "FSDP1's vectors, which are refused"),
        "_orig_mod": ("torch._dynamo.eval_frame.OptimizedModule", "the model inside a compiled one"),
        "_no_weight_decay": ("", "a mark of Mamba's and others' models"),
    }
)
# Arguments, by the function that takes them.
ARGUMENTS: Mapping[str, str] = MappingProxyType(
    {"_weight": "torch.nn.Embedding with values of our own, without drawing others first"}
)


def missing() -> list[str]:
    """Names of the table that the installed torch does not have.

    Examples:
        >>> missing()
        []
    """
    optimizer = torch.optim.SGD([torch.zeros(1, dtype=torch.float32, device="cpu")], lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    objects = {"module": torch.nn.Module(), "optimizer": optimizer, "scheduler": scheduler, "dtensor": DTensor}
    gone = [name for name in NAMES if not _exists(name)]
    gone += [
        f"{kind}.{name}" for kind, names in ATTRIBUTES.items() for name in names if not hasattr(objects[kind], name)
    ]
    gone += [f"Optimizer.{name}" for name in OVERRIDDEN if not hasattr(torch.optim.Optimizer, name)]
    gone += [f"{owner}: {name}" for name, (owner, _) in PROBED.items() if owner and not _mentions(owner, name)]
    known = torch.nn.Embedding.__init__.__code__.co_varnames
    return gone + [f"Embedding({name}=)" for name in ARGUMENTS if name not in known]


def _mentions(owner: str, name: str) -> bool:
    """Whether the source of the file that has a class or module still has a name: instances alone have it."""
    found = find_spec(owner.rpartition(".")[0] if owner[owner.rfind(".") + 1].isupper() else owner)
    return found is not None and found.origin is not None and name in Path(found.origin).read_text(encoding="utf-8")


def _exists(name: str) -> bool:
    module, _, attribute = name.rpartition(".")
    try:
        attrgetter(attribute)(import_module(module))
    except (ImportError, AttributeError):
        return False
    return True
