"""What FSDP2 adds to Lightning's strategy; on two processes: tests/recipes/test_distributed.py."""

import torch
from torch import nn
from torch.optim import SGD

from recipes.fsdp2 import named_state


def test_a_checkpoints_states_get_the_names_of_their_parameters():
    """In whatever order its numbers are: of the groups (one device), or of the model (FSDP2)."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    first, second = model
    first.bias.requires_grad_(False)
    matrices, vectors = [first.weight, second.weight], [second.bias]
    optimizer = SGD([{"params": matrices}, {"params": vectors}], lr=1.0, momentum=0.9)
    model(torch.randn(3, 2)).sum().backward()
    optimizer.step()
    expected = {
        name: optimizer.state[p]["momentum_buffer"]
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    own = optimizer.state_dict()
    by_model = {0: 0, 1: 2, 2: 3}
    fsdp2 = {
        "state": {by_model[number]: value for number, value in own["state"].items()},
        "param_groups": [
            {**group, "params": [by_model[number] for number in group["params"]]}
            for group in own["param_groups"]
        ],
    }
    for saved in (own, fsdp2):
        named = named_state(saved, optimizer, model)
        assert {name: one["momentum_buffer"] for name, one in named["state"].items()} == expected
        assert [group["params"] for group in named["param_groups"]] == [
            ["0.weight", "1.weight"],
            ["1.bias"],
        ]
