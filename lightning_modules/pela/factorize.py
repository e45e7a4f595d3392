"""Low-rank factorisation of every fully connected layer, and its inverse.

PELA (arXiv 2310.10700), Eqs 1–3. With the singular value decomposition of a weight,
W = A · Σ · Bᵀ, truncated to the r largest singular values,

    W · x ≈ V · (U · x),   V = A_r · √Σ_r  (d_out × r),   U = √Σ_r · B_rᵀ  (r × d_in)

(U as nn.Linear stores it: the transpose of the paper's). The bias stays on V. The rank

    r = ⌊d_in · d_out / (κ · (d_in + d_out))⌋

leaves 1/κ of the layer's parameters and multiply-adds. A plan, which maps a layer's name to its
rank, is all that is needed to build an empty model for a checkpoint:
`factorize(model, ranks=plan, method="empty")`.

Beyond the paper: given a matrix C = L · Lᵀ for each layer (`moments`, see `calibration.py`), W · L
is decomposed instead, and U is multiplied by L⁻¹ from the right. With the second moments
C = E[x xᵀ] of the layer's inputs this minimises the error of the output, E‖W·x − V·U·x‖², instead
of the error of the weight, ‖W − V·U‖² (as SVD-LLM does, arXiv 2403.07378).
"""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Literal

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lightning_modules.modes import precise
from lightning_modules.pela.layers import (
    Linear,
    call_layers,
    checked_layers,
    dense_weight,
    factors_of,
    find_layers,
    linear_names,
    low_rank_layer,
    low_rank_layers,
    plan_of,
    sizes,
)

Method = Literal["svd", "randomized", "empty"]


def plan_uniform(
    model: nn.Module, ratio: float = 2.0, skip: Sequence[str] = (), multiple: int = 1
) -> dict[str, int]:
    """The paper's ranks: every layer keeps 1/ratio of its parameters.

    Args:
        model: a dense model, which may be on the meta device.
        ratio: κ; 2 halves the parameters and multiply-adds.
        skip: layers to leave dense in addition to the defaults, see `find_layers`.
        multiple: ranks above it are rounded down to a multiple of it. The paper's ranks are often
            no multiples of 8 (DeiT-B's feed-forward layers have 307 at κ = 2), for which matrix
            products are slower.

    Returns:
        Ranks by layer name.

    Raises:
        ValueError: if ratio is not above 0, gives a layer rank 0 or more than its full rank,
            multiple is below 1, or layers cannot be factorised (see `find_layers`).
    """
    if not 0 < ratio < float("inf"):
        raise ValueError(f"ratio is {ratio}: expected a number above 0, 2 halves the parameters")
    if multiple < 1:
        raise ValueError(f"multiple is {multiple}: expected at least 1, such as 8")
    kappa = Fraction(str(float(ratio)))  # exact: in floats 3072 // (0.4 · 128) is 59, not 60
    plan = {}
    for name, layer in find_layers(model, skip).items():
        inputs, outputs = sizes(layer)
        rank = int(inputs * outputs / (kappa * (inputs + outputs)))
        if rank == 0:
            raise ValueError(
                f"ratio {ratio:g} leaves {name} ({inputs} → {outputs}) rank 0: give a ratio of at "
                f"most {inputs * outputs / (inputs + outputs):g}, or add {name!r} to skip"
            )
        if rank > min(inputs, outputs):
            raise ValueError(
                f"ratio {ratio:g} asks {name} ({inputs} → {outputs}) for rank {rank}, above its "
                f"full rank {min(inputs, outputs)}: give a larger ratio"
            )
        plan[name] = rank // multiple * multiple or rank
    return plan


