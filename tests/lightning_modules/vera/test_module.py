"""The LightningModules: what they train, with which learning rate, and what they score."""

import copy
import math
import re
from functools import partial
from types import SimpleNamespace

import lightning as L
import pytest
import timm
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef
from timm.models import save_for_hf
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, BertModel

from callbacks.seeding import SeedEveryStep
from datamodules import InstructionData
from datamodules.tokens import train_tokenizer
from lightning_modules.apet.module import TextToTextTuning
from lightning_modules.backbones import build_text
from lightning_modules.labels import IGNORED
from lightning_modules.vera import (
    ImageTuning,
    LanguageTuning,
    TextTuning,
    load_adapter,
    save_adapter,
)
from lightning_modules.vera.scores import classification_scores, loss_of
from lightning_modules.vera.targets import resolve

BERT = {
    "vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 32, "max_position_embeddings": 16,
}  # fmt: skip
GPT2 = {"vocab_size": 50, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
VIT = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}


def text(num_classes=2, **arguments):
    module = TextTuning(num_classes, "bert", model_args=BERT, rank=4, **arguments)
    module.configure_model()
    return module


class FakeTrainer:
    """Says how long training is, as configure_optimizers asks."""

    estimated_stepping_batches = 100

    class fit_loop:
        _combined_loader = None


def test_two_learning_rates():
    module = text(lr=0.1, head_lr=0.01, weight_decay=0.5)
    module.trainer = FakeTrainer()
    setting = module.configure_optimizers()
    found = {}
    for group in setting["optimizer"].param_groups:
        for parameter in group["params"]:
            [name] = [n for n, p in module.model.named_parameters() if p is parameter]
            found[name] = (group["initial_lr"], group["weight_decay"])
    vectors = {n for n in found if "vera_" in n}
    assert len(vectors) == 2 * 2 * 2 and len(found) == len(vectors) + 2
    assert all(found[name] == (0.1, 0.0) for name in vectors)
    assert found["classifier.weight"] == (0.01, 0.5) and found["classifier.bias"] == (0.01, 0.0)


@pytest.mark.parametrize(("warmup", "steps"), [(0.06, 6), (20, 20), (0, 0)])
def test_warmup_is_a_share_or_a_number_of_steps(warmup, steps):
    module = text(warmup=warmup)
    module.trainer = FakeTrainer()
    schedule = module.configure_optimizers()["lr_scheduler"]["scheduler"]
    factors = [schedule.lr_lambdas[0](step) for step in range(101)]
    assert factors.index(max(factors)) == steps and factors[100] == 0


@pytest.mark.parametrize(
    ("module", "heads", "adapted"),
    [
        (TextTuning(3, "bert", model_args=BERT, rank=4), ["classifier"], ("query", "value")),
        (
            TextTuning(2, "gpt2", model_args={**GPT2, "pad_token_id": 0}, rank=4),
            ["score"],
            ("c_attn",),
        ),
        (ImageTuning(3, "vit_tiny_patch16_224", model_args=VIT, rank=4), ["head"], ("qkv",)),
        (
            ImageTuning(3, "deit_tiny_distilled_patch16_224", model_args=VIT, rank=4),
            ["head", "head_dist"],
            ("qkv",),
        ),
        (LanguageTuning("gpt2", model_args=GPT2, rank=4), [], ("c_attn",)),
    ],
    ids=["bert", "gpt2", "vit", "two heads", "language"],
)
def test_heads_and_targets_are_found(module, heads, adapted):
    module.configure_model()
    assert module.heads == heads
    layers = module.model.vera.layers
    assert {name.rpartition(".")[2] for name in layers} == set(adapted)
    if adapted[0] in ("c_attn", "qkv"):
        assert set(layers.values()) == {("q", "v")}


def test_an_unknown_family_has_to_be_told_its_targets():
    module = ImageTuning(3, "resnet18", rank=4)
    with pytest.raises(ValueError, match=r"ResNet has no attention.*; or give model\.targets"):
        module.configure_model()


