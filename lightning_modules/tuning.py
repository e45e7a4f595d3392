"""The usual ways to fine-tune a pre-trained Transformer: the baselines of the papers.

`tune` adds a method's parameters to the model in place, makes trainable what the method trains, and
freezes the rest. The names of the model's parameters do not change, except where peft wraps a
layer.
"""

import re
import warnings
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Literal, get_args

from torch import Tensor, nn

from lightning_modules.apet import Apet, attach, bitfit, insert, prompt
from lightning_modules.apet.checks import check_heads
from lightning_modules.layouts import is_layer_norm, width

Tuning = Literal[
    "full",
    "head",
    "bitfit",
    "lora",
    "lora_fa",
    "randlora",
    "vblora",
    "adapter_h",
    "adapter_l",
    "adapter_p",
    "adapter_d",
    "prompt",
    "apet",
]

PEFT = ("lora", "lora_fa", "randlora", "vblora")

# the last linear layer of attention and of the feed-forward part, as model families name them
ATTENTION_OUT = (
    "attention.output.dense",
    "attn.c_proj",
    "attn.proj",
    "self_attn.o_proj",
    "self_attention.dense",
    "SelfAttention.o",
)
FEED_FORWARD_OUT = (
    "output.dense",
    "mlp.c_proj",
    "mlp.fc2",
    "mlp.down_proj",
    "mlp.dense_4h_to_h",
    "DenseReluDense.wo",
)


def tune(
    model: nn.Module,
    method: Tuning,
    heads: Sequence[str] = (),
    rank: int = 8,
    targets: Sequence[str] = (),
    alpha: float | None = None,
    **further: Any,
) -> nn.Module:
    """Prepare a model for a fine-tuning method: add and unfreeze its parameters, freeze the rest.

    Args:
        model: a timm or transformers model.
        method: "full", everything. "head", the heads alone. "bitfit", all biases (Ben Zaken et al.,
            2021), or where there are none (T5) a new one for each linear layer. "prompt", soft
            tokens before the text (Lester et al., 2021). "apet", a budget of parameters at random
            positions (Su et al., arXiv 2306.02320). Through peft: "lora" (Hu et al., 2021);
            "lora_fa", LoRA with A frozen (Zhang et al., 2023); "randlora", updates of full rank as
            sums of random low-rank matrices (Albert et al., 2025); "vblora", LoRA whose factors
            combine the vectors of a shared bank (Li et al., 2024). "adapter_h", bottlenecks after
            attention and feed-forward network, before the residual sum, and the layer norms, RMS
            norms included (Houlsby et al., 2019); "adapter_l", bottlenecks after the feed-forward
            network only, each with a layer norm before it (Lin et al., 2020); "adapter_p", those
            without that norm (Pfeiffer et al., 2021); "adapter_d", "adapter_h" in the upper half of
            the layers only, of an encoder–decoder's encoder and decoder each (AdapterDrop, Rücklé
            et al., 2020).
        heads: names of modules that always train.
        rank: rank of peft's methods, width of the bottlenecks, or number of soft tokens.
        targets: layers of peft's methods, by the ends of their names.
        alpha: LoRA's scale is alpha / rank; None for alpha = rank.
        **further: `dropout` of LoRA's and LoRA-FA's input, a probability; `vectors` and
            `vector_length` of VB-LoRA's bank; `seed` of RandLoRA's matrices,
            APET's positions or a prompt's initial values; APET's `budget` and `operations`;
            `norms`, false to leave the layer norms out of "adapter_h" and "adapter_d"; `pooler`,
            false to leave a pooler's bias out of "bitfit"; `layers`, ends of the names of the
            layers and norms that "bitfit" gives a bias in a model without any.

    Returns:
        The same model.

    Raises:
        ValueError: for an unknown method, a rank below 1, a head that the model does not have, or
            a model without layers that the adapters or APET know.
    """
    if method not in get_args(Tuning):
        raise ValueError(
            f"unknown method {method!r}: expected one of {', '.join(get_args(Tuning))}"
        )
    if rank < 1:
        raise ValueError(f"rank {rank} is not a whole number of at least 1: give for example 8")
    check_heads(model, heads)
    if method == "apet":
        return insert(model, heads=heads, **further)
    if method == "prompt":
        return attach(model, Apet(prompt(rank), heads=tuple(heads), **further))
    model.requires_grad_(method == "full")
    if method == "bitfit":
        _train_biases(model, heads, **further)
    elif method in PEFT:
        _add_peft(model, method, rank, targets, rank if alpha is None else alpha, **further)
    elif method.startswith("adapter"):
        _add_adapters(model, method, rank, **further)
    for head in heads:
        model.get_submodule(head).requires_grad_(True)
    return model


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that train, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _train_biases(
    model: nn.Module, heads: Sequence[str], pooler: bool = True, layers: Sequence[str] = ()
) -> None:
    biases = {name: p for name, p in model.named_parameters() if name.endswith("bias")}
    if not biases:
        attach(model, Apet(bitfit(model, heads, layers), heads=tuple(heads)))
    for name, bias in biases.items():
        bias.requires_grad_(pooler or "pooler" not in name.split("."))


