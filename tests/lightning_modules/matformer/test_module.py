"""MatViT against the paper's formulas, written out on extracted models."""

import functools
import logging

import lightning as L
import pytest
import torch
from torch.nn import functional as F

from callbacks.granularity import GranularitySampling
from lightning_modules.matformer import MatViT, consistency, extract, granularity, set_granularity
from lightning_modules.matformer.consistency import (
    classification_loss,
    nearest_neighbour_accuracy,
)
from lightning_modules.pela import factorize

CLASSES = 5
TINY = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 8}


def build(**settings):
    """A module with weights large enough that submodels disagree; what it logs is in `logged`."""
    module = MatViT(CLASSES, "vit_tiny_patch16_224", TINY, **settings)
    torch.manual_seed(0)
    module.configure_model()
    for layer in module.model.modules():
        if isinstance(layer, torch.nn.Linear) and settings.get("head_bias") is None:
            torch.nn.init.normal_(layer.weight, std=0.4)
            torch.nn.init.normal_(layer.bias, std=0.4)
    module.logged = {}
    module.log = lambda name, value, **_: module.logged.__setitem__(name, value)
    return module.eval()


def batch(size=8, seed=1):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(size, 3, 8, 8, generator=generator)
    return images, torch.randint(CLASSES, (size,), generator=generator)


def data(size=8):
    return torch.utils.data.DataLoader(list(zip(*batch(size), strict=True)), batch_size=4)


def trainer(**settings):
    return L.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, **settings,
    )  # fmt: skip


def test_weights_of_low_rank_are_refused(tmp_path):
    """Nearly all layers would stay at random."""
    torch.save(factorize(build(fractions=None).model, 2.0).state_dict(), tmp_path / "low.pt")
    with pytest.raises(ValueError, match=r"low.pt is of low rank \(blocks.0.attn.proj.u.weight, …"):
        build(init_from=str(tmp_path / "low.pt"))


def test_a_step_optimises_the_granularity_that_is_set():
    module, (images, labels) = build(), batch()
    losses = []
    for name in ("S", "M", "L", "XL"):
        set_granularity(module.model, name)
        losses.append(module.training_step((images, labels), 0))
        expected = F.cross_entropy(extract(module.model, name)(images), labels)
        torch.testing.assert_close(losses[-1], expected)
        assert module.logged["train/loss"] is losses[-1]
    assert len({round(loss.item(), 4) for loss in losses}) == 4


@pytest.mark.parametrize("size", [8, 6])  # 6 images: two granularities get two, two get one
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("joint", ["mean", "sum"])
def test_joint_training_takes_the_loss_of_every_granularity(joint, split, size):
    module, (images, labels) = build(joint=joint, split_batch=split), batch(size)
    pieces = [range(0, 2), range(2, 4), range(4, 6), range(6, 8)]
    if size == 6:
        pieces = [range(0, 2), range(2, 4), range(4, 5), range(5, 6)]
    total = 0.0
    for index, piece in enumerate(pieces):
        part = list(piece) if split else list(range(size))
        logits = extract(module.model, index)(images[part])
        total += F.cross_entropy(logits, labels[part])
    expected = total / 4 if joint == "mean" else total
    torch.testing.assert_close(module.training_step((images, labels), 0), expected)


def test_a_batch_too_small_to_split():
    with pytest.raises(ValueError, match=r"batch of 3 .* 4 granularities.* data.batch_size"):
        build(joint="mean", split_batch=True).training_step(batch(3), 0)


