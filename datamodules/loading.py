"""Loaders whose order and augmentation depend on (seed, epoch) alone, resumable inside an epoch.

For images and text alike:

* `SeededSampler` draws the samples' indices, with a random seed for each draw;
* `SeededDataset` makes a sample under the seed of its draw, so that it does not depend on the
  number of workers or ranks, nor on random numbers used earlier in the process;
* `ResumableLoader` saves its position inside the epoch in Lightning's checkpoint;
* `PartsData` is the DataModule that has such a loader for each part of its data.

`build_loader` combines the first three; `data_folder` finds the data, and `draw` and `hold_out`
choose among them.
"""

import hashlib
import os
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import DataLoader, Dataset, DistributedSampler

IGNORED = -100  # the label that cross entropy and torchmetrics (ignore_index=-100) ignore
Draw = tuple[int, int, bool]
SCORED = {TrainerFn.VALIDATING: "val", TrainerFn.TESTING: "test"}


class SeededSampler(DistributedSampler[Draw]):
    """Yields a draw `(index, seed, valid)` for each place of this rank in an epoch.

    All ranks share one list of draws, a function of (seed, epoch), of which rank r of R takes the
    places r, r + R, r + 2R, … Training (`shuffle=True`) drops the last few draws so that all
    ranks get equally many; evaluation drops nothing and fills up with draws that are not valid.
    Evaluation is the same at every epoch.

    It is a `DistributedSampler` because Lightning leaves those in place and calls their
    `set_epoch`.

    Args:
        dataset: what is drawn from; only its length is used.
        num_replicas: number of ranks R.
        rank: this rank, 0 ≤ rank < R.
        seed: non-negative.
        shuffle: a new order every epoch (training), or the order of the dataset (evaluation).
        repeats: repeated augmentation (Hoffer et al., arXiv 1901.09335): each drawn index comes
            this many times in a row, each time with another seed. The epoch's length stays the
            same, so an epoch has 1/repeats of the dataset's samples.

    Attributes:
        start: number of this rank's draws that the next pass skips at its beginning.

    Raises:
        ValueError: for repeats below 1.
    """

    def __init__(
        self,
        dataset: Dataset,
        num_replicas: int = 1,
        rank: int = 0,
        seed: int = 0,
        shuffle: bool = True,
        repeats: int = 1,
    ) -> None:
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last=shuffle)
        if repeats < 1:
            raise ValueError(f"repeats is {repeats}, expected 1 or more: 1 draws each sample once.")
        self.repeats = repeats
        self.start = 0

    def __iter__(self) -> Iterator[Draw]:
        rng = np.random.default_rng((self.seed, self.epoch if self.shuffle else 0))
        count = len(self.dataset)  # type: ignore[arg-type]
        order = rng.permutation(count) if self.shuffle else np.arange(count)
        # np.resize truncates a list that is too long, and repeats one that is too short
        indices = np.resize(order.repeat(self.repeats), self.total_size).tolist()
        seeds = rng.integers(2**32, size=self.total_size).tolist()
        first = self.rank + self.start * self.num_replicas
        for place in range(first, self.total_size, self.num_replicas):
            yield indices[place], seeds[place], place < count


class SeededDataset(Dataset):
    """Makes samples of a map-style dataset from the draws of a `SeededSampler`.

    While the dataset makes a sample, the random number generators of torch (CPU), numpy and
    Python are seeded by the draw; their state is restored afterwards. A draw that is not valid
    gets the label `IGNORED`.

    Args:
        dataset: has `(…, label)` tuples, or dicts with the key "labels"; a label is a number or a
            tensor. If its attribute `random` is None, its samples do not depend on random numbers
            and the seeding is skipped, which saves a tenth of a millisecond a sample.
    """

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset
        self.seeded = getattr(dataset, "random", True) is not None

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, draw: Draw) -> Any:
        index, seed, valid = draw
        sample = self._seeded_sample(index, seed) if self.seeded else self.dataset[index]
        if valid:
            return sample
        if isinstance(sample, dict):
            return {**sample, "labels": _ignored(sample["labels"])}
        return (*sample[:-1], _ignored(sample[-1]))

    def _seeded_sample(self, index: int, seed: int) -> Any:
        with isolate_rng(include_cuda=False):
            # not torch.manual_seed: it would reseed the GPUs too, where the model draws
            torch.default_generator.manual_seed(seed)
            np.random.seed(seed)
            random.seed(seed)
            return self.dataset[index]


