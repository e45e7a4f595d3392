"""Each sample once, each draw the same whatever loads it, and a resumed run as if never stopped."""

import cpu_torchvision  # noqa: F401

import random
from collections.abc import Iterator
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import Dataset

from datamodules.loading import (
    IGNORED,
    ResumableLoader,
    SeededDataset,
    SeededSampler,
    build_loader,
    draw,
)

# A resumed run here saves nothing, so it does without the callback that wrote its checkpoint.
pytestmark = pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")


class Numbers(Dataset):
    """Sample i is (i, a number of each generator), its label i + 1; it notes what it was asked."""

    def __init__(self, count: int = 14) -> None:
        self.count, self.asked = count, []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.asked.append(index)
        noise = [torch.rand(()).item(), np.random.rand(), random.random()]
        return torch.tensor([index, *noise], dtype=torch.float64), index + 1


def draws(count: int, replicas: int, epoch: int = 0, **kwargs) -> list[list[tuple]]:
    """The draws of each rank."""
    samplers = [SeededSampler(Numbers(count), replicas, rank, **kwargs) for rank in range(replicas)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    return [list(sampler) for sampler in samplers]


def interleaved(ranks: list[list[tuple]]) -> list[tuple]:
    return [draw for row in zip(*ranks, strict=True) for draw in row]


@pytest.mark.parametrize("count", [1, 7, 8, 9])
@pytest.mark.parametrize("replicas", [1, 2, 5])
def test_evaluation_has_each_sample_once(count, replicas):
    ranks = draws(count, replicas, shuffle=False)
    valid = [index for index, _, valid in interleaved(ranks) if valid]
    assert valid == list(range(count))
    assert len({len(rank) for rank in ranks}) == 1
    assert ranks == draws(count, replicas, epoch=3, shuffle=False)


def test_ranks_share_one_order():
    alone = draws(13, 1, epoch=2)[0]
    for replicas in (2, 3, 4):
        shared = interleaved(draws(13, replicas, epoch=2))
        assert shared == alone[: 13 // replicas * replicas]


def test_order_and_seeds_depend_on_seed_and_epoch():
    first = draws(50, 1)[0]
    assert first == draws(50, 1)[0]
    assert sorted(index for index, _, _ in first) == list(range(50))
    others = [draws(50, 1, epoch=1)[0], draws(50, 1, seed=1)[0], draws(50, 1, epoch=1, seed=1)[0]]
    for other in others:
        assert [draw[0] for draw in other] != [draw[0] for draw in first]
        assert not {draw[1] for draw in other} & {draw[1] for draw in first}
    assert others[0] != others[1]


def test_repeats_fill_an_epoch_of_the_same_length_with_copies_side_by_side():
    ranks = draws(12, 3, repeats=3)
    everything = interleaved(ranks)
    assert len(everything) == 12
    assert [rank[0] for rank in [[d[0] for d in r] for r in ranks]] == [everything[0][0]] * 3
    assert len({index for index, _, _ in everything}) == 4
    assert len({seed for _, seed, _ in everything}) == 12
    with pytest.raises(ValueError, match="repeats is 0"):
        draws(12, 1, repeats=0)


def test_a_draw_neither_reads_nor_moves_the_global_generators():
    dataset = SeededDataset(Numbers())
    state = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    first = dataset[3, 77, True]
    torch.rand(5), np.random.rand(5), random.random()
    second = dataset[3, 77, True]
    assert torch.equal(first[0], second[0])
    assert not torch.equal(first[0], dataset[3, 78, True][0])
    torch.set_rng_state(state[0])
    random.setstate(state[2])
    dataset[3, 77, True]
    assert torch.equal(torch.get_rng_state(), state[0])
    assert random.getstate() == state[2]


def test_a_pass_does_not_move_the_global_generator():
    before = torch.get_rng_state()
    for training in (True, False):
        list(build_loader(Numbers(), 4, training=training))
    assert torch.equal(torch.get_rng_state(), before)


def test_what_only_fills_up_is_ignored():
    assert SeededDataset(Numbers())[3, 0, False][1] == IGNORED
    words = [{"input_ids": torch.ones(4, dtype=torch.long), "labels": torch.arange(4)}]
    sample = SeededDataset(words)[0, 0, False]
    assert sample["labels"].tolist() == [IGNORED] * 4
    assert sample["input_ids"].tolist() == [1] * 4
    assert words[0]["labels"].tolist() == [0, 1, 2, 3]


def test_workers_change_nothing():
    alone, helped = (build_loader(Numbers(), 4, training=True, num_workers=n) for n in (0, 2))
    for epoch in (0, 1):
        for loader in (alone, helped):
            loader.sampler.set_epoch(epoch)
        for (x, label), (other_x, other_label) in zip(alone, helped, strict=True):
            assert torch.equal(x, other_x)
            assert torch.equal(label, other_label)


def test_training_drops_a_batch_that_is_not_full_unless_it_is_the_only_one():
    assert [len(x) for x, _ in build_loader(Numbers(14), 4, training=True)] == [4, 4, 4]
    assert [len(x) for x, _ in build_loader(Numbers(3), 4, training=True)] == [3]
    assert [len(x) for x, _ in build_loader(Numbers(14), 4, training=False)] == [4, 4, 4, 2]


def test_skipped_samples_are_not_loaded():
    numbers = Numbers()
    loader = build_loader(numbers, 4, training=True)
    whole = [x for x, _ in loader]
    numbers.asked.clear()
    loader = build_loader(numbers, 4, training=True)
    loader.load_state_dict({"epoch": 0, "batches": 2, "length": 3})
    (rest,) = [x for x, _ in loader]
    assert torch.equal(rest, whole[2])
    assert len(numbers.asked) == 4
    assert loader.state_dict() == {"epoch": 1, "batches": 0, "length": 3}


def test_bad_use_is_named():
    loader = build_loader(Numbers(), 4, training=True)
    with pytest.raises(ValueError, match="epoch of 7 batches and this run's epochs have 3"):
        loader.load_state_dict({"epoch": 0, "batches": 2, "length": 7})
    loader.load_state_dict({"epoch": 2, "batches": 0, "length": 7})  # between epochs all is well
    with pytest.raises(ValueError, match="overfit_batches=2"):
        build_loader(
            Numbers(), 4, training=True, trainer=L.Trainer(overfit_batches=2, logger=False)
        )
    with pytest.raises(ValueError, match="has 0 samples"):
        build_loader(Numbers(0), 4, training=True)


# Resuming under Lightning.


class Recorder(L.LightningModule):
    """Writes down what each training step gets."""

    def __init__(self, workers: int) -> None:
        super().__init__()
        self.layer, self.workers = torch.nn.Linear(4, 1, dtype=torch.float64), workers
        self.seen: list[list[float]] = []

    def train_dataloader(self) -> ResumableLoader:
        return build_loader(Numbers(), 4, training=True, num_workers=self.workers)  # 3 batches

    def val_dataloader(self):
        return build_loader(Numbers(5), 4, training=False)

    def training_step(self, batch, batch_idx):
        self.seen += batch[0].tolist()
        return self.layer(batch[0]).mean()

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def run(workers: int = 0, ckpt: Path | None = None, save: ModelCheckpoint | None = None, **kwargs):
    """Trains and returns (what was seen, the trainer)."""
    module = Recorder(workers)
    trainer = L.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=save,
        enable_checkpointing=save is not None,
        **{"max_epochs": -1, **kwargs},
    )
    trainer.fit(module, ckpt_path=ckpt)
    return module.seen, trainer


@pytest.fixture(scope="module")
def uninterrupted() -> Iterator[list[list[float]]]:
    seen, _ = run(max_epochs=4)
    assert len(seen) == 4 * 3 * 4
    yield seen


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", [1, 2, 3, 5, 6])
def test_stopped_by_max_steps_and_saved_afterwards(stop, workers, uninterrupted, tmp_path):
    before, trainer = run(workers, max_steps=stop)
    trainer.save_checkpoint(tmp_path / "stop.ckpt")
    after, _ = run(workers, tmp_path / "stop.ckpt", max_steps=12)
    assert before + after == uninterrupted


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("every", [2, 3, 4, 5])
@pytest.mark.parametrize("limit", [{"max_steps": 12}, {"max_epochs": 4}], ids=str)
def test_saved_by_the_way_of_a_run_that_went_on(every, limit, workers, uninterrupted, tmp_path):
    save = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=every, save_top_k=-1)
    went_on, _ = run(workers, save=save, max_steps=7)
    assert went_on == uninterrupted[: 7 * 4]
    after, _ = run(workers, tmp_path / f"step={every}.ckpt", **limit)
    assert after == uninterrupted[every * 4 :]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("validate", [True, False])
