"""A method's arguments besides rank and targets."""

from collections.abc import Mapping
from typing import Any, TypedDict

from lightning_modules.vera.projections import Init


class MethodArgs(TypedDict, total=False):
    """Further arguments of a method: of `add_vera` (the first five), or of `tune`.

    Attributes:
        d_init: initial value of every entry of VeRA's d.
        seed: of the random draw: VeRA's A and B, RandLoRA's matrices, a prompt's initial values, or
            APET's positions.
        init: distribution of VeRA's A and B.
        shared: one A and B for all layers; false for one pair per layer (Table 7, "unique").
        train: VeRA's trained vectors: "b" and "d", or one of them (Table 6).
        alpha: LoRA's scale is alpha / rank; alpha = rank when left out.
        dropout: probability with which LoRA drops each entry of its input.
        vectors: number of vectors in VB-LoRA's bank.
        vector_length: length of those vectors.
        budget: number of parameters that APET trains.
        operations: kinds of APET's parameters: "add", "concat", "plug".
        norms: false to freeze the layer norms, which these adapters also train (Houlsby et al.).
        pooler: false to freeze the bias of a pooler, which BitFit trains with the others.
        layers: ends of the names of the layers and norms that BitFit gives a bias in a model that
            has none (T5).
    """

    d_init: float
    seed: int
    init: Init
    shared: bool
    train: list[str]
    alpha: float
    dropout: float
    vectors: int
    vector_length: int
    budget: int
    operations: list[str]
    norms: bool
    pooler: bool
    layers: list[str]


ARGUMENTS = {
    "vera": ("d_init", "seed", "init", "shared", "train"),
    "lora": ("alpha", "dropout"),
    "lora_fa": ("alpha", "dropout"),
    "randlora": ("alpha", "seed"),
    "vblora": ("vectors", "vector_length"),
    "adapter_h": ("norms",),
    "adapter_d": ("norms",),
    "bitfit": ("pooler", "layers"),
    "prompt": ("seed",),
    "apet": ("budget", "seed", "operations"),
}


def complete(hparams: Mapping[str, Any]) -> dict[str, Any]:
    """`method_args` for comparing two runs: VeRA's with its defaults, and without d_init."""
    defaults = {"seed": 0, "init": "kaiming_uniform", "shared": True, "train": ["b", "d"]}
    arguments = {**(hparams.get("method_args") or {})}
    if hparams.get("method") != "vera":
        return arguments
    arguments.pop("d_init", None)  # has no effect once a checkpoint's d is loaded
    return defaults | arguments