@pytest.mark.parametrize("classes", [2, 4])
def test_scores_are_of_the_whole_set(classes):
    """Not the mean over batches, against scikit-learn; what only pads does not count."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(classes, (37,), generator=generator)
    guesses = torch.where(torch.rand(37, generator=generator) < 0.6, labels, 0)
    scores = classification_scores(classes)
    for label, guess in zip(labels.split(5), guesses.split(5), strict=True):
        scores.update(guess, label)
    found = {name: value.item() for name, value in scores.compute().items()}
    average = "binary" if classes == 2 else "macro"
    assert found == pytest.approx(
        {
            "accuracy": accuracy_score(labels, guesses),
            "f1": f1_score(labels, guesses, average=average),
            "matthews": matthews_corrcoef(labels, guesses),
            "classes_predicted": len(guesses.unique()),
        },
        abs=1e-6,
    )


@pytest.mark.parametrize("classes", [2, 4])
def test_guessing_one_class_correlates_with_nothing(classes):
    labels = torch.arange(12) % classes
    guesses = torch.ones_like(labels)
    scores = classification_scores(classes)
    for guess, label in [(guesses, labels), (labels, guesses)]:
        scores.reset()
        scores.update(guess, label)
        assert scores.compute()["matthews"] == matthews_corrcoef(label, guess) == 0
        assert scores.compute()["classes_predicted"] == len(guess.unique())


def test_regression_scores_are_of_the_whole_set():
    generator = torch.Generator().manual_seed(0)
    labels = torch.rand(37, generator=generator) * 5
    guesses = labels + torch.randn(37, generator=generator)
    scores = classification_scores(1)
    for label, guess in zip(labels.split(5), guesses.split(5), strict=True):
        scores.update(guess, label)
    found = {name: value.item() for name, value in scores.compute().items()}
    expected = {"pearson": pearsonr, "spearman": spearmanr}
    for name, reference in expected.items():
        assert found[name] == pytest.approx(reference(guesses, labels).statistic, abs=1e-5)


def test_padding_rows_are_left_out():
    module = text()
    module.eval()
    ids = torch.arange(2, 14).view(3, 4)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    logits, targets = module.outputs({**batch, "labels": torch.tensor([1, IGNORED, 0])})
    whole = module.predict_step({**batch, "labels": torch.tensor([1, 0, 0])}, 0)
    assert torch.equal(logits, whole[[0, 2]]) and targets.tolist() == [1, 0]
    module.validation_step({**batch, "labels": torch.full((3,), IGNORED)}, 0)
    assert module.mean_loss.weight == 0


def test_the_language_loss_is_the_mean_over_the_tokens_that_count():
    """Against a loop over tokens, with label smoothing, in float64."""
    module = LanguageTuning("gpt2", model_args=GPT2, rank=4, label_smoothing=0.1)
    module.configure_model()
    module.double().eval()
    ids = torch.tensor([[5, 6, 7, 8, 9], [10, 11, 12, 0, 0]])
    labels = torch.tensor([[IGNORED, IGNORED, 7, 8, 9], [IGNORED, 11, 12, IGNORED, IGNORED]])
    mask = (ids > 0).long()
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    logits, targets = module.outputs(batch)
    found = loss_of(logits, targets, 0.1)
    everything = module.model(ids, attention_mask=mask).logits
    losses = []
    for row in range(2):
        for place in range(1, 5):
            if labels[row, place] != IGNORED:
                log = everything[row, place - 1].log_softmax(-1)
                losses.append(-(0.9 * log[labels[row, place]] + 0.1 * log.mean()).item())
    assert len(losses) == 5
    assert found.item() == pytest.approx(sum(losses) / 5, abs=1e-6)


def test_loss_of_scores_is_their_squared_error():
    assert loss_of(torch.tensor([1.0, 3.0]), torch.tensor([0.0, 1.0])).item() == 2.5
    assert loss_of(torch.zeros(2, 4).bfloat16(), torch.tensor([0, 1])).item() == pytest.approx(
        math.log(4)
    )


def test_only_the_method_trains():
    module = text(num_classes=2)
    ids = torch.arange(2, 14).view(3, 4)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    labels = torch.tensor([1, 0, 1])
    loss_of(*module.outputs({**batch, "labels": labels})).backward()
    with_gradient = {n for n, p in module.model.named_parameters() if p.grad is not None}
    adapted = ("query.vera_b", "query.vera_d", "value.vera_b", "value.vera_d")
    layers = range(BERT["num_hidden_layers"])
    assert with_gradient == {"classifier.weight", "classifier.bias"} | {
        f"bert.encoder.layer.{n}.attention.self.{name}" for n in layers for name in adapted
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 8}, "its rank is 8, this run's is 4"),
        ({"method_args": {"seed": 1}}, "its method_args is {'seed': 1"),
        ({"method_args": {"train": ["b"]}}, "its method_args is .*'train': \\['b'\\]"),
        ({"method": "lora"}, "its method is 'lora', this run's is 'vera'"),
        ({"architecture": "roberta"}, "its architecture is 'roberta'"),
    ],
)
def test_the_checkpoint_of_another_model_is_refused(change, message):
    module = text()
    saved = {**module.hparams, **change}
    module.on_load_checkpoint({"hyper_parameters": dict(module.hparams)})
    with pytest.raises(ValueError, match=message):
        module.on_load_checkpoint({"hyper_parameters": saved})


def test_what_adapters_were_added_to_is_not_random_afterwards(tmp_path):
    lora = text(method="lora")
    torch.save({"state_dict": lora.state_dict()}, tmp_path / "lora.ckpt")
    with pytest.raises(
        ValueError, match="query.weight, .*merge those of a run with adapters first"
    ):
        text(init_from=str(tmp_path / "lora.ckpt"))
    plain = text(method="full")
    state = {n: v for n, v in plain.state_dict().items() if "classifier" not in n}
    torch.save({"state_dict": state}, tmp_path / "plain.ckpt")  # the head may be new
    text(init_from=str(tmp_path / "plain.ckpt"))


class Tokens(L.LightningDataModule):
    """What a model is told of the tokenizer, and one batch."""

    def __init__(self, vocab_size, length=4):
        super().__init__()
        self.vocab_size, self.pad_token_id, self.length = vocab_size, 0, length

    def predict_dataloader(self):
        ids = torch.ones(2, self.length, dtype=torch.int64)
        return DataLoader([{"input_ids": ids, "attention_mask": ids}], batch_size=None)


def predict(module, data):
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
    return trainer.predict(module, data)


def test_model_and_tokenizer_have_to_fit():
    module, known = TextTuning(2, "bert", model_args=BERT, rank=4), BERT["vocab_size"]
    with pytest.raises(ValueError, match=f"has {known + 1} tokens and the model embeds {known}: "):
        predict(module, Tokens(known + 1))
    with pytest.raises(
        ValueError, match="a text has 17 tokens and the model 16 positions: set dat"
    ):
        predict(module, Tokens(known, 17))
    prompted = TextTuning(2, "bert", method="prompt", model_args=BERT, rank=4)
    with pytest.raises(
        ValueError, match="a text has 13 tokens after a prompt of 4 and .*max_length to 12 or less"
    ):
        predict(prompted, Tokens(known, 13))
    [logits] = predict(prompted, Tokens(known, 12))
    assert logits.shape == (2, 2)
    [logits] = predict(TextTuning(2, "gpt2", model_args=GPT2, rank=2), Tokens(50))
    assert logits.shape == (2, 2)  # transformers wants a padding token for that


@pytest.mark.parametrize("kind", [partial(TextTuning, 2), LanguageTuning, TextToTextTuning])
def test_a_pre_trained_model_reads_its_own_tokens(kind, tmp_path):
    """Another tokenizer of no more tokens trained it on other words, without a word."""
    own, other = str(tmp_path / "own"), str(tmp_path / "other")
    build_text("gpt2", "causal", {**GPT2, "vocab_size": 270}).save_pretrained(own)
    train_tokenizer([], 259).save_pretrained(own)
    train_tokenizer(["a word, another word"], 262).save_pretrained(other)

    def built(tokenizer, pretrained=True):
        module = kind(architecture=own, pretrained=pretrained)
        data = InstructionData(source="generated", tokenizer=tokenizer)
        module.trainer = SimpleNamespace(datamodule=data)
        return module.build()

    built(own)
    built(other, pretrained=False)
    with pytest.raises(
        ValueError, match="own has another tokenizer, of 259 .*: set --data.tokeniz"
    ):
        built(other)


class FakeData:
    """Gives the vocabulary and the padding token, as a DataModule does."""

    vocab_size, pad_token_id = 50, 0


@pytest.mark.parametrize("kind", ["gpt2", "opt"])
def test_a_decoder_reads_the_last_token_that_is_no_padding(kind, tmp_path):
    """Of the data's padding, whatever its configuration says; from a checkpoint alone, too."""
    sizes = {"opt": {"vocab_size": 50, "hidden_size": 16, "word_embed_proj_dim": 16, "ffn_dim": 32,
                     "num_hidden_layers": 2, "num_attention_heads": 2}, "gpt2": GPT2}  # fmt: skip
    module = TextTuning(2, kind, model_args=sizes[kind], rank=4)
    module.trainer = SimpleNamespace(datamodule=FakeData())
    module.configure_model()
    module.trainer = None
    content = {"state_dict": module.state_dict(), "hyper_parameters": dict(module.hparams)}
    module.on_save_checkpoint(content)
    torch.save({**content, "pytorch-lightning_version": L.__version__}, tmp_path / "one.ckpt")
    loaded = TextTuning.load_from_checkpoint(tmp_path / "one.ckpt", weights_only=True)
    ids = torch.tensor([[4, 5, 6, 7], [8, 9, 0, 0]])
    batch = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    short = {name: value[1:, :2] for name, value in batch.items()}
    for one in (module.eval(), loaded.eval()):
        assert torch.allclose(one.predict_step(batch, 0)[1:], one.predict_step(short, 0))


