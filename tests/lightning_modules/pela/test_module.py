"""PELA's training against the paper's formulas, written out on plain models."""

import copy
import importlib
import logging
import math

import lightning as L
import pytest
import timm
import torch
from timm.models import save_for_hf
from torch.nn import functional as F

from lightning_modules.pela import (
    PELA,
    Classifier,
    Distillation,
    LoRA,
    TokenMerging,
    compress,
    factorize,
    plan_of,
    plan_uniform,
)
from lightning_modules.pela.baselines import lillama, maskalign, tinybert
from lightning_modules.pela.layers import low_rank_layers
from lightning_modules.standalone import save

surgery = importlib.import_module("lightning_modules.pela.factorize")

CLASSES = 5
VIT = {"img_size": 8, "patch_size": 2, "embed_dim": 32, "depth": 2, "num_heads": 4}
SWIN = {
    "img_size": 16, "patch_size": 2, "window_size": 2, "embed_dim": 16, "depths": [2, 2],
    "num_heads": [2, 4],
}  # fmt: skip
ARCHITECTURES = {
    "vit": ("vit_tiny_patch16_224", VIT),
    "swin": ("swin_tiny_patch4_window7_224", SWIN),
}


def network(kind="vit", seed=0, **settings):
    """A dense model with weights large enough to differ from its low-rank student."""
    name, arguments = ARCHITECTURES[kind]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = timm.create_model(name, num_classes=CLASSES, **{**arguments, **settings})
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """Checkpoints of the dense models."""
    folder = tmp_path_factory.mktemp("dense")
    for kind in ARCHITECTURES:
        torch.save(network(kind).state_dict(), folder / f"{kind}.pt")
    return folder


def build(source, kind="vit", module=PELA, teacher=True, **settings):
    """A module at the start of its training; what it logs is in `logged`."""
    name, arguments = ARCHITECTURES[kind]
    given = {"num_classes": CLASSES, "architecture": name, "model_args": arguments, "ratio": 2.0}
    module = module(**{**given, **settings}, init_from=source and str(source / f"{kind}.pt"))
    module.configure_model()
    if teacher and hasattr(module, "build_teacher"):
        object.__setattr__(module, "teacher", module.build_teacher().eval())
    module.logged = {}
    module.log = lambda name, value, **_: module.logged.__setitem__(name, value)
    module.log_dict = lambda values, **_: module.logged.update(values)
    return module.eval()


def batch(kind="vit", size=6):
    generator = torch.Generator().manual_seed(1)
    side = ARCHITECTURES[kind][1]["img_size"]
    images = torch.randn(size, 3, side, side, generator=generator)
    return images, torch.randint(CLASSES, (size,), generator=generator)


def data(size=8):
    return torch.utils.data.DataLoader(list(zip(*batch(size=size), strict=True)), batch_size=4)


def trainer(**settings):
    return L.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, **settings,
    )  # fmt: skip


def block_outputs(model, images):
    """Outputs of a ViT's blocks, and what the first one is given, by calling them in turn."""
    x = model.norm_pre(model._pos_embed(model.patch_embed(images)))
    outputs = [x]
    for block in model.blocks:
        outputs.append(block(outputs[-1]))
    return outputs


def distances(student, teacher):
    modules = dict(teacher.named_modules())
    return [
        layer.v.weight @ layer.u.weight - modules[name].weight
        for name, layer in low_rank_layers(student).items()
    ]


