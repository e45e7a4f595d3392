"""A step changes only the slices that took part in it."""

import pytest
import timm
import torch
from timm.layers import GluMlp
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_modules.matformer.idle_tail import freeze_idle_tail
from lightning_modules.matformer.nest import nest, nesting_of, set_granularity


def build(frozen, mlp_layer=None, part="ffn"):
    torch.manual_seed(0)
    arguments = {"mlp_layer": mlp_layer} if mlp_layer else {}
    model = timm.create_model(
        "vit_tiny_patch16_224",
        img_size=8, patch_size=4, embed_dim=16, depth=2, num_heads=4, num_classes=3, **arguments,
    )  # fmt: skip
    nest(model, (1 / 4, 1 / 2, 3 / 4, 1), part)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    if frozen:
        freeze_idle_tail(optimizer, model)
    return model, optimizer


def step(model, optimizer, granularity):
    set_granularity(model, granularity)
    optimizer.zero_grad()
    model(torch.randn(4, 3, 8, 8)).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("frozen", [True, False])
def test_adamw_moves_the_idle_tail_unless_it_is_frozen(frozen):
    model, optimizer = build(frozen)
    step(model, optimizer, "XL")
    mlp = model.blocks[1].mlp
    before = {k: v.clone() for k, v in mlp.state_dict().items()}
    moments = optimizer.state[mlp.fc1.weight]["exp_avg"].clone()
    step(model, optimizer, "M")
    half = 32
    after = mlp.state_dict()
    idle = [
        torch.equal(before["fc1.weight"][half:], after["fc1.weight"][half:]),
        torch.equal(before["fc1.bias"][half:], after["fc1.bias"][half:]),
        torch.equal(before["fc2.weight"][:, half:], after["fc2.weight"][:, half:]),
        torch.equal(moments[half:], optimizer.state[mlp.fc1.weight]["exp_avg"][half:]),
    ]
    assert idle == [frozen] * 4
    for name in ("fc1.weight", "fc1.bias"):
        assert (before[name][:half] != after[name][:half]).any()
    assert (before["fc2.weight"][:, :half] != after["fc2.weight"][:, :half]).any()
    assert (before["fc2.bias"] != after["fc2.bias"]).all()


def test_each_part_of_a_fused_projection_has_its_own_tail():
    model, optimizer = build(True, part="heads")
    step(model, optimizer, "XL")
    qkv = model.blocks[0].attn.qkv
    before = qkv.weight.detach().clone()
    step(model, optimizer, "M")
    moved = (before != qkv.weight).any(1).unflatten(0, (3, 16))
    assert moved[:, :8].all() and not moved[:, 8:].any()


def test_steps_at_the_largest_granularity_are_plain_adamw():
    torch.manual_seed(3)
    frozen, frozen_optimizer = build(True)
    torch.manual_seed(3)
    plain, plain_optimizer = build(False)
    for seed in range(3):
        torch.manual_seed(seed)
        step(frozen, frozen_optimizer, "XL")
        torch.manual_seed(seed)
        step(plain, plain_optimizer, "XL")
    for a, b in zip(frozen.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.5),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.5, fused=True),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.5, foreach=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-4, momentum=0.9, weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-4),
}


def put_back(model, optimizer):
    """The policy in its plain form: after the step, all idle slices are what they were.

    Running averages that a step makes are zero where it did not act; SGD's are not by themselves,
    which holds weight decay.
    """
    saved, new = [], []

    def keep(*_):
        for layer in nesting_of(model).layers:
            for child in layer.slices().values():
                for name, parameter in child.named_parameters(recurse=False):
                    axis = child.axis(name)
                    if axis is None:
                        continue
                    idle = torch.ones(parameter.shape[axis], dtype=torch.bool)
                    for start, stop in child.runs:
                        idle[start:stop] = False
                    index = idle.nonzero().flatten()
                    states = optimizer.state.get(parameter, {}).values()
                    if not states:
                        new.append((parameter, axis, index))
                    for tensor in (parameter.data, *states):
                        if torch.is_tensor(tensor) and tensor.shape == parameter.shape:
                            saved.append((tensor, axis, index, tensor.index_select(axis, index)))

    def restore(*_):
        for tensor, axis, index, values in saved:
            tensor.index_copy_(axis, index, values)
        for parameter, axis, index in new:
            for tensor in optimizer.state[parameter].values():
                if torch.is_tensor(tensor) and tensor.shape == parameter.shape:
                    tensor.index_fill_(axis, index, 0)
        saved.clear()
        new.clear()

    optimizer.register_step_pre_hook(keep)
    optimizer.register_step_post_hook(restore)


@pytest.mark.parametrize("with_closure", [False, True])
@pytest.mark.parametrize("part", ["ffn", "heads"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_equals_putting_the_idle_slices_back(kind, part, with_closure):
    results = []
    for policy in (put_back, lambda model, optimizer: freeze_idle_tail(optimizer, model)):
        model, _ = build(False, mlp_layer=GluMlp, part=part)
        model = model.double()
        for (
            block
        ) in model.blocks:  # a key's bias has no gradient but rounding, which Adam magnifies
            block.attn.qkv.bias.requires_grad_(False)
        optimizer = OPTIMIZERS[kind](model.parameters())
        groups = [(id(group), list(group)) for group in optimizer.param_groups]
        policy(model, optimizer)
        for number, granularity in enumerate((1, 3, 0, [2, 0], 3, 1)):
            torch.manual_seed(number)
            images = torch.randn(4, 3, 8, 8, dtype=torch.float64)
            set_granularity(model, granularity)

            def closure(model=model, images=images, optimizer=optimizer):
                optimizer.zero_grad()
                loss = model(images).square().sum()
                loss.backward()
                return loss

            # Lightning's way, in which there are no gradients yet when the step begins
            loss = optimizer.step(closure) if with_closure else closure()
            if not with_closure:
                optimizer.step()
            assert loss.item() > 0
        assert [(id(group), list(group)) for group in optimizer.param_groups] == groups
        states = [optimizer.state[p] for p in model.parameters()]
        results.append((list(model.parameters()), states))
        assert set(optimizer.state) <= set(model.parameters())
        optimizer.load_state_dict(optimizer.state_dict())
    (expected, expected_states), (given, states) = results
    for a, b in zip(expected, given, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    for a, b in zip(expected_states, states, strict=True):
        assert a.keys() == b.keys()
        for key, value in a.items():
            torch.testing.assert_close(value, b[key], rtol=1e-10, atol=1e-12)


def test_a_step_copies_nothing():
    """After the first step, no tensor as large as a tenth of the nested weights is made."""
    model, _ = build(False)
    optimizer = OPTIMIZERS["fused"](model.parameters())
    freeze_idle_tail(optimizer, model)
    step(model, optimizer, "XL")
    set_granularity(model, "S")
    optimizer.zero_grad()
    model(torch.randn(4, 3, 8, 8)).square().sum().backward()
    largest = 0

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **kwargs or {})
            made = out if isinstance(out, torch.Tensor) else None
            if made is not None and made.untyped_storage().data_ptr() not in known:
                largest = max(largest, made.numel())
            return out

    tensors = [t for p in model.parameters() for t in (p, p.grad, *optimizer.state[p].values())]
    known = {t.untyped_storage().data_ptr() for t in tensors}
    with Largest():
        optimizer.step()
    # single-tensor AdamW makes one denominator of the size of the slice in use
    assert 0 < largest <= model.blocks[0].mlp.fc2.weight.numel() // 4
