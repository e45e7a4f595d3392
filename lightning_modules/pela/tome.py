"""Token merging (ToMe, arXiv 2210.09461), the baseline that spends its budget on tokens.

Written from the paper. In every block, between attention and MLP, r patch tokens go:

    1. the patch tokens are split, alternating, into sets A and B;
    2. each token of A finds the most similar token of B, by the cosine of their keys, averaged
       over heads;
    3. the r most similar pairs are merged: their mean, weighted by how many patches each stands
       for (its size s);
    4. attention counts a token as often as it has patches:  softmax(Q Kᵀ / √d + log s)  (Eq. 1).

Class and register tokens are never merged.
"""

from dataclasses import dataclass
from typing import Any

import torch
from timm.layers import Attention
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass
class Merging:
    """What the blocks of one model share: r, the tokens left alone, and the sizes so far."""

    r: int
    prefix: int
    size: Tensor | None = None


class MergingBlock(Block):
    """timm's ViT block that merges tokens after its attention; see `add_tome`."""

    merging: Merging
    first: bool
    last: bool

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        """(B, N, C) to (B, N − r, C)."""
        merging, bias = self.merging, None
        if self.first:
            merging.size = None
        if merging.size is not None:
            bias = merging.size.log()[:, None, None, :, 0].to(x.dtype)
        x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x), attn_mask=bias)))
        keys = self.get_submodule("attn.k_norm").__dict__.pop("keys")
        x, size = merge_tokens(x, keys, merging.r, merging.prefix, merging.size)
        merging.size = None if self.last else size
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


def add_tome(model: nn.Module, r: int) -> nn.Module:
    """Merge r tokens in every block of a timm ViT, in place; no weight changes.

    Args:
        model: a timm VisionTransformer with plain blocks, trained or not, dense or low-rank.
        r: tokens to merge in each block, at least 0; half of a block's patch tokens at most are
            merged, as the matching allows.

    Returns:
        The same model.

    Raises:
        ValueError: for another kind of model, or r below 0.
    """
    if r < 0:
        raise ValueError(f"r is {r}: expected the number of tokens to merge in a block, at least 0")
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    plain = all(type(block) is Block and type(block.attn) is Attention for block in blocks)
    if not blocks or not plain:
        raise ValueError(
            f"{type(model).__name__} has no plain blocks of timm's ViT: token merging needs them"
        )
    merging = Merging(r, model.num_prefix_tokens)  # type: ignore[arg-type]
    for i, block in enumerate(blocks):
        block.__class__ = MergingBlock
        assert isinstance(block, MergingBlock)
        block.merging, block.first, block.last = merging, i == 0, i == len(blocks) - 1
        block.get_submodule("attn.k_norm").register_forward_hook(_keep_keys)
    return model


def merge_tokens(
    x: Tensor, keys: Tensor, r: int, prefix: int = 0, size: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Merge the r most similar pairs of tokens.

    Args:
        x: tokens (B, N, C).
        keys: what similarity is measured on, (B, N, D).
        r: pairs; half of the N − prefix tokens at most.
        prefix: the first tokens, which are left alone.
        size: patches that each token stands for, (B, N, 1); ones when None.

    Returns:
        Tokens (B, N − r, C), the merged ones at the places of set B behind what is left of set A,
        and their sizes (B, N − r, 1).
    """
    size = x.new_ones(*x.shape[:2], 1, dtype=torch.float32) if size is None else size
    r = min(r, (x.shape[1] - prefix) // 2)
    if r == 0:
        return x, size
    with torch.no_grad():
        keys = F.normalize(keys[:, prefix:].float(), dim=-1)
        similarity, partner = (keys[:, ::2] @ keys[:, 1::2].transpose(1, 2)).max(-1)
        order = similarity.argsort(dim=1, descending=True)
        leaving, staying = order[:, :r], order[:, r:].sort(dim=1).values
        partner = partner.gather(1, leaving)
    weighted = torch.cat([x * size, size], dim=-1)  # sums of both; their quotient is the mean
    head, a, b = weighted[:, :prefix], weighted[:, prefix::2], weighted[:, prefix + 1 :: 2]
    b = b.scatter_add(1, _wide(partner, b), a.gather(1, _wide(leaving, a)))
    merged = torch.cat([head, a.gather(1, _wide(staying, a)), b], dim=1)
    size = merged[..., -1:]
    return (merged[..., :-1] / size).to(x.dtype), size


def _wide(index: Tensor, like: Tensor) -> Tensor:
    return index[..., None].expand(-1, -1, like.shape[-1])


def _keep_keys(module: nn.Module, inputs: Any, output: Tensor) -> None:
    """Leaves the keys (B, heads, N, D), averaged over heads, with the layer they come from."""
    module.__dict__["keys"] = output.detach().mean(1)
