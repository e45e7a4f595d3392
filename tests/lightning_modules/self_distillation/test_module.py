"""The stages against the paper's formulas, and what they hand to each other."""

import copy
import json

import lightning as L
import pytest
import torch
from torch.nn import functional as F
from transformers import ViTMAEConfig, ViTMAEForPreTraining, ViTMAEModel

from callbacks.frozen_teacher import FrozenTeacher
from datamodules.loading import build_loader
from lightning_modules.self_distillation import (
    ImageAdaptation,
    ImageFinetuning,
    TextAdaptation,
    TextFinetuning,
    distance,
    fingerprint,
    from_transformers,
    masked_autoencoding,
    r3f,
)
from lightning_modules.weights import read_state_dict

VIT = {
    "architecture": "vit_tiny_patch16_224",
    "model_args": {"img_size": 8, "patch_size": 2, "embed_dim": 16, "depth": 2, "num_heads": 2},
}
DECODER = {"depth": 1, "width": 12, "heads": 3}
BERT = {
    "architecture": "bert",
    "model_args": {
        "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 32, "vocab_size": 40, "max_position_embeddings": 16,
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    },
}  # fmt: skip
CLASSES = 3


class Tokenizer:
    """What masking asks of one."""

    mask_token_id, all_special_ids = 4, [0, 1, 2, 3, 4]

    def __len__(self):
        return 40


class Data(L.LightningDataModule):
    """Sixteen images or sentences; `tokenizer` as the text DataModules have it."""

    tokenizer = Tokenizer()

    def __init__(self, kind):
        super().__init__()
        self.kind, self.num_classes = kind, CLASSES

    def examples(self):
        generator = torch.Generator().manual_seed(0)
        labels = torch.arange(16) % CLASSES
        if self.kind == "images":
            images = torch.randn(16, 3, 8, 8, generator=generator) + labels[:, None, None, None]
            return list(zip(images, labels, strict=True))
        ids = torch.randint(5, 40, (16, 9), generator=generator)
        return [
            {"input_ids": i, "attention_mask": torch.ones_like(i), "labels": label}
            for i, label in zip(ids, labels, strict=True)
        ]

    def train_dataloader(self):
        return build_loader(self.examples(), 4, training=True)

    val_dataloader = test_dataloader = train_dataloader


def batch(kind):
    return torch.utils.data.default_collate(Data(kind).examples()[:4])


def adaptation(kind, **settings):
    torch.manual_seed(3)  # of weights that no file gives
    if kind == "images":
        return ImageAdaptation(**VIT, decoder_args=DECODER, norm_pix=False, **settings)
    return TextAdaptation(**BERT, **settings)


def finetuning(kind, **settings):
    torch.manual_seed(4)
    stage = {"images": ImageFinetuning, "text": TextFinetuning}[kind]
    return stage(CLASSES, **{"images": VIT, "text": BERT}[kind], **settings)


def fit(module, kind, folder, steps=2, ckpt_path=None, callbacks=(), **settings):
    checkpoint = L.pytorch.callbacks.ModelCheckpoint(
        folder, every_n_train_steps=2, save_top_k=-1, save_last=True
    )
    trainer = L.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        max_steps=steps, max_epochs=-1, limit_val_batches=0, num_sanity_val_steps=0,
        callbacks=[checkpoint, *callbacks], **settings,
    )  # fmt: skip
    torch.manual_seed(5)
    trainer.fit(module, datamodule=Data(kind), ckpt_path=ckpt_path)
    return folder / "last.ckpt"


def alone(module, kind, teacher=True):
    """A module as it is in training, without a trainer; what it logs is in `logged`."""
    module.configure_model()
    if teacher:
        object.__setattr__(module, "teacher", module.build_teacher().requires_grad_(False).eval())
    module._trainer = type("Trainer", (), {"datamodule": Data(kind)})()
    module.logged = {}
    module.log = lambda name, value, **_: module.logged.__setitem__(name, value)
    module.log_dict = lambda values, **_: module.logged.update(values)
    return module


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """kind → the original's checkpoint, and one of its further pre-training."""
    found = {}
    for kind in ("images", "text"):
        folder = tmp_path_factory.mktemp(kind)
        original = fit(adaptation(kind, lr=1e-2), kind, folder / "original")
        further = adaptation(kind, lr=1e-2, init_from=str(original))
        found[kind] = original, fit(further, kind, folder / "further")
    return found


def distilling(kind, files, **settings):
    original, further = map(str, files[kind])
    settings = {"distil": "hidden", **settings}
    return adaptation(kind, init_from=original, teacher_from=further, **settings)