def factorize(
    model: nn.Module,
    ratio: float = 2.0,
    skip: Sequence[str] = (),
    ranks: Mapping[str, int] | None = None,
    method: Method = "svd",
    moments: Mapping[str, Tensor] | None = None,
    multiple: int = 1,
) -> nn.Module:
    """Replace every fully connected layer by a low-rank layer, in place.

    All layers are checked before the first is changed. On the meta device only shapes change.

    Args:
        model: a dense model: timm, transformers or any other.
        ratio: κ; 2 halves the parameters and multiply-adds.
        skip: layers to leave dense in addition to the defaults, see `find_layers`. The released
            code also skips "attn.proj" of Swin.
        ranks: a plan to use instead of ratio, skip and multiple: exactly its layers and ranks.
        method: "svd" (see `factors`), "randomized" (torch.svd_lowrank, with nearly the error of the
            exact decomposition; faster at a tenth of the full rank, not at κ = 2) or "empty"
            (uninitialised, for weights to be loaded). Computed in at least float32, then rounded
            to the weight's type.
        moments: a matrix C (d_in, d_in) for each layer by name, from `Calibration`.
        multiple: see `plan_uniform`.

    Returns:
        The same model; `plan_of(model)` is its plan.

    Raises:
        ValueError: for an unknown method, if ratio, skip or ranks do not fit the model, a layer
            cannot be replaced (see `find_layers`), a weight has NaN or infinite values, or moments
            lack a layer.
    """
    if method not in ("svd", "randomized", "empty"):
        raise ValueError(f"unknown method {method!r}: expected 'svd', 'randomized' or 'empty'")
    plan = plan_uniform(model, ratio, skip, multiple) if ranks is None else dict(ranks)
    layers = _planned_layers(model, plan)
    if method != "empty":
        for name, layer in layers.items():
            require_finite(name, layer)
            require_moment(name, moments)
    places = _places(model, layers)
    for name, layer in layers.items():
        weight = dense_weight(layer)
        if method == "empty" or weight.is_meta:
            u = weight.new_empty(plan[name], weight.shape[1])
            v = weight.new_empty(weight.shape[0], plan[name])
        else:
            moment = None if moments is None else moments[name]
            u, v = factors(weight, plan[name], method == "randomized", moment)
        bias = None if layer.bias is None else layer.bias.detach()
        low_rank = low_rank_layer(_linear(u, None, layer), _linear(v, bias, layer))
        low_rank.transposed = isinstance(layer, Conv1D)  # type: ignore[assignment]  # for merge
        for parent, child in places[name]:
            setattr(parent, child, low_rank.train(layer.training))
    call_layers(model)
    return model


def merge(model: nn.Module) -> nn.Module:
    """Replace every low-rank layer by the dense layer with the product of its factors, in place.

    Returns:
        The same model, made of dense layers, with the same outputs.

    Raises:
        ValueError: if the model has no low-rank layer, or one carries an adapter.
    """
    plan_of(model)
    layers = low_rank_layers(model)
    parts = {name: factors_of(name, layer) for name, layer in layers.items()}
    for name, places in _places(model, layers).items():
        u, v = parts[name]
        weight = product(u, v).detach().to(v.weight.dtype)
        bias = None if v.bias is None else v.bias.detach().clone()
        dense: nn.Module = _linear(weight, bias, v)
        if getattr(layers[name], "transposed", False):
            dense = _conv1d(dense)  # type: ignore[arg-type]
        for parent, child in places:
            setattr(parent, child, dense)
    return model


def product(u: nn.Linear, v: nn.Linear) -> Tensor:
    """V · U (d_out, d_in), multiplied in at least float32."""
    return precise(v.weight) @ precise(u.weight)


