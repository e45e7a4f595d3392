"""The stages against the paper's formulas, and what they hand to each other."""

import copy
import json
from types import SimpleNamespace

import lightning as L
import pytest
import timm
import torch
from sklearn.metrics import accuracy_score, f1_score
from timm.models import save_for_hf
from torch.nn import functional as F
from transformers import ViTMAEConfig, ViTMAEForPreTraining, ViTMAEModel

from datamodules.loading import build_loader
from lightning_modules.labels import IGNORED
from lightning_modules.self_distillation import (
    Adaptation,
    Finetuning,
    distance,
    from_transformers,
    masked_autoencoding,
    r3f,
    supervised_contrastive,
)
from lightning_modules.self_distillation.adaptation_module import rows_of, split
from lightning_modules.weights import fingerprint, read_state_dict

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
        settings = {"mae_args": {"norm_pix": False}, **settings}
        return Adaptation(**VIT, decoder_args=DECODER, **settings)
    return Adaptation(**BERT, modality="text", **settings)


def finetuning(kind, **settings):
    torch.manual_seed(4)
    return Finetuning(CLASSES, modality=kind, **{"images": VIT, "text": BERT}[kind], **settings)


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
    module._trainer = type("Trainer", (), {"datamodule": Data(kind), "world_size": 1})()
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
    inputs = split(examples)[0]
    torch.manual_seed(0)
    args = (module.model, inputs, None, Data.tokenizer)
    hidden = module.objective.hide(*args)
    prediction = module.objective.predict(module.model, inputs, hidden, everywhere=False)
    mae = module.objective.loss(module.model, prediction, inputs, hidden)
    if kind == "images":
        reference = masked_autoencoding(module.model, inputs, hidden, norm_pix=False)
        torch.testing.assert_close(mae, reference)
    (0.3 * mae).backward()
    tokens = slice(0, 1) if kind == "images" else slice(None)  # [CLS], or every one
    states = [net.encode(inputs)[:, tokens] for net in (module.model, module.teacher)]
    distillation = (states[0] - states[1]).square().sum((1, 2)).mean()
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
    student = fit(module, kind, tmp_path, callbacks=[Watch()])
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


@pytest.mark.parametrize("kind", ["images", "text"])
def test_student_and_teacher_predict_under_the_same_masks(kind, files):
    module = alone(distilling(kind, files, distil="predictions", mae_weight=0.0), kind)
    module.teacher.load_state_dict(module.model.state_dict())
    assert module.training_step(batch(kind), 0).abs() < 1e-6


@pytest.mark.parametrize("distil", ["hidden", "predictions"])
def test_padding_and_the_reduction_have_their_say(distil, files):
    losses = []
    for width, settings in ((0, {}), (3, {}), (3, {"reduction": "mean"})):
        module = alone(
            distilling("text", files, distil=distil, mae_weight=0.0, **settings), "text"
        ).eval()
        module._hide = lambda inputs: (inputs["input_ids"], None)
        inputs, labels = split(batch("text"))
        padded = {name: F.pad(values, (0, width)) for name, values in inputs.items()}
        losses.append(module.training_step(padded | {"labels": labels}, 0))
    torch.testing.assert_close(losses[1], losses[0])
    each = 9 * (16 if distil == "hidden" else 1)  # tokens, and a hidden state's numbers
    torch.testing.assert_close(losses[2], losses[0] / each)


def test_tokens_are_hidden_as_mae_args_and_the_tokenizer_say():
    arguments = {"ratio": 0.9, "as_mask": 0.0, "as_random": 0.0}
    module = alone(adaptation("text", mae_args=arguments), "text", teacher=False)
    ids = torch.arange(40).repeat(50, 1)
    corrupted, labels = module._hide({"input_ids": ids})
    hidden = labels != IGNORED
    assert torch.equal(corrupted, ids)
    assert not hidden[:, :5].any() and 0.85 < hidden[:, 5:].float().mean() < 0.95


