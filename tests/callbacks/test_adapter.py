"""The adapter is left behind when training ends, and loads into its base."""

import copy
import json
from types import SimpleNamespace

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import load_file
from torch.utils.data import DataLoader

from callbacks.adapter import SaveAdapter, best_checkpoint
from lightning_modules.vera import ImageTuning, load_adapter, strip

VIT = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}


def train(folder, method, **settings):
    generator = torch.Generator().manual_seed(0)
    samples = [(torch.randn(3, 16, 16, generator=generator), i % 3) for i in range(6)]
    module = ImageTuning(3, "vit_tiny_patch16_224", model_args=VIT, method=method, rank=4, lr=0.1)
    module.configure_model()
    base = strip(copy.deepcopy(module.model)) if method == "vera" else None
    given = {"logger": False, "enable_checkpointing": False, "callbacks": [SaveAdapter()]}
    trainer = L.Trainer(
        max_epochs=1, accelerator="cpu", enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder, **{**given, **settings},
    )  # fmt: skip
    trainer.fit(module, DataLoader(samples, 2))
    return module, base


def test_an_adapter_is_saved_and_loads_into_the_base(tmp_path):
    module, base = train(tmp_path, "vera")
    module.eval()
    images = torch.randn(2, 3, 16, 16)
    assert not torch.allclose(base.eval()(images), module.model(images))
    load_adapter(base, tmp_path / "adapter")
    torch.testing.assert_close(base(images), module.model(images))


def test_it_is_written_beside_checkpoints_that_are_kept_elsewhere(tmp_path):
    """Before, `--checkpoint.dirpath` left the adapter in the folder of every other run."""
    callbacks = [SaveAdapter(), ModelCheckpoint(tmp_path / "mine")]
    train(tmp_path / "run", "vera", callbacks=callbacks, enable_checkpointing=True)
    assert (tmp_path / "mine" / "adapter").is_dir() and not (tmp_path / "run" / "adapter").exists()
    callbacks = [SaveAdapter(), ModelCheckpoint(tmp_path / "run" / "checkpoints")]
    train(tmp_path / "run", "vera", callbacks=callbacks, enable_checkpointing=True)
    assert (tmp_path / "run" / "adapter").is_dir()


def test_runs_of_the_current_folder_overwrite_no_adapter_of_each_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for run in ("one", "two"):
        callbacks = [SaveAdapter(), ModelCheckpoint(run)]
        train(tmp_path, "vera", callbacks=callbacks, enable_checkpointing=True)
        assert (tmp_path / run / "adapter").is_dir()
    assert not (tmp_path / "adapter").exists()


def test_a_smoke_test_overwrites_no_adapter(tmp_path):
    train(tmp_path, "vera", fast_dev_run=True)
    assert not (tmp_path / "adapter").exists()


def test_other_methods_have_none(tmp_path, caplog):
    with caplog.at_level("INFO"):
        train(tmp_path, "lora")
    assert "no VeRA adapter to save" in caplog.text and not (tmp_path / "adapter").exists()


class Digits(L.LightningDataModule):
    """Six images of three classes; the validation loss rises after the first epoch."""

    class_names, tokenizer_name = ["one", "two", "three"], None

    def train_dataloader(self):
        generator = torch.Generator().manual_seed(0)
        return DataLoader(
            [(torch.randn(3, 16, 16, generator=generator), i % 3) for i in range(6)], 2
        )

    def val_dataloader(self):
        generator = torch.Generator().manual_seed(0)
        return DataLoader(
            [(torch.randn(3, 16, 16, generator=generator), (i + 1) % 3) for i in range(6)], 2
        )


def test_the_adapter_is_that_of_the_best_checkpoint(tmp_path):
    torch.manual_seed(0)
    module = ImageTuning(3, "vit_tiny_patch16_224", model_args=VIT, rank=4, lr=0.05, warmup=0)
    best = ModelCheckpoint(tmp_path, "best", monitor="val/loss")
    trainer = L.Trainer(
        max_epochs=4, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path, callbacks=[SaveAdapter(), best],
    )  # fmt: skip
    trainer.fit(module, datamodule=Digits())
    state = torch.load(tmp_path / "best.ckpt", weights_only=True)["state_dict"]
    assert not torch.equal(state["model.head.weight"], module.model.head.weight)  # not the last
    saved = load_file(tmp_path / "adapter" / "adapter.safetensors")
    assert torch.equal(saved["head.head.weight"], state["model.head.weight"])
    names = [f"model.blocks.{i}.attn.qkv.vera_b_{label}" for i in (0, 1) for label in "qv"]
    assert torch.equal(saved["b"], torch.cat([state[name] for name in names]))
    manifest = json.loads((tmp_path / "adapter" / "manifest.json").read_text())
    assert manifest["base"] == "vit_tiny_patch16_224" and manifest["tokenizer"] is None
    assert manifest["classes"] == ["one", "two", "three"]


def test_no_best_checkpoint_or_a_sharded_one(tmp_path, caplog):
    """Before the first save the path is empty; only SaveAdapter speaks of the adapter."""
    module = ImageTuning(3, "vit_tiny_patch16_224", model_args=VIT, rank=4)
    module.configure_model()
    monitor = ModelCheckpoint(tmp_path, "best", monitor="val/loss")
    trainer = SimpleNamespace(
        checkpoint_callbacks=[monitor], default_root_dir=tmp_path, fast_dev_run=False
    )
    assert best_checkpoint(trainer) is None
    SaveAdapter(tmp_path / "first").on_fit_end(trainer, module)
    assert not caplog.text and (tmp_path / "first" / "manifest.json").is_file()
    shards = tmp_path / "shards"
    shards.mkdir()
    monitor.best_model_path = str(shards)
    assert best_checkpoint(trainer) is monitor and not caplog.text
    SaveAdapter(tmp_path / "second").on_fit_end(trainer, module)
    assert f"{shards} is sharded; the adapter is that of the last step" in caplog.text
    assert (tmp_path / "second" / "manifest.json").is_file()