def _ignored(label: Any) -> Any:
    """`IGNORED` in the type and shape of `label`."""
    return label * 0 + IGNORED


class ResumableLoader(DataLoader):
    """A `DataLoader` over a `SeededSampler` that can be resumed inside an epoch.

    Lightning stores `state_dict()` in its checkpoints and loads it before the first batch of the
    resumed run (`CombinedLoader._state_dicts`). The position is the number of batches yielded; the
    end of an epoch counts as the beginning of the next. Earlier batches are skipped as indices,
    without loading their samples.

    Two properties of Lightning 2.6 have to be worked around. It creates the iterator of a resumed
    run before it sets the epoch, when workers would already fetch samples in the order of epoch 0:
    therefore nothing happens here before the first batch is requested. And after a run that
    `max_steps` ended inside epoch k it continues with epoch k + 1: therefore a restored loader
    counts its epochs itself. A third is worked around by the callback Resuming.
    """

    sampler: SeededSampler

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._epoch, self._batches = 0, 0
        self._next_pass: tuple[int, int] | None = None  # (epoch, batches to skip) if restored

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self._epoch, self._batches = self._next_pass or (self.sampler.epoch, 0)
        if self._next_pass:
            self._next_pass = (self._epoch + 1, 0)
        self.sampler.set_epoch(self._epoch)
        self.sampler.start = self._batches * self.batch_size  # type: ignore[operator]
        for batch in super().__iter__():
            self._batches += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        """The position of the next batch: its epoch, and the number of batches before it there."""
        finished = self._batches == len(self)
        return {
            "epoch": self._epoch + finished,
            "batches": 0 if finished else self._batches,
            "length": len(self),
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Makes the next pass continue at `state`.

        Raises:
            ValueError: `state` is inside an epoch with another number of batches.
        """
        if state["batches"] and state["length"] != len(self):
            raise ValueError(
                f"The checkpoint was saved inside an epoch of {state['length']} batches and this "
                f"run's epochs have {len(self)}: resume with the same data, batch size and number "
                "of devices, or from a checkpoint saved at the end of an epoch."
            )
        self._next_pass = self._epoch, self._batches = state["epoch"], state["batches"]


def build_loader(
    dataset: Dataset,
    batch_size: int,
    *,
    training: bool,
    seed: int = 0,
    repeats: int = 1,
    num_workers: int = 0,
    collate_fn: Callable | None = None,
    trainer: Trainer | None = None,
) -> DataLoader:
    """Build the loader of this rank.

    A training loader is a `ResumableLoader`; it shuffles, and drops the last batch if it is not
    full (unless it is the only one). An evaluation loader has all samples in order, each valid on
    exactly one rank.

    Args:
        dataset: map-style; see `SeededDataset` for its samples.
        batch_size: samples per batch and rank.
        training: whether it is for training; see above.
        seed: seed of order and augmentation.
        repeats: see `SeededSampler`.
        num_workers: processes that load samples; 0 loads in this process.
        collate_fn: makes a batch of a list of samples; torch's default when None.
        trainer: has the rank and the number of ranks; None: rank 0 of 1.

    Raises:
        ValueError: there are fewer training samples than ranks; or the trainer has
            `overfit_batches`, which would replace the sampler.
    """
    if overfit := getattr(trainer, "overfit_batches", 0):
        raise ValueError(
            f"The trainer has overfit_batches={overfit}, which takes the seeded "
            "sampler away: set it to 0 and give the DataModule fewer samples instead."
        )
    # not world_size and global_rank: under tensor parallelism several ranks share their samples
    ranks = (trainer and trainer.distributed_sampler_kwargs) or {"num_replicas": 1, "rank": 0}
    sampler = SeededSampler(dataset, **ranks, seed=seed, shuffle=training, repeats=repeats)
    if len(sampler) == 0:
        raise ValueError(
            f"The dataset has {len(dataset)} samples, too few for the "  # type: ignore[arg-type]
            f"{sampler.num_replicas} ranks: add samples or use fewer devices."
        )
    return (ResumableLoader if training else DataLoader)(
        SeededDataset(dataset),
        batch_size=batch_size,
        sampler=sampler,
        num_workers=num_workers,
        collate_fn=collate_fn,
        drop_last=training and len(sampler) >= batch_size,
        pin_memory=torch.cuda.is_available(),
        persistent_workers=num_workers > 0,
        # without it each pass would draw a number from the global generator
        generator=torch.Generator().manual_seed(seed),
    )


class PartsData(LightningDataModule):
    """A DataModule with the parts "train", "val", "test" and "predict", and a loader for each.

    A subclass returns a part's samples in `samples`.

    Args:
        batch_size: samples per device and training step.
        eval_batch_size: samples per device and evaluation step; `batch_size` when None.
        num_workers: processes that load samples; 0 loads in the training process.
        seed: seed of order and augmentation.
        repeats: repeated augmentation in training, see `SeededSampler`.
    """

    def __init__(
        self,
        batch_size: int,
        eval_batch_size: int | None = None,
        num_workers: int = 0,
        seed: int = 0,
        repeats: int = 1,
    ) -> None:
        super().__init__()
        self.batch_size, self.eval_batch_size = batch_size, eval_batch_size or batch_size
        self.num_workers, self.seed, self.repeats = num_workers, seed, repeats

    def samples(self, part: str) -> Dataset:
        """The samples of a part. The dataset's method `collate`, if it has one, makes batches."""
        raise NotImplementedError

    def members(self, part: str) -> tuple[list[str], bool]:
        """A line for each sample of a part, in order, and whether the seed drew the part.

        A line identifies its sample independently of where the data are: a path below the root, or
        a text.
        """
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """The description of the data that a trained model needs for prediction, in plain types.

        `kind` is "images", "segmentation", "detection", "sentences", "prompts" or "pictures and
        texts"; {} where prediction is not supported.
        """
        return {}

    def state_dict(self) -> dict[str, Any]:
        """The description, the LightningModule's class and the seed, for checkpoints."""
        description = self.describe()
        if not description or self.trainer is None:
            return {}
        module = type(self.trainer.lightning_module)
        name = f"{module.__module__}.{module.__qualname__}"
        return {"description": description, "module": name, "seed": self.seed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refuse a checkpoint of other classes, or of another order: its outputs are numbered.

        And one of another seed, where it matters: most examples that this run holds out would be
        among those that the checkpoint was trained on.

        Raises:
            ValueError: naming the classes of both from the first that differs, or both seeds.
        """
        seed = state_dict.get("seed", self.seed)  # older checkpoints have none
        if seed != self.seed and self._draws():
            raise ValueError(
                f"The checkpoint's run had seed {seed} and this one has {self.seed}, which draws "
                f"other examples to train and to validate on: set --seed_everything {seed}."
            )
        theirs = state_dict.get("description", {}).get("class_names", [])
        ours = self.describe().get("class_names", []) if theirs else []
        if theirs != ours:
            pairs = zip(theirs, ours, strict=False)
            same = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
            raise ValueError(
                f"The checkpoint was trained on other classes: from class {same} on it has "
                f"{listed(theirs[same:])}, and the data have {listed(ours[same:])}. Give it the "
                "data that it was trained on, or start anew from its weights with "
                "--model.init_from."
            )

    def _draws(self) -> bool:
        """Whether the seed draws what the trainer trains on (their order) or scores."""
        verb = self.trainer.state.fn if self.trainer else None
        return verb == TrainerFn.FITTING or (verb in SCORED and self.members(SCORED[verb])[1])

    def manifest(self, part: str) -> dict[str, Any]:
        """A record of the samples in a part, so that others can check or reproduce it.

        Returns:
            `examples`, their number; `sha256` of the lines of `members`, each with its line end;
            and `members`, the lines themselves, if the seed drew the part.
        """
        lines, drawn = self.members(part)
        text = "".join(f"{line}\n" for line in lines)
        # a file's name need not be UTF-8
        digest = hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()
        manifest = {"examples": len(lines), "sha256": digest}
        return {**manifest, "members": lines} if drawn else manifest

    def train_dataloader(self) -> DataLoader:
        return self.loader(self.samples("train"), training=True)

    def val_dataloader(self) -> DataLoader:
        return self.loader(self.samples("val"))

    def test_dataloader(self) -> DataLoader:
        return self.loader(self.samples("test"))

    def predict_dataloader(self) -> DataLoader:
        return self.loader(self.samples("predict"))

    def loader(self, dataset: Dataset, training: bool = False) -> DataLoader:
        """The loader of this rank with this DataModule's settings, see `build_loader`."""
        return build_loader(
            dataset,
            self.batch_size if training else self.eval_batch_size,
            training=training,
            seed=self.seed,
            repeats=self.repeats if training else 1,
            num_workers=self.num_workers,
            collate_fn=getattr(dataset, "collate", None),
            trainer=self.trainer,
        )


def draw(items: list, count: int | None, seed: int) -> list:
    """`count` of the items, drawn by `seed`, in their original order; all if `count` is None."""
    if count is None or count >= len(items):
        return items
    chosen = np.random.default_rng(seed).permutation(len(items))[:count]
    return [items[place] for place in sorted(chosen.tolist())]


def listed(names: Sequence[str], most: int = 10) -> str:
    """Names in quotation marks, the first `most` of them, for a message; "none" without names."""
    more = [f"{len(names) - most} more"] if len(names) > most else []
    return ", ".join([*map(repr, names[:most]), *more]) or "none"


def require_choice(setting: str, value: str, choices: Collection[str]) -> None:
    """Refuse a setting's value that is none of these.

    Raises:
        ValueError: naming the setting, the value and the choices.
    """
    if value not in choices:
        *others, last = choices
        raise ValueError(f"{setting} is {value!r}, expected {', '.join(others)} or {last}.")


def require_limits(**limits: int | None) -> None:
    """Refuse a limit below 1, which would leave nothing, or all but the last.

    Raises:
        ValueError: naming the setting and its value.
    """
    for name, value in limits.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}, expected 1 or more, or null for no limit.")


def require_share(val_fraction: float, cure: str) -> None:
    """Refuse a share to hold out that is below 0 or leaves nothing to train on.

    Raises:
        ValueError: naming it; `cure` ends the sentence after "leave it at".
    """
    if not 0 <= val_fraction < 1:
        raise ValueError(
            f"val_fraction is {val_fraction}, expected a share from 0 to below 1: leave it at "
            f"{cure}."
        )


def hold_out(items: list, fraction: float, seed: int) -> tuple[list, list]:
    """Splits items in two, both in their order: those that stay, and those held out.

    Args:
        items: what is split.
        fraction: share to hold out, between 0 and 1; at least one item is.
        seed: draws which.
    """
    count = max(1, round(len(items) * fraction))
    chosen = set(np.random.default_rng(seed).permutation(len(items))[:count].tolist())
    return (
        [item for place, item in enumerate(items) if place not in chosen],
        [item for place, item in enumerate(items) if place in chosen],
    )


def data_folder(root: str | None, default: str) -> Path:
    """`root`, or the folder `default` in RECIPES_DATA when None.

    Raises:
        ValueError: neither is given.
        FileNotFoundError: the folder is not there.
    """
    named = os.environ.get("RECIPES_DATA")
    if root is None and not named:
        raise ValueError(
            "No folder of data is given: set --data.root, or RECIPES_DATA in the environment, "
            "or --data.source generated to try things out."
        )
    folder = Path(root).expanduser() if root else Path(named or "").expanduser() / default
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{folder} is not a folder, expected the data there: correct --data.root."
        )
    return folder
