"""Training all granularities in one step, as DynaBERT and the official codes do."""

from collections.abc import Callable

from torch import Tensor, nn

from lightning_modules.matformer.nest import nesting_of, set_granularity


def joint_losses(model: nn.Module, loss_of: Callable[[int], Tensor]) -> list[Tensor]:
    """The loss at every granularity, smallest first; their sum may be back-propagated.

    With gradient checkpointing the backward pass runs the blocks again, and they must be as wide as
    they were. Autograd works off the graph made last first, one loss after the other, so each loss
    sets its granularity again when its turn comes. Afterwards the smallest is set.

    Args:
        model: nested.
        loss_of: the loss at the granularity of that index, which is set when it is called.
    """
    losses = []
    for index in range(len(nesting_of(model).names)):
        set_granularity(model, index)
        loss = loss_of(index)
        if loss.requires_grad:
            loss.register_hook(lambda _, index=index: set_granularity(model, index))
        losses.append(loss)
    return losses
