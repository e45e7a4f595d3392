"""Table of layer classes: which weights belong to a hidden neuron or an attention head.

layouts.py reads it; no model library is imported here. A class is matched exactly, because its
subclasses may compute something else. To add a class of your own, write one line:

    LAYOUTS["my.module.Ffn"] = FeedForwardLayout(("up",), "down")
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class FeedForwardLayout:
    """A class of feed-forward networks: hidden neurons between expanding and reducing layers.

    Attributes:
        expanding: paths of the child layers whose output is the hidden state.
        reducing: path of the child layer whose input is the hidden state.
        halves: equal blocks in the output of an expanding layer: 2 for [gate | up].
        norm: path of the child that normalises the hidden state, where there is one.
        config: what transformers' configuration calls the number of hidden neurons; None where it
            cannot be set there. A name that ends in "ratio" is that number over `hidden_size`.
        attributes: attributes of the module that repeat the number of hidden neurons.
        switch_off: attributes of the module set to 0 while it is sliced, because they choose a
            fused kernel, which reads the full weights instead of calling the children.
    """

    expanding: tuple[str, ...]
    reducing: str
    halves: int = 1
    norm: str | None = None
    config: str | None = None
    attributes: tuple[str, ...] = ()
    switch_off: tuple[str, ...] = ()


@dataclass(frozen=True)
class AttentionLayout:
    """A class of attention layers.

    Attributes:
        q, k, v: paths of the child layers (or parameters) that compute queries, keys and values;
            equal where one fused layer computes them.
        o: path of the output projection.
        head_dim: attribute of the module that holds the size of a head (dots reach children).
        order: the order of "q", "k" and "v" in the output of a fused layer.
        pieces: number of equal blocks in the output of a fused layer, each of which holds queries,
            keys and values in that order: 1 for [q | k | v], "groups" for one block per key/value
            head.
        by_head: paths of further children whose output is split by query heads: a gate, a norm.
        attributes: attributes of the module that depend on the heads in use, each mapped to
            "heads", "width" (heads times head size), "key_value_heads", "key_value_width" or
            "groups" (query heads for each key/value head).
        config: the same for entries of transformers' configuration (also "head_dim"); None where
            the configuration derives the size of a head from the number of heads.
        fixed: the reason why heads can be neither dropped nor reordered; empty where they can.
    """

    q: str
    k: str
    v: str
    o: str
    head_dim: str
    order: str = "qkv"
    pieces: int | str = 1
    by_head: tuple[str, ...] = ()
    attributes: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, str] | None = None
    fixed: str = ""


Layout = FeedForwardLayout | AttentionLayout


def class_path(kind: type) -> str:
    """A class's name with its module, such as "timm.layers.mlp.Mlp"."""
    return f"{kind.__module__}.{kind.__qualname__}"


def _hf(classes: str, layout: Any = None) -> dict[str, Any]:
    """One layout for classes of transformers, given as "llama.LlamaMLP mistral.MistralMLP"."""
    pairs = [entry.split(".") for entry in classes.split()]
    return {f"transformers.models.{m}.modeling_{m}.{name}": layout for m, name in pairs}


def _rope(module: Any) -> AttentionLayout:
    names = ("qkv",) * 3 if module.qkv is not None else ("q_proj", "k_proj", "v_proj")
    attributes = {"num_heads": "heads", "attn_dim": "width", "num_kv_groups": "groups"}
    attributes |= {"num_kv_heads": "key_value_heads", "kv_dim": "key_value_width"}
    return AttentionLayout(
        *names, "proj", "head_dim", by_head=("norm", "gate"), attributes=attributes
    )


def _gpt2(module: Any) -> AttentionLayout:
    names = ("q_attn" if module.is_cross_attention else "c_attn", "c_attn", "c_attn", "c_proj")
    attributes = {"num_heads": "heads", "split_size": "width"}
    return AttentionLayout(*names, "head_dim", attributes=attributes)


def _gpt_bigcode(module: Any) -> AttentionLayout:
    names = ("q_attn" if module.is_cross_attention else "c_attn", "c_attn", "c_attn", "c_proj")
    pieces = 1 if module.multi_query or module.is_cross_attention else "groups"
    fixed = "its forward splits queries, keys and values by the width of the model"
    return AttentionLayout(*names, "head_dim", pieces=pieces, fixed=fixed)