@pytest.mark.parametrize("kind", ["images", "text"])
def test_the_error_of_validation_is_over_all_examples_under_fixed_masks(kind):
    module = alone(adaptation(kind), kind, teacher=False).eval()
    inputs, labels = split(batch(kind))
    expected = 0.0
    labels[0] = IGNORED  # it only fills the last batch up
    for number, rows in enumerate(([1, 2], [3])):
        real = rows_of(inputs, torch.tensor(rows))
        hidden = module._hide(real, torch.Generator().manual_seed(number))
        prediction = module.objective.predict(module.model, real, hidden, False)
        error = module.objective.loss(module.model, prediction, real, hidden)
        expected += len(rows) / 3 * error.item()
    for _ in range(2):
        for number, rows in enumerate(([1, 2], [3, 0])):
            rows = torch.tensor(rows)
            examples = rows_of(inputs, rows)
            if kind == "text":
                module.validation_step(examples | {"labels": labels[rows]}, number)
            else:
                module.validation_step((examples, labels[rows]), number)
        module.on_validation_epoch_end()
        assert module.logged["val/mae"].item() == pytest.approx(expected)


def test_scores_are_of_all_examples_without_padding():
    module = alone(finetuning("images"), "images", teacher=False)
    module.forward = lambda logits: logits
    logits = torch.randn(7, CLASSES, generator=torch.Generator().manual_seed(0))
    logits[:, 2] -= 9  # a class that is never predicted
    labels = torch.tensor([0, 1, 2, 0, 0, 1, 2])
    for _ in range(2):
        module.score((logits[:4], labels[:4]))
        filled = torch.cat([labels[4:], torch.tensor([IGNORED])])
        module.score((torch.cat([logits[4:], logits[:1]]), filled))
        module.report("val")
        expected = {
            "val/loss": F.cross_entropy(logits, labels).item(),
            "val/accuracy": accuracy_score(labels, logits.argmax(1)),
            "val/f1": f1_score(labels, logits.argmax(1), average="macro"),
            "val/classes_predicted": 2,
        }
        assert {n: value.item() for n, value in module.logged.items()} == pytest.approx(expected)


@pytest.mark.parametrize("make", [adaptation, finetuning])
def test_the_rate_warms_up_and_falls_to_zero(make):
    module = make("images", warmup=0.25)
    module.configure_model()
    module._trainer = SimpleNamespace(estimated_stepping_batches=8, fit_loop=SimpleNamespace())
    factor = module.configure_optimizers()["lr_scheduler"]["scheduler"].lr_lambdas[0]
    assert [factor(step) for step in (0, 1, 2, 5, 8)] == [0, 0.5, 1, 0.5, 0]


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
def test_r3f_beside_cross_entropy(kind, files):
    inputs, labels = split(batch(kind))
    for method, settings in {"plain": {}, "r3f": {"weight": 2.0, "epsilon": 1.0}}.items():
        module = finetuning(
            kind, init_from=str(files[kind][0]), method=method, method_args=settings
        )
        alone(module, kind, teacher=False)
        torch.manual_seed(0)
        loss = module.training_step(batch(kind), 0)
        logits = module(inputs)
        expected = F.cross_entropy(logits, labels)
        if method == "r3f":
            torch.manual_seed(0)
            noisy = r3f(module.model, inputs, logits, 1.0, "normal")
            assert noisy > 1e-6
            expected = expected + 2.0 * noisy
            torch.manual_seed(0)
            with torch.autocast("cpu", torch.bfloat16):  # below whose rounding the noise is
                torch.testing.assert_close(module.training_step(batch(kind), 0), loss)
        torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("kind", ["images", "text"])
