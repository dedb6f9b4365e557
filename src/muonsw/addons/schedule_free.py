"""Schedule-Free learning, wrapped around an optimizer: averaging replaces a falling learning rate.

Defazio et al., "The Road Less Scheduled" (arXiv 2405.15682); with NorMuon, arXiv 2605.23061. There are three
sequences: the optimizer moves z, gradients are taken at y, and x is evaluated. With eta_k the learning rate of step k,
counted from 1, and b = beta:

    z <- the optimizer's step on z, with the gradient at y
    x <- (1 - c) x + c z,   c = w_k / (w_1 + ... + w_k),   w_k = k^r max(eta_1..eta_k)^p
    y <- b x + (1 - b) z

Parameters hold y while training and x while evaluating; z is kept in the state, and x = (y - (1 - b) z) / b. During a
step they hold z, and y is copied, so a step that raises or is skipped changes nothing. The authors' code is
schedule_free 70785b5. By default it decays z by a fraction of y; here decay acts at z alone, which the authors of
Schedule-Free NorMuon found necessary for long runs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from muonsw.decay import decays
from muonsw.distributed.shards import is_dtensor, local
from muonsw.nonfinite import Flag
from muonsw.optimizer import ScaledDecayOptimizer
from muonsw.options import require_number
from muonsw.precision import LOW_PRECISION, state_dtype
from muonsw.text import users_line
from muonsw.work import Group

# Attributes that survive a copy; torch never copies hooks.
_COPIED = ("optimizer", "beta", "warmup_steps", "r", "weight_lr_power", "training")
# Counters of each group, saved with it. Skipped steps count, as in a scheduler, but add nothing to `averaging_weight`,
# which is a tensor if only the device knows about skips.
_COUNTERS: Group = {"averaged_steps": 0, "averaging_weight": 0.0, "averaging_lr": 0.0, "holds_y": False}


class ScheduleFree(Optimizer):
    """Wrap an optimizer of this library in Schedule-Free learning.

    Call `train` before training and `eval` before evaluating or saving, as with a model. After `warmup_steps` the
    learning rate stays constant unless you add a scheduler. With AdamW the authors use `betas=(0.0, 0.999)`: averaging
    replaces momentum. Register hooks of saving and loading with the inner optimizer.

    Args:
        optimizer: `AdamWSW`, `MuonSW` or `SGDSW` on float32 or float64 parameters; do not step it yourself.
        beta: how close y, where gradients are computed, is to the average; long runs may need 0.95 or 0.98.
        warmup_steps: steps over which the learning rate rises from zero.
        r: power of the step in the weights of the average.
        weight_lr_power: power p of the highest learning rate so far in these weights.
        model: a model whose forward passes raise if its mode differs from the optimizer's.

    Examples:
        >>> from muonsw import AdamWSW
        >>> weight = nn.Parameter(torch.zeros(4))
        >>> optimizer = ScheduleFree(AdamWSW([weight], lr=0.1, decay="constant", betas=(0.0, 0.999)), warmup_steps=10)
        >>> optimizer.train()
        >>> for _ in range(200):
        ...     optimizer.zero_grad()
        ...     (weight - 1).square().sum().backward()
        ...     optimizer.step()
        >>> optimizer.eval()
        >>> bool((weight - 1).abs().max() < 0.1)
        True
    """

    def __init__(
        self,
        optimizer: ScaledDecayOptimizer,
        *,
        beta: float = 0.9,
        warmup_steps: int = 0,
        r: float = 0.0,
        weight_lr_power: float = 2.0,
        model: nn.Module | None = None,
    ) -> None:
        if not isinstance(optimizer, ScaledDecayOptimizer):
            raise TypeError(f"ScheduleFree wraps AdamWSW, MuonSW or SGDSW, not {type(optimizer).__name__}")
        require_number("beta", beta, 0, 1, open_ends=True)
        for key, value in {"warmup_steps": warmup_steps, "r": r, "weight_lr_power": weight_lr_power}.items():
            require_number(key, value)
        self.optimizer = optimizer
        super().__setstate__({})  # torch's hooks
        self.beta, self.warmup_steps, self.r, self.weight_lr_power = beta, warmup_steps, r, weight_lr_power
        self.training = any(group.get("holds_y", False) for group in self.param_groups)  # if already loaded
        self._join_groups()
        if any(group["decay"] == "scaled" and decays(group) for group in self.param_groups):
            warnings.warn(
                "under Schedule-Free the learning rate stays at its peak after warmup, where decay='scaled' equals "
                "decay='constant'; pass that, or filter this warning if a scheduler lowers the rate",
                stacklevel=users_line(),
            )
        if model is not None:
            model.register_forward_pre_hook(self._check_mode)

    @property
    def param_groups(self) -> list[Group]:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The inner optimizer's state, including z."""
        return self.optimizer.state

    @property  # a copy, because torch adds to it
    def defaults(self) -> Group:  # type: ignore[override]
        return dict(self.optimizer.defaults)

    def __getattr__(self, name: str) -> Any:
        """Forward everything else to the inner optimizer: `routing`, `summary`, `set_peak_lr` and more."""
        if name.startswith("_") or name == "optimizer":  # torch asks before `optimizer` is set
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.optimizer, name)

    def __getstate__(self) -> dict[str, Any]:
        self._read_weights()
        return {key: vars(self)[key] for key in _COPIED}

    def add_param_group(self, param_group: Group) -> None:
        """Add a group to the inner optimizer; its average begins with its first step."""
        self.optimizer.add_param_group(param_group)
        self._join_groups()

    @torch.no_grad()
    def train(self, mode: bool = True) -> None:
        """Put y into the parameters, or x with `mode=False`."""
        if mode != self.training:
            for param, z in self._averaged():
                local(param).lerp_(local(z), 1 - self.beta if mode else 1 - 1 / self.beta)
        self.training = mode
        for group in self.param_groups:
            group["holds_y"] = mode

    def eval(self) -> None:
        """Put x into the parameters, to evaluate or to save them."""
        self.train(False)

    @_disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step at y; a step that raises changes nothing.

        A step with all learning rates at zero works in either mode: frameworks use one to create state before a load.
        """
        idle = not any(group["lr"] for group in self.param_groups)
        if not self.training and not idle:
            raise RuntimeError("this optimizer is in evaluation mode; call optimizer.train() before training")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if idle:
            self.optimizer.step()
            for param in self._stepped():
                self.state[param].setdefault("z", param.detach().clone())
            return loss
        self._join_groups()  # the model's dtype may have changed
        rates, highest = [group["lr"] for group in self.param_groups], []
        ys, stepped = self._put_z(), set[Tensor]()
        try:
            for group in self.param_groups:
                warmup = min(1.0, (group["averaged_steps"] + 1) / self.warmup_steps) if self.warmup_steps else 1.0
                group["lr"] = float(group["lr"]) * warmup
                highest.append(max(group["averaging_lr"], group["lr"]))
            self.optimizer.step()
            if self.optimizer._last_finite is not False:
                stepped = self._stepped()
        finally:
            for group, lr in zip(self.param_groups, rates, strict=True):
                group["lr"] = lr
            for param in ys.keys() - stepped:
                held = local(param.detach())
                local(self.state[param]["z"]).copy_(held)
                held.copy_(ys[param])
        finite = self.optimizer._last_finite
        taken = finite.factor(torch.float64) if isinstance(finite, Flag) else float(finite)
        for group, highest_lr in zip(self.param_groups, highest, strict=True):
            self._average(group, [p for p in group["params"] if p in stepped], highest_lr, taken)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state, with z, the total weight of the average, and the mode.

        Warns in training mode: such a checkpoint resumes correctly, but its model is y.
        """
        if self.training and any(True for _ in self._averaged()):
            warnings.warn(
                "saved in training mode, in which the parameters are not the average; call optimizer.eval() before "
                "saving model and optimizer, and optimizer.train() afterwards",
                stacklevel=users_line(),
            )
        self._read_weights()
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state and its mode; load the model from the same checkpoint.

        The state of a run without Schedule-Free starts a new average. A load that raises changes nothing.
        """
        handle = self.optimizer.register_load_state_dict_post_hook(lambda _: self._join_groups())
        try:
            self.optimizer.load_state_dict(state_dict)
        finally:
            handle.remove()
        if not any("averaged_steps" in group for group in state_dict["param_groups"]):
            for group in self.param_groups:
                group.update(_COUNTERS)
        self.training = any(group["holds_y"] for group in self.param_groups)

    def _join_groups(self) -> None:
        """Add counters to new groups; refuse dtypes that cannot hold the average."""
        for number, group in enumerate(self.param_groups):
            for dtype in {param.dtype for param in group["params"]}:
                dtype_of_state = state_dtype(group["state_dtype"], dtype)
                if dtype in LOW_PRECISION or dtype_of_state.itemsize < dtype.itemsize:
                    raise ValueError(
                        f"param group {number}: late in a run, a step changes the average by less than {dtype} weights "
                        f"with {dtype_of_state} state can hold; keep both in float32"
                    )
        for group in self.param_groups:
            for key, value in {**_COUNTERS, "holds_y": self.training}.items():
                group.setdefault(key, value)

    def _averaged(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Parameters that have been stepped, each with its z."""
        for group in self.param_groups:
            for param in group["params"]:
                if "z" in self.state.get(param, ()):
                    yield param, self.state[param]["z"]

    def _stepped(self) -> set[Tensor]:
        """The parameters that the inner optimizer moved in its last step."""
        return {param for _, params, _ in self.optimizer._last for param in params}

    def _read_weights(self) -> None:
        """Convert each group's total weight to a number; waits for the device."""
        for group in self.param_groups:
            group["averaging_weight"] = float(group["averaging_weight"])

    def _put_z(self) -> dict[Tensor, Tensor]:
        """Put z into the parameters that may move, and b x into their z; return copies of y."""
        ys: dict[Tensor, Tensor] = {}
        for group in self.param_groups:
            for param in [p for p in group["params"] if p.grad is not None or (is_dtensor(p) and p.requires_grad)]:
                if "z" not in self.state[param]:
                    self.state[param]["z"] = param.detach().clone()
                ys[param] = local(param.detach()).clone()
        for param, y in ys.items():
            z = local(self.state[param]["z"])
            bx = y - (1 - self.beta) * z
            local(param.detach()).copy_(z)
            z.copy_(bx)
        return ys

    def _average(self, group: Group, params: list[Tensor], highest_lr: float, taken: float | Tensor) -> None:
        """Count a group's step; move the new z from its parameters to their state, and put the new y in its place."""
        group["averaged_steps"] += 1
        group["averaging_lr"] = highest_lr
        weight = group["averaged_steps"] ** self.r * highest_lr**self.weight_lr_power
        # zero if the step was skipped
        share = taken * weight / (group["averaging_weight"] + weight) if weight else 0.0
        group["averaging_weight"] = group["averaging_weight"] + taken * weight
        for param in params:
            z, bx = local(param.detach()), local(self.state[param]["z"])
            c = share.to(z.device, z.dtype) if isinstance(share, Tensor) else share
            new_y = (1 - c) * bx + (1 - self.beta * (1 - c)) * z
            bx.copy_(z)
            z.copy_(new_y)

    def _check_mode(self, model: nn.Module, _: Any) -> None:
        """Refuse to evaluate at y or to compute gradients at x; batch norms may update their statistics at x."""
        if self.training and not model.training:
            raise RuntimeError("the model evaluates while its optimizer is in training mode; call optimizer.eval()")
        if model.training and not self.training and torch.is_grad_enabled():
            raise RuntimeError("the model trains while its optimizer is in evaluation mode; call optimizer.train()")