def _torch(module: Any) -> AttentionLayout:
    separate = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
    names = ("in_proj_weight",) * 3 if module._qkv_same_embed_dim else separate
    fixed = "torch's MultiheadAttention takes its head size from the width of the model"
    return AttentionLayout(*names, "out_proj", "head_dim", fixed=fixed)


# fmt: off
_MLP = FeedForwardLayout(("fc1",), "fc2", norm="norm")
_TORCH_MLP = FeedForwardLayout(("linear1",), "linear2", switch_off=("activation_relu_or_gelu",))
_CONFIG_VIT = {"num_attention_heads": "heads", "head_dim": "head_dim"}
_CONFIG_LLAMA = {**_CONFIG_VIT, "num_key_value_heads": "key_value_heads"}
_SELF = ("self.query", "self.key", "self.value", "output.dense", "self.attention_head_size")
_SEPARATE = ("q_proj", "k_proj", "v_proj", "o_proj", "head_dim")
_FUSED = ("query_key_value",) * 3

# a function where the layout depends on the module's settings
LAYOUTS: dict[str, Layout | Callable[[Any], Layout]] = {
    # timm. EvaAttention (EVA, DINOv3), BEiT's Attention, Swin's WindowAttention and
    # RelPosAttention are left out: their heads also have position tables or biases of their own.
    "timm.layers.mlp.Mlp": _MLP,
    "timm.layers.mlp.GluMlp": FeedForwardLayout(("fc1",), "fc2", halves=2, norm="norm"),
    "timm.layers.mlp.SwiGLU": FeedForwardLayout(("fc1_g", "fc1_x"), "fc2", norm="norm"),
    "timm.layers.attention.Attention": AttentionLayout(
        "qkv", "qkv", "qkv", "proj", "head_dim", by_head=("norm", "gate"),
        attributes={"num_heads": "heads", "attn_dim": "width"}),
    "timm.layers.attention.AttentionRope": _rope,
    # transformers: feed-forward networks
    **_hf("llama.LlamaMLP mistral.MistralMLP qwen2.Qwen2MLP qwen3.Qwen3MLP smollm3.SmolLM3MLP "
          "gemma.GemmaMLP gemma2.Gemma2MLP gemma3.Gemma3MLP",
          FeedForwardLayout(("gate_proj", "up_proj"), "down_proj", config="intermediate_size",
                            attributes=("intermediate_size",))),
    **_hf("phi3.Phi3MLP",
          FeedForwardLayout(("gate_up_proj",), "down_proj", halves=2, config="intermediate_size")),
    **_hf("vit.ViTMLP deit.DeiTMLP",
          FeedForwardLayout(("fc1",), "fc2", config="intermediate_size")),
    **_hf("dinov2.Dinov2MLP", FeedForwardLayout(("fc1",), "fc2", config="mlp_ratio")),
    **_hf("dinov2.Dinov2SwiGLUFFN", FeedForwardLayout(("gate_proj", "up_proj"), "down_proj")),
    **_hf("bert.BertLayer roberta.RobertaLayer electra.ElectraLayer deberta_v2.DebertaV2Layer",
          FeedForwardLayout(("intermediate.dense",), "output.dense", config="intermediate_size")),
    **_hf("distilbert.FFN", FeedForwardLayout(("lin1",), "lin2", config="hidden_dim")),
    **_hf("gpt2.GPT2MLP gpt_bigcode.GPTBigCodeMLP",
          FeedForwardLayout(("c_fc",), "c_proj", config="n_inner")),
    **_hf("starcoder2.Starcoder2MLP",
          FeedForwardLayout(("c_fc",), "c_proj", config="intermediate_size")),
    **_hf("codegen.CodeGenMLP", FeedForwardLayout(("fc_in",), "fc_out", config="n_inner")),
    **_hf("gpt_neox.GPTNeoXMLP",
          FeedForwardLayout(("dense_h_to_4h",), "dense_4h_to_h", config="intermediate_size")),
    **_hf("bloom.BloomMLP", FeedForwardLayout(("dense_h_to_4h",), "dense_4h_to_h")),
    **_hf("opt.OPTDecoderLayer", FeedForwardLayout(("fc1",), "fc2", config="ffn_dim")),
    **_hf("t5.T5DenseActDense", FeedForwardLayout(("wi",), "wo", config="d_ff")),
    **_hf("t5.T5DenseGatedActDense", FeedForwardLayout(("wi_0", "wi_1"), "wo", config="d_ff")),
    # transformers: attention
    **_hf("llama.LlamaAttention mistral.MistralAttention qwen2.Qwen2Attention qwen3.Qwen3Attention "
          "smollm3.SmolLM3Attention starcoder2.Starcoder2Attention gemma.GemmaAttention "
          "gemma2.Gemma2Attention gemma3.Gemma3Attention",
          AttentionLayout(*_SEPARATE, attributes={"num_key_value_groups": "groups"},
                          config=_CONFIG_LLAMA)),
    **_hf("vit.ViTAttention deit.DeiTAttention dinov2.Dinov2Attention",
          AttentionLayout(*_SEPARATE, attributes={"num_attention_heads": "heads"},
                          config=_CONFIG_VIT)),
    **_hf("bert.BertAttention roberta.RobertaAttention electra.ElectraAttention",
          AttentionLayout(*_SELF, attributes={"self.num_attention_heads": "heads",
                                              "self.all_head_size": "width"})),
    **_hf("distilbert.DistilBertSelfAttention",
          AttentionLayout("q_lin", "k_lin", "v_lin", "out_lin", "attention_head_size",
                          attributes={"n_heads": "heads"})),
    **_hf("opt.OPTAttention",
          AttentionLayout("q_proj", "k_proj", "v_proj", "out_proj", "head_dim",
                          attributes={"num_heads": "heads"})),
    **_hf("gpt2.GPT2Attention", _gpt2),
    **_hf("gpt_bigcode.GPTBigCodeAttention", _gpt_bigcode),
    **_hf("gpt_neox.GPTNeoXAttention",
          AttentionLayout(*_FUSED, "dense", "head_size", pieces="groups")),
    **_hf("bloom.BloomAttention",
          AttentionLayout(*_FUSED, "dense", "head_dim", pieces="groups",
                          fixed="each head's ALiBi slope follows from its number")),
    **_hf("codegen.CodeGenAttention",
          AttentionLayout("qkv_proj", "qkv_proj", "qkv_proj", "out_proj", "head_dim", order="qvk",
                          pieces=4, fixed="its forward cuts the heads into four")),
    **_hf("phi3.Phi3Attention",
          AttentionLayout("qkv_proj", "qkv_proj", "qkv_proj", "o_proj", "head_dim",
                          fixed="its forward reads the number of heads from the configuration")),
    **_hf("t5.T5Attention",
          AttentionLayout("q", "k", "v", "o", "key_value_proj_dim",
                          fixed="its layers share one relative position bias for all heads")),
    # torchvision and torch
    "torchvision.models.vision_transformer.MLPBlock": FeedForwardLayout(("0",), "3"),
    "torch.nn.modules.transformer.TransformerEncoderLayer": _TORCH_MLP,
    "torch.nn.modules.transformer.TransformerDecoderLayer": _TORCH_MLP,
    "torch.nn.modules.activation.MultiheadAttention": _torch,
}
# fmt: on

