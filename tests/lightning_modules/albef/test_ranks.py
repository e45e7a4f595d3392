"""On two processes: one queue for all, and retrieval as one process computes it."""

import cpu_torchvision  # noqa: F401  (first: see its docstring)

import os

import pytest
import torch
from lightning.fabric.plugins.environments.lightning import find_free_network_port
from torch import distributed
from torch.multiprocessing import start_processes

from lightning_modules.albef.momentum import Queue
from lightning_modules.albef.retrieval import Gallery, encode, rerank, rerank_on_all_ranks
from tests.lightning_modules.albef.test_model import small, tokens


def everything():
    """A gallery of five images with a text each, and a row that only fills up."""
    model, (ids, mask) = small("retrieval"), tokens(6)
    mask[4:, 5:] = 0
    owners = torch.tensor([0, 1, 2, 3, 4, -100])
    torch.manual_seed(1)
    images = torch.randn(6, 3, 16, 16)
    return model, (images, owners, ids, mask, owners)


def be_a_rank(rank, port, folder):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", rank=rank, world_size=2)
    queue = Queue(6, 2)
    for step in range(2):  # 2 ranks × 2 pairs: the second step wraps
        ids = torch.arange(2) + 10 * rank + 100 * step
        rows = ids[:, None].float().expand(-1, 2)
        queue.add(rows, -rows, ids)
    model, inputs = everything()
    share = [part[rank::2] for part in inputs]
    if rank:  # texts of another length on the other rank
        share[2], share[3] = share[2][:, :5], share[3][:, :5]
    gallery = encode(model, *share).gathered().valid()
    scores = [rerank_on_all_ranks(model, gallery, 2, by_text, rank, 2) for by_text in (False, True)]
    kept = {"queue": dict(queue.state_dict()), "gallery": vars(gallery), "scores": scores}
    torch.save(kept, f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    port = find_free_network_port()
    start_processes(be_a_rank, (port, str(folder)), nprocs=2, start_method="forkserver")
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


def test_the_queue_has_what_all_ranks_saw_in_their_order(ranks):
    for kept in ranks:
        queue = kept["queue"]
        assert queue["idx_queue"].tolist() == [[110, 111, 10, 11, 100, 101]]
        assert queue["image_queue"][0].tolist() == [110, 111, 10, 11, 100, 101]
        assert queue["text_queue"][1].tolist() == [-110, -111, -10, -11, -100, -101]
        assert queue["queue_ptr"].item() == 2


def test_both_ranks_score_what_one_process_scores(ranks):
    one, other = ranks
    assert one["gallery"]["image_ids"].tolist() == [0, 2, 4, 1, 3]
    gallery = Gallery(**one["gallery"])
    model, _ = everything()
    for by_text in (False, True):
        expected = rerank(model, gallery, 2, by_text)
        torch.testing.assert_close(one["scores"][by_text], expected)
        torch.testing.assert_close(other["scores"][by_text], expected)
    for name, value in one["gallery"].items():
        assert torch.equal(value, other["gallery"][name])