@pytest.mark.parametrize("setting", ["paper", "released"])
@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 0.0), (0.0, 2.0), (0.5, 3.0), (0.0, 0.0)])
def test_a_step_is_equation_7(setting, alpha, beta, dense):
    module = build(dense, alpha=alpha, beta=beta, setting=setting, p=2.0, epsilon=0.25)
    images, labels = batch()
    passes = []
    module.model.patch_embed.register_forward_hook(lambda *_: passes.append(1))
    loss = module.training_step((images, labels), 0)
    assert len(passes) == 1  # one pass of the student

    teacher = network()
    base = F.cross_entropy(module.model(images), labels)
    squares = [
        (s - t).square()
        for s, t in zip(
            block_outputs(module.model, images)[1:], block_outputs(teacher, images)[1:], strict=True
        )
    ]
    excess = [d.square().sum().sqrt() - 0.25 for d in distances(module.model, teacher)]
    if setting == "paper":
        fd = sum(s.flatten(1).sum(1).mean() for s in squares) / (2 * len(squares))
        rwp = sum(excess)
    else:
        fd = sum(s.mean() for s in squares) / len(squares)
        rwp = sum(e**2 for e in excess) / len(excess)
    assert fd > 1e-3 and rwp > 1e-3
    torch.testing.assert_close(loss, base + alpha * fd + beta * rwp)
    expected = {"train/base": base, "train/loss": loss}
    if alpha:
        expected["train/distillation"] = fd
    if beta:
        expected["train/perturbation"] = rwp
    torch.testing.assert_close(module.logged, expected)


def test_soft_targets_and_padding(dense):
    module = build(dense, alpha=0.0, beta=0.0)
    images, labels = batch()
    logits = module(images)
    soft = 0.3 * F.one_hot(labels, CLASSES) + 0.7 * F.one_hot(labels.flip(0), CLASSES)
    expected = -(soft * logits.log_softmax(-1)).sum(-1).mean()
    torch.testing.assert_close(module.training_step((images, soft), 0), expected)
    expected = F.cross_entropy(logits[:4], labels[:4])
    labels[4:] = -100
    torch.testing.assert_close(module.training_step((images, labels), 0), expected)


@pytest.mark.parametrize("features", ["blocks", "stages", "pooled"])
def test_the_features_that_are_compared(features, dense):
    module = build(dense, "swin", features=features, beta=0.0)
    images, labels = batch("swin")
    module.training_step((images, labels), 0)

    def outputs(model):
        x, blocks, stages = model.patch_embed(images), [], []
        for stage in model.layers:
            x = stage.downsample(x)
            for block in stage.blocks:
                x = block(x)
                blocks.append(x)
            stages.append(x)
        pooled = model.forward_head(model.forward_features(images), pre_logits=True)
        return {"blocks": blocks, "stages": stages, "pooled": [pooled]}[features]

    pairs = zip(outputs(module.model), outputs(network("swin")), strict=True)
    expected = torch.stack([(s - t).square().mean() for s, t in pairs]).mean()
    torch.testing.assert_close(module.logged["train/distillation"], expected)


def test_losses_are_computed_in_full_precision_under_autocast(dense):
    """The features come in bfloat16 here; their distance must not be rounded to it."""
    module = build(dense, epsilon=1e-3)
    images, labels = batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = module.training_step((images, labels), 0)
        assert module.model.blocks[0].mlp(torch.randn(1, 1, 32)).dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    for name in ("base", "distillation", "perturbation"):
        value = module.logged[f"train/{name}"]
        assert value.dtype == torch.float32 and value != value.bfloat16().float(), name
    exact = torch.stack([d.abs().max() for d in distances(module.model, network())])
    torch.testing.assert_close(
        module.logged["train/perturbation"], (exact - 1e-3).square().mean(), rtol=1e-5, atol=0
    )


def test_the_cross_entropy_of_bfloat16_is_computed_in_float32(dense):
    module = build(dense, alpha=0.0, beta=0.0).bfloat16()
    images, labels = batch()
    assert module.training_step((images.bfloat16(), labels), 0).dtype == torch.float32


def queries_and_keys(block, inputs):
    """Of a block's attention, before any norm of theirs, (6, 4, 17, 8) each."""
    q, k, _ = block.attn.qkv(block.norm1(inputs)).chunk(3, dim=-1)
    return [x.reshape(6, 17, 4, 8).transpose(1, 2) for x in (q, k)]