# Modules whose class name looks like a feed-forward network's, but which compute position biases or
# mix tokens. A pair means that child of that class.
NEITHER = {
    "timm.layers.pos_embed_rel.RelPosMlp",
    ("timm.models.mlp_mixer.MixerBlock", "mlp_tokens"),
    ("timm.models.swin_transformer_v2_cr.WindowMultiHeadAttention", "meta_mlp"),
}

# A module whose class name matches and has no layout is refused by name, never skipped in silence.
LOOKS_LIKE: dict[type, re.Pattern[str]] = {
    FeedForwardLayout: re.compile(r"(?i)(mlp|ffn|feed_?forward)(?!.*head$)"),
    AttentionLayout: re.compile(r"(?i)att(entio)?n(?!.*pool)"),
}

# Residual blocks that can be skipped: their first argument and their output are the hidden state.
BLOCKS = {
    "timm.models.vision_transformer.Block",
    "torchvision.models.vision_transformer.EncoderBlock",
    "torch.nn.modules.transformer.TransformerEncoderLayer",
    *_hf(
        "llama.LlamaDecoderLayer mistral.MistralDecoderLayer qwen2.Qwen2DecoderLayer "
        "qwen3.Qwen3DecoderLayer smollm3.SmolLM3DecoderLayer gemma.GemmaDecoderLayer "
        "vit.ViTLayer deit.DeiTLayer dinov2.Dinov2Layer bert.BertLayer roberta.RobertaLayer "
        "gpt2.GPT2Block opt.OPTDecoderLayer starcoder2.Starcoder2DecoderLayer"
    ),
}