def test_saved_at_the_end_of_an_epoch(epochs, validate, workers, uninterrupted, tmp_path):
    parts = {} if validate else {"limit_val_batches": 0}
    save = ModelCheckpoint(tmp_path, "end")
    before, _ = run(workers, save=save, max_epochs=epochs, **parts)
    after, _ = run(workers, tmp_path / "end.ckpt", max_epochs=4, **parts)
    assert before + after == uninterrupted


def test_resumed_twice(uninterrupted, tmp_path):
    seen: list[list[float]] = []
    ckpt = None
    for stop in (2, 4, 7, 12):
        part, trainer = run(ckpt=ckpt, max_steps=stop)
        ckpt = tmp_path / f"{stop}.ckpt"
        trainer.save_checkpoint(ckpt)
        seen += part
    assert seen == uninterrupted


def test_short_epochs_begin_anew(tmp_path):
    whole, _ = run(max_epochs=3, limit_train_batches=2)
    before, _ = run(max_epochs=1, limit_train_batches=2, save=ModelCheckpoint(tmp_path, "end"))
    after, _ = run(ckpt=tmp_path / "end.ckpt", max_epochs=3, limit_train_batches=2)
    assert before + after == whole


def test_prediction_goes_through():
    class Predictor(Recorder):
        def predict_step(self, batch, batch_idx):
            return batch[1]

    trainer = L.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
    batches = trainer.predict(Predictor(0), build_loader(Numbers(5), 4, training=False))
    assert torch.cat(batches).tolist() == [1, 2, 3, 4, 5]


def test_draw() -> None:
    assert draw([1, 2, 3], None, 0) == draw([1, 2, 3], 9, 0) == [1, 2, 3]
    assert draw(list(range(99)), 9, 0) == sorted(draw(list(range(99)), 9, 0))