def test_supcon_pre_trains_and_a_linear_classifier_follows(kind, files, tmp_path):
    """Table 5: two views, the projected [CLS]; then the head alone, on the frozen encoder."""
    settings = {"mae_weight": 0.0, "supcon_temperature": 0.2, "lr": 1e-2}
    module = adaptation(kind, init_from=str(files[kind][0]), **settings)
    contrast = fit(module, kind, tmp_path / "contrast")
    examples = batch(kind)
    inputs, labels = split(examples)
    alone(module, kind, teacher=False).eval()
    loss = module.training_step(examples, 0)
    mirrored = inputs.flip(-1) if kind == "images" else inputs
    features = [module.model.projection(module.model.encode(x)[:, 0]) for x in (inputs, mirrored)]
    expected = supervised_contrastive(torch.cat(features), torch.cat([labels, labels]), 0.2)
    torch.testing.assert_close(loss, expected)
    assert set(module.logged) == {"train/contrast", "train/loss"}
    before, after = (read_state_dict(one) for one in (files[kind][0], contrast))
    # but what BERT's head shares with its embeddings
    prefix = {"images": "decoder.", "text": ("cls.predictions.bias", "cls.predictions.t")}[kind]
    moved = {n for n in before if not torch.equal(before[n], after[n])}
    assert len(moved) > 20 and not any(n.startswith(prefix) for n in moved)  # no loss reaches it

    linear = finetuning(kind, init_from=str(contrast), method="linear", lr=1e-2)
    whole = read_state_dict(fit(linear, kind, tmp_path / "linear"))
    heads = tuple(f"{head}." for head in linear.heads)
    name = {"images": "encoder.{}", "text": "{}"}[kind]
    for key, value in whole.items():
        assert key.startswith(heads) or torch.equal(value, after[name.format(key)])
    start = finetuning(kind, init_from=str(contrast))
    start.configure_model()
    assert not torch.equal(
        start.model.state_dict()[f"{heads[0]}weight"], whole[f"{heads[0]}weight"]
    )


@pytest.mark.parametrize("method", ["mars", "recadam"])
def test_a_baseline_resumes_with_the_weights_it_began_with(method, files, tmp_path):
    original = str(files["images"][0])
    choices = {"mars": {"radius": 0.02}, "recadam": {"pretrain_cof": 200, "anneal_t0": 2}}
    settings = {"method": method, "lr": 3e-3, "method_args": choices[method]}
    whole = finetuning("images", init_from=original, **settings)
    fit(whole, "images", tmp_path / "whole", 4)
    resumed = finetuning("images", **settings)  # without init_from: the checkpoint has it all
    first = tmp_path / "whole" / "epoch=0-step=2.ckpt"
    fit(resumed, "images", tmp_path / "resumed", 4, ckpt_path=first)
    for one, other in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)
    if method == "mars":  # saved weights are projected ones
        original_weights = read_state_dict(original)
        for state in (read_state_dict(first), whole.model.state_dict()):
            change = state["head.weight"].abs().sum(1)
            assert (change <= 0.02 + 1e-6).all() and change.max() > 0.019
            name = "blocks.0.mlp.fc1.weight"
            gone = (state[name] - original_weights[f"encoder.{name}"]).abs().sum(1)
            assert (gone <= 0.02 + 1e-6).all() and gone.max() > 0.019


def test_recadam_has_plain_adam_for_the_head(files):
    module = finetuning("images", method="recadam", init_from=str(files["images"][0]))
    module.configure_model()
    groups = [{"params": list(module.model.parameters()), "weight_decay": 0.0}]
    free = [g for g in module.recadam(groups).param_groups if not g["anchored"]]
    assert [id(p) for g in free for p in g["params"]] == [
        id(p) for p in module.model.head.parameters()
    ]


def test_recadam_that_diverges_is_refused(files, tmp_path):
    settings = {"method": "recadam", "lr": 1e-3, "method_args": {"pretrain_cof": 5000.0}}
    module = finetuning("images", **settings)
    with pytest.raises(ValueError, match="RecAdam diverges: lr 0.001 · pretrain_cof 5000"):
        fit(module, "images", tmp_path)
    # warm-up brings lr · γ to 0, 1.67, 3.33 and 5
    late = finetuning("images", **settings, warmup=3)
    with pytest.raises(ValueError, match=r"lr 0.000666667 · .* is 3.33333 at step 3, expected"):
        fit(late, "images", tmp_path, steps=4)
    assert late.trainer.global_step == 0


