"""Converts VeRA adapters to and from peft's format, and to LoRA.

peft's VeRA draws the same A and B, so that the vectors can be copied unchanged. A VeRA layer also
equals a LoRA layer of the same rank: Λ_b B Λ_d A = B' A' with A' = d ⊙ A and B' = b ⊙ B (each with
its rows scaled), so that no decomposition is needed.
"""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lightning_modules.layouts import inside, shape_of
from lightning_modules.vera.adapter import held_modules
from lightning_modules.vera.projections import Projections
from lightning_modules.vera.vera import (
    Vera,
    attach,
    layers_of,
    projections_of,
    vectors_of,
    vera_of,
)
from lightning_modules.weights import drawn_at_random, read_file

PREFIX = "base_model.model."
CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"


def to_peft(model: nn.Module, folder: str | Path, projections: bool = True) -> Path:
    """Write the adapter as a VeRA directory for `peft.PeftModel.from_pretrained`.

    What the base's files lack (`model.at_random`) is written like a head, in `modules_to_save`.

    Args:
        model: a model that `add_vera` has changed.
        folder: created if it is missing.
        projections: write A and B too, as peft does by default.

    Returns:
        The folder.

    Raises:
        ValueError: if the model has no VeRA layer, or peft cannot represent it: slices, unshared
            projections, without `projections` matrices that peft would not draw, or an adapted
            layer that the base's files lack.
    """
    from peft import VeraConfig

    record = vera_of(model)
    sliced = [name for name, labels in record.layers.items() if labels != ("",)]
    if sliced:
        raise ValueError(
            f"{sliced[0]} is adapted in slices {', '.join(record.layers[sliced[0]])}, which peft's "
            "VeRA does not know: write it with to_lora"
        )
    if not record.shared:
        raise ValueError(
            "the projections are not shared, and peft's VeRA knows one pair: write it with to_lora"
        )
    held = held_modules(model, drawn_at_random(model, record.heads))
    matrices = projections_of(model)[0]
    drawn = matrices.given is None and record.init == "kaiming_uniform"
    if not drawn and not projections:
        raise ValueError(
            f"peft would draw other matrices than these ({record.init}): write them with "
            "projections=True"
        )
    tensors = {}
    for name, (b, d) in vectors_of(model).items():
        tensors[f"{PREFIX}{name}.vera_lambda_b"] = b
        tensors[f"{PREFIX}{name}.vera_lambda_d"] = d
    if projections:
        a, b_matrix = matrices.on(torch.device("cpu"), torch.float32)
        tensors |= {"base_model.vera_A": a, "base_model.vera_B": b_matrix}
    config = VeraConfig(
        r=record.rank,
        projection_prng_key=record.seed,
        d_initial=record.d_init,
        save_projection=projections,
        **_shared_config(model, held),
    )
    return _write(model, held, config, tensors, folder)


