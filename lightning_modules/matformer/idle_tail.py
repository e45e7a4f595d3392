"""Keeps the optimizer from moving the slices of weights that a step did not use.

At granularity i the gradient of the neurons beyond m_i is zero, not absent, so Adam's momentum and
weight decay would keep moving them. The paper (MatFormer, arXiv 2310.07707, Eq. 2) does not say how
it handles this. Here a step changes only weights that took part in it, as PyTorch treats any
parameter without a gradient.

During a step the optimizer's parameter groups hold views of the slices in use instead of the nested
parameters, with views of their gradients and of the optimizer's running averages. Nothing is
copied, so a smaller granularity makes the step cheaper.

Adam counts steps for a full tensor, so a slice that is used rarely gets the bias correction of the
tensor's number of steps. That matters only for about the first 1/(1 - β2) steps, during warm-up.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_modules.matformer.nest import nesting_of

Runs = tuple[int, tuple[tuple[int, int], ...]]  # an axis, and the ranges (start, stop) along it


def freeze_idle_tail(optimizer: Optimizer, model: nn.Module) -> None:
    """Make every step of the optimizer leave the unused slices of a nested model unchanged.

    Works on full parameters and on FSDP2's shards. Which slices are unused depends on the
    granularity that is set after the backward pass, so a closure (Lightning passes one) is
    evaluated before the step.

    Args:
        optimizer: any optimizer whose state tensors either have their parameter's shape and start
            from zero, or are scalars. Hooks are registered on it.
        model: the nested model it trains.
    """
    groups: list[tuple[dict[str, Any], list[nn.Parameter]]] = []
    views: list[tuple[nn.Parameter, nn.Parameter, int, int, int]] = []

    def narrow(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
        closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            args, kwargs = args[:1], {**kwargs, "closure": lambda: loss}
        in_use = _partly_in_use(model)
        for group in list(optimizer.param_groups):
            groups.append((group, group["params"]))
            kept: list[nn.Parameter] = []
            dense: list[nn.Parameter] = []
            strided: list[nn.Parameter] = []
            for parameter in group["params"]:
                if parameter not in in_use or parameter.grad is None:
                    kept.append(parameter)
                    continue
                axis, runs = in_use[parameter]
                for start, stop in runs:
                    view = _view(optimizer, parameter, axis, start, stop)
                    views.append((view, parameter, axis, start, stop))
                    contiguous = view.numel() and view.is_contiguous()
                    (dense if contiguous else strided).append(view)
            group["params"] = kept
            if dense:
                optimizer.param_groups.append({**group, "params": dense})
            if strided:  # fused kernels need contiguous memory
                fused = {"fused": None} if group.get("fused") else {}
                optimizer.param_groups.append({**group, "params": strided, **fused})
        return args, kwargs

    def widen(optimizer: Optimizer, *_: object) -> None:
        for view, parameter, axis, start, stop in views:
            state, small = optimizer.state[parameter], optimizer.state.pop(view, {})
            for key, value in small.items():
                if not torch.is_tensor(value) or value.shape != view.shape:
                    state[key] = value
                    continue
                if state.get(key) is None:
                    state[key] = torch.zeros_like(parameter, dtype=value.dtype)
                part = _local(state[key]).narrow(axis, start, stop - start)
                if part.data_ptr() != value.data_ptr():  # not a view: created by the first step
                    part.copy_(value)
        views.clear()
        del optimizer.param_groups[len(groups) :]
        for group, parameters in groups:
            group["params"] = parameters
        groups.clear()

    optimizer.register_step_pre_hook(narrow)
    optimizer.register_step_post_hook(widen)


def _partly_in_use(model: nn.Module) -> dict[nn.Parameter, Runs]:
    """The parameters with unused slices, and the ranges in use of this process's shard of them."""
    in_use: dict[nn.Parameter, Runs] = {}
    for layer in nesting_of(model).layers:
        for child in layer.slices().values():
            for name, parameter in child.named_parameters(recurse=False):
                axis = child.axis(name)
                if axis is not None and child.runs != ((0, parameter.shape[axis]),):
                    in_use[parameter] = axis, tuple(_of_shard(parameter, axis, child.runs))
    return in_use


def _of_shard(
    parameter: Tensor, axis: int, runs: tuple[tuple[int, int], ...]
) -> Iterator[tuple[int, int]]:
    """The ranges in this process's shard, relative to its start; (0, 0) where there is none."""
    first = _offset(parameter)[axis]
    length = _local(parameter).shape[axis]
    inside = [(max(a - first, 0), min(b - first, length)) for a, b in runs]
    yield from [(a, b) for a, b in inside if a < b] or [(0, 0)]


def _view(
    optimizer: Optimizer, parameter: nn.Parameter, axis: int, start: int, stop: int
) -> nn.Parameter:
    """A slice of a parameter as a parameter, with views of its gradient and optimizer state."""

    def cut(tensor: Tensor) -> Tensor:
        return _local(tensor).narrow(axis, start, stop - start)

    view = nn.Parameter(cut(parameter))
    assert parameter.grad is not None
    view.grad = cut(parameter.grad)
    state = optimizer.state.get(parameter)
    if state:
        optimizer.state[view] = {
            key: value
            if not torch.is_tensor(value)
            else (cut(value) if value.shape == parameter.shape else value.clone())
            for key, value in state.items()
        }
    return view


def _local(tensor: Tensor) -> Tensor:
    """This process's shard of a tensor."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def _offset(tensor: Tensor) -> tuple[int, ...]:
    """The index along each dimension at which this process's shard begins."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.ndim
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = tensor.device_mesh, tensor.placements
    _, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    return tuple(offset) or (0,) * tensor.ndim
