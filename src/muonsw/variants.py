"""The public optimizers: one engine, three default algorithms.

Each signature starts with the rates and the decay rule, continues with the options of its algorithm, and ends with
those of kernels, graphs and ranks. `GroupOptions` describes the options that all of them share (`cautious`, ...).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Unpack

import torch
from torch import Tensor

from muonsw.optimizer import Params, ScaledDecayOptimizer
from muonsw.options import GroupOptions, MuonOptions

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class MuonSW(ScaledDecayOptimizer):
    """Muon with scaled weight decay: orthogonalized momentum, and decay by `lambda lr^2/peak`.

    Args:
        params: parameters, named parameters, or param groups; a group may set any option. For a whole model, see
            `for_model`.
        lr: learning rate, a number or a one-element tensor.
        weight_decay: lambda.
        decay: the decay rule: "scaled" (lambda lr^2/peak), "constant" (lambda lr, as in torch), or another name in
            `DECAY_RULES`.
        peak_lr: the highest learning rate of the run. None takes it from the scheduler, or else `lr`; "running_max"
            is the highest rate so far. A step above the peak is an error. Groups with different rates each need a
            number.
        peak: "group" divides by the group's own peak, "base" by the peak before `lr_multiplier`.
        momentum: beta.
        nesterov: look ahead along the momentum.
        momentum_form: "ema" (`M <- beta M + (1-beta) G`) or "heavy_ball" (`M <- beta M + G`).
        orthogonalizer: "auto" (Newton-Schulz, the fastest form for each shape), "newton_schulz", "gram_newton_schulz",
            "polar_express", "exact", another set of coefficients ("newton_schulz_you", "polar_express_5",
            "polar_express_nanochat", "simple_quintic"), "aurora", or a registered name.
        ns_steps: iterations of the orthogonalizer; None means 5, or 12 for "simple_quintic", as its authors chose.
        ns_dtype: dtype of its products; "auto" is bfloat16 if the hardware multiplies it fast, float16 on older GPUs
            with tensor cores, else float32. On GPUs all but "newton_schulz" use float16 instead of bfloat16.
        scale: shape scale: "match_rms_adamw" (0.2 sqrt(max(m, n))), "original", "spectral" or "none".
        precondition: transform the momentum before it is orthogonalized: "muon2" (divide by the root of the
            average squared gradient), "sign", "equalize" (rows of equal norm), "soap" (whiten in SOAP's eigenbasis),
            or another name in `PRECONDITIONERS`.
        normalize: transform the direction afterwards: "normuon" (rows of equal size), "adamuon" (divide elements by
            the root of their average square), "muon_plus" (norm of an orthogonal matrix), or another name in
            `NORMALIZERS`.
        matrix: how to view parameters with more than two axes: "stack" (matrices in the last two axes, (out, in)) or
            "flatten" (the first axis is out, the others together are in).
        split_sizes: sizes of the matrices side by side in a fused projection.
        split_dim: the axis of the matrix to split, 0 for out, 1 for in.
        heads: split into this many equal parts instead of `split_sizes`: one matrix per head.
        block_period: orthogonalize the parts, and the whole matrix only every `block_period` steps (MuonBP).
        transposed: matrices are stored as (in, out), as in the Conv1D of GPT-2; out is then the last axis for `scale`
            and `split_dim`.
        nonfinite: on infinities and NaNs in gradients, "skip" the whole step, "raise" (waits for the device), or
            "propagate".
        chunk_bytes: temporary memory for a batch of matrices; default 4 MiB on CPUs, 576 MiB elsewhere.
        replay: capture the step as a CUDA graph and replay it, because small models are CPU-bound. None does so for up
            to 537 million parameters on one GPU if it can; True at any size, with a warning if it cannot; False never.
            The graph keeps the step's temporary memory.
        process_group: ranks that hold the same plain parameters, as under DistributedDataParallel: each then
            orthogonalizes its share. DTensors need no process group. None: every rank orthogonalizes everything.
        **options: see `MuonOptions`.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.RMSNorm(8), torch.nn.Linear(8, 8))
        >>> optimizer = MuonSW.for_model(model, lr=0.02, weight_decay=0.1)
        >>> scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
        >>> for _ in range(3):
        ...     model(torch.ones(2, 8)).square().mean().backward()
        ...     optimizer.step(); scheduler.step(); optimizer.zero_grad()
        >>> optimizer.param_groups[0]["resolved_peak_lr"]
        0.02
    """

    algorithm: ClassVar[str] = "muon"

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        weight_decay: float | Tensor = 0.1,
        *,
        decay: str = "scaled",
        peak_lr: float | str | None = None,
        peak: str = "group",
        momentum: float = 0.95,
        nesterov: bool = True,
        momentum_form: str = "ema",
        orthogonalizer: str = "auto",
        ns_steps: int | None = None,
        ns_dtype: torch.dtype | str = "auto",
        scale: str = "match_rms_adamw",
        precondition: str | None = None,
        normalize: str | None = None,
        matrix: str | None = None,
        split_sizes: tuple[int, ...] | None = None,
        split_dim: int = 0,
        heads: int | None = None,
        block_period: int | None = None,
        transposed: bool = False,
        nonfinite: str = "skip",
        chunk_bytes: int | None = None,
        replay: bool | None = None,
        process_group: ProcessGroup | None = None,
        **options: Unpack[MuonOptions],
    ) -> None:
        super().__init__(params, {**locals(), **options})


class AdamWSW(ScaledDecayOptimizer):
    """AdamW with scaled weight decay; with `decay="constant"` it is `torch.optim.AdamW`, defaults included.

    Defazio (2025) proposed the rule for Adam and applies it to normalized layers only (AdamC). Here it applies to every
    group whose `weight_decay` is not zero; `for_model` sets zero for norms and embeddings.

    Args:
        params: as for `MuonSW`, like all arguments not listed here.
        betas: decay rates of the average gradient and the average squared gradient.
        eps: added to the root of the average squared gradient.
        **options: see `GroupOptions`.

    Examples:
        >>> weight = torch.nn.Parameter(torch.ones(3))
        >>> optimizer = AdamWSW([weight], lr=0.1, weight_decay=0.5)
        >>> weight.square().sum().backward()
        >>> optimizer.step()
        >>> weight.data
        tensor([0.8500, 0.8500, 0.8500])
    """

    algorithm: ClassVar[str] = "adamw"

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        weight_decay: float | Tensor = 0.01,
        *,
        decay: str = "scaled",
        peak_lr: float | str | None = None,
        peak: str = "group",
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        nonfinite: str = "skip",
        chunk_bytes: int | None = None,
        replay: bool | None = None,
        **options: Unpack[GroupOptions],
    ) -> None:
        super().__init__(params, {**locals(), **options})


class SGDSW(ScaledDecayOptimizer):
    """SGD with momentum and scaled, decoupled weight decay.

    `torch.optim.SGD` adds decay to the gradient; here it acts on the weight and bypasses momentum.

    Args:
        params: as for `MuonSW`, like all arguments not listed here.
        momentum: beta; zero keeps no state.
        nesterov: look ahead along the momentum.
        momentum_form: "heavy_ball" (`M <- beta M + G`) or "ema" (`M <- beta M + (1-beta) G`).
        **options: see `GroupOptions`.

    Examples:
        >>> weight = torch.nn.Parameter(torch.ones(3))
        >>> optimizer = SGDSW([weight], lr=0.1, weight_decay=0.5)
        >>> weight.square().sum().backward()
        >>> optimizer.step()
        >>> weight.data
        tensor([0.7500, 0.7500, 0.7500])
    """

    algorithm: ClassVar[str] = "sgd"

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        weight_decay: float | Tensor = 0.0,
        *,
        decay: str = "scaled",
        peak_lr: float | str | None = None,
        peak: str = "group",
        momentum: float = 0.0,
        nesterov: bool = False,
        momentum_form: str = "heavy_ball",
        nonfinite: str = "skip",
        chunk_bytes: int | None = None,
        replay: bool | None = None,
        **options: Unpack[GroupOptions],
    ) -> None:
        super().__init__(params, {**locals(), **options})
