"""The theory of self-distillation: ridge regression of a linear model, in closed form.

Self-distillation (arXiv 2210.02871), Section 4. The model is f(x, w) = W φ(x), with φ(x) in R^d and
p outputs; w (p·d,) holds the rows of W. With A = I_p ⊗ Φ, (p·d, p·n), all predictions are Aᵀ w;
A = U Σ Vᵀ has rank r. The teacher's weights are w_{0,0}, those of the t-th student

    w_{t,0} = argmin_w  1/n Σ_i ‖f(x_i, w) − f(x_i, w_{t−1,0})‖² + λ‖w‖²

and w_{t,T} those after fine-tuning w_{t,0} by gradient flow, for time T, on
½ Σ_i ‖f(x_i, w) − y_i‖². All is computed in float64.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LinearModel:
    """The setting of Section 4.

    Attributes:
        features: Φ, (d, n), one column φ(x_i) for each example.
        teacher: w_{0,0}, (p·d,).
        ridge: λ.
        targets: targets of fine-tuning, y (p·n,), ordered by output.
        time: duration T of the gradient flow.
    """

    features: Tensor
    teacher: Tensor
    ridge: float
    targets: Tensor
    time: float

    @property
    def a(self) -> Tensor:
        """A = I_p ⊗ Φ, (p·d, p·n), in float64."""
        outputs = len(self.teacher) // len(self.features)
        eye = torch.eye(outputs, dtype=torch.float64, device=self.features.device)
        return torch.kron(eye, self.features.double())

    def decomposition(self) -> tuple[Tensor, Tensor, Tensor]:
        """U (p·d, r), σ (r,) and V (p·n, r) of A, without zero singular values."""
        u, sigma, vh = torch.linalg.svd(self.a, full_matrices=False)
        keep = sigma > sigma.max() * max(self.a.shape) * torch.finfo(torch.float64).eps
        return u[:, keep], sigma[keep], vh[keep].T

    def recursion(self, t: int) -> Tensor:
        """w_{t,0} (p·d,), by solving the t problems one after another.

        Each is a least-squares problem with the ridge as further rows, (Aᵀ; √(nλ) I) w =
        (Aᵀ w_{t−1}; 0). With λ = 0 the solution is that of least norm.
        """
        weights = self.teacher.double()
        count = self.features.shape[1]
        eye = torch.eye(len(weights), dtype=torch.float64, device=weights.device)
        system = torch.cat([self.a.T, (count * self.ridge) ** 0.5 * eye])
        solve = torch.linalg.pinv(system)[:, : self.a.shape[1]]
        for _ in range(t):
            weights = solve @ (self.a.T @ weights)
        return weights

    def closed_form(self, t: int) -> Tensor:
        """w_{t,0} (p·d,), by Lemma 1.

        Σ_{i≤r} 1/σ_i · (1 / (1 + nλ/σ_i²))^t · ỹ_i · u_i  +  1{t=0} · P_r w_{0,0}, with
        ỹ = Vᵀ vec(f_0), f_0 the teacher's predictions, and P_r the projection onto the orthogonal
        complement of A's column space.
        """
        u, sigma, v = self.decomposition()
        weights = u @ (
            self._shrinkage(sigma, t) * (v.T @ (self.a.T @ self.teacher.double())) / sigma
        )
        return weights + self._outside(u) if t == 0 else weights

    def fine_tuned(self, t: int) -> Tensor:
        """w_{t,T} (p·d,), the weights after gradient flow from w_{t,0}.

        The component along u_i becomes e^{−σ_i² T} · u_iᵀ w_{t,0} + (1 − e^{−σ_i² T}) · (Vᵀ y)_i /
        σ_i; the component outside A's column space does not change.
        """
        u, sigma, v = self.decomposition()
        weights = self.closed_form(t)
        decay = (-(sigma**2) * self.time).exp()
        along = u.T @ weights
        aim = v.T @ self.targets.double() / sigma
        return weights + u @ ((1 - decay) * (aim - along))

    def zeta(self, t: int) -> float:
        """A bound on ‖w_{t,T}‖, from which Theorem 1 bounds the generalisation gap.

        ζ(t)² = Σ_{i≤r} ( (1 − e^{−σ_i² T}) · |(Vᵀ y)_i| / σ_i
                          + e^{−σ_i² T} · (1 / (1 + nλ/σ_i²))^t · |ỹ_i| / σ_i )²
                + 1{t=0} · Σ_{i>r} (u_iᵀ w_{0,0})²

        by the triangle inequality along each u_i. It decreases strictly in t if λ > 0 and ỹ ≠ 0.
        The factors by which the theorem multiplies it do not depend on t. This is a correction of
        the paper's ζ, see `zeta_as_printed`.
        """
        aim, start, drop = self._zeta_terms(t)
        return float(((aim + start).square().sum() + drop).sqrt())

    def zeta_as_printed(self, t: int) -> float:
        """The ζ(t) of Appendix A, which does not bound ‖w_{t,T}‖ in general.

        ζ(t)² = Σ_{i≤r} q_i (1 − e^{−σ_i² T})² + Σ_{i≤r} (c_i^{(t,0)})² e^{−2σ_i² T}
                + Σ_{i>r} (c_i^{(t,0)})²,    q_i = (Vᵀ y)_i² / σ_i²,  c_i^{(t,0)} = u_iᵀ w_{t,0}

        The square of w_{t,T} along u_i also has a cross term of its two parts, which the paper
        leaves out; where that is positive, ‖w_{t,T}‖ may exceed ζ(t). This ζ, too, decreases
        strictly in t.
        """
        aim, start, drop = self._zeta_terms(t)
        return float((aim.square().sum() + start.square().sum() + drop).sqrt())

    def _zeta_terms(self, t: int) -> tuple[Tensor, Tensor, float]:
        """The absolute values of w_{t,T}'s two parts along each u_i, and `extra_drop` for t = 0."""
        _, sigma, v = self.decomposition()
        decay = (-(sigma**2) * self.time).exp()
        aim = (1 - decay) * (v.T @ self.targets.double()).abs() / sigma
        start = (v.T @ (self.a.T @ self.teacher.double())).abs() / sigma
        drop = self.extra_drop() if t == 0 else 0.0
        return aim, decay * self._shrinkage(sigma, t) * start, drop

    def psi(self, t: int, initial: Tensor) -> float:
        """Theorem 2: ψ(t) = ‖w_init‖ + ζ(t), which ‖w_init − w_{t,T}‖ does not exceed.

        Args:
            t: rounds of self-distillation.
            initial: w_init, (p·d,).
        """
        return float(initial.double().norm()) + self.zeta(t)

    def extra_drop(self) -> float:
        """B = Σ_{i>r} (u_iᵀ w_{0,0})², by which ζ² additionally falls in the first round."""
        return float(self._outside(self.decomposition()[0]).square().sum())

    def _shrinkage(self, sigma: Tensor, t: int) -> Tensor:
        return (1 + self.features.shape[1] * self.ridge / sigma**2) ** -t

    def _outside(self, u: Tensor) -> Tensor:
        """P_r w_{0,0}."""
        teacher = self.teacher.double()
        return teacher - u @ (u.T @ teacher)