@torch.no_grad()
def test_evaluation_equals_evaluating_the_extracted_models():
    module = build(eval_granularities=[[0, 1]])
    batches = [batch(40, seed=1), batch(3, seed=2)]
    batches[1][1][1:] = -100  # as padding a distributed batch leaves it
    for index, one in enumerate(batches):
        module.validation_step(one, index)
    module.on_validation_epoch_end()

    images = torch.cat([batches[0][0], batches[1][0][:1]])
    labels = torch.cat([batches[0][1], batches[1][1][:1]])
    reference = extract(module.model, "XL")(images)
    p = reference.softmax(-1)
    expected = {}
    for label, chosen in {"S": 0, "M": 1, "L": 2, "XL": 3, "S*1+M*1": [0, 1]}.items():
        logits = extract(module.model, chosen)(images)
        log_q = logits.log_softmax(-1)
        expected |= {
            f"val/accuracy_{label}": (logits.argmax(-1) == labels).float().mean(),
            f"val/loss_{label}": -log_q[torch.arange(len(labels)), labels].mean(),
            f"val/agreement_{label}": (logits.argmax(-1) == reference.argmax(-1)).float().mean(),
            f"val/kl_{label}": (p * (p.log() - log_q)).sum(-1).mean(),
        }
    expected["val/accuracy"] = expected["val/accuracy_XL"]
    assert module.logged.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(module.logged[name], value, msg=name, atol=1e-6, rtol=1e-5)
    assert expected["val/agreement_S"] < 1 and expected["val/kl_S"] > 0.01  # they do differ
    torch.testing.assert_close(module(images), reference)  # and XL is left set

    module.test_step(batches[0], 0)  # nothing of the validation lingers
    module.on_test_epoch_end()
    alone = (reference[:40].argmax(-1) == labels[:40]).float().mean()
    torch.testing.assert_close(module.logged["test/accuracy_XL"], alone)


@torch.no_grad()
def test_a_plain_model_is_its_own_reference():
    module, (images, labels) = build(fractions=None), batch()
    module.validation_step((images, labels), 0)
    module.on_validation_epoch_end()
    logits = module.model(images)
    torch.testing.assert_close(
        module.logged,
        {
            "val/accuracy": (logits.argmax(-1) == labels).float().mean(),
            "val/loss": F.cross_entropy(logits, labels),
            "val/agreement": torch.tensor(1.0),
            "val/kl": torch.tensor(0.0),
        },
    )


@pytest.mark.parametrize("soft", [False, True])
def test_sigmoid_cross_entropy(soft):
    module, (images, labels) = build(loss="sigmoid"), batch()
    targets = torch.eye(CLASSES)[labels]
    if soft:
        labels = targets = 0.3 * targets + 0.7 * targets.flip(0)
    p = module(images).sigmoid()
    expected = -(targets * p.log() + (1 - targets) * (1 - p).log()).sum(-1).mean()
    torch.testing.assert_close(module.training_step((images, labels), 0), expected)


def test_an_unknown_loss():
    with pytest.raises(ValueError, match="unknown loss 'hinge': expected 'softmax' or 'sigmoid'"):
        classification_loss(*batch(), "hinge")


@pytest.mark.parametrize("soft", [False, True])
def test_the_softmax_loss_of_bfloat16_is_computed_in_float32(soft):
    logits, labels = torch.randn(8, CLASSES).bfloat16(), batch()[1]
    targets = torch.eye(CLASSES)[labels] if soft else labels
    expected = F.cross_entropy(logits.float(), targets)
    given = targets.bfloat16() if soft else targets
    torch.testing.assert_close(classification_loss(logits, given, "softmax"), expected)


def test_softmax_training_ignores_padding():
    module, (images, labels) = build(), batch()
    expected = F.cross_entropy(module(images[:5]), labels[:5])
    labels[5:] = -100
    torch.testing.assert_close(module.training_step((images, labels), 0), expected)


def test_head_bias_starts_every_class_at_the_prior():
    module, (images, labels) = build(loss="sigmoid", head_bias=-6.9), batch()
    torch.testing.assert_close(module(images), torch.full((8, CLASSES), -6.9))
    p = torch.tensor(-6.9).sigmoid()
    expected = -p.log() - (CLASSES - 1) * (1 - p).log()
    torch.testing.assert_close(module.training_step((images, labels), 0), expected)


@pytest.mark.parametrize("policy", ["frozen", "moving"])
def test_idle_tail_is_what_the_setting_says(policy):
    module = build(idle_tail=policy, weight_decay=0.5, lr=0.1)
    always_m = GranularitySampling([0.0, 1.0, 0.0, 0.0])
    before = module.model.blocks[1].mlp.fc1.weight.detach().clone()
    trainer(max_steps=1, callbacks=[always_m]).fit(module, data())
    changed = (before != module.model.blocks[1].mlp.fc1.weight).any(1)
    assert changed[:16].all()
    assert changed[16:].any() == changed[16:].all() == (policy == "moving")


