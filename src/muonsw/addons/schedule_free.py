"""Schedule-Free learning around an optimizer: averaging takes the place of a falling learning rate.

Defazio et al., "The Road Less Scheduled" (arXiv 2405.15682); around NorMuon, arXiv 2605.23061. There are three
sequences: the optimizer moves z, gradients are taken at y, and x is evaluated. With eta_k the learning rate of step k,
from 1, and b = beta:

    z <- the optimizer's step on z, with the gradient at y
    x <- (1 - c) x + c z,   c = w_k / (w_1 + ... + w_k),   w_k = k^r max(eta_1..eta_k)^p
    y <- b x + (1 - b) z

Parameters hold y while training and x while evaluating; z is kept in the state, and x = (y - (1 - b) z) / b. During a
step they hold z, and y is copied, so a step that raises or is skipped changes nothing. The authors' code is
schedule_free 70785b5. Unlike theirs, decay acts at z by default, which the authors of Schedule-Free NorMuon found
necessary for long runs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from muonsw.addons.norm_rules import acts
from muonsw.decay import decays, phi_of
from muonsw.distributed.shards import is_dtensor, local
from muonsw.nonfinite import Flag
from muonsw.optimizer import ScaledDecayOptimizer
from muonsw.options import require_number
from muonsw.precision import LOW_PRECISION, state_dtype
from muonsw.text import users_line
from muonsw.work import Group

# The attributes that a copy keeps; torch copies no optimizer's hooks.
_COPIED = ("optimizer", "beta", "warmup_steps", "r", "weight_lr_power", "decay_at", "training")
# What each group counts, saved with it. Skipped steps count as in a scheduler, but add nothing to `averaging_weight`, a
# tensor where only the device knows of them.
_COUNTERS: Group = {"averaged_steps": 0, "averaging_weight": 0.0, "averaging_lr": 0.0, "holds_y": False}


def _of_inner(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(self: ScheduleFree, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.optimizer, method.__name__)(*args, **kwargs)

    return call


class ScheduleFree(Optimizer):
    """Schedule-Free learning around one of our optimizers.

    Call `train` before training and `eval` before evaluating or saving, as with a model. The learning rate stays where
    it is after `warmup_steps`; a scheduler may change it all the same. With AdamW, `betas=(0.0, 0.999)` is the authors'
    setting: averaging is the momentum.

    Args:
        optimizer: `AdamWSW`, `MuonSW` or `SGDSW` on float32 or float64 parameters; this one steps it from now on.
        beta: how close y, where gradients are taken, is to the average; long runs may need 0.95 or 0.98.
        warmup_steps: steps over which the learning rate rises from zero.
        r: power of the step in the weights of the average.
        weight_lr_power: power p of the highest learning rate so far in these weights.
        decay_at: whether decay takes its fraction of "z" or "y".
        model: a model whose forward passes fail if its mode is not that of this optimizer.

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
        decay_at: str = "z",
        model: nn.Module | None = None,
    ) -> None:
        if not isinstance(optimizer, ScaledDecayOptimizer):
            raise TypeError(f"ScheduleFree goes around AdamWSW, MuonSW or SGDSW, not a {type(optimizer).__name__}")
        require_number("beta", beta, 0, 1, open_ends=True)
        for key, value in {"warmup_steps": warmup_steps, "r": r, "weight_lr_power": weight_lr_power}.items():
            require_number(key, value)
        if decay_at not in ("z", "y"):
            raise ValueError(f"decay_at={decay_at!r}: must be 'z' or 'y'")
        self.optimizer = optimizer
        super().__setstate__({})  # torch's hooks
        self.beta, self.warmup_steps, self.r, self.weight_lr_power = beta, warmup_steps, r, weight_lr_power
        self.decay_at = decay_at
        self.training = any(group.get("holds_y", False) for group in self.param_groups)  # of a state that was loaded
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
        """The state of the optimizer inside, with z."""
        return self.optimizer.state

    @property
    def defaults(self) -> Group:  # type: ignore[override]
        return dict(self.optimizer.defaults)

    def __getattr__(self, name: str) -> Any:
        """Everything else is the inner optimizer's: `routing`, `summary`, `set_peak_lr` and more."""
        if name.startswith("_") or name == "optimizer":  # torch asks before `optimizer` is set
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.optimizer, name)

    def __getstate__(self) -> dict[str, Any]:
        self._read_weights()
        return {key: vars(self)[key] for key in _COPIED}

    # The optimizer inside saves and loads, and calls these hooks with itself.
    register_state_dict_pre_hook = _of_inner(Optimizer.register_state_dict_pre_hook)
    register_state_dict_post_hook = _of_inner(Optimizer.register_state_dict_post_hook)
    register_load_state_dict_pre_hook = _of_inner(Optimizer.register_load_state_dict_pre_hook)
    register_load_state_dict_post_hook = _of_inner(Optimizer.register_load_state_dict_post_hook)
    zero_grad = _of_inner(Optimizer.zero_grad)

    def add_param_group(self, param_group: Group) -> None:
        """Add a group to the optimizer inside; its average begins with its first step."""
        self.optimizer.add_param_group(param_group)
        try:
            self._join_groups()
        except ValueError:
            self.param_groups.pop()
            raise

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

        In both modes it takes a step with learning rates of zero, by which frameworks create state before they load it.
        """
        idle = not any(group["lr"] for group in self.param_groups)
        if not self.training and not idle:
            raise RuntimeError("this optimizer is in evaluation mode; call optimizer.train() before training goes on")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if idle:
            self.optimizer.step()
            for param in self._stepped():
                self.state[param].setdefault("z", param.detach().clone())
            return loss
        self._join_groups()  # the model may have been converted since
        rates_before = [group["lr"] for group in self.param_groups]
        warmups = [
            min(1.0, (group["averaged_steps"] + 1) / self.warmup_steps) if self.warmup_steps else 1.0
            for group in self.param_groups
        ]
        highest = [
            max(group["averaging_lr"], float(lr) * warmup)
            for group, lr, warmup in zip(self.param_groups, rates_before, warmups, strict=True)
        ]
        ys, stepped = self._put_z(), set[Tensor]()
        try:
            for group, warmup in zip(self.param_groups, warmups, strict=True):
                group["lr"] *= warmup
            self.optimizer.step()
            phis = [phi_of(group, float(group["lr"]), group["step_count"]) for group in self.param_groups]
            if self.optimizer._last_skipped is not True:
                stepped = self._stepped()
        finally:
            for group, lr in zip(self.param_groups, rates_before, strict=True):
                group["lr"] = lr
            for param in ys.keys() - stepped:
                held = local(param.detach())
                local(self.state[param]["z"]).copy_(held)
                held.copy_(ys[param])
        skipped = self.optimizer._last_skipped
        taken = 1 - skipped.bad.double() if isinstance(skipped, Flag) else float(not skipped)
        for group, highest_lr, phi in zip(self.param_groups, highest, phis, strict=True):
            self._average(group, {p: ys[p] for p in group["params"] if p in stepped}, highest_lr, phi, taken)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The state of the optimizer inside, with z, the total weight of the average, and the mode.

        It warns in training mode: such a checkpoint resumes correctly, but its model is y.
        """
        if self.training and any(True for _ in self._averaged()):
            warnings.warn(
                "saved in training mode, in which parameters are not the average that is to be evaluated; call "
                "optimizer.eval() before saving model and optimizer, and optimizer.train() after it",
                stacklevel=users_line(),
            )
        self._read_weights()
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state together with the model of the same checkpoint, in the mode in which both were saved.

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
        """Refuse groups that cannot be averaged, and add the counters to new ones."""
        for number, group in enumerate(self.param_groups):
            if self.decay_at == "y" and (acts(group) or group["cautious"]):
                raise ValueError(f"param group {number}: norm rules and cautious decay act on z; leave decay_at='z'")
            for dtype in {param.dtype for param in group["params"]}:
                kept = state_dtype(group["state_dtype"], dtype)
                if dtype in LOW_PRECISION or kept.itemsize < dtype.itemsize:
                    raise ValueError(
                        f"param group {number}: a late step changes the average by less than {dtype} weights with "
                        f"{kept} state can hold; keep both in float32"
                    )
        for group in self.param_groups:
            for key, value in {**_COUNTERS, "holds_y": self.training}.items():
                group.setdefault(key, value)

    def _averaged(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Parameters that have been stepped, each with its z in the parameter's present dtype."""
        for group in self.param_groups:
            for param in group["params"]:
                if "z" in self.state.get(param, ()):
                    yield param, self.state[param]["z"].to(param.dtype)

    def _stepped(self) -> set[Tensor]:
        """The parameters that the inner optimizer moved in its last step."""
        return {param for _, params, _ in self.optimizer._last for param in params}

    def _read_weights(self) -> None:
        """Make a number of each group's total weight; waits for the device."""
        for group in self.param_groups:
            group["averaging_weight"] = float(group["averaging_weight"])

    def _put_z(self) -> dict[Tensor, Tensor]:
        """Put z into the parameters that the optimizer may move, and b x into their z; return copies of y."""
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

    def _average(
        self, group: Group, ys: dict[Tensor, Tensor], highest_lr: float, phi: float, taken: float | Tensor
    ) -> None:
        """Count a step of a group; put the new y into its parameters, which hold the new z, and keep that z."""
        group["averaged_steps"] += 1
        group["averaging_lr"] = highest_lr
        weight = group["averaged_steps"] ** self.r * highest_lr**self.weight_lr_power
        # c, zero where the step was skipped
        share = taken * weight / (group["averaging_weight"] + weight) if weight else 0.0
        group["averaging_weight"] = group["averaging_weight"] + taken * weight
        for param, y in ys.items():
            z, bx = local(param.detach()), local(self.state[param]["z"])
            c, decay = (x.to(z.device, z.dtype) if isinstance(x, Tensor) else x for x in (share, phi * taken))
            if self.decay_at == "y":  # the optimizer has taken phi z, where phi y is meant
                z += decay * ((y - bx) / (1 - self.beta) - y)
            new_y = (1 - c) * bx + (1 - self.beta * (1 - c)) * z
            bx.copy_(z)
            z.copy_(new_y)

    def _check_mode(self, model: nn.Module, _: Any) -> None:
        """Refuse to evaluate at y and to take gradients at x; batch norms may take statistics at x."""
        if self.training and not model.training:
            raise RuntimeError("the model evaluates while its optimizer is in training mode; call optimizer.eval()")
        if model.training and not self.training and torch.is_grad_enabled():
            raise RuntimeError("the model trains while its optimizer is in evaluation mode; call optimizer.train()")