@torch.no_grad()
def factors(
    weight: Tensor, rank: int, randomized: bool = False, moment: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The two factors of a weight: U (rank, d_in) and V (d_out, rank), in the weight's type.

    The singular vectors of one side are the eigenvectors of the smaller of WᵀW and WWᵀ; those of
    the other side are W times them. V · U is therefore W projected on the former. At any rank, its
    squared error exceeds the sum of the discarded σ² by rounding only, of the order of σ₁² times
    the type's precision (1e-7 for float32).

    Args:
        weight: (d_out, d_in).
        rank: singular values to keep.
        randomized: approximate by torch.svd_lowrank, with a fixed seed.
        moment: C (d_in, d_in), such as the second moment E[x xᵀ] of the layer's input.
    """
    matrix, root = _whitened(weight, moment)
    if matrix.is_cuda:
        matrix = matrix.double()  # float32 products may be TF32 there
    wide = matrix.shape[0] < matrix.shape[1]
    tall = matrix.T if wide else matrix
    with torch.autocast(matrix.device.type, enabled=False):
        basis = _leading_basis(tall, rank, randomized)
        other = tall @ basis  # the other side's singular vectors, each times its singular value
        scale = other.norm(dim=0).clamp(min=torch.finfo(other.dtype).tiny).sqrt()
        v, u = other / scale, (basis * scale).T
    if wide:
        v, u = u.T, v.T
    if root is not None:
        u = torch.linalg.solve_triangular(root, u.to(root), upper=False, left=False)
    return u.to(weight.dtype).contiguous(), v.to(weight.dtype).contiguous()


def _leading_basis(tall: Tensor, rank: int, randomized: bool) -> Tensor:
    """The right singular vectors (n, rank) of the largest singular values of a matrix (m ≥ n, n).

    They are the eigenvectors of tallᵀ · tall, which take a fraction of the time of a full singular
    value decomposition.
    """
    if not randomized:
        gram = tall.new_zeros(tall.shape[1], tall.shape[1])
        width = -(-tall.shape[1] // 4)
        for start in range(0, tall.shape[1], width):  # eigh reads the upper triangle only
            rows = slice(start, start + width)
            gram[rows, start:] = tall[:, rows].T @ tall[:, start:]
        return torch.linalg.eigh(gram, UPLO="U").eigenvectors[:, -rank:].flip(1)
    with torch.random.fork_rng([tall.device] if tall.is_cuda else []):
        torch.manual_seed(0)
        return torch.svd_lowrank(tall, q=min(rank + 16, tall.shape[1]), niter=4)[2][:, :rank]


@torch.no_grad()
def singular_values(weight: Tensor, moment: Tensor | None = None) -> Tensor:
    """The singular values, decreasing, of a weight W (d_out, d_in) or, given C = L · Lᵀ, of W · L.

    The squares of those that a rank discards sum to the squared error of the factors.
    """
    return torch.linalg.svdvals(_whitened(weight, moment)[0])


def require_finite(name: str, layer: Linear) -> None:
    """Refuse a weight with NaN or infinite values.

    Raises:
        ValueError: if it has any.
    """
    if not layer.weight.is_meta and not torch.isfinite(layer.weight).all():
        raise ValueError(f"{name}.weight has NaN or infinite values: load finite weights")


def require_moment(name: str, moments: Mapping[str, Tensor] | None) -> None:
    """Refuse moments that lack a layer.

    Raises:
        ValueError: if there are moments, but none of this layer.
    """
    if moments is not None and name not in moments:
        raise ValueError(f"moments lack {name}: calibrate with the same skip and model")


def _whitened(weight: Tensor, moment: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The matrix to decompose, and L where there is a moment.

    A millionth of the mean of its diagonal is added to the moment's, because constant inputs make
    it singular.
    """
    if moment is None:
        return precise(weight.detach()), None
    moment = moment.to(weight.device, torch.float64)
    damping = 1e-6 * moment.diagonal().mean().clamp(min=1e-30)
    root = torch.linalg.cholesky(moment + damping * torch.eye(len(moment)).to(moment))
    return weight.detach().double() @ root, root


def _planned_layers(model: nn.Module, plan: Mapping[str, int]) -> dict[str, Linear]:
    """The layers that a plan names, in its order, after checking layers and ranks."""
    if not plan:
        raise ValueError("nothing to factorise: the plan names no layer")
    modules = dict(model.named_modules())
    for name in plan:
        if not name or not isinstance(modules.get(name), Linear | nn.Sequential):
            raise ValueError(
                f"the plan does not fit {type(model).__name__}: {name!r} is not a linear layer of "
                f"it, those are {linear_names(model)}; take a plan made for this architecture"
            )
    layers = checked_layers(model, plan)
    for name, layer in layers.items():
        (inputs, outputs), rank = sizes(layer), plan[name]
        full = min(inputs, outputs)
        if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= full:
            raise ValueError(
                f"the plan gives {name} ({inputs} → {outputs}) rank {rank}: expected a whole "
                f"number from 1 to its full rank {full}"
            )
    return layers


def _places(
    model: nn.Module, layers: Mapping[str, nn.Module]
) -> dict[str, list[tuple[nn.Module, str]]]:
    """The places of each layer, as (parent, name in it); a shared layer has several."""
    names = {id(layer): name for name, layer in layers.items()}
    places: dict[str, list[tuple[nn.Module, str]]] = {name: [] for name in layers}
    for parent in model.modules():
        for child, module in parent._modules.items():
            if id(module) in names:
                places[names[id(module)]].append((parent, child))
    return places


def _linear(weight: Tensor, bias: Tensor | None, like: Linear) -> nn.Linear:
    """An nn.Linear of these tensors, with the mode and requires_grad of `like`."""
    outputs, inputs = weight.shape
    linear = nn.Linear(inputs, outputs, bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, like.weight.requires_grad)
    if bias is not None:
        linear.bias = nn.Parameter(bias, like.bias.requires_grad)
    return linear.train(like.training)


def _conv1d(linear: nn.Linear) -> Conv1D:
    """The layer as transformers' Conv1D, whose weight is transposed."""
    conv = Conv1D(linear.out_features, linear.in_features)
    conv.weight = nn.Parameter(linear.weight.detach().T.contiguous(), linear.weight.requires_grad)
    conv.bias = linear.bias
    return conv.train(linear.training)