def test_the_arguments_of_another_method_are_refused():
    with pytest.raises(ValueError, match="has 'alpha', .* of method 'vera': expected d_init, seed"):
        text(method_args={"alpha": 2.0})
    with pytest.raises(ValueError, match="has 'd_init', .* of method 'full': expected none"):
        text(method="full", method_args={"d_init": 2.0})


class Sentences(L.LightningDataModule):
    """Eight sentences of two classes, in batches of four."""

    def train_dataloader(self):
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(2, 50, (8, 6), generator=generator)
        rows = [
            {"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row[0] % 2}
            for row in ids
        ]
        return DataLoader(rows, batch_size=4)

    val_dataloader = train_dataloader


def fit(module, folder, epochs=2, ckpt_path=None, **arguments):
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=epochs, logger=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder, num_sanity_val_steps=0,
        **{"enable_checkpointing": False, **arguments},
    )  # fmt: skip
    trainer.fit(module, Sentences(), ckpt_path=ckpt_path, weights_only=True)
    return trainer


def vectors(module):
    return {n: p.detach().clone() for n, p in module.named_parameters() if "vera_" in n}


def test_bf16_true_keeps_the_vectors_in_float32(tmp_path):
    """Near 0.1 a bfloat16 has steps of 5e-4: updates of 1e-4 would not move d."""
    module = TextTuning(2, "bert", model_args=BERT, rank=4, lr=1e-4, warmup=0)
    fit(module, tmp_path, precision="bf16-true")
    assert module.model.bert.embeddings.word_embeddings.weight.dtype == torch.bfloat16
    for name, vector in vectors(module).items():
        assert vector.dtype == torch.float32, name
        start = 0.1 if "vera_d" in name else 0.0
        moved = (vector - start).abs()
        assert (moved > 0).any() and moved.max() < 1e-3, name