def test_joint_training_has_no_idle_tail():
    module = build(joint="mean", lr=0.1)
    before = module.model.blocks[1].mlp.fc1.weight.detach().clone()
    trainer(max_steps=1).fit(module, data())
    assert (before != module.model.blocks[1].mlp.fc1.weight).any(1).all()


def test_the_nearest_document_is_that_of_the_smallest_angle(monkeypatch):
    monkeypatch.setattr(consistency, "SCORED", 3)  # one query at a time
    documents = torch.tensor([[10.0, 10.0], [0.0, 1.0], [1.0, 0.0]])
    queries = torch.tensor([[0.1, 2.0], [3.0, 2.9], [1.0, 0.1], [1.0, 0.1]])
    labels = torch.tensor([1, 0, 2, 0])  # the last one is wrong
    assert nearest_neighbour_accuracy(queries, labels, documents, torch.arange(3)) == 0.75


def test_the_schedule_spans_the_run():
    module = build(lr=1.0, warmup_steps=2, optimizer="sgd")
    rates = []

    class Rates(L.Callback):
        def on_train_batch_start(self, trainer, *_):
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    trainer(max_epochs=3, callbacks=[Rates()]).fit(module, data())
    assert rates == pytest.approx([0, 0.5, 1, 0.853553, 0.5, 0.146447], abs=1e-6)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    module = build(init_from=None)
    runner = trainer(max_steps=1)
    runner.fit(module, data())
    path = tmp_path_factory.mktemp("run") / "last.ckpt"
    runner.save_checkpoint(path)
    return path, module


def test_a_checkpoint_holds_plain_types_and_loads_by_itself(checkpoint):
    path, module = checkpoint
    content = torch.load(path, weights_only=True)
    assert content["hyper_parameters"]["model_args"] == TINY
    loaded = MatViT.load_from_checkpoint(path, weights_only=True)
    images, _ = batch()
    for name in ("S", "XL"):
        set_granularity(module.model, name)
        set_granularity(loaded.model, name)
        assert torch.equal(loaded.eval()(images), module.eval()(images))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("architecture", "vit_small_patch16_224"),
        ("model_args", {**TINY, "depth": 3}),
        ("num_classes", 7),
        ("fractions", [0.5, 1.0]),
        ("part", "heads"),
    ],
)
def test_resuming_from_another_models_checkpoint_is_refused(checkpoint, name, value):
    path, module = checkpoint
    other = MatViT(**{**module.hparams, name: value})
    with pytest.raises(ValueError, match=f"another model: its {name} is .*model.init_from") as said:
        trainer(max_steps=2).fit(other, data(), ckpt_path=path)
    assert repr(module.hparams[name]) in str(said.value) and repr(value) in str(said.value)


def test_a_checkpoint_of_something_else_is_refused():
    with pytest.raises(ValueError, match="another model: its architecture is None"):
        build().on_load_checkpoint({"state_dict": {}})


def test_init_from_says_what_did_not_fit_and_leaves_no_trace(checkpoint, tmp_path, caplog):
    _, module = checkpoint
    state = {f"model.{name}": value for name, value in module.model.state_dict().items()}
    del state["model.norm.bias"]
    state["model.old_head"] = torch.zeros(3)
    state["model.head.weight"] = torch.zeros(9, 16)
    torch.save({"state_dict": state}, tmp_path / "old.ckpt")
    new = MatViT(CLASSES, "vit_tiny_patch16_224", TINY, init_from=str(tmp_path / "old.ckpt"))
    with caplog.at_level(logging.INFO, "lightning_modules"):
        new.configure_model()
    assert "1 missing: norm.bias" in caplog.text
    assert "1 unexpected: old_head" in caplog.text
    assert "1 reshaped: head.weight (9, 16) for (5, 16)" in caplog.text
    kept = {"norm.bias", "head.weight"}
    for name, value in new.model.state_dict().items():
        assert torch.equal(value, module.model.state_dict()[name]) == (name not in kept), name
    assert "init_from" not in new.hparams