def test_tinybert_is_its_papers(dense):
    module = build(dense, module=Distillation, method="tinybert", alpha=0.5)
    images, labels = batch()
    loss = module.training_step((images, labels), 0)
    teacher, student = network(), module.model
    expected = torch.zeros(())
    own, other = block_outputs(student, images), block_outputs(teacher, images)
    for s, t in zip(own, other, strict=True):  # the embedding and the hidden states
        expected = expected + (s - t).square().mean()
    for i in range(2):
        scores = []
        for model, inputs in ((student, own[i]), (teacher, other[i])):
            q, k = queries_and_keys(model.blocks[i], inputs)
            scores.append(torch.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(8))
        expected = expected + (scores[0] - scores[1]).square().mean()
    soft = teacher(images).softmax(-1)
    expected = expected - (soft * student(images).log_softmax(-1)).sum(-1).mean()
    base = F.cross_entropy(student(images), labels)
    torch.testing.assert_close(module.logged["train/distillation"], expected)
    torch.testing.assert_close(loss, base + 0.5 * expected)


def test_tinybert_compares_the_scores_of_normalised_queries_and_keys():
    student, teacher = (network(seed=seed, qk_norm=True) for seed in (0, 1))
    seen = {model: [] for model in (student, teacher)}
    for model, scores in seen.items():
        for block in model.blocks:  # without the fused operation, dropout is given softmax(scores)
            block.attn.fused_attn = False
            block.attn.attn_drop.register_forward_hook(lambda _, x, y, s=scores: s.append(x[0]))
    images, _ = batch()
    _, loss = tinybert(student, teacher, images)
    rest = F.cross_entropy(student(images), teacher(images).softmax(-1))
    own, other = block_outputs(student, images), block_outputs(teacher, images)
    rest = rest + sum((s - t).square().mean() for s, t in zip(own, other, strict=True))
    expected = 0.0
    for i in range(2):
        scores = []
        for model, inputs in ((student, own[i]), (teacher, other[i])):
            block = model.blocks[i]
            q, k = queries_and_keys(block, inputs)
            scores.append(block.attn.q_norm(q) @ block.attn.k_norm(k).mT / math.sqrt(8))
            torch.testing.assert_close(scores[-1].softmax(-1), seen[model][i])
        expected = expected + (scores[0] - scores[1]).square().mean()
    torch.testing.assert_close(loss - rest, expected, rtol=1e-4, atol=1e-4)


def test_tinybert_on_swin(dense):
    module = build(dense, "swin", Distillation, method="tinybert")
    module.training_step(batch("swin"), 0).backward()
    assert 0 < module.logged["train/distillation"] < 100


def test_maskalign_shows_the_student_a_part(dense):
    module = build(dense, module=Distillation, method="maskalign")
    images, labels = batch()
    seen = []
    module.model.blocks[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    loss = module.training_step((images, labels), 0)
    whole_tokens, tokens = seen  # one pass for the labels, one for the distillation
    assert whole_tokens.shape == (6, 17, 32)
    assert tokens.shape == (6, 1 + 5, 32)  # 30 % of 16 patches
    whole = block_outputs(module.model, images)[0]
    places = (tokens[:, :, None] == whole[:, None]).all(-1).int().argmax(-1)  # (6, 6)
    assert (places[:, 0] == 0).all() and (places.diff(dim=1) > 0).all()
    assert len({tuple(row) for row in places.tolist()}) > 1  # each image has its own
    x, terms = tokens, []
    for block, target in zip(
        module.model.blocks, block_outputs(network(), images)[1:], strict=True
    ):
        x = block(x)
        kept = target[torch.arange(6)[:, None], places]
        terms.append((F.layer_norm(x, (32,)) - F.layer_norm(kept, (32,))).square().mean())
    expected = torch.stack(terms).mean()
    torch.testing.assert_close(module.logged["train/distillation"], expected)
    whole_loss = F.cross_entropy(module.model(images), labels)  # the labels see the whole image
    torch.testing.assert_close(loss, whole_loss + expected)
    assert module.model(images).shape == (6, CLASSES) and len(seen[-1][0]) == 17  # as before


def test_lillama_teaches_every_block_by_itself(dense):
    """arXiv 2412.16719, written out block by block; labels teach nothing."""
    module = build(dense, module=Distillation, method="lillama", alpha=2.0)
    images, labels = batch()
    student, teacher = module.model, module.teacher
    loss = module.training_step((images, labels), 0)
    loss.backward()
    gradients = {name: p.grad for name, p in student.named_parameters()}

    def apart(found, wanted):
        product = (found * wanted).sum(-1) / (found.norm(dim=-1) * wanted.norm(dim=-1))
        return (found - wanted).abs().mean() + (1 + (-product).exp()).log().mean()

    student.zero_grad()
    total = 0.0
    x_s = x_t = block_outputs(teacher, images)[0]  # the embeddings of both
    for mine, theirs in zip(student.blocks, teacher.blocks, strict=True):
        with torch.no_grad():
            y_t = theirs(x_t)
        y_s = mine(x_s.detach())
        term = 2.0 * (apart(mine(x_t.detach()), y_t) + apart(y_s, y_t))
        term.backward()
        total += term.item()
        x_s, x_t = y_s, y_t
    assert loss.item() == pytest.approx(total, rel=1e-5)
    for name, parameter in student.named_parameters():
        if name.startswith("blocks."):
            torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-5, rtol=1e-4)
        else:
            assert gradients[name] is None and not parameter.requires_grad
    assert module.logged["train/base"] > 0


