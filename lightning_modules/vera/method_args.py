"""The arguments of a method beside its rank and its targets, and those of older checkpoints."""

from collections.abc import Mapping
from typing import Any, TypedDict

from lightning_modules.vera.projections import Init


class MethodArgs(TypedDict, total=False):
    """Further arguments of a method: of `add_vera` (the first five), or of `tune`.

    Attributes:
        d_init: what every entry of VeRA's d starts at.
        seed: VeRA's A and B are drawn from it.
        init: how they are drawn.
        shared: one A and B for all layers (else Table 7's "unique").
        train: VeRA's trained vectors, b and d (or one of them, Table 6).
        alpha: LoRA's scale is alpha / rank; rank when left out.
        vectors: number of vectors in VB-LoRA's bank.
        vector_length: their length.
        budget: number of APET's parameters; `seed` draws their positions.
        operations: what they are, "add", "concat", "plug".
    """

    d_init: float
    seed: int
    init: Init
    shared: bool
    train: list[str]
    alpha: float
    vectors: int
    vector_length: int
    budget: int
    operations: list[str]


ARGUMENTS = {
    "vera": ("d_init", "seed", "init", "shared", "train"),
    "lora": ("alpha",),
    "lora_fa": ("alpha",),
    "randlora": ("alpha", "seed"),
    "vblora": ("vectors", "vector_length"),
    "prompt": ("seed",),
    "apet": ("budget", "seed", "operations"),
}


def complete(hparams: Mapping[str, Any]) -> dict[str, Any]:
    """`method_args` with VeRA's defaults filled in, of which those that make A, B, b and d."""
    defaults = {"seed": 0, "init": "kaiming_uniform", "shared": True, "train": ["b", "d"]}
    arguments = {**(hparams.get("method_args") or {})}
    if hparams.get("method") != "vera":
        return arguments
    arguments.pop("d_init", None)  # where d started is no matter once it is loaded
    return defaults | arguments


def upgraded(hparams: Mapping[str, Any]) -> dict[str, Any]:
    """Hyperparameters of a checkpoint from before `method_args`, as they are now."""
    saved = dict(hparams)
    if "betas" not in saved:
        return saved
    del saved["betas"]
    flat = {name: saved.pop(name, None) for name in ("d_init", "init", "shared", "train", "alpha")}
    flat["seed"] = saved.pop("projection_seed", None)
    known = ARGUMENTS.get(saved.get("method", "vera"), ())
    saved["method_args"] = {n: v for n, v in flat.items() if n in known and v is not None}
    return saved
