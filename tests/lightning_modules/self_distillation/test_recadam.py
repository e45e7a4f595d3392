"""RecAdam against its formulas, Adam where it becomes that, and a run that is resumed."""

import copy
import io
import math

import pytest
import torch
from torch import nn

from lightning_modules.self_distillation import RecAdam


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def train(net, optimizer, steps, first=0):
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(8, 4, dtype=torch.float64, generator=generator)
        optimizer.zero_grad()
        (net(x) - x[:, :3]).square().sum().backward()
        optimizer.step()


def parameters_of(net):
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def test_its_formulas():
    """By scalars, one parameter after another, with the gradients that autograd gave."""
    lr, beta1, beta2, eps, decay, k, t0, gamma = 1e-3, 0.8, 0.95, 1e-6, 0.1, 0.5, 4, 900.0
    net = model()
    theta = parameters_of(net).tolist()
    anchor, m, v = list(theta), [0.0] * len(theta), [0.0] * len(theta)
    optimizer = RecAdam(net.parameters(), lr, (beta1, beta2), eps, decay, k, t0, gamma)
    for t in range(1, 9):
        train(net, optimizer, 1, first=t)
        gradient = torch.cat([p.grad.flatten() for p in net.parameters()]).tolist()
        share = 1 / (1 + math.exp(-k * (t - t0)))
        for i, g in enumerate(gradient):
            m[i] = beta1 * m[i] + (1 - beta1) * g
            v[i] = beta2 * v[i] + (1 - beta2) * g * g
            step = math.sqrt(1 - beta2**t) / (1 - beta1**t) * m[i] / (math.sqrt(v[i]) + eps)
            theta[i] -= share * lr * step
            theta[i] -= lr * (1 - share) * gamma * (theta[i] - anchor[i])
            theta[i] -= lr * decay * theta[i]
        expected = torch.tensor(theta, dtype=torch.float64)
        torch.testing.assert_close(parameters_of(net), expected, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("settings", [{"anneal_t0": -1e6}, {"anchored": False}])
def test_it_is_adam_where_lambda_is_one(settings):
    ours, theirs = model(), model()
    train(ours, RecAdam(ours.parameters(), 1e-2, eps=0.0, **settings), 20)
    train(theirs, torch.optim.Adam(theirs.parameters(), 1e-2, eps=0.0), 20)
    torch.testing.assert_close(parameters_of(ours), parameters_of(theirs), rtol=1e-11, atol=1e-14)


def test_the_head_takes_plain_adam_and_the_body_stays_near():
    net = model()
    start = copy.deepcopy(net)
    groups = [{"params": net[0].parameters()}, {"params": net[2].parameters(), "anchored": False}]
    train(net, RecAdam(groups, 1e-3, anneal_k=0.01, anneal_t0=10_000, pretrain_cof=500.0), 30)
    body, head = ((net[i].weight - start[i].weight).abs().max() for i in (0, 2))
    assert body < 1e-9 < 1e-3 < head


def test_moments_are_the_task_gradients():
    net = model()
    optimizer = RecAdam(net.parameters(), 1e-3, anneal_t0=5, pretrain_cof=1000.0)
    train(net, optimizer, 1)
    for parameter in net.parameters():
        state = optimizer.state[parameter]
        torch.testing.assert_close(state["exp_avg"], 0.1 * parameter.grad)
        torch.testing.assert_close(state["exp_avg_sq"], 0.001 * parameter.grad.square())


def test_it_resumes_to_the_bit():
    settings = {"lr": 1e-3, "anneal_k": 0.3, "anneal_t0": 10, "pretrain_cof": 700.0}
    whole = model()
    train(whole, RecAdam(whole.parameters(), **settings), 20)
    half = model()
    optimizer = RecAdam(half.parameters(), **settings)
    train(half, optimizer, 9)
    file = io.BytesIO()
    torch.save([half.state_dict(), optimizer.state_dict()], file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    resumed = model()
    resumed.load_state_dict(weights)
    optimizer = RecAdam(resumed.parameters(), **settings)  # its anchors are wrong until they load
    optimizer.load_state_dict(state)
    train(resumed, optimizer, 11, first=9)
    assert torch.equal(parameters_of(resumed), parameters_of(whole))


def test_a_parameter_without_gradient_stays():
    net = model()
    net[0].weight.requires_grad_(False)
    before = net[0].weight.clone()
    train(net, RecAdam(net.parameters(), 1e-4, weight_decay=0.1), 3)
    assert torch.equal(net[0].weight, before)


def test_a_pull_that_diverges_is_refused_before_anything_moves():
    net = model()
    optimizer = RecAdam(net.parameters(), 1e-3, anneal_k=1.0, anneal_t0=100)
    before = parameters_of(net)
    with pytest.raises(ValueError, match=r"lr 0.001 · pretrain_cof 5000 · \(1 − λ\) 1 is 5 at st"):
        train(net, optimizer, 1)
    assert torch.equal(parameters_of(net), before)
    for group in optimizer.param_groups:
        group["lr"] = 4e-4  # exactly 2 is the edge
    train(net, optimizer, 1)
    head = RecAdam(net.parameters(), 1.0, anchored=False)
    train(net, head, 1)  # no pull, so nothing to refuse


def test_the_pull_goes_as_annealing_goes():
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = RecAdam([parameter], 1e-4, anneal_k=0.5, anneal_t0=3)
    with torch.no_grad():
        parameter.fill_(1.0)
    for t in range(1, 6):
        parameter.grad = torch.zeros_like(parameter)
        before = parameter.item()
        optimizer.step()
        share = 1 / (1 + math.exp(-0.5 * (t - 3)))
        assert parameter.item() == pytest.approx(before * (1 - 0.5 * (1 - share)), rel=1e-12)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, "lr is -1.0: expected a number of at least 0"),
        ({"pretrain_cof": float("nan")}, "pretrain_cof is nan"),
        ({"betas": (0.9, 1.0)}, r"betas are \(0.9, 1.0\): expected two numbers in \[0, 1\)"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        RecAdam(model().parameters(), **settings)