def gradients(module):
    return {n: p.grad.clone() for n, p in module.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", ["images", "text"])
def test_one_backward_is_the_two_of_the_public_code(kind, files):
    module = alone(distilling(kind, files, mae_weight=0.3), kind)
    examples = batch(kind)
    torch.manual_seed(0)
    module.training_step(examples, 0).backward()
    together = gradients(module)
    assert not any(p.grad is not None for p in module.teacher.parameters())

    module.model.zero_grad()
    inputs = module.inputs(examples)
    torch.manual_seed(0)
    hidden = module.hide(examples)
    prediction = module.predict(module.model, examples, hidden)
    mae = module.error(prediction, examples, hidden)
    if kind == "images":
        reference = masked_autoencoding(module.model, inputs, hidden, norm_pix=False)
        torch.testing.assert_close(mae, reference)
    (0.3 * mae).backward()
    cls = [net.encode(inputs)[:, 0] for net in (module.model, module.teacher)]
    distillation = (cls[0] - cls[1]).square().sum(1).mean()
    distillation.backward()
    torch.testing.assert_close(together, gradients(module))
    expected = {
        "train/mae": mae, "train/distillation": distillation,
        "train/loss": 0.3 * mae + distillation,
    }  # fmt: skip
    torch.testing.assert_close(module.logged, expected)
    assert mae > 1e-3 and distillation > 1e-5


@pytest.mark.parametrize("kind", ["images", "text"])
def test_the_student_begins_with_the_original_and_the_teacher_stays(kind, files, tmp_path):
    original, further = files[kind]
    seen = []

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            seen.append(fingerprint(pl_module.teacher.state_dict()))

    module = distilling(kind, files, lr=1e-2)
    student = fit(module, kind, tmp_path, callbacks=[FrozenTeacher(), Watch()])
    found = torch.load(student, weights_only=True)
    assert found["start"] == fingerprint(read_state_dict(original))
    assert set(seen) == {fingerprint(read_state_dict(further))}
    assert not [name for name in found["state_dict"] if "teacher" in name]
    assert len({fingerprint(read_state_dict(f)) for f in (original, further, student)}) == 3


@pytest.mark.parametrize("kind", ["images", "text"])
@pytest.mark.parametrize("distil", ["hidden", "predictions", "l2", "mars"])
def test_every_way_to_tie_reaches_what_it_should(distil, kind, files):
    module = alone(distilling(kind, files, distil=distil, mae_weight=0.0), kind)
    loss = module.training_step(batch(kind), 0)
    assert set(module.logged) == {"train/distillation", "train/loss"} and loss > 0
    loss.backward()
    inside = {f"{n}" for n, p in module.model.named_parameters() if p.grad is not None}
    encoder = {"images": "encoder.", "text": "bert."}[kind]
    decoder = {name for name in inside if not name.startswith(encoder)}
    assert bool(decoder) == (distil == "predictions") and inside - decoder


def test_only_the_decoder_of_an_encoder_that_had_none(files):
    module = alone(adaptation("text", train="decoder"), "text", teacher=False)
    module.training_step(batch("text"), 0).backward()
    assert gradients(module) and all(name.startswith("cls.") for name in gradients(module))


@pytest.mark.parametrize("kind", ["images", "text"])
def test_finetuning_takes_the_encoder(kind, files):
    module = finetuning(kind, init_from=str(files[kind][1]))
    module.configure_model()
    whole = read_state_dict(files[kind][1])
    prefix = {"images": "encoder.", "text": ""}[kind]
    taken = 0
    for name, value in module.model.state_dict().items():
        if f"{prefix}{name}" in whole:
            assert torch.equal(value, whole[f"{prefix}{name}"])
            taken += 1
        else:
            assert name.startswith(tuple(f"{head}." for head in module.heads))
    assert taken > 20


@pytest.mark.parametrize("kind", ["images", "text"])
def test_the_losses_of_the_rivals(kind, files):
    examples = batch(kind)
    logits = {}
    for method in ("plain", "r3f", "supcon"):
        settings = {"method": method, "r3f_weight": 2.0, "r3f_epsilon": 1.0}
        module = alone(finetuning(kind, init_from=str(files[kind][0]), **settings), kind, False)
        torch.manual_seed(0)
        loss = module.training_step(examples, 0)
        logits[method], features = module.features(examples)
        labels = module.labels(examples)
        cross = F.cross_entropy(logits[method], labels)
        if method == "plain":
            torch.testing.assert_close(loss, cross)
        elif method == "r3f":
            torch.manual_seed(0)
            noisy = r3f(module.model, module.inputs(examples), logits[method], 1.0)
            torch.testing.assert_close(loss, cross + 2.0 * noisy)
            assert noisy > 1e-6
        else:
            unit = F.normalize(features, dim=1)
            similar = (unit @ unit.T / 0.3).masked_fill(torch.eye(4, dtype=torch.bool), -1e9)
            # of the labels 0, 1, 2, 0 only the first and the last have a positive
            contrast = -(similar.log_softmax(1)[[0, 3], [3, 0]]).mean()
            torch.testing.assert_close(loss, 0.1 * cross + 0.9 * contrast)
    torch.testing.assert_close(logits["plain"], logits["supcon"])


@pytest.mark.parametrize("method", ["mars", "recadam"])
def test_a_rival_resumes_with_the_weights_it_began_with(method, files, tmp_path):
    original = str(files["images"][0])
    settings = {"method": method, "lr": 3e-3, "radius": 0.02, "pretrain_cof": 200, "anneal_t0": 2}
    whole = finetuning("images", init_from=original, **settings)
    fit(whole, "images", tmp_path / "whole", 4)
    resumed = finetuning("images", **settings)  # without init_from: the checkpoint has it all
    first = tmp_path / "whole" / "epoch=0-step=2.ckpt"
    fit(resumed, "images", tmp_path / "resumed", 4, ckpt_path=first)
    for one, other in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)
    if method == "mars":  # saved weights are projected ones
        start = finetuning("images", init_from=original).build(pretrained=False).state_dict()
        original_weights = read_state_dict(original)
        for state in (read_state_dict(first), whole.model.state_dict()):
            change = state["head.weight"].abs().sum(1)
            assert (change <= 0.02 + 1e-6).all() and change.max() > 0.019
            name = "blocks.0.mlp.fc1.weight"
            gone = (state[name] - original_weights[f"encoder.{name}"]).abs().sum(1)
            assert (gone <= 0.02 + 1e-6).all() and gone.max() > 0.019
        assert start.keys() == whole.model.state_dict().keys()


