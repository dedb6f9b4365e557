"""The optimizers people import: one engine, three default algorithms.

Each signature begins with the rates and the decay rule, then has what is the algorithm's own; the knobs of kernels,
graphs and ranks come last. Further options that all of them take (`rounding`, ...) are described at `GroupOptions`.
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
        params: parameters, named parameters, or dicts with `params` and options of their own. Any option may
            be set in a group. For a whole model, see `for_model`.
        lr: learning rate, a number or a one-element tensor.
        weight_decay: lambda.
        decay: the decay rule: "scaled" (lambda lr^2/peak), "constant" (lambda lr, as torch has it), or another name of
            `DECAY_RULES`.
        peak_lr: the highest learning rate of the run. None takes what the scheduler wrote into the group, else `lr`;
            "running_max" follows the highest so far. A step above the peak is an error. Groups with different rates
            need a number each.
        peak: "group" divides by the group's own peak, "base" by the peak before `lr_multiplier`.
        momentum: beta.
        nesterov: look ahead along the momentum.
        momentum_form: "ema" (`M <- beta M + (1-beta) G`) or "heavy_ball" (`M <- beta M + G`).
        orthogonalizer: "auto" (Newton-Schulz, the fastest way for each shape), "newton_schulz", "gram_newton_schulz",
            "polar_express", "exact", another set of coefficients ("newton_schulz_you", "polar_express_5",
            "polar_express_nanochat", "simple_quintic"), "aurora", or a registered name.
        ns_steps: iterations of the orthogonalizer; None is the number of its authors: 5, or 12 of "simple_quintic".
        ns_dtype: dtype of its products; "auto" is bfloat16 where the hardware multiplies it, float16 on older GPUs
            with tensor cores, else float32. On GPUs all but "newton_schulz" take float16 instead of bfloat16.
        scale: shape scale: "match_rms_adamw" (0.2 sqrt(max(m, n))), "original", "spectral" or "none".
        precondition: what is done to the momentum before it is orthogonalized: "muon2" (divided by the root of the
            average squared gradient), "sign", "equalize" (rows of equal norm), "soap" (whitened in the eigenbasis of
            SOAP), or another name of `PRECONDITIONERS`.
        normalize: what is done to the direction after that: "normuon" (rows of equal size), "adamuon" (elements divided
            by the root of their average square), "muon_plus" (norm of an orthogonal matrix), or another name of
            `NORMALIZERS`.
        matrix: how parameters with more than two axes are seen: "stack" (the last two are (out, in), the others
            count matrices) or "flatten" (the first is out, the others are in).
        split_sizes: sizes of the matrices that a fused projection holds side by side.
        split_dim: along which axis of the matrix they lie, 0 for out, 1 for in.
        heads: that many equal parts along `split_dim`, in place of `split_sizes`: one matrix for each head.
        block_period: orthogonalize these parts at most steps, and the whole matrix at every so many (MuonBP).
        transposed: matrices are stored as (in, out), as by the Conv1D of GPT-2; `scale` and `split_dim` then take the
            last axis for out.
        nonfinite: what to do about infinities and NaNs in gradients: "skip" the whole step, "raise" (waits for
            the device), or "propagate".
        chunk_bytes: temporary memory that a batch of matrices may take; 4 MiB on CPUs, 576 MiB elsewhere.
        replay: capture the step as a CUDA graph and replay it, since steps of small models wait for the host. None
            does so for up to 537 million parameters on one GPU, where nothing is in the way; True whatever the size,
            and warns where it cannot; False never. The graph keeps the step's temporary memory.
        process_group: ranks that hold the same plain parameters, as under DistributedDataParallel: each then
            orthogonalizes its share. Parameters that are DTensors need no word. None lets every rank do everything.
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

    The rule was proposed for Adam by Defazio (2025), who applies it to normalized layers only (AdamC). Here it
    applies to every group whose `weight_decay` is not zero; `for_model` gives zero to norms and embeddings.

    Args:
        params: as for `MuonSW`, like all arguments that are not listed here.
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

    `torch.optim.SGD` adds its decay to the gradient; here it is applied to the weight, apart from momentum.

    Args:
        params: as for `MuonSW`, like all arguments that are not listed here.
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