def test_fused_adamw_clips_under_bf16_mixed_on_a_cpu(tmp_path):
    module = text(warmup=0)
    before = vectors(module)
    trainer = fit(module, tmp_path, precision="bf16-mixed", gradient_clip_val=1e-9)
    assert trainer.optimizers[0].param_groups[0]["fused"]
    # clipped to far below AdamW's epsilon of 1e-8, so that the steps stay small
    after = vectors(module)
    moved = max((after[name] - before[name]).abs().max().item() for name in before)
    assert 0 < moved < 4e-4 < 4 * module.hparams.lr


def test_a_checkpoint_of_the_adapter_alone_resumes(tmp_path):
    torch.manual_seed(0)
    base = text(method="full")
    torch.save({"state_dict": base.state_dict()}, tmp_path / "base.ckpt")

    def build(file="base.ckpt"):
        torch.manual_seed(1)
        return text(init_from=str(tmp_path / file), adapter_only=True, warmup=0)

    once, rest, half = build(), build(), build()
    saving = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    fit(once, tmp_path, callbacks=[saving, SeedEveryStep()], enable_checkpointing=True)
    with torch.no_grad():
        for parameter in rest.parameters():  # what the checkpoint, or the base, has to replace
            parameter.add_(parameter.requires_grad)
    fit(rest, tmp_path, ckpt_path=tmp_path / "epoch=0.ckpt", callbacks=[SeedEveryStep()])
    for name, value in once.state_dict().items():
        assert torch.equal(rest.state_dict()[name], value), name
    trainer = fit(half, tmp_path, epochs=1, enable_checkpointing=True)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    saved = torch.load(tmp_path / "half.ckpt", weights_only=True)
    names = saved["state_dict"].keys()
    assert {n for n in names if "vera_" not in n} == {
        "model.classifier.weight", "model.classifier.bias"
    }  # fmt: skip
    assert (tmp_path / "half.ckpt").stat().st_size < (tmp_path / "base.ckpt").stat().st_size
    loaded = TextTuning.load_from_checkpoint(tmp_path / "half.ckpt")  # finds its base by itself
    for name, value in half.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    other = text(method="full")
    torch.save({"state_dict": other.state_dict()}, tmp_path / "other.ckpt")
    wrong = build("other.ckpt")
    with pytest.raises(ValueError, match="trained on another base than .*other.ckpt is now"):
        wrong.on_load_checkpoint(copy.deepcopy(saved))
    del saved["state_dict"]["model.classifier.bias"]
    with pytest.raises(ValueError, match="such as model.classifier.bias"):
        build().on_load_checkpoint(saved)


