"""The draw depends on (seed, step) only."""

import cpu_torchvision  # noqa: F401

import random
from collections import Counter
from types import SimpleNamespace

import pytest
import timm
import torch
from lightning import LightningModule

from callbacks.granularity import GranularitySampling
from lightning_modules.matformer import nest
from lightning_modules.matformer.nest import nesting_of


def draws(callback, steps=range(2000)):
    return [tuple(callback.draw(step, 4, 3)) for step in steps]


def test_draws_repeat_and_do_not_touch_other_generators():
    random.seed(1)
    torch.manual_seed(1)
    expected = random.Random(1).random()
    first = draws(GranularitySampling(seed=5))
    assert first == draws(GranularitySampling(seed=5))
    assert first != draws(GranularitySampling(seed=6))
    assert first[700:] == draws(GranularitySampling(seed=5), range(700, 2000))  # a resumed run
    assert random.random() == expected
    assert torch.rand(1) == torch.rand(1, generator=torch.Generator().manual_seed(1))


def test_the_runs_seed_is_the_default(monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "5")
    assert draws(GranularitySampling()) == draws(GranularitySampling(seed=5))
    monkeypatch.delenv("PL_GLOBAL_SEED")
    assert draws(GranularitySampling()) == draws(GranularitySampling(seed=0))


def test_one_granularity_for_all_layers_and_uniform():
    counts = Counter(draws(GranularitySampling()))
    assert set(counts) == {(i,) * 3 for i in range(4)}
    assert all(400 < count < 600 for count in counts.values())


def test_probabilities_of_table_6():
    probabilities = [0.17, 0.20, 0.22, 0.41]
    counts = Counter(
        chosen[0] for chosen in draws(GranularitySampling(probabilities), range(20000))
    )
    for index, probability in enumerate(probabilities):
        assert abs(counts[index] / 20000 - probability) < 0.015


def test_per_layer_draws_are_independent():
    counts = Counter(draws(GranularitySampling(per_layer=True), range(12800)))
    assert len(counts) == 64
    assert all(120 < count < 290 for count in counts.values())


def test_the_batches_of_one_step_share_a_granularity():
    module = LightningModule()
    module.model = nest(timm.create_model("vit_tiny_patch16_224", depth=2))
    sampling, drawn = GranularitySampling(seed=0), []
    for batch in range(16):  # accumulated in pairs
        trainer = SimpleNamespace(global_step=batch // 2)
        sampling.on_train_batch_start(trainer, module, None, batch)
        drawn.append([layer.granularity for layer in nesting_of(module.model).layers])
    assert drawn[::2] == drawn[1::2] == [sampling.draw(step, 4, 2) for step in range(8)]


@pytest.mark.parametrize(
    "probabilities", [[0.5, 0.5], [0.5, 0.5, 0.5, -0.5], [0.25, 0.25, 0.25, 0.26]]
)
def test_bad_probabilities(probabilities):
    module = LightningModule()
    module.model = nest(timm.create_model("vit_tiny_patch16_224", depth=1))
    with pytest.raises(ValueError, match="must be 4 numbers, one each for S, M, L, XL"):
        GranularitySampling(probabilities).on_train_start(None, module)
