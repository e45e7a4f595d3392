"""What an optimizer does to the slices that a step did not use.

At granularity i the gradient of the neurons beyond m_i is zero, not absent, so Adam's momentum and
weight decay keep moving them. The paper (MatFormer, Eq. 2) does not say what it did. Ours: a step
changes only what took part in it, as PyTorch treats any parameter without a gradient.

For the time of a step, the optimizer is given views of the slices in use instead of the nested
parameters, with views of their gradients and of its own running averages. Nothing is copied: a
smaller granularity makes the step cheaper.

Adam counts steps for a whole tensor, so a slice that is used rarely gets the bias correction of
the tensor's age; it matters only for about the first 1/(1 - β2) steps, which warm-up covers.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_modules.matformer.nest import nesting_of

Runs = tuple[int, tuple[tuple[int, int], ...]]  # an axis, and (start, stop) along it


def freeze_idle_tail(optimizer: Optimizer, model: nn.Module) -> None:
    """Make every step of the optimizer leave the idle slices of a nested model as they were.

    Works on whole parameters and on FSDP2's shards. The granularity that counts is the one set when
    the gradients are there: a closure, as Lightning passes one, is called before the optimizer is.

    Args:
        optimizer: any optimizer whose state tensors have their parameter's shape, or none, and
            start from zero.
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
                    whole = view.numel() and view.is_contiguous()
                    (dense if whole else strided).append(view)
            group["params"] = kept
            if dense:
                optimizer.param_groups.append({**group, "params": dense})
            if strided:  # fused kernels take only what lies in one piece
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
                if part.data_ptr() != value.data_ptr():  # the first step has made it
                    part.copy_(value)
        views.clear()
        del optimizer.param_groups[len(groups) :]
        for group, parameters in groups:
            group["params"] = parameters
        groups.clear()

    optimizer.register_step_pre_hook(narrow)
    optimizer.register_step_post_hook(widen)


def _partly_in_use(model: nn.Module) -> dict[nn.Parameter, Runs]:
    """The parameters with idle slices, and what is in use of this process's shard of them."""
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
    """The runs in this process's shard, counted from its beginning; one empty run where none is."""
    first = _offset(parameter)[axis]
    length = _local(parameter).shape[axis]
    inside = [(max(a - first, 0), min(b - first, length)) for a, b in runs]
    yield from [(a, b) for a, b in inside if a < b] or [(0, 0)]


def _view(
    optimizer: Optimizer, parameter: nn.Parameter, axis: int, start: int, stop: int
) -> nn.Parameter:
    """A parameter that is a view of a slice, with its gradient and the optimizer's state."""

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
    """This process's part of a tensor."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def _offset(tensor: Tensor) -> tuple[int, ...]:
    """Where this process's part of a tensor begins, along each dimension."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.ndim
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = tensor.device_mesh, tensor.placements
    _, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    return tuple(offset) or (0,) * tensor.ndim
