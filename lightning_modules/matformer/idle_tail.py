"""What an optimizer does to the slices that a step did not use.

At granularity i the gradient of the neurons beyond m_i is zero, not absent, so Adam's momentum and
weight decay keep moving them. The paper (MatFormer, Eq. 2) does not say what it did. Ours: a step
changes only what took part in it, as PyTorch treats any parameter without a gradient. The idle
slices of each parameter and of the optimizer's running averages are put back after the step.

Adam counts steps for a whole tensor, so a slice that is used rarely gets the bias correction of
the tensor's age; it matters only for about the first 1/(1 - β2) steps, which warm-up covers.
"""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_modules.matformer.nest import idle_indices, nesting_of


def freeze_idle_tail(optimizer: Optimizer, model: nn.Module) -> None:
    """Make every step of the optimizer leave the idle slices of a nested model as they were.

    Works on whole parameters and on FSDP2's shards. The granularity that counts is the one set when
    `optimizer.step` is called, even where a closure computes the gradients in it, as Lightning's
    does: before it there is no gradient to go by.

    Args:
        optimizer: any optimizer whose state tensors have their parameter's shape, or none.
        model: the nested model it trains.
    """
    nesting = nesting_of(model)
    saved: list[tuple[Tensor, int, Tensor, Tensor]] = []

    def keep(optimizer: Optimizer, *_: object) -> None:
        saved.clear()
        for layer in nesting.layers:
            for child in layer.slices().values():
                for name, parameter in child.named_parameters(recurse=False):
                    local, offset = _local(parameter)
                    idle = idle_indices(child, name, offset, local.shape[0])
                    if idle is None:
                        continue
                    dim, index = idle[0], idle[1].to(local.device, non_blocking=True)
                    state = optimizer.state.get(parameter, {}).values()
                    for tensor in (parameter, *state):
                        if torch.is_tensor(tensor) and tensor.shape == parameter.shape:
                            local = _local(tensor)[0]
                            saved.append((local, dim, index, local.index_select(dim, index)))

    def restore(*_: object) -> None:
        for local, dim, index, values in saved:
            local.index_copy_(dim, index, values)
        saved.clear()

    optimizer.register_step_pre_hook(keep)
    optimizer.register_step_post_hook(restore)


def _local(tensor: Tensor) -> tuple[Tensor, int]:
    """This process's part of a tensor and the row of the whole at which it begins."""
    if not isinstance(tensor, DTensor):
        return tensor.detach(), 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tensor.to_local().detach(), offset[0] if offset else 0