def test_wrong_settings():
    with pytest.raises(ValueError, match="split_batch needs joint"):
        MatViT(CLASSES, split_batch=True)
    with pytest.raises(ValueError, match="joint: mean needs fractions"):
        MatViT(CLASSES, joint="mean", fractions=None)
    with pytest.raises(ValueError, match="granularity \\[0\\] has 1 entries: this model has 2"):
        build(eval_granularities=[[0]])
    with pytest.raises(ValueError, match="no model 'vit_tiny_patch16_42'; similar: vit_"):
        MatViT(CLASSES, "vit_tiny_patch16_42", pretrained=True).configure_model()
    with pytest.raises(ValueError, match="no model 'nothing'; similar: none"):
        MatViT(CLASSES, "nothing").configure_model()


class Drawn(L.Callback):
    """The granularities that training steps had."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.seen.append([layer.granularity for layer in pl_module.model.nesting.layers])


def test_the_sampler_comes_with_the_module_and_is_never_doubled():
    module, drawn = build(), Drawn()
    runner = trainer(max_epochs=20, callbacks=[drawn])  # a trainer.callbacks that forgets it
    runner.fit(module, data())
    assert sum(isinstance(c, GranularitySampling) for c in runner.callbacks) == 1
    assert {tuple(seen) for seen in drawn.seen} == {(i, i) for i in range(4)}

    module, drawn = build(), Drawn()
    runner = trainer(max_epochs=2, callbacks=[drawn, GranularitySampling([0, 0, 1, 0])])
    runner.fit(module, data())
    assert sum(isinstance(c, GranularitySampling) for c in runner.callbacks) == 1
    assert drawn.seen == [[2, 2]] * 4


def test_a_plain_model_and_joint_training_have_no_sampler():
    for settings in ({"fractions": None}, {"joint": "mean"}):
        runner = trainer(max_steps=1)
        runner.fit(build(**settings), data())
        assert not any(isinstance(c, GranularitySampling) for c in runner.callbacks)
    with pytest.raises(ValueError, match="joint: mean trains all .* leave GranularitySampling out"):
        trainer(max_steps=1, callbacks=[GranularitySampling()]).fit(build(joint="mean"), data())


@pytest.mark.parametrize("chosen", [None, "S", [0, 2]])
def test_predictions_are_those_of_the_granularity_that_is_named(chosen):
    module = build(granularity=chosen)
    assert "granularity" not in module.hparams
    set_granularity(module.model, "M")  # what training drew last
    predicted = torch.cat(trainer().predict(module, data()))
    with granularity(module.model, "XL" if chosen is None else chosen):
        expected = module(batch()[0]).detach()
    torch.testing.assert_close(predicted, expected)
    assert (predicted - module(batch()[0])).abs().max() > 1e-3
    module.granularity = "M"
    torch.testing.assert_close(
        torch.cat(trainer().predict(module, data())), module(batch()[0]).detach()
    )


@pytest.mark.parametrize("reentrant", [False, True])
def test_joint_training_with_gradient_checkpointing(reentrant, monkeypatch):
    """The backward pass runs the blocks again, each at the granularity that it had."""
    again = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=reentrant)
    for name in ("checkpoint", "checkpoint_seq"):
        monkeypatch.setattr(
            f"timm.models.vision_transformer.{name}",
            lambda blocks, x: functools.reduce(
                lambda y, block: again(block, y),
                blocks if isinstance(blocks, torch.nn.Sequential) else [blocks],
                x,
            ),
        )
    gradients = []
    for checkpointing in (False, True):
        module = build(joint="mean").double().train()
        module.model.set_grad_checkpointing(checkpointing)
        images, labels = batch()
        module.training_step((images.double(), labels), 0).backward()
        gradients.append({name: p.grad for name, p in module.named_parameters()})
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected, rtol=1e-12, atol=1e-14)
