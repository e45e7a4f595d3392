"""The momentum model and the queue of its features (arXiv 2107.07651, Section 3.2; MoCo)."""

import copy

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F

NO_ID = -100  # id of the random vectors in a new queue


class Momentum(nn.Module):
    """An exponential moving average of a model: θ_m ← m · θ_m + (1 − m) · θ.

    It has no gradients and no dropout. The average of a compressed model is compressed, too.

    Args:
        online: the model to average; its current weights are the initial average.
        decay: m.
    """

    def __init__(self, online: nn.Module, decay: float = 0.995):
        super().__init__()
        self.model = copy.deepcopy(online).requires_grad_(False)
        self.decay = decay
        self.train(False)

    @torch.no_grad()
    def update(self, online: nn.Module) -> None:
        """Update the average, in place; to be called before the momentum model is used."""
        pairs = zip(self.model.parameters(), online.parameters(), strict=True)
        for average, parameter in pairs:
            average.mul_(self.decay).add_(parameter, alpha=1 - self.decay)

    def train(self, mode: bool = True) -> "Momentum":
        """Stay in eval mode, whatever the mode of the module around it."""
        return super().train(False)


class Queue(nn.Module):
    """The latest feature vectors of images and texts, and their ids, in ring buffers.

    All ranks hold the same queue: a step adds the features of all ranks, in the order of ranks.

    Args:
        size: Q, number of vectors of each kind.
        width: features of a vector.
    """

    image_queue: Tensor
    text_queue: Tensor
    idx_queue: Tensor
    queue_ptr: Tensor

    def __init__(self, size: int, width: int):
        super().__init__()
        for name in ("image_queue", "text_queue"):
            self.register_buffer(name, F.normalize(torch.randn(width, size), dim=0))
        self.register_buffer("idx_queue", torch.full((1, size), NO_ID))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def add(self, images: Tensor, texts: Tensor, ids: Tensor) -> None:
        """Replace the oldest vectors by a batch.

        Args:
            images: unit vectors of this rank's images, (B, width).
            texts: unit vectors of this rank's texts, (B, width).
            ids: id of the image that each belongs to, (B,).

        Raises:
            ValueError: if all ranks' batches together are larger than the queue.
        """
        images, texts, ids = gather(images), gather(texts), gather(ids)
        size = self.idx_queue.shape[1]
        if len(ids) > size:
            raise ValueError(
                f"queue_size is {size}, expected at least the {len(ids)} pairs of a step on all "
                "devices: give a larger queue_size or a smaller batch_size"
            )
        start = int(self.queue_ptr)
        places = (start + torch.arange(len(ids), device=ids.device)) % size
        self.image_queue[:, places] = images.T.to(self.image_queue)
        self.text_queue[:, places] = texts.T.to(self.text_queue)
        self.idx_queue[0, places] = ids
        self.queue_ptr[0] = (start + len(ids)) % size


def check_queue(size: int, batch_size: int, ranks: int) -> None:
    """Refuse a queue size that is no multiple of the pairs of a step, as ALBEF's code does.

    Args:
        size: of the queue.
        batch_size: pairs of a step on one device.
        ranks: number of devices.

    Raises:
        ValueError: if size is not a multiple of the pairs of a step on all devices.
    """
    step = batch_size * ranks
    if size % step:
        lower, upper = size // step * step, -(-size // step) * step
        near = f"{upper}" if lower == 0 else f"{lower} or {upper}"
        raise ValueError(
            f"queue_size is {size}, expected a multiple of the {step} pairs of a step "
            f"({batch_size} on each of {ranks} devices): set model.queue_size to {near}"
        )


def gather(tensor: Tensor) -> Tensor:
    """The ranks' tensors (B, …) concatenated in rank order, (R · B, …); without gradients."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return tensor
    parts = [torch.empty_like(tensor) for _ in range(distributed.get_world_size())]
    distributed.all_gather(parts, tensor.contiguous())
    return torch.cat(parts)