def lora_factors(model: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    """A' (r, n) and B' (m, r) of every adapted layer by name, with ΔW = B' A'.

    Slices of a fused layer that share A become one LoRA layer: A' = A, B' = b ⊙ B ⊙ d in the rows
    of each slice, and zero in all other rows.

    Raises:
        ValueError: if the model has no VeRA layer, or slices of one layer do not share A.
    """
    factors = {}
    for name, layer in layers_of(model).items():
        if len({id(piece.projections) for piece in layer.slices}) > 1:
            raise ValueError(
                f"the slices of {name} do not share A, so they are no LoRA of rank "
                f"{vera_of(model).rank}: add VeRA with shared=True"
            )
        first = layer.slices[0]
        b, d = (vector.detach() for vector in layer.vectors(first))
        a, b_matrix = layer.matrices(first, b, b.dtype)
        if first.blocks == 1:
            factors[name] = d[:, None] * a, b[:, None] * b_matrix
            continue
        outer = b.new_zeros(shape_of(layer)[0], len(d))
        for piece in layer.slices:
            b, d = (vector.detach() for vector in layer.vectors(piece))
            outer.chunk(piece.blocks)[piece.index].copy_(b[:, None] * b_matrix * d)
        factors[name] = a.clone(), outer
    return factors


def to_lora(model: nn.Module, folder: str | Path) -> Path:
    """Write the adapter as a LoRA directory for peft, exactly and with the same rank.

    It is as large as any LoRA adapter of that rank: L·(m + n)·r numbers. What the base's files
    lack is written as by `to_peft`.

    Args:
        model: a model that `add_vera` has changed.
        folder: created if it is missing.

    Returns:
        The folder.

    Raises:
        ValueError: if the model has no VeRA layer, slices of one layer do not share A, or the
            base's files lack an adapted layer.
    """
    from peft import LoraConfig

    record = vera_of(model)
    held = held_modules(model, drawn_at_random(model, record.heads))
    tensors = {}
    for name, (a, b) in lora_factors(model).items():
        tensors[f"{PREFIX}{name}.lora_A.weight"] = a
        tensors[f"{PREFIX}{name}.lora_B.weight"] = b
    config = LoraConfig(r=record.rank, lora_alpha=record.rank, **_shared_config(model, held))
    return _write(model, held, config, tensors, folder)


@torch.no_grad()
def from_peft(model: nn.Module, folder: str | Path) -> nn.Module:
    """Load a VeRA adapter that peft wrote into a plain model, in place.

    A and B are drawn from the seed; where the directory has other ones, those are used. peft's
    dropout is ignored.

    Args:
        model: the plain base model.
        folder: with adapter_config.json and adapter_model.safetensors.

    Returns:
        The same model. It stays unchanged where an error is raised.

    Raises:
        FileNotFoundError: if a file is missing.
        ValueError: if the adapter is not VeRA's, trains biases, or does not fit the model.
    """
    folder = Path(folder)
    for name in (CONFIG, TENSORS):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"no {name} in {folder}: expected a folder written by peft")
    config = json.loads((folder / CONFIG).read_text())
    if config.get("peft_type") != "VERA" or config.get("bias", "none") != "none":
        raise ValueError(
            f"{folder / CONFIG} is of type {config.get('peft_type')} with bias "
            f"{config.get('bias')!r}: expected VERA with bias 'none'"
        )
    tensors = {n.removeprefix(PREFIX): t for n, t in read_file(folder / TENSORS).items()}
    given = tensors.pop("base_model.vera_A", None), tensors.pop("base_model.vera_B", None)
    ends = (".vera_lambda_b", ".vera_lambda_d")
    names = {n.removesuffix(end) for n in tensors for end in ends if n.endswith(end)}
    modules = dict(model.named_modules())
    unknown = sorted(n for n in names if not isinstance(modules.get(n), nn.Linear | Conv1D))
    if unknown or not names:
        raise ValueError(
            f"the adapter in {folder} does not fit {type(model).__name__}: "
            f"{', '.join(unknown[:4]) or 'no layer'} is no linear layer of it; load it into the "
            "base that it was trained on"
        )
    layers: dict[str, tuple[str, ...]] = {n: ("",) for n in modules if n in names}
    kept = config.get("modules_to_save") or []
    heads = tuple(n for n in modules if any(n == k or n.endswith(f".{k}") for k in kept))
    seed, rank = config["projection_prng_key"], config["r"]
    shapes = [shape_of(modules[name]) for name in layers]
    outputs, inputs = (max(sizes) for sizes in zip(*shapes, strict=True))
    expected = _expected_shapes(layers, shapes, rank)
    state = model.state_dict()
    expected |= {n: tuple(t.shape) for n, t in state.items() if inside(n, heads)}
    shapes_read = {n: tuple(t.shape) for n, t in tensors.items()}
    if shapes_read != expected:
        names_read = shapes_read.keys() | expected.keys()
        wrong = min(n for n in names_read if shapes_read.get(n) != expected.get(n))
        raise ValueError(
            f"{wrong} has shape {shapes_read.get(wrong)} in {folder}, but {expected.get(wrong)} "
            f"fits {type(model).__name__}: load it into the base that it was trained on"
        )
    matrices = _stored_matrices(rank, inputs, outputs, seed, given, folder)
    record = Vera(
        rank, seed, "kaiming_uniform", config["d_initial"], True, ("b", "d"), layers, heads
    )
    attach(model, record, matrices)
    for name, vectors in vectors_of(model).items():
        for vector, end in zip(vectors, ends, strict=True):
            vector.copy_(tensors[name + end])
    for name, tensor in model.state_dict().items():
        if inside(name, heads):
            tensor.copy_(tensors[name])
    return model


def _expected_shapes(
    layers: dict[str, tuple[str, ...]], shapes: list[tuple[int, int]], rank: int
) -> dict[str, tuple[int, ...]]:
    """The shapes of an adapter's vectors, by peft's names."""
    sizes: dict[str, tuple[int, ...]] = {}
    for name, (outputs, _) in zip(layers, shapes, strict=True):
        sizes |= {f"{name}.vera_lambda_b": (outputs,), f"{name}.vera_lambda_d": (rank,)}
    return sizes


def _stored_matrices(
    rank: int, inputs: int, outputs: int, seed: int, given: Any, folder: Path
) -> tuple[Tensor, Tensor] | None:
    """A and B of a directory, in float32; None if it has none or the seed gives the same."""
    if any(matrix is None for matrix in given):
        return None
    drawn = Projections(rank, inputs, outputs, seed).on(torch.device("cpu"), torch.float32)
    matrices = given[0].float(), given[1].float()
    if [m.shape for m in matrices] != [m.shape for m in drawn]:
        raise ValueError(
            f"vera_A {tuple(given[0].shape)} and vera_B {tuple(given[1].shape)} in {folder} do not "
            f"fit layers of {inputs} inputs, {outputs} outputs and rank {rank}: load it into the "
            "base that it was trained on"
        )
    same = all(torch.equal(m, d) for m, d in zip(matrices, drawn, strict=True))
    return None if same else matrices


def _shared_config(model: nn.Module, held: list[str]) -> dict[str, Any]:
    """The entries that peft's configurations of VeRA and LoRA share."""
    layers = layers_of(model)
    return {
        # a regular expression, because a list would match the ends of other names too
        "target_modules": "|".join(re.escape(name) for name in layers),
        "fan_in_fan_out": any(isinstance(layer, Conv1D) for layer in layers.values()),
        "modules_to_save": held or None,
        "base_model_name_or_path": getattr(model, "name_or_path", None),
        "inference_mode": True,
    }


def _write(
    model: nn.Module, held: list[str], config: Any, tensors: dict[str, Tensor], folder: str | Path
) -> Path:
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, tensor in model.state_dict().items():
        if inside(name, held):
            tensors[PREFIX + name] = tensor
    content = {k: v.detach().cpu().clone().contiguous() for k, v in tensors.items()}
    save_file(content, folder / TENSORS, metadata={"format": "pt"})
    config.save_pretrained(folder)
    return folder
