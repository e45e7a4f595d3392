"""Token merging against the paper's procedure, written out token by token."""

import copy

import pytest
import timm
import torch

from lightning_modules.counting import count_macs, count_parameters
from lightning_modules.pela.tome import add_tome, matching_tokens, merge_tokens

TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 3, "num_heads": 3}


def vit(**settings):
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", num_classes=5, **{**TINY, **settings})
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.double().eval()


def merged_by_hand(x, keys, r, prefix, size):
    """One sample, token by token: (N, C), (N, D), (N,) → the multiset of (token, size)."""
    n = len(x)
    a, b = range(prefix, n, 2), range(prefix + 1, n, 2)
    cosine = torch.nn.functional.cosine_similarity
    pairs = []
    for i in a:
        score, j = max((cosine(keys[i], keys[j], dim=0).item(), j) for j in b)
        pairs.append((score, i, j))
    gone = {i: j for _, i, j in sorted(pairs, reverse=True)[: min(r, (n - prefix) // 2)]}
    left = {}
    for i in range(n):
        if i not in gone:
            members = [i, *(source for source, target in gone.items() if target == i)]
            total = sum(size[m] for m in members)
            left[i] = (sum(size[m] * x[m] for m in members) / total, total)
    return left


@pytest.mark.parametrize("tokens", [10, 11])
@pytest.mark.parametrize(("r", "prefix"), [(1, 0), (3, 1), (3, 2), (100, 1)])
def test_merging_is_the_papers(r, prefix, tokens):
    generator = torch.Generator().manual_seed(r + prefix)
    x, keys = (
        torch.randn(2, tokens, 4, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    size = torch.randint(1, 5, (2, tokens, 1), generator=generator).double()
    found, sizes = merge_tokens(x, keys, r, prefix, size)
    torch.testing.assert_close(found[:, :prefix], x[:, :prefix])
    for sample in range(2):
        left = merged_by_hand(x[sample], keys[sample], r, prefix, size[sample, :, 0])
        # A's remaining tokens, then B's
        order = sorted(left, key=lambda i: (i >= prefix, i >= prefix and (i - prefix) % 2, i))
        torch.testing.assert_close(found[sample], torch.stack([left[i][0] for i in order]))
        torch.testing.assert_close(sizes[sample, :, 0], torch.stack([left[i][1] for i in order]))
    torch.testing.assert_close(sizes.sum(1), size.sum(1))  # no patch is lost
    # so the mean over patches stays
    torch.testing.assert_close((found * sizes).sum(1), (x * size).sum(1))


def test_merging_nothing_changes_nothing():
    model, images = vit(), torch.randn(2, 3, 32, 32, dtype=torch.float64)
    expected = model(images)
    torch.testing.assert_close(add_tome(model, 0)(images), expected)


@torch.no_grad()
def test_twin_patches_merge_without_loss():
    """Equal tokens are merged into one that attention counts twice: the same output.

    Positions are switched off and every patch is there twice, as neighbours in A and B.
    """
    model = vit()
    model.pos_embed.zero_()
    images = torch.randn(1, 3, 32, 16, dtype=torch.float64)
    columns = images.unflatten(-1, (2, 8)).repeat_interleave(2, dim=-2).flatten(-2)
    expected = model(columns)
    shared = add_tome(model, 8).blocks[0].merging

    def merge_no_more(block, inputs):
        assert inputs[0].shape[1] == 1 + 8
        shared.r = 0

    model.blocks[1].register_forward_pre_hook(merge_no_more)
    torch.testing.assert_close(model(columns), expected)

    def forget_sizes(block, inputs, output):
        shared.size.fill_(1)

    model.blocks[0].register_forward_hook(forget_sizes)
    shared.r = 8
    assert not torch.allclose(model(columns), expected)  # it is the sizes that make them equal


def test_tokens_weights_and_multiply_adds():
    model = vit().float()
    dense = count_macs(model, (1, 3, 32, 32))
    weights = count_parameters(model)
    names = model.state_dict().keys()
    add_tome(model, 4)
    lengths = []
    for block in model.blocks:
        block.mlp.register_forward_pre_hook(lambda _, inputs: lengths.append(inputs[0].shape[1]))
    for _ in range(2):  # sizes start anew with each image
        lengths.clear()
        model(torch.randn(2, 3, 32, 32))
        assert lengths == [13, 9, 5]
    assert count_parameters(model) == weights and model.state_dict().keys() == names
    d = 24
    expected = 16 * 3 * 64 * d + 5 * d  # patches and head
    cosines = 0
    for before in (17, 13, 9):
        after = before - 4
        expected += 4 * before * d * d + 2 * before**2 * d + 8 * after * d * d
        cosines += ((before - 1) // 2) ** 2 * (d // 3)
    assert count_macs(model, (1, 3, 32, 32)) == expected + cosines < dense


def test_gradients_reach_every_weight():
    model = add_tome(vit(), 3).train()
    model(torch.randn(2, 3, 32, 32, dtype=torch.float64)).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())


def test_models_that_cannot_merge():
    swin = timm.create_model(
        "swin_tiny_patch4_window7_224", img_size=32, window_size=2, embed_dim=8, depths=(1, 1, 1, 1)
    )
    with pytest.raises(ValueError, match=r"VisionTransformer pools its tokens \(global_pool avg\)"):
        add_tome(vit(global_pool="avg"), 2)
    with pytest.raises(ValueError, match="SwinTransformer has no plain blocks of timm's ViT"):
        add_tome(swin, 4)
    with pytest.raises(ValueError, match="r is -1: expected the number of tokens"):
        add_tome(vit(), -1)


def test_as_many_tokens_are_merged_as_multiply_adds_ask_for():
    dense, image = vit(img_size=8, patch_size=2).float(), (1, 3, 8, 8)
    macs = {r: count_macs(add_tome(copy.deepcopy(dense), r), image) for r in range(4)}
    assert matching_tokens(dense, macs[2], 8) == 2
    assert matching_tokens(dense, macs[2] - 1, 8) == 3
    assert matching_tokens(dense, macs[0], 8) == 0
    most = matching_tokens(dense, 0, 8)  # out of reach: as many as merge at all
    assert count_macs(add_tome(copy.deepcopy(dense), most), image) < macs[3]