def _add_peft(
    model: nn.Module,
    method: str,
    rank: int,
    targets: Sequence[str],
    alpha: float,
    dropout: float = 0.0,
    seed: int = 0,
    vectors: int = 256,
    vector_length: int = 64,
) -> None:
    import peft  # imported here, because it is not installed everywhere

    config: Any
    scale: Any = alpha
    if method == "randlora":
        config = peft.RandLoraConfig(r=rank, randlora_alpha=scale, projection_prng_key=seed)
    elif method == "vblora":
        config = peft.VBLoRAConfig(r=rank, num_vectors=vectors, vector_length=vector_length)
    else:
        config = peft.LoraConfig(r=rank, lora_alpha=scale, lora_dropout=dropout)
    config.target_modules = set(targets)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out")  # peft sets it for Conv1D
        if method == "vblora":  # every layer refers to the shared bank: the wrapper can be dropped
            peft.tuners.vblora.VBLoRAModel(model, config, "default")
        else:
            peft.inject_adapter_in_model(config, model)
    if method == "lora_fa":
        for name, parameter in model.named_parameters():
            if ".lora_A." in name:
                parameter.requires_grad_(False)


class Bottleneck(nn.Module):
    """A bottleneck adapter, x + U σ(D x), where U starts at zero.

    Args:
        width: features of x.
        rank: features of D x.
        norm: apply a LayerNorm before D (Lin et al., 2020).
    """

    def __init__(self, width: int, rank: int, norm: bool = False):
        super().__init__()
        self.norm = nn.LayerNorm(width) if norm else nn.Identity()
        self.down = nn.Linear(width, rank)
        self.act = nn.GELU()
        self.up = nn.Linear(rank, width)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, x: Tensor) -> Tensor:
        """The adapted features (…, width) of x (…, width), in the type of x."""
        change = self.up(self.act(self.down(self.norm(x.to(self.down.weight.dtype)))))
        return x + change.to(x.dtype)


def _add_adapters(model: nn.Module, method: str, rank: int, norms: bool = True) -> None:
    attention = [n for n, _ in model.named_modules() if n.endswith(ATTENTION_OUT)]
    feed_forward = [
        n for n, _ in model.named_modules() if n.endswith(FEED_FORWARD_OUT) and n not in attention
    ]
    if not attention or not feed_forward:
        raise ValueError(
            f"{type(model).__name__} has no place for adapters: expected layers that end in "
            f"{', '.join(ATTENTION_OUT)} and {', '.join(FEED_FORWARD_OUT)}"
        )
    if method == "adapter_d":
        attention, feed_forward = _upper_half(attention), _upper_half(feed_forward)
    places = feed_forward
    if method in ("adapter_h", "adapter_d"):
        places = attention + feed_forward
        for module in model.modules():
            if is_layer_norm(type(module)):
                module.requires_grad_(norms)
    for name in places:
        layer: Any = model.get_submodule(name)
        if type(layer) is nn.Sequential:  # a low-rank layer: behind its second half
            layer = layer[-1]
        adapter = Bottleneck(width(layer, 0), rank, norm=method == "adapter_l")
        layer.add_module("adapter", adapter.to(layer.weight.device))
        layer.register_forward_hook(_adapt)


def _upper_half(names: list[str]) -> list[str]:
    """The second half of the layers of every stack: of an encoder–decoder's encoder and decoder."""
    stacks: dict[str, list[str]] = defaultdict(list)
    for name in names:
        stacks[re.split(r"\.\d+\.", name)[0]].append(name)
    return [name for stack in stacks.values() for name in stack[len(stack) // 2 :]]


def _adapt(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return layer.adapter(output)  # type: ignore[operator]