def test_recadam_has_plain_adam_for_the_head(files):
    module = finetuning("images", method="recadam", init_from=str(files["images"][0]))
    module.configure_model()
    groups = [{"params": list(module.model.parameters()), "weight_decay": 0.0}]
    free = [g for g in module.build_optimizer(groups).param_groups if not g["anchored"]]
    assert [id(p) for g in free for p in g["params"]] == [
        id(p) for p in module.model.head.parameters()
    ]


def test_recadam_that_diverges_is_refused(files, tmp_path):
    module = finetuning("images", method="recadam", lr=1e-3, pretrain_cof=5000.0)
    with pytest.raises(ValueError, match="RecAdam diverges: lr 0.001 · pretrain_cof 5000"):
        fit(module, "images", tmp_path)
    # warm-up brings lr · γ to 0, 1.67, 3.33 and 5
    late = finetuning("images", method="recadam", lr=1e-3, pretrain_cof=5000.0, warmup=3)
    with pytest.raises(ValueError, match=r"lr 0.000666667 · .* is 3.33333 at step 3, expected"):
        fit(late, "images", tmp_path, steps=4)
    assert late.trainer.global_step == 0


def test_checkpoints_load_by_themselves_and_refuse_others(files):
    again = ImageAdaptation.load_from_checkpoint(files["images"][1])
    assert again.start == fingerprint(read_state_dict(files["images"][0]))
    narrow = copy.deepcopy(VIT)
    narrow["model_args"]["embed_dim"] = 8
    other = ImageAdaptation(**narrow, decoder_args=DECODER)
    with pytest.raises(ValueError, match="of another model: its model_args is .*use model.init_fr"):
        other.on_load_checkpoint(torch.load(files["images"][1], weights_only=True))


@pytest.mark.parametrize("kind", ["images", "text"])
@pytest.mark.parametrize("stage", [adaptation, finetuning])
def test_the_distance_is_logged_as_long_as_the_start_is_known(stage, kind, files, tmp_path):
    original = str(files[kind][0])
    prefix = "encoder." if kind == "images" else "bert."
    then = {
        name.removeprefix(prefix): value
        for name, value in read_state_dict(original).items()
        if name.startswith(prefix)
    }

    def gone(module):
        now = {n.removeprefix(prefix): value for n, value in module.model.state_dict().items()}
        return distance({n: v for n, v in now.items() if not n.startswith("pooler.")}, then)

    settings = {"init_from": original, "lr": 1e-2}
    whole = stage(kind, **settings)
    fit(whole, kind, tmp_path / "whole", 4, log_every_n_steps=2)
    assert whole.trainer.callback_metrics["train/distance"] == pytest.approx(gone(whole), rel=1e-5)
    assert gone(whole) > 0.01 and not whole.origin

    first = tmp_path / "whole" / "epoch=0-step=2.ckpt"
    again = stage(kind, **settings)
    fit(again, kind, tmp_path / "again", 4, ckpt_path=first, log_every_n_steps=2)
    assert again.trainer.callback_metrics["train/distance"] == pytest.approx(gone(again), rel=1e-5)
    lost = stage(kind, lr=1e-2)
    fit(lost, kind, tmp_path / "lost", 4, ckpt_path=first, log_every_n_steps=2)
    assert "train/distance" not in lost.trainer.callback_metrics