@pytest.mark.parametrize("named", [True, False])
def test_what_the_base_does_not_give_is_in_the_checkpoint_of_an_adapter(tmp_path, named):
    """bge-small comes without the pooler that its classifier reads: a frozen, random matrix."""
    if named:
        base = BertModel(BertConfig(**BERT), add_pooling_layer=False)
        base.save_pretrained(tmp_path / "base")
        start = {"architecture": str(tmp_path / "base"), "pretrained": True}
    else:
        state = {n: v for n, v in text(method="full").state_dict().items() if "pooler" not in n}
        torch.save({"state_dict": state}, tmp_path / "base.ckpt")
        start = {"architecture": "bert", "model_args": BERT}
        start["init_from"] = str(tmp_path / "base.ckpt")
    module = TextTuning(2, **start, method="bitfit", adapter_only=True)
    trainer = fit(module, tmp_path, epochs=1, enable_checkpointing=True)
    trainer.save_checkpoint(tmp_path / "tuned.ckpt")
    saved = torch.load(tmp_path / "tuned.ckpt", weights_only=True)["state_dict"]
    assert "model.bert.pooler.dense.weight" in saved
    assert "model.bert.encoder.layer.0.output.dense.weight" not in saved
    torch.manual_seed(7)
    loaded = TextTuning.load_from_checkpoint(tmp_path / "tuned.ckpt")
    for name, value in module.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


def test_a_checkpoint_says_what_the_base_s_files_lack(tmp_path):
    """So that an adapter that is written from it holds the pooler, too."""
    base = BertModel(BertConfig(**BERT), add_pooling_layer=False)
    base.save_pretrained(tmp_path / "base")
    module = TextTuning(2, str(tmp_path / "base"), pretrained=True, rank=4, lr=0.1, warmup=0)
    trainer = fit(module, tmp_path, epochs=1)
    trainer.save_checkpoint(tmp_path / "tuned.ckpt")
    loaded = TextTuning.load_from_checkpoint(tmp_path / "tuned.ckpt").model.eval()
    pooler = {"bert.pooler.dense.weight", "bert.pooler.dense.bias"}
    assert loaded.at_random == pooler
    folder = save_adapter(loaded, tmp_path / "adapter")
    again = BertForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=2).eval()
    load_adapter(again, folder)
    ids = torch.arange(2, 14).view(3, 4)
    assert torch.equal(again(ids).logits, loaded(ids).logits)
    fit(text(warmup=0), tmp_path, epochs=1).save_checkpoint(tmp_path / "random.ckpt")
    assert "at_random" not in torch.load(tmp_path / "random.ckpt", weights_only=True)


