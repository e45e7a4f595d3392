"""Token merging (ToMe, arXiv 2210.09461), the baseline that saves tokens instead of parameters.

Written from the paper. Every block removes r patch tokens between attention and MLP:

    1. the patch tokens are split alternately into sets A and B;
    2. for each token of A the most similar token of B is found, by the cosine of their keys,
       averaged over heads;
    3. the r most similar pairs are merged into their mean, weighted by the number of patches that
       each token stands for (its size s);
    4. attention weights a token by its size:  softmax(Q Kᵀ / √d + log s)  (Eq. 1).

Class and register tokens are never merged.
"""

import bisect
import copy
from dataclasses import dataclass
from typing import Any

import torch
from timm.layers import Attention
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_modules.counting import count_macs


@dataclass
class Merging:
    """State that the blocks of a model share.

    Attributes:
        r: tokens to merge in each block.
        prefix: number of class and register tokens.
        size: patches that each token stands for, (B, N, 1); None before the first block.
    """

    r: int
    prefix: int
    size: Tensor | None = None


class MergingBlock(Block):
    """timm's ViT block that merges tokens after its attention; see `add_tome`."""

    merging: Merging
    first: bool
    last: bool

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        """Tokens (B, N − r, C) from tokens (B, N, C)."""
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


def refuse_merging(model: nn.Module, why: str) -> None:
    """Refuse a model with merging blocks, for a file that cannot keep them.

    Args:
        model: any.
        why: the file cannot, which continues "merges tokens, ".

    Raises:
        ValueError: naming the first of the blocks.
    """
    for name, module in model.named_modules():
        if isinstance(module, MergingBlock):
            raise ValueError(
                f"{name} merges tokens, {why}: export the classifier with --to pt2 (or "
                "to_program), which keeps it"
            )


def add_tome(model: nn.Module, r: int) -> nn.Module:
    """Make every block of a timm ViT merge r tokens, in place; weights do not change.

    Args:
        model: a timm VisionTransformer with plain blocks, dense or low-rank.
        r: tokens to merge in each block, at least 0; a block merges at most half of its patch
            tokens.

    Returns:
        The same model.

    Raises:
        ValueError: for a model with other blocks, one that pools its tokens, in which a merged one
            would count once, or r below 0.
    """
    if r < 0:
        raise ValueError(f"r is {r}: expected the number of tokens to merge in a block, at least 0")
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    plain = all(type(block) is Block and type(block.attn) is Attention for block in blocks)
    if not blocks or not plain:
        raise ValueError(
            f"{type(model).__name__} has no plain blocks of timm's ViT: token merging needs them"
        )
    if (pool := getattr(model, "global_pool", "")) not in ("", "token"):
        raise ValueError(
            f"{type(model).__name__} pools its tokens (global_pool {pool}), in which a merged one "
            "would count once: token merging needs a class token, model_args {'global_pool': "
            "'token'}"
        )
    merging = Merging(r, model.num_prefix_tokens)  # type: ignore[arg-type]
    for i, block in enumerate(blocks):
        block.__class__ = MergingBlock
        assert isinstance(block, MergingBlock)
        block.merging, block.first, block.last = merging, i == 0, i == len(blocks) - 1
        block.get_submodule("attn.k_norm").register_forward_hook(_keep_keys)
    return model


def matching_tokens(dense: nn.Module, target: float, side: int) -> int:
    """The smallest r with at most `target` multiply-adds for an image of (3, side, side).

    If no r gets that low, the largest one that still merges more tokens than r − 1.

    Args:
        dense: a timm ViT that merges no tokens; it is not changed.
        target: multiply-adds.
        side: of the image, in pixels.
    """

    def minus_macs(r: int) -> int:
        """Multiply-adds with r, negated: `bisect` needs values that grow with r."""
        return -count_macs(add_tome(copy.deepcopy(dense), r), (1, 3, side, side))

    patches: Any = dense.patch_embed
    most = patches.num_patches // 2
    # from some r on every block merges half of its tokens, and more saves nothing
    enough = min(-target, minus_macs(most))
    return bisect.bisect_left(range(most), enough, key=minus_macs)


def merge_tokens(
    x: Tensor, keys: Tensor, r: int, prefix: int = 0, size: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Merge the r most similar pairs of tokens.

    Args:
        x: tokens (B, N, C).
        keys: the attention's keys (B, N, D), whose similarity decides.
        r: number of pairs; at most half of the N − prefix tokens are merged.
        prefix: number of first tokens that are not merged.
        size: patches that each token stands for, (B, N, 1); ones when None.

    Returns:
        Tokens (B, N − r, C) and their sizes (B, N − r, 1). The order is prefix, what is left of
        set A, then set B with the merged tokens.
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
    # merging adds up both size-weighted tokens and sizes; their quotient is the weighted mean
    weighted = torch.cat([x * size, size], dim=-1)
    head, a, b = weighted[:, :prefix], weighted[:, prefix::2], weighted[:, prefix + 1 :: 2]
    b = b.scatter_add(1, _wide(partner, b), a.gather(1, _wide(leaving, a)))
    merged = torch.cat([head, a.gather(1, _wide(staying, a)), b], dim=1)
    size = merged[..., -1:]
    return (merged[..., :-1] / size).to(x.dtype), size


def _wide(index: Tensor, like: Tensor) -> Tensor:
    return index[..., None].expand(-1, -1, like.shape[-1])


def _keep_keys(module: nn.Module, inputs: Any, output: Tensor) -> None:
    """Store the keys (B, heads, N, D), averaged over heads, on the layer for `MergingBlock`."""
    module.__dict__["keys"] = output.detach().mean(1)