VITMAE = {
    "image_size": 8, "patch_size": 2, "hidden_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "intermediate_size": 32, "decoder_hidden_size": 12,
    "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 3,
    "decoder_intermediate_size": 24,
}  # fmt: skip


def test_a_name_whose_weights_come_without_a_decoder(tmp_path):
    encoder = ViTMAEModel(ViTMAEConfig(**VITMAE))
    encoder.save_pretrained(tmp_path / "encoder")
    for architecture in (str(tmp_path / "encoder"), "vit_base_patch16_224.mae"):
        with pytest.raises(ValueError, match=f"{architecture} has no decoder, .*--decoder_steps"):
            ImageAdaptation(architecture, pretrained=True).configure_model()
    new = ImageAdaptation(str(tmp_path / "encoder"), pretrained=True, train="decoder")
    new.configure_model()
    for name, value in encoder.state_dict().items():
        assert torch.equal(new.model.encoder.state_dict()[name], value), name


def test_a_hub_model_at_another_image_size_and_in_training_mode(tmp_path):
    torch.manual_seed(0)
    plain = ViTMAEForPreTraining(ViTMAEConfig(**VITMAE))
    from_transformers(plain)  # sets the positions
    plain.save_pretrained(tmp_path / "mae")
    same, larger = (
        ImageAdaptation(str(tmp_path / "mae"), pretrained=True, model_args=args)
        for args in ({"hidden_dropout_prob": 0.5}, {"image_size": 12})
    )
    for module in (same, larger):
        module.configure_model()
        assert all(part.training for part in module.model.modules())
    for name, value in plain.vit.state_dict().items():
        assert torch.equal(same.model.encoder.state_dict()[name], value), name
        moved = larger.model.encoder.state_dict()[name]
        assert torch.equal(moved, value) or (name.endswith("position_embeddings") and moved.any())
    assert larger.model.encode(torch.randn(1, 3, 12, 12)).shape == (1, 1 + 36, 16)


def test_bad_input(files, tmp_path):
    with pytest.raises(ValueError, match="mae_weight is 0.0 and distil is None: expected a weigh"):
        adaptation("images", mae_weight=0.0)
    with pytest.raises(ValueError, match="mask_ratio is 1.5: expected a share between 0 and 1"):
        adaptation("images", mask_ratio=1.5)
    with pytest.raises(ValueError, match="teacher has no weights: give model.teacher_from"):
        adaptation("images", distil="hidden").build_teacher()
    module = alone(distilling("images", files), "images", teacher=False)
    with pytest.raises(ValueError, match="there is no teacher: add callbacks.frozen_teacher"):
        module.training_step(batch("images"), 0)

    encoder_only = tmp_path / "encoder.pt"
    whole = read_state_dict(files["images"][0])
    encoder = {n.removeprefix("encoder."): v for n, v in whole.items() if n.startswith("encoder.")}
    torch.save(encoder, encoder_only)
    with pytest.raises(ValueError, match="has no decoder, so it cannot predict pixels"):
        adaptation("images", init_from=str(encoder_only)).configure_model()
    adaptation("images", init_from=str(encoder_only), train="decoder").configure_model()

    whole = read_state_dict(files["text"][0])
    headless = tmp_path / "headless.pt"
    torch.save({n: v for n, v in whole.items() if n.startswith("bert.")}, headless)
    with pytest.raises(ValueError, match="does not fit BertForMaskedLM: cls.predictions"):
        adaptation("text", init_from=str(headless)).configure_model()
    adaptation("text", init_from=str(headless), train="decoder").configure_model()
    finetuning("text", init_from=str(headless)).configure_model()


def test_hyperparameters_are_plain(files):
    saved = torch.load(files["text"][1], weights_only=True)["hyper_parameters"]
    assert not {"init_from", "teacher_from", "pretrained"} & set(saved)
    json.dumps(saved)