def test_recadam_that_is_plain_adam_before_warm_up_ends_is_refused(tmp_path):
    settings = {"method": "recadam", "method_args": {"anneal_t0": 2, "pretrain_cof": 100.0}}
    early = finetuning("images", **settings, warmup=3)
    with pytest.raises(ValueError, match="anneal_t0 is 2 and warm-up takes 3 steps: it would be"):
        fit(early, "images", tmp_path, steps=6)
    assert early.trainer.global_step == 0
    with pytest.raises(ValueError, match="anneal_t0 is 2 and warm-up takes 2 steps"):
        fit(finetuning("images", **settings, warmup=2), "images", tmp_path, steps=4)
    fit(finetuning("images", **settings, warmup=1), "images", tmp_path, steps=4)
    with pytest.raises(ValueError, match="anneal_t0 is 2 and training takes 2 steps: it would"):
        fit(finetuning("images", **settings, warmup=1), "images", tmp_path, steps=2)
    as_share = finetuning("images", **settings, warmup=0.6)
    with pytest.raises(ValueError, match="warm-up takes 2.4 steps"):
        fit(as_share, "images", tmp_path, steps=4)


def test_checkpoints_load_by_themselves_and_refuse_others(files):
    again = Adaptation.load_from_checkpoint(files["images"][1])
    assert again.start == fingerprint(read_state_dict(files["images"][0]))
    narrow = copy.deepcopy(VIT)
    narrow["model_args"]["embed_dim"] = 8
    other = Adaptation(**narrow, decoder_args=DECODER)
    with pytest.raises(ValueError, match="of another model: its model_args is .*use model.init_fr"):
        other.on_load_checkpoint(torch.load(files["images"][1], weights_only=True))


