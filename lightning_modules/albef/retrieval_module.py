"""Trains image–text retrieval, scored by R@k, and visual grounding, which is trained likewise."""

from typing import Any, ClassVar

from torch import Tensor
from torchmetrics import MeanMetric

from lightning_modules.albef.alignment import Alignment, Pairs, align, fuse_pairs
from lightning_modules.albef.base_module import AlbefModule
from lightning_modules.albef.grounding import choose_box, grad_cam, overlap
from lightning_modules.albef.losses import matching_loss
from lightning_modules.albef.model import Task
from lightning_modules.albef.momentum import Queue, check_queue
from lightning_modules.albef.retrieval import (
    Gallery,
    encode,
    recall,
    rerank_on_all_ranks,
)

DIRECTIONS = {"i2t": False, "t2i": True}  # whether the queries are texts


class Retrieval(AlbefModule):
    """ALBEF's retrieval: L_itc + L_itm (arXiv 2107.07651, Section 5.1).

    Evaluation logs R@1, 5 and 10 in both directions, `stage/i2t_r1` (images as queries for texts)
    to `stage/t2i_r10`; their mean `r_mean`; and the same by similarity alone,
    `stage/itc_i2t_r1` ….

    Args:
        queue_size: size of the queue of further contrastive keys; a multiple of the pairs of a step
            on all devices.
        k: number of keys that matching re-ranks for each query; 128 (Flickr30k) and 256 (COCO) in
            the paper.
        **kwargs: see `AlbefModule`.
    """

    task: ClassVar[Task] = "retrieval"
    heads = ("vision_proj", "text_proj", "itm_head")

    def __init__(self, queue_size: int = 65536, k: int = 128, **kwargs: Any):
        super().__init__(**kwargs)
        projection = (self.settings.sizes or {}).get("projection", 256)
        self.queue = Queue(queue_size, projection)
        self.galleries: list[Gallery] = []

    def on_fit_start(self) -> None:
        """Refuse a queue size that is no multiple of the pairs of a step.

        Raises:
            ValueError: see `check_queue`.
        """
        super().on_fit_start()
        trainer: Any = self.trainer
        batch_size = getattr(trainer.datamodule, "batch_size", None)
        if batch_size:
            check_queue(self.settings.queue_size, batch_size, trainer.world_size)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """L_itc + L_itm."""
        _, losses, _ = self.align(batch, batch_idx)
        return self.total_loss(losses)

    def align(
        self, batch: dict[str, Tensor], batch_idx: int
    ) -> tuple[Alignment, dict[str, Tensor], Pairs]:
        """The alignment, the losses "itc" and "itm", and the pairs of a batch of `CaptionData`."""
        pairs = Pairs(batch["images"], batch["input_ids"], batch["attention_mask"], batch["index"])
        aligned = align(self.model, self.momentum, self.queue, pairs, self.alpha(batch_idx))
        fused, labels = fuse_pairs(self.model, aligned, pairs.mask)
        matching = matching_loss(self.model.match(fused), labels)
        return aligned, {"itc": aligned.loss, "itm": matching}, pairs

    def score(self, batch: dict[str, Tensor]) -> None:
        """Encode a batch for the end of the epoch."""
        self.galleries.append(self.encode(batch))

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Gallery:
        """The encoded batch; `Gallery.of` joins several."""
        return self.encode(batch)

    def encode(self, batch: dict[str, Tensor]) -> Gallery:
        """Encode a batch of `CaptionData`."""
        return encode(
            self.model,
            batch["images"],
            batch["labels"],
            batch["input_ids"],
            batch["attention_mask"],
            batch["text_index"],
        )

    def report(self, stage: str) -> None:
        """Log the scores under `stage/`."""
        gallery = Gallery.of(self.galleries).gathered().valid()
        self.galleries.clear()
        scores: dict[str, float] = {}
        for name, by_text in DIRECTIONS.items():
            ids = (gallery.image_ids, gallery.text_ids)
            queries, keys = reversed(ids) if by_text else ids
            similarity = gallery.similarity.T if by_text else gallery.similarity
            rank_and_world = (self.global_rank, self.trainer.world_size)
            reranked = rerank_on_all_ranks(
                self.model, gallery, self.settings.k, by_text, *rank_and_world
            )
            for prefix, matrix in (("itc_", similarity), ("", reranked)):
                for k, value in zip((1, 5, 10), recall(matrix, queries, keys), strict=True):
                    scores[f"{prefix}{name}_r{k}"] = value
        reranked_scores = [value for name, value in scores.items() if not name.startswith("itc_")]
        scores["r_mean"] = sum(reranked_scores) / len(reranked_scores)
        for name, value in scores.items():
            self.log(f"{stage}/{name}", value, prog_bar=name == "r_mean", sync_dist=True)


class Grounding(Retrieval):
    """Weakly supervised grounding (RefCOCO+): trained as retrieval, evaluated by Grad-CAM.

    Evaluation logs `stage/accuracy`: the share of phrases for which the chosen box has an IoU of
    at least 0.5 with the true one. A phrase in whose image the detector found no box counts as
    wrong.

    Args:
        block: layer whose cross-attention is used; 8 in the paper.
        **kwargs: see `Retrieval`.
    """

    all_patches = "grounding needs a heat map of all patches"

    def __init__(self, block: int = 8, **kwargs: Any):
        super().__init__(**kwargs)
        self.accuracy = MeanMetric()

    def score(self, batch: dict[str, Tensor]) -> None:
        """Choose a box for a phrase, and add it to the accuracy."""
        heat = self.heat(batch)[0]  # on padding too: sharded ranks pass through the model together
        if (batch["labels"] < 0).all():  # padding that gives all ranks equally many examples
            return
        height, width = batch["size"].tolist()
        found, boxes = False, batch["candidates"]
        if len(boxes):
            chosen = boxes[choose_box(heat, (height, width), boxes)]
            found = overlap(batch["box"], chosen) >= 0.5
        self.accuracy.update(float(found))

    def heat(self, batch: dict[str, Tensor]) -> Tensor:
        """Grad-CAM of each phrase over its image's patches, (B, rows, columns)."""
        inputs = (batch["images"], batch["input_ids"], batch["attention_mask"])
        return grad_cam(self.model, *inputs, self.settings.block)

    def report(self, stage: str) -> None:
        """Log `stage/accuracy`."""
        self.log(f"{stage}/accuracy", self.accuracy.compute(), prog_bar=True)
        self.accuracy.reset()