def test_a_new_head_that_stands_still_is_in_the_checkpoint_of_an_adapter(tmp_path):
    base = timm.create_model("vit_tiny_patch16_224", num_classes=0, **VIT)
    save_for_hf(base, tmp_path, model_args={**VIT, "num_classes": 0}, safe_serialization=True)
    settings = {"architecture": f"local-dir:{tmp_path}", "pretrained": True, "adapter_only": True}
    module = ImageTuning(3, **settings, method="lora", rank=2, heads=[])
    module.configure_model()
    checkpoint = {"state_dict": module.state_dict(), "hyper_parameters": dict(module.hparams)}
    module.on_save_checkpoint(checkpoint)
    assert "model.head.weight" in checkpoint["state_dict"]
    assert "model.blocks.0.mlp.fc1.weight" not in checkpoint["state_dict"]
    torch.save({**checkpoint, "pytorch-lightning_version": "2.6.0"}, tmp_path / "lora.ckpt")
    loaded = ImageTuning.load_from_checkpoint(tmp_path / "lora.ckpt")
    for name, value in module.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    loaded.model.blocks[0].mlp.fc1.weight.data.add_(1)
    with pytest.raises(ValueError, match="trained on another base"):
        loaded.on_load_checkpoint(checkpoint)


def test_an_adapter_alone_needs_a_base_that_can_be_found_again():
    with pytest.raises(ValueError, match="set model.pretrained or model.init_from"):
        text(adapter_only=True)


def test_a_head_may_stand_still():
    module = text(lr=0.1, head_lr=0.0)
    module.trainer = FakeTrainer()
    groups = module.configure_optimizers()["optimizer"].param_groups
    assert {group["initial_lr"] for group in groups} == {0.1, 0.0}


@pytest.mark.parametrize("name", ["beit_base_patch16_224", "swinv2_tiny_window8_256"])
def test_layers_that_are_not_called_are_refused(name):
    with torch.device("meta"):
        model = timm.create_model(name, depth=1) if "beit" in name else timm.create_model(name)
    with pytest.raises(ValueError, match="qkv, whose weight is read without calling the layer"):
        resolve(model, ["qkv"], [])


def test_layers_of_torch_s_own_blocks_are_refused():
    """Their fast path of evaluation reads the weights."""
    block = torch.nn.TransformerEncoderLayer(16, 2, 32)
    with pytest.raises(ValueError, match="linear1, whose weight is read without calling"):
        resolve(torch.nn.Sequential(block), ["linear1"], [])


def test_targets_mean_the_same_to_lora_and_vera():
    for targets in (["qkv", "blocks.*.mlp.fc1"], ["all-linear"]):
        adapted = []
        for method in ("vera", "lora"):
            module = ImageTuning(
                3, "vit_tiny_patch16_224", model_args=VIT, rank=4, method=method, targets=targets
            )
            module.configure_model()
            trained = (n for n, p in module.model.named_parameters() if p.requires_grad)
            adapted.append(
                {re.split(r"\.(?:vera_|lora_)", n)[0] for n in trained if not n.startswith("head")}
            )
        assert adapted[0] == adapted[1] and len(adapted[0]) >= 4


@pytest.mark.parametrize("method", ["full", "head", "bitfit"])
def test_methods_without_targets_need_no_known_attention(method):
    module = ImageTuning(3, "resnet18", method=method, rank=4)
    module.configure_model()
    assert any(p.requires_grad for p in module.model.parameters())


def test_what_cannot_train_is_said():
    with pytest.raises(ValueError, match="method head trains nothing in this model: give model.he"):
        text(method="head", heads=[])
    with pytest.raises(ValueError, match="apet needs model.method_args.budget"):
        text(method="apet")


def test_a_head_that_is_not_trained_in_full_may_be_missing(tmp_path):
    """APET without heads starts from weights without a classifier (apet.counts)."""
    weights = BertModel(BertConfig(**BERT)).state_dict()
    torch.save({f"bert.{name}": value for name, value in weights.items()}, tmp_path / "mlm.pt")
    apet = {"method": "apet", "heads": [], "method_args": {"budget": 50}}
    started = text(**apet, init_from=str(tmp_path / "mlm.pt"))
    classifier = {"classifier.weight", "classifier.bias"}
    assert started.model.at_random == classifier
    of_three = text(num_classes=3, method="full").state_dict()
    torch.save({"state_dict": of_three}, tmp_path / "three.ckpt")
    assert text(**apet, init_from=str(tmp_path / "three.ckpt")).model.at_random == classifier
