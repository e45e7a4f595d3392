"""RecAdam: Adam with a pull towards the pre-trained weights that is annealed away.

Chen et al., Recall and Learn (arXiv 2004.12651).
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


class RecAdam(Optimizer):
    """Adam on the task's loss, combined with a quadratic pull towards the initial weights.

        λ_t = 1 / (1 + exp(−k (t − t0)))
        θ ← θ − λ_t · lr · √(1 − β2^t) / (1 − β1^t) · m / (√v + ε)
        θ ← θ − lr · (1 − λ_t) · γ · (θ − θ*)
        θ ← θ − lr · weight_decay · θ

    m and v are averages of the task's gradient alone. θ* are the parameters at the time when the
    optimizer is built; they are in its state_dict, so that a resumed run has the same θ*. A group
    with `anchored: False` (a new head) has λ = 1, which is plain Adam.

    Args:
        params: parameters or groups.
        lr: learning rate.
        betas: β1, β2.
        eps: ε.
        weight_decay: decoupled, per unit of learning rate.
        anneal_k: k, per step; .05 to 1 are usual.
        anneal_t0: t0, in steps; 100 to 1000 are usual.
        pretrain_cof: γ.
        anchored: False for plain Adam; usually set for a single group.

    Raises:
        ValueError: for settings out of range; from `step`, if lr · γ · (1 − λ_t) is above 2, where
            the pull overshoots further in every step.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        anneal_k: float = 0.5,
        anneal_t0: float = 250,
        pretrain_cof: float = 5000.0,
        anchored: bool = True,
    ):
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "anneal_k": anneal_k,
            "anneal_t0": anneal_t0,
            "pretrain_cof": pretrain_cof,
            "anchored": anchored,
            "steps": 0,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, with the current values of its parameters as θ*.

        Raises:
            ValueError: for settings out of range.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for name in ("lr", "eps", "weight_decay", "anneal_k", "pretrain_cof"):
            if not group[name] >= 0:
                raise ValueError(f"{name} is {group[name]}: expected a number of at least 0")
        if not all(0 <= beta < 1 for beta in group["betas"]):
            raise ValueError(f"betas are {group['betas']}: expected two numbers in [0, 1)")
        for parameter in group["params"]:
            # not in the first step: θ* are the values before training, and a sharded checkpoint
            # can only be loaded into a state that exists
            state = self.state[parameter]
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
            if group["anchored"]:
                state["anchor"] = parameter.detach().clone()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step.

        Args:
            closure: computes the loss and its gradients, and returns the loss.

        Returns:
            The closure's loss, if there is one.

        Raises:
            ValueError: if lr · γ · (1 − λ_t) is above 2.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        shares = [annealing(group, group["steps"] + 1) for group in self.param_groups]
        for group, share in zip(self.param_groups, shares, strict=True):
            group["steps"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group, share)
        return loss

    def _update(self, parameter: Tensor, group: dict[str, Any], share: float) -> None:
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        lr, steps, gradient = group["lr"], group["steps"], parameter.grad
        assert gradient is not None
        average, squares = state["exp_avg"], state["exp_avg_sq"]
        average.mul_(beta1).add_(gradient, alpha=1 - beta1)
        squares.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        size = lr * math.sqrt(1 - beta2**steps) / (1 - beta1**steps)
        parameter.addcdiv_(average, squares.sqrt().add_(group["eps"]), value=-share * size)
        if group["anchored"]:
            pull = lr * (1 - share) * group["pretrain_cof"]
            parameter.add_(parameter - state["anchor"], alpha=-pull)
        parameter.mul_(1 - lr * group["weight_decay"])


def require_convergence(optimizer: RecAdam, schedule: Any, steps: int) -> None:
    """Refuse settings with which a later `step` would raise an error.

    Args:
        optimizer: its groups have their peak learning rates in `initial_lr`.
        schedule: of the learning rate; only a LambdaLR can be evaluated ahead, others pass.
        steps: optimizer steps of the full run.

    Raises:
        ValueError: naming the first step at which lr · γ · (1 − λ_t) is above 2.
    """
    if not isinstance(schedule, LambdaLR):
        return
    for step in range(steps):
        for group, share in zip(optimizer.param_groups, schedule.lr_lambdas, strict=True):
            annealing({**group, "lr": group["initial_lr"] * share(step)}, step + 1)


def require_annealing(optimizer: RecAdam, warmup: float, steps: float) -> None:
    """Refuse a RecAdam that anneals before the learning rate's peak, or not during training.

    Args:
        optimizer: its groups have k and t0.
        warmup: steps of warm-up.
        steps: of the training.

    Raises:
        ValueError: if t0 lies within warm-up or at its end, so that λ is 1/2 or more there; or if
            it is not before the end of training, so that λ never reaches 1/2.
    """
    for group in optimizer.param_groups:
        if not group["anchored"]:
            continue
        start = group["anneal_t0"]
        if start <= warmup:
            raise ValueError(
                f"RecAdam's anneal_t0 is {start:g} and warm-up takes {warmup:g} "
                "steps: it would be mostly plain Adam before the learning rate reaches its peak; "
                "set model.method_args.anneal_t0 above warm-up, or shorten model.warmup"
            )
        if start >= steps:
            raise ValueError(
                f"RecAdam's anneal_t0 is {start:g} and training takes {steps:g} steps: it would "
                "hold the pre-trained weights to the end and hardly learn the task; set "
                "model.method_args.anneal_t0 below the number of steps, or train longer"
            )


def annealing(group: dict[str, Any], steps: int) -> float:
    """λ_t of a parameter group at its t-th step.

    Raises:
        ValueError: if lr · γ · (1 − λ_t) is above 2.
    """
    if not group["anchored"]:
        return 1.0
    exponent = group["anneal_k"] * (steps - group["anneal_t0"])
    share = 1 / (1 + math.exp(-exponent)) if exponent > -700 else 0.0  # where exp overflows
    pull = group["lr"] * group["pretrain_cof"] * (1 - share)
    if pull > 2:
        raise ValueError(
            f"RecAdam diverges: lr {group['lr']:g} · pretrain_cof {group['pretrain_cof']:g} · "
            f"(1 − λ) {1 - share:g} is {pull:g} at step {steps}, expected at most 2; lower lr or "
            "pretrain_cof"
        )
    return share