@pytest.mark.parametrize("kind", ["images", "text"])
def test_a_copied_or_saved_model_encodes_with_its_own_weights(kind, tmp_path):
    model = alone(adaptation(kind), kind, teacher=False).model.eval()
    torch.save(model, tmp_path / "model.pt")
    example = batch(kind)
    if kind == "text":
        example.pop("labels")
    inputs = example if kind == "text" else example[0]
    expected = model.encode(inputs)
    for other in (copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
        assert torch.equal(other.encode(inputs), expected)
        for parameter in other.parameters():
            torch.nn.init.zeros_(parameter)
        assert not other.encode(inputs).any()
    assert torch.equal(model.encode(inputs), expected)


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
    assert gone(whole) > 0.01 and not whole.tracker.origin

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
            Adaptation(architecture, pretrained=True).configure_model()
    new = Adaptation(str(tmp_path / "encoder"), pretrained=True, train="decoder")
    new.configure_model()
    for name, value in encoder.state_dict().items():
        assert torch.equal(new.model.encoder.state_dict()[name], value), name


def test_a_folder_of_timm_gets_a_new_decoder(tmp_path):
    encoder = timm.create_model(VIT["architecture"], num_classes=0, **VIT["model_args"])
    arguments = {**VIT["model_args"], "num_classes": 0}
    save_for_hf(encoder, tmp_path, model_args=arguments, safe_serialization=True)
    new = Adaptation(
        f"local-dir:{tmp_path}", pretrained=True, train="decoder", decoder_args=DECODER
    )
    new.configure_model()
    assert fingerprint(new.model.encoder.state_dict()) == fingerprint(encoder.state_dict())
    with pytest.raises(ValueError, match=f"is no ViTMAE .*: give local-dir:{tmp_path} if it is a"):
        Adaptation(str(tmp_path), pretrained=True).configure_model()
    with pytest.raises(ValueError, match=f"local-dir:{tmp_path} has no decoder"):
        Adaptation(f"local-dir:{tmp_path}", pretrained=True).configure_model()


def test_a_hub_model_at_another_image_size_and_in_training_mode(tmp_path):
    torch.manual_seed(0)
    plain = ViTMAEForPreTraining(ViTMAEConfig(**VITMAE))
    from_transformers(plain)  # sets the positions
    plain.save_pretrained(tmp_path / "mae")
    same, larger = (
        Adaptation(str(tmp_path / "mae"), pretrained=True, model_args=args)
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
    with pytest.raises(ValueError, match="has the ratio 1.5: expected a share between 0 and 1"):
        adaptation("images", mae_args={"ratio": 1.5})
    with pytest.raises(ValueError, match="mae_args is {'norm': 1} for text: .*argument 'norm'"):
        adaptation("text", mae_args={"norm": 1})
    with pytest.raises(ValueError, match="modality is 'sound': expected 'images' or 'text'"):
        Adaptation(modality="sound")
    with pytest.raises(ValueError, match="supcon_temperature is 0.1 beside mae_weight 1.0"):
        adaptation("images", supcon_temperature=0.1)
    with pytest.raises(ValueError, match="method_args has 'radius', and method recadam takes anne"):
        finetuning("images", method="recadam", method_args={"radius": 1.0})
    with pytest.raises(ValueError, match="method is 'supcon': expected plain, linear, recadam"):
        finetuning("images", method="supcon")
    with pytest.raises(ValueError, match="teacher has no weights: give model.teacher_from"):
        adaptation("images", distil="hidden").build_teacher()
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


@pytest.mark.parametrize("stage", [adaptation, finetuning])
def test_texts_that_the_model_cannot_embed_are_refused(stage, tmp_path, monkeypatch):
    class OtherTokens(Data):
        vocab_size = 41

    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, max_steps=1)
    with pytest.raises(ValueError, match="has 41 tokens and the model embeds 40: set data.tok"):
        trainer.fit(stage("text"), OtherTokens("text"))
    monkeypatch.setitem(BERT["model_args"], "max_position_embeddings", 8)
    with pytest.raises(ValueError, match="a text has 9 tokens and the model 8 positions: set data"):
        fit(stage("text"), "text", tmp_path)


def test_a_checkpoint_from_before_says_what_to_do(files, tmp_path):
    """ImageAdaptation's and TextAdaptation's had no modality; the weights' names are the same."""
    for kind in ("images", "text"):
        old = torch.load(files[kind][1], weights_only=True)
        del old["hyper_parameters"]["modality"]
        torch.save(old, tmp_path / "old.ckpt")
        for stage in (adaptation, finetuning):
            with pytest.raises(ValueError, match="its modality is None, .* use model.init_from"):
                stage(kind).on_load_checkpoint(old)
            stage(kind, init_from=str(tmp_path / "old.ckpt")).configure_model()


def test_hyperparameters_are_plain(files):
    saved = torch.load(files["text"][1], weights_only=True)["hyper_parameters"]
    assert not {"init_from", "teacher_from", "pretrained"} & set(saved)
    json.dumps(saved)


@pytest.mark.parametrize(
    ("architecture", "args", "heads"),
    [
        ("resnet18", {}, {"fc.weight", "fc.bias"}),
        (
            "deit_tiny_distilled_patch16_224",
            {"img_size": 16, "embed_dim": 16, "depth": 1, "num_heads": 2},
            {"head.weight", "head.bias", "head_dist.weight", "head_dist.bias"},
        ),
    ],
)
def test_the_classifiers_of_other_models_are_heads(architecture, args, heads):
    module = Finetuning(CLASSES, architecture=architecture, model_args=args, method="linear")
    module.configure_model()
    trained = {name for name, one in module.model.named_parameters() if one.requires_grad}
    assert trained == heads
