"""The adapter is left behind when training ends, and loads into its base."""

import copy

import lightning as L
import torch
from torch.utils.data import DataLoader

from callbacks.adapter import SaveAdapter
from lightning_modules.vera import ImageTuning, load_adapter, strip

VIT = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}


def train(folder, method):
    generator = torch.Generator().manual_seed(0)
    samples = [(torch.randn(3, 16, 16, generator=generator), i % 3) for i in range(6)]
    module = ImageTuning(3, "vit_tiny_patch16_224", model_args=VIT, method=method, rank=4, lr=0.1)
    module.configure_model()
    base = strip(copy.deepcopy(module.model)) if method == "vera" else None
    trainer = L.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
        callbacks=[SaveAdapter()],
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


def test_other_methods_have_none(tmp_path, caplog):
    with caplog.at_level("INFO"):
        train(tmp_path, "lora")
    assert "no VeRA adapter to save" in caplog.text and not (tmp_path / "adapter").exists()