def test_maskalign_needs_tokens_that_can_be_left_out(dense):
    module = build(dense, "swin", Distillation, method="maskalign")
    with pytest.raises(ValueError, match="SwinTransformer cannot leave tokens out"):
        module.training_step(batch("swin"), 0)


def eva():
    """EVA-02, whose blocks take their rotary positions beside the tokens."""
    torch.manual_seed(0)
    small = {"img_size": 28, "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": CLASSES}
    model = timm.create_model("eva02_tiny_patch14_224", **small).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model


def test_maskalign_is_for_models_that_call_their_blocks_one_after_another():
    with pytest.raises(ValueError, match="Eva cannot leave tokens out: MaskAlign needs a timm ViT"):
        maskalign(eva(), eva(), torch.randn(2, 3, 28, 28))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("beit_base_patch16_224", "Beit reads the weights of blocks.0.attn.qkv without calling it"),
        ("eva02_tiny_patch14_224", "Eva reads the weights of blocks.0.attn.qkv without calling it"),
        ("vit_small_patch16_dinov3", "Eva turns queries and keys by rotary positions"),
    ],
)
def test_tinybert_needs_the_scores_that_the_model_computes(name, said):
    small = {"img_size": 56, "embed_dim": 64, "depth": 1, "num_heads": 2, "num_classes": CLASSES}
    if "patch14" not in name:
        small["img_size"] = 32
    model = timm.create_model(name, **small).eval()
    images = torch.randn(2, 3, small["img_size"], small["img_size"])
    with pytest.raises(ValueError, match=f"{said}.*choose method lillama"):
        tinybert(model, copy.deepcopy(model), images)
    assert lillama(model, copy.deepcopy(model), images)[1].isfinite()


def test_lillama_calls_blocks_with_all_that_the_model_gives_them():
    """A student equal to its teacher is as near as can be: log(1 + 1/e) for every term."""
    _, distance = lillama(eva(), eva(), torch.randn(2, 3, 28, 28))
    assert distance.item() == pytest.approx(4 * math.log1p(math.exp(-1)), rel=1e-5)


def test_the_student_is_the_librarys(dense):
    for settings, ranks in (
        ({"ratio": 3.0}, plan_uniform(network(), 3.0)),
        (
            {"ratio": 3.0, "skip": ["head", "attn.proj"]},
            plan_uniform(network(), 3.0, ["attn.proj"]),
        ),
        ({"ranks": {"blocks.0.attn.qkv": 4}}, {"blocks.0.attn.qkv": 4}),
    ):
        module = build(dense, teacher=False, **settings)
        assert plan_of(module.model) == ranks == module.hparams.ranks
        expected = factorize(network(), ranks=ranks).state_dict()
        for name, value in module.model.state_dict().items():
            assert torch.equal(value, expected[name]), name
    plain = build(dense, teacher=False, ratio=None)
    assert not low_rank_layers(plain.model) and plain.hparams.ranks is None


