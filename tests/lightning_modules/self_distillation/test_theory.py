"""Section 4 in numbers: Lemma 1, what falls strictly with rounds, and the bound of Theorem 2."""

import dataclasses
import itertools

import pytest
import torch

from lightning_modules.self_distillation.theory import LinearModel

ROUNDS = range(7)


def linear(d=7, n=4, p=2, ridge=0.05, time=0.3, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    return LinearModel(normal(d, n), normal(p * d), ridge, normal(p * n), time)


# More features than examples (something is not reached), fewer, and dependent examples.
@pytest.fixture(params=["wide", "tall", "dependent"])
def setting(request):
    if request.param == "wide":
        return linear()
    if request.param == "tall":
        return linear(d=3, n=6)
    model = linear()
    features = model.features.clone()
    features[:, 3] = features[:, 0] - 2 * features[:, 1]
    return dataclasses.replace(model, features=features)


def test_predictions_are_the_models():
    """Aᵀ w is W φ(x_i), output after output."""
    model = linear()
    predictions = model.teacher.reshape(2, 7) @ model.features
    torch.testing.assert_close(model.a.T @ model.teacher, predictions.flatten())


def test_lemma_1_is_the_recursion(setting):
    for t in ROUNDS:
        difference = setting.closed_form(t) - setting.recursion(t)
        assert difference.abs().max() < 1e-12


def test_the_recursion_minimises():
    """The gradient of the stated objective vanishes at its solution, by autograd."""
    model = linear()
    for t in (1, 2, 3):
        w = model.recursion(t).requires_grad_()
        errors = model.a.T @ (w - model.recursion(t - 1))
        (errors.square().sum() / 4 + model.ridge * w.square().sum()).backward()
        assert w.grad.abs().max() < 1e-12


def test_weights_shrink_strictly(setting):
    norms = [setting.closed_form(t).norm().item() for t in ROUNDS]
    assert all(a > b for a, b in itertools.pairwise(norms))


def test_without_ridge_nothing_changes_after_the_first_round(setting):
    plain = dataclasses.replace(setting, ridge=0.0)
    first = plain.recursion(1)
    for t in (2, 5):
        assert (plain.recursion(t) - first).abs().max() < 1e-12
        assert (plain.closed_form(t) - first).abs().max() < 1e-12


def test_the_pseudo_inverse_start():
    """The check that is known to hold: w_0 = A⁺ y, no part of which is out of reach."""
    start = linear()
    start = dataclasses.replace(start, teacher=torch.linalg.pinv(start.a.T) @ start.targets)
    assert start.extra_drop() < 1e-24
    norms = [start.recursion(t).norm().item() for t in ROUNDS]
    assert all(a > b for a, b in itertools.pairwise(norms))
    plain = dataclasses.replace(start, ridge=0.0)
    assert (plain.recursion(5) - start.teacher).abs().max() < 1e-12


def test_fine_tuning_is_gradient_flow(setting):
    """Against many small steps of Runge and Kutta."""
    for t in (0, 2):
        w, steps = setting.closed_form(t), 400
        h = setting.time / steps

        def slope(w):
            return -setting.a @ (setting.a.T @ w - setting.targets)

        for _ in range(steps):
            k1 = slope(w)
            k2 = slope(w + h / 2 * k1)
            k3 = slope(w + h / 2 * k2)
            w = w + h / 6 * (k1 + 2 * k2 + 2 * k3 + slope(w + h * k3))
        assert (setting.fine_tuned(t) - w).abs().max() < 1e-8


def test_zeta_falls_strictly_and_bounds_the_weights(setting):
    bounds = [setting.zeta(t) for t in ROUNDS]
    assert all(a > b for a, b in itertools.pairwise(bounds))
    for t in ROUNDS:
        assert setting.fine_tuned(t).norm() <= bounds[t] + 1e-12


def test_the_printed_zeta_lacks_the_cross_term():
    """It falls strictly, and is exact but for the cross term; the corrected one bounds where it
    does not."""
    exceeded = 0
    for seed in range(40):
        setting = linear(d=24, n=16, p=3, ridge=0.02, time=1.0, seed=seed)
        printed = [setting.zeta_as_printed(t) for t in ROUNDS]
        assert all(a > b for a, b in itertools.pairwise(printed))
        for t in ROUNDS:
            size = setting.fine_tuned(t).norm()
            u, sigma, v = setting.decomposition()
            decay = (-(sigma**2) * setting.time).exp()
            cross = (
                2 * (1 - decay) * (v.T @ setting.targets) / sigma * decay
                * (u.T @ setting.closed_form(t))
            ).sum()  # fmt: skip
            assert printed[t] ** 2 == pytest.approx(float(size**2 - cross), rel=1e-9)
            assert size <= setting.zeta(t) * (1 + 1e-12)
            exceeded += bool(size > printed[t])
    assert exceeded > 0


def test_psi_falls_strictly_and_bounds_the_distance(setting):
    initial = torch.randn(len(setting.teacher), generator=torch.Generator().manual_seed(7)).double()
    bounds = [setting.psi(t, initial) for t in ROUNDS]
    assert all(a > b for a, b in itertools.pairwise(bounds))
    for t in ROUNDS:
        assert (setting.fine_tuned(t) - initial).norm() <= bounds[t] + 1e-12
    at_zero = torch.zeros_like(initial)
    assert setting.psi(2, at_zero) == setting.zeta(2)


def test_the_first_round_drops_b_besides(setting):
    """B = Σ_{i>r} (u_iᵀ w_00)²: what the teacher has outside of A's reach."""
    u, _, _ = torch.linalg.svd(setting.a)  # all of U
    rank = int(torch.linalg.matrix_rank(setting.a))
    b = (u[:, rank:].T @ setting.teacher).square().sum().item()
    assert setting.extra_drop() == pytest.approx(b, abs=1e-12)
    # A teacher without that part: the same ζ from round 1, a smaller one by B before.
    inside = u[:, :rank] @ (u[:, :rank].T @ setting.teacher)
    reached = dataclasses.replace(setting, teacher=inside)
    assert reached.zeta(1) == pytest.approx(setting.zeta(1), rel=1e-12)
    assert setting.zeta(0) ** 2 - reached.zeta(0) ** 2 == pytest.approx(b, abs=1e-10)
    assert (b > 0.1) == (rank < len(u))
