"""Batches that mix adapters: each row can use another one.

A and B are the same for all adapters of one seed, so the two products with them are computed once
for the batch, and only the scaling vectors differ by row (Equation 2 with b and d gathered by row):

    h_i = W0 x_i + b_{a(i)} ⊙ (d_{a(i)} ⊙ x_i Aᵀ) Bᵀ
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lightning_modules.layouts import inside
from lightning_modules.vera.adapter import (
    check_adapter,
    head_tensors,
    held_modules,
    load_adapter,
    read_adapter,
    record_from,
    split_vectors,
)
from lightning_modules.vera.vera import layers_of, vectors_of, vera_of


class Adapters:
    """Saved adapters of one base model, by name, for use in one batch.

        adapters = Adapters(model, {"sst2": "runs/sst2/adapter", "cola": "runs/cola/adapter"})
        with adapters.rows(["sst2", "cola", "sst2"]):
            logits = model(**batch).logits

    Their vectors and heads are stored separately from the model's, which apply outside of `rows`.
    So is what the base's files lack, such as a pooler, which is another one in each training.

    Args:
        model: the base, plain or adapted; a plain one gets the first adapter loaded into it.
        folders: folders written by `save_adapter`, by the name that each adapter gets.
        check_base: as for `load_adapter`.

    Raises:
        ValueError: if an adapter has another base, seed, rank, targets or heads than the model.
    """

    def __init__(
        self, model: nn.Module, folders: Mapping[str, str | Path], check_base: bool = True
    ):
        self.model, self.check_base = model, check_base
        self._vectors: dict[str, dict[str, tuple[Tensor, Tensor]]] = {}
        self._heads: dict[str, dict[str, Tensor]] = {}
        self._by_row: list[str] = []  # names of the modules whose tensors `_heads` has
        self._base: str | None = None  # SHA-256, to hash the model once and not for every adapter
        for name, folder in folders.items():
            self.add(name, folder)

    @property
    def names(self) -> tuple[str, ...]:
        """The adapters' names, in the order they were added."""
        return tuple(self._vectors)

    def add(self, name: str, folder: str | Path) -> None:
        """Read one more adapter, or replace the one of that name.

        Raises:
            FileNotFoundError: if a file is missing.
            ValueError: if it has another base, seed, rank, targets or heads than the model.
        """
        manifest, tensors = read_adapter(folder)
        if not hasattr(self.model, "vera"):
            load_adapter(self.model, folder, self.check_base)
        record = vera_of(self.model)
        if record_from(manifest).heads != record.heads:
            raise ValueError(
                f"the adapter in {folder} has heads {manifest['heads']}, but the model has "
                f"{list(record.heads)}: adapters of one batch need the same heads"
            )
        base_was_checked = self._base == manifest["base_sha256"]
        check = self.check_base and not base_was_checked
        check_adapter(self.model, manifest, tensors, folder, check)
        self._base = manifest["base_sha256"]
        vectors = vectors_of(self.model)
        heads = head_tensors(self.model, record, tensors, folder)
        self._by_row = held_modules(self.model, [*heads, *chain(*self._heads.values())])
        self._vectors[name] = {
            key: (b.to(vectors[key][0]), d.to(vectors[key][1]))
            for key, (b, d) in split_vectors(manifest, tensors).items()
        }
        self._heads[name] = {n: saved.to(tensor) for n, (tensor, saved) in heads.items()}

    @contextmanager
    def rows(self, names: Sequence[str | None], copies: int = 1) -> Iterator[None]:
        """Within the context, row i of every batch uses the adapter names[i].

        Heads run once for each adapter in the batch, on its rows.

        Args:
            names: one for each row; None for the base with the model's heads.
            copies: number of consecutive rows that belong to one name: the number of beams or of
                returned sequences in generation.

        Raises:
            ValueError: for an unknown name, or if a batch has another number of rows.
        """
        for name in names:
            if name is not None and name not in self._vectors:
                raise ValueError(
                    f"unknown adapter {name!r}: there are {', '.join(self.names) or 'none'}"
                )
        rows = [name for name in names for _ in range(copies)]
        used = list(dict.fromkeys(rows))
        index = torch.tensor([used.index(name) for name in rows])
        layers = layers_of(self.model)
        try:
            for layer_name, layer in layers.items():
                layer.rows = {}
                for piece in layer.slices:
                    key = f"{layer_name}:{piece.label}" if piece.label else layer_name
                    b, d = layer.vectors(piece)
                    base = torch.zeros_like(b), torch.zeros_like(d)
                    pairs = [self._vectors[n][key] if n is not None else base for n in used]
                    layer.rows[piece.label] = (
                        torch.stack([b for b, _ in pairs])[index],
                        torch.stack([d for _, d in pairs])[index],
                    )
            for head in self._by_row:
                module: Any = self.model.get_submodule(head)
                module.forward = _HeadByRow(self, head, module, used, index)
            yield
        finally:
            for layer in layers.values():
                layer.rows = None
            for head in self._by_row:
                self.model.get_submodule(head).__dict__.pop("forward", None)

    def head(self, name: str, head: str) -> dict[str, Tensor]:
        """The tensors of one adapter's head, by their names within the head."""
        prefix = f"{head}."
        return {
            n.removeprefix(prefix): t for n, t in self._heads[name].items() if inside(n, [head])
        }


class _HeadByRow:
    """The forward of a head, with the weights of each row's adapter."""

    def __init__(
        self,
        adapters: Adapters,
        head: str,
        module: nn.Module,
        used: list[str | None],
        index: Tensor,
    ):
        self.adapters, self.head, self.module = adapters, head, module
        self.used, self.index = used, index

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if x.shape[0] != len(self.index):
            raise ValueError(
                f"adapters were named for {len(self.index)} rows, but the head {self.head} got an "
                f"input of shape {tuple(x.shape)}: name one adapter for each row of the batch"
            )
        by_row = self.module.__dict__.pop("forward")
        try:
            order, outputs = [], []
            for i, name in enumerate(self.used):
                rows = (self.index == i).nonzero().squeeze(1).to(x.device)
                state = {} if name is None else self.adapters.head(name, self.head)
                outputs.append(functional_call(self.module, state, (x[rows], *args), kwargs))
                order.append(rows)
        finally:
            self.module.__dict__["forward"] = by_row
        return torch.cat(outputs)[torch.cat(order).argsort()]