@torch.no_grad()
def test_evaluation_is_over_the_whole_set_without_padding(dense):
    module = build(dense, teacher=False)
    images, labels = batch(size=7)
    logits = module.model(images)
    padded = labels.clone()
    padded[6:] = -100
    nothing = torch.full((2,), -100)
    for part, known in ((images[:4], padded[:4]), (images[4:], padded[4:]), (images[:2], nothing)):
        module.validation_step((part, known), 0)
    module.on_validation_epoch_end()
    torch.testing.assert_close(
        module.logged,
        {
            "val/accuracy": (logits[:6].argmax(-1) == labels[:6]).float().mean(),
            "val/loss": F.cross_entropy(logits[:6], labels[:6]),
        },
    )
    module.test_step((images[:2], labels[:2]), 0)  # nothing of the validation lingers
    module.on_test_epoch_end()
    torch.testing.assert_close(module.logged["test/loss"], F.cross_entropy(logits[:2], labels[:2]))


def test_only_the_student_trains(dense):
    name, arguments = ARCHITECTURES["vit"]
    module = PELA(
        num_classes=CLASSES, architecture=name, model_args=arguments, ratio=2.0,
        init_from=str(dense / "vit.pt"), lr=0.1, epsilon=1e-3,
    )  # fmt: skip
    runner = trainer(max_epochs=1)
    runner.fit(module, data())
    start = factorize(network(), 2.0).state_dict()
    for name, value in module.model.state_dict().items():
        assert not torch.equal(value, start[name]), name
    assert not any("teacher" in name for name in module.state_dict())


def test_a_teacher_has_to_be_given(dense):
    module = build(dense, teacher=False)
    with pytest.raises(ValueError, match="no teacher: callbacks.frozen_teacher.FrozenTeacher"):
        module.training_step(batch(), 0)
    with pytest.raises(ValueError, match="teacher has no weights: give model.teacher_from"):
        build(None)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda state: state.pop("blocks.1.mlp.fc1.weight"), "1 missing: blocks.1.mlp.fc1.weight"),
        (lambda state: state.update(more=torch.zeros(1)), "1 unexpected: more"),
        (lambda state: state.update({"norm.bias": torch.zeros(2)}), "1 reshaped: norm.bias"),
    ],
)
def test_a_teacher_that_does_not_match(change, named, dense, tmp_path):
    state = network().state_dict()
    change(state)
    torch.save(state, tmp_path / "other.pt")
    with pytest.raises(ValueError, match=f"not the dense original of this vit_.*{named}.*teacher_"):
        build(dense, teacher_from=str(tmp_path / "other.pt"))


def test_a_low_rank_model_is_no_teacher(dense, tmp_path):
    save(factorize(network(), 2.0), tmp_path)
    file = str(tmp_path / "model.safetensors")
    module = classifier(PELA, init_from=file)
    with pytest.raises(ValueError, match="not the dense original.*as model.teacher_from"):
        module.build_teacher()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"ratio": 0.0}, "ratio is 0.0: expected a number above 0"),
        ({"ratio": -2.0}, "ratio is -2.0: expected a number above 0"),
        ({"ratio": 1000.0}, "ratio 1000 leaves blocks.0.attn.qkv .* rank 0"),
        ({"skip": ["atn"]}, "skip pattern 'atn' matches no module"),
        ({"module": TokenMerging, "merged_tokens": -1}, "r is -1"),
        ({"module": LoRA, "lora_rank": -1, "ratio": None}, "rank -1"),
        ({"module": LoRA, "lora_rank": 4}, "lora_rank 4 is for the dense model: set model.ratio"),
    ],
)
def test_wrong_settings(settings, said, dense):
    with pytest.raises(ValueError, match=said):
        build(dense, teacher=False, **settings)


def classifier(kind=Classifier, **settings):
    """A module of the small ViT, not built yet."""
    name, arguments = ARCHITECTURES["vit"]
    given = {"num_classes": CLASSES, "architecture": name, "model_args": arguments}
    return kind(**{**given, **settings})


@pytest.fixture(scope="module")
def checkpoint(dense, tmp_path_factory):
    """A PELA checkpoint with ranks that no ratio tells."""
    folder = tmp_path_factory.mktemp("run")
    save(compress(network(), ratio=3.0, ranks="energy"), folder / "energy")
    module = classifier(PELA, init_from=str(folder / "energy"), teacher_from=str(dense / "vit.pt"))
    runner = trainer(max_steps=1)
    runner.fit(module, data())
    path = folder / "last.ckpt"
    runner.save_checkpoint(path)
    return path, module.eval()


