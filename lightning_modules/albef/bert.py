"""A BERT whose upper layers have cross-attention, to an image or a question.

ALBEF (arXiv 2107.07651), Section 3.1: the lower layers encode the text, the upper ones fuse it with
the image by cross-attention. The layers are transformers' `BertLayer`; parameter names are those of
ALBEF's checkpoints.

transformers treats a layer with cross-attention as a decoder's and makes its self-attention causal.
This is undone here, and explicit masks are passed instead.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import BertConfig
from transformers.models.bert.modeling_bert import (
    BertEmbeddings,
    BertLayer,
    BertLMPredictionHead,
)


class Bert(nn.Module):
    """A BERT of text layers, followed by fusion layers with cross-attention.

    Args:
        config: widths, heads, dropout and vocabulary; its number of layers is not used.
        text_layers: number of layers without cross-attention.
        fusion_layers: number of layers with cross-attention above them.
        context_width: features of the states that cross-attention attends to.
        causal: each token attends to itself and earlier ones only (the answer decoder).
    """

    def __init__(
        self,
        config: BertConfig,
        text_layers: int,
        fusion_layers: int,
        context_width: int,
        causal: bool = False,
    ):
        super().__init__()
        values = config.to_dict() | {"is_decoder": False, "add_cross_attention": False}
        text_config = BertConfig.from_dict(values, attn_implementation="sdpa")
        values |= {"is_decoder": True, "add_cross_attention": True}
        fusion_config = BertConfig.from_dict(values, attn_implementation="sdpa")
        self.config, self.text_layers, self.causal = text_config, text_layers, causal
        self.embeddings = BertEmbeddings(text_config)
        layers = [BertLayer(text_config) for _ in range(text_layers)]
        for _ in range(fusion_layers):
            layer = BertLayer(fusion_config)
            layer.attention.self.is_causal = False
            attention = layer.crossattention.self
            attention.key = nn.Linear(context_width, config.hidden_size)
            attention.value = nn.Linear(context_width, config.hidden_size)
            layers.append(layer)
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(layers)})
        self.apply(self._initialise)

    @property
    def layers(self) -> Sequence[BertLayer]:
        """All layers: first the text layers, then the fusion layers."""
        return self.encoder["layer"]  # type: ignore[return-value]

    def text(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Run the text layers.

        Args:
            ids: tokens (B, L).
            mask: 1 for tokens, 0 for padding (B, L).

        Returns:
            States (B, L, D).
        """
        states = self.embeddings(ids)
        visible = self._visible(mask, states.dtype)
        for layer in self.layers[: self.text_layers]:
            states = layer(states, visible)
        return states

    def fuse(
        self, states: Tensor, mask: Tensor, context: Tensor, context_mask: Tensor | None = None
    ) -> Tensor:
        """Run the fusion layers, which attend to an image or another context.

        Args:
            states: of the text layers (B, L, D).
            mask: of the text's tokens (B, L).
            context: states to attend to, (B, N, context_width).
            context_mask: 1 for context, 0 for padding (B, N); None without padding.

        Returns:
            States (B, L, D).
        """
        visible, context_visible = self._visible(mask, states.dtype), None
        if context_mask is not None:
            context_visible = _additive(context_mask[:, None, None, :].bool(), states.dtype)
        for layer in self.layers[self.text_layers :]:
            states = layer(states, visible, context, context_visible)
        return states

    def forward(
        self, ids: Tensor, mask: Tensor, context: Tensor, context_mask: Tensor | None = None
    ) -> Tensor:
        """States (B, L, D) of all layers for tokens (B, L); see `text` and `fuse`."""
        return self.fuse(self.text(ids, mask), mask, context, context_mask)

    def _visible(self, mask: Tensor, dtype: torch.dtype) -> Tensor:
        """The additive mask of self-attention, (B, 1, 1 or L, L)."""
        visible = mask[:, None, None, :].bool()
        if self.causal:
            length = mask.shape[1]
            past = torch.ones(length, length, dtype=torch.bool, device=mask.device).tril()
            visible = visible & past
        return _additive(visible, dtype)

    def _initialise(self, module: nn.Module) -> None:
        """BERT's initialisation: weights normal, biases and the padding's embedding zero."""
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            with torch.no_grad():
                module.weight[module.padding_idx].zero_()


class TokenHead(BertLMPredictionHead):
    """Logits of the vocabulary, with the input embeddings as output weights.

    ALBEF's checkpoints hold the output bias twice, under two names, and transformers uses only one.
    Here the logits get the mean of both, so that neither is left without a gradient. In the
    checkpoints both are equal, and so is their mean.
    """

    def __init__(self, bert: Bert):
        super().__init__(bert.config)
        self.decoder.weight = bert.embeddings.word_embeddings.weight
        nn.init.zeros_(self.decoder.bias)
        nn.init.normal_(self.transform.dense.weight, std=bert.config.initializer_range)
        nn.init.zeros_(self.transform.dense.bias)

    def forward(self, states: Tensor) -> Tensor:
        """Logits (…, vocabulary) of states (…, D)."""
        bias = (self.decoder.bias + self.bias) / 2
        return F.linear(self.transform(states), self.decoder.weight, bias)


class TokenBert(nn.Module):
    """A `Bert` with a token head, for masked tokens (pre-training) or next tokens (answers).

    Args:
        bert: see `Bert`.
    """

    def __init__(self, bert: Bert):
        super().__init__()
        self.bert = bert
        self.cls = nn.ModuleDict({"predictions": TokenHead(bert)})

    def predict(self, states: Tensor) -> Tensor:
        """Logits of the vocabulary for states (…, D)."""
        return self.cls["predictions"](states)


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """An additive mask: 0 where `visible` is true, the lowest number of the type elsewhere."""
    zeros = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return zeros.masked_fill(~visible, torch.finfo(dtype).min)
