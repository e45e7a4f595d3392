"""The noise of a batch depends on the seed, the batches before it and the process alone."""

import cpu_torchvision  # noqa: F401

import random
from types import SimpleNamespace

import numpy as np
import torch

from callbacks.seeding import SeedEveryStep


def noise(seed=0, batches_seen=0, rank=0, batch_idx=0):
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(total_batch_idx=batches_seen))
    trainer = SimpleNamespace(fit_loop=loop, global_rank=rank)
    SeedEveryStep(seed).on_train_batch_start(trainer, None, None, batch_idx)
    return random.random(), np.random.rand(), torch.rand(()).item()


def test_every_batch_of_every_process_has_noise_of_its_own():
    first = noise()
    assert noise() == first
    others = [noise(seed=1), noise(batches_seen=1), noise(rank=1)]
    assert all(len(set(values)) == 4 for values in zip(first, *others, strict=True))


def test_the_batches_of_the_next_epoch_have_other_noise():
    assert noise(batches_seen=5, batch_idx=0) != noise(batches_seen=0, batch_idx=0)