def test_a_checkpoint_holds_plain_types_and_loads_by_itself(checkpoint):
    path, module = checkpoint
    content = torch.load(path, weights_only=True)
    assert content["hyper_parameters"]["ranks"] == plan_of(module.model)
    assert not {"init_from", "teacher_from", "pretrained"} & content["hyper_parameters"].keys()
    loaded = PELA.load_from_checkpoint(path, weights_only=True).eval()
    assert torch.equal(loaded(batch()[0]), module(batch()[0]))


def test_a_rebuilt_model_is_not_decomposed_again(checkpoint, monkeypatch):
    def refuse(*_):
        raise AssertionError("decomposed")

    monkeypatch.setattr(surgery, "factors", refuse)
    loaded = PELA.load_from_checkpoint(checkpoint[0], weights_only=True)
    assert torch.equal(loaded.eval()(batch()[0]), checkpoint[1](batch()[0]))


def test_ranks_without_weights_do_not_train(checkpoint):
    module = classifier(ranks=plan_of(checkpoint[1].model))
    with pytest.raises(ValueError, match="model.ranks came without weights: give model.init_from"):
        trainer(max_steps=1).fit(module, data())


def test_an_argument_that_never_was_is_a_mistake():
    with pytest.raises(TypeError, match="unexpected keyword argument 'ration'"):
        classifier(PELA, ration=2.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("architecture", "vit_small_patch16_224"),
        ("model_args", {**VIT, "depth": 3}),
        ("num_classes", 7),
        ("ratio", 2.0),
        ("skip", ["attn.proj"]),
    ],
)
def test_resuming_from_another_models_checkpoint_is_refused(checkpoint, name, value):
    path, module = checkpoint
    other = PELA(**{**module.hparams, "alpha": 0.0, "beta": 0.0, "ranks": None, name: value})
    with pytest.raises(ValueError, match=f"another model: its {name} is .*model.init_from") as said:
        trainer(max_steps=2).fit(other, data(), ckpt_path=path)
    assert repr(module.hparams[name]) in str(said.value) and repr(value) in str(said.value)


def low_rank_source(form, checkpoint, tmp_path):
    path, module = checkpoint
    return str(path) if form == "checkpoint" else str(save(copy.deepcopy(module.model), tmp_path))


@pytest.mark.parametrize("form", ["checkpoint", "folder"])
def test_a_low_rank_model_is_fine_tuned_with_a_new_head(form, checkpoint, tmp_path, caplog):
    source = low_rank_source(form, checkpoint, tmp_path)
    arguments = {**VIT, "img_size": 12}  # and on larger images
    module = classifier(num_classes=3, model_args=arguments, init_from=source)
    with caplog.at_level(logging.INFO, "lightning_modules"):
        module.configure_model()
    assert "2 reshaped: head.bias (5,) for (3,), head.weight" in caplog.text
    old = checkpoint[1].model.state_dict()
    assert plan_of(module.model) == plan_of(checkpoint[1].model) == module.hparams.ranks
    for name, value in module.model.state_dict().items():
        same = value.shape == old[name].shape and torch.equal(value, old[name])
        assert same != (name in ("head.weight", "head.bias", "pos_embed")), name
    assert module(torch.randn(4, 3, 12, 12)).shape == (4, 3)


def test_low_rank_weights_and_a_ratio_do_not_go_together(checkpoint, tmp_path):
    source = low_rank_source("folder", checkpoint, tmp_path)
    with pytest.raises(ValueError, match="low-rank already, so ratio 2 would do nothing: set"):
        classifier(init_from=source, ratio=2.0).configure_model()
    module = classifier(init_from=source, ranks={"blocks.0.mlp.fc1": 1})
    with pytest.raises(ValueError, match="ranks other than those given: set model.ranks to null"):
        module.configure_model()


