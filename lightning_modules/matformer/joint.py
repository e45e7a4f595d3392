"""The losses of all granularities in one step, as in DynaBERT and the official implementations."""

from collections.abc import Callable

from torch import Tensor, nn

from lightning_modules.matformer.nest import nesting_of, set_granularity


def joint_losses(model: nn.Module, loss_of: Callable[[int], Tensor]) -> list[Tensor]:
    """The loss at every granularity, smallest first, ready for the backward pass of their sum.

    With gradient checkpointing the backward pass runs the blocks again, and they must then have the
    widths of the forward pass. Autograd runs the backward passes one after the other, last loss
    first, so a hook on each loss sets that loss's granularity again. The largest granularity stays
    set until the backward pass, and the smallest after it.

    Args:
        model: a nested model.
        loss_of: called with each granularity's index after that granularity has been set; returns
            the loss, a scalar.
    """
    losses = []
    for index in range(len(nesting_of(model).names)):
        set_granularity(model, index)
        loss = loss_of(index)
        if loss.requires_grad:
            loss.register_hook(lambda _, index=index: set_granularity(model, index))
        losses.append(loss)
    return losses