def test_low_rank_weights_of_another_size(checkpoint, tmp_path):
    source = low_rank_source("folder", checkpoint, tmp_path)
    wider = {**VIT, "embed_dim": 64}
    module = classifier(model_args=wider, init_from=source)
    with pytest.raises(ValueError, match=r"does not fit VisionTransformer: blocks.0.*give the"):
        module.configure_model()


def test_lora_trains_its_factors_and_the_head(dense):
    module = build(dense, module=LoRA, ratio=None, lora_rank=2)
    images, labels = batch()
    torch.testing.assert_close(module(images), network()(images))
    module.training_step((images, labels), 0).backward()
    trained = {name for name, p in module.model.named_parameters() if p.grad is not None}
    assert all("lora_" in name or name.startswith("head.") for name in trained)
    assert len(trained) == 2 * 2 + 2


def test_lora_trains_both_heads_of_a_distilled_model():
    module = LoRA(
        num_classes=CLASSES, architecture="deit_tiny_distilled_patch16_224", model_args=VIT
    )
    module.configure_model()
    trained = {name for name, one in module.model.named_parameters() if one.requires_grad}
    heads = {f"{head}.{kind}" for head in ("head", "head_dist") for kind in ("weight", "bias")}
    assert {name for name in trained if "lora" not in name} == heads


def test_tinybert_needs_a_teacher_whose_classifier_is_trained(tmp_path):
    save_for_hf(network(), tmp_path, model_args=VIT, safe_serialization=True)
    folder = {"architecture": f"local-dir:{tmp_path}", "pretrained": True}
    other = Distillation(method="tinybert", num_classes=CLASSES + 1, **folder)
    with pytest.raises(ValueError, match=r"has no classifier of 6 classes.*model\.teacher_from"):
        other.build_teacher()
    Distillation(method="tinybert", num_classes=CLASSES, **folder).build_teacher()
    Distillation(method="maskalign", num_classes=CLASSES + 1, **folder).build_teacher()


def test_token_merging_is_switched_on(dense):
    module = build(dense, module=TokenMerging, ratio=None, merged_tokens=3)
    lengths = []
    module.model.norm.register_forward_pre_hook(lambda _, inputs: lengths.append(inputs[0].shape))
    module(batch()[0])
    assert lengths == [(6, 17 - 6, 32)]


def test_shares_of_the_gradient(dense, monkeypatch):
    """Each weighted term's gradient norm over their sum, by a backward pass of its own."""
    module = build(dense, alpha=0.5, beta=3.0, epsilon=0.25)
    module.model.patch_embed.requires_grad_(False)
    images, labels = batch()
    trainer = type("", (), {"global_step": 3, "log_every_n_steps": 4})
    monkeypatch.setattr(module, "_trainer", trainer)
    loss = module.training_step((images, labels), 0)
    loss.backward()  # the graph is still whole
    teacher, student = network(), module.model
    squares = [
        (s - t).square().mean()
        for s, t in zip(
            block_outputs(student, images)[1:], block_outputs(teacher, images)[1:], strict=True
        )
    ]
    excess = [d.abs().max() - 0.25 for d in distances(student, teacher)]
    terms = {
        "distillation": 0.5 * torch.stack(squares).mean(),
        "base": F.cross_entropy(student(images), labels),
        "perturbation": 3 * torch.stack(excess).square().mean(),
    }
    norms = {}
    for name, term in terms.items():
        student.zero_grad()
        term.backward()
        norms[name] = sum(
            p.grad.square().sum() for p in student.parameters() if p.grad is not None
        ).sqrt()
    total = sum(norms.values())
    for name, norm in norms.items():
        torch.testing.assert_close(module.logged[f"train/share_{name}"], norm / total)


def test_shares_are_logged_when_the_trainer_logs(dense, tmp_path):
    module = classifier(PELA, ratio=2.0, init_from=str(dense / "vit.pt"), beta=2.0)
    logger = L.pytorch.loggers.CSVLogger(tmp_path, "", "")
    runner = L.Trainer(
        accelerator="cpu", logger=logger, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, max_epochs=2, log_every_n_steps=3,
    )  # fmt: skip
    runner.fit(module, data(12))
    lines = (tmp_path / "metrics.csv").read_text().splitlines()
    assert "train/share_perturbation" in lines[0] and len(lines) == 1 + 2
