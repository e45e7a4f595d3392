"""Low-rank factorisation of every fully connected layer, once, and the way back.

PELA (arXiv 2310.10700), Eqs 1–3. With the singular value decomposition of a weight,
W = A · Σ · Bᵀ, cut after its r largest singular values,

    W · x ≈ V · (U · x),   V = A_r · √Σ_r  (d_out × r),   U = √Σ_r · B_rᵀ  (r × d_in)

(U stored as nn.Linear stores it: the transpose of the paper's). The bias stays on V. The rank

    r = ⌊d_in · d_out / (κ · (d_in + d_out))⌋

leaves 1/κ of the layer's parameters and multiply-adds. The plan, a dictionary from a layer's name
to its rank, rebuilds the model: `factorize(model, ranks=plan)`.

Beyond the paper: with the second moments C = E[x xᵀ] = L · Lᵀ of the layers' inputs (see
`calibration.py`) the decomposition is that of W · L, and U is multiplied by L⁻¹ from the right.
That minimises E‖W·x − V·U·x‖², the error of the output, instead of ‖W − V·U‖², that of the weight
(as SVD-LLM does, arXiv 2403.07378).
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from fractions import Fraction
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SKIP = ("head", "head_dist", "patch_embed", "downsample", "norm")
MIN_OUTPUTS = 10
ALIGNMENT = 8  # entries: 32 bytes of float32, and what tensor cores want of 16-bit types

Method = Literal["svd", "randomized", "empty"]
Progress = Callable[[int, int, str], None]


class LowRankLinear(nn.Sequential):
    """Linear(d_in, r, no bias) → Linear(r, d_out, bias): y = V · (U · x) + b.

    `weight` is the product V · U, for the models that read the weight of a layer instead of
    calling it (timm's BEiT does); that is right, but saves no operations there.

    The paper's ranks are seldom multiples of 8 (307 of DeiT-B's feed-forward layers), and products
    of odd widths miss what processors are built for: the factors are then multiplied with zero rows
    up to the next multiple, which changes no value and is a hundredth of the work. The parameters,
    what the meta device counts, and a compiled or exported model, are without them.
    """

    u: nn.Linear
    v: nn.Linear

    def __init__(self, u: nn.Linear, v: nn.Linear):
        super().__init__(OrderedDict(u=u, v=v))

    def forward(self, x: Tensor) -> Tensor:
        """(…, d_in) → (…, d_out)."""
        spare = -self.rank % ALIGNMENT
        wrapped = type(self.u) is not nn.Linear or type(self.v) is not nn.Linear  # by peft
        if spare == 0 or wrapped or x.is_meta or torch.compiler.is_compiling():
            return self.v(self.u(x))
        u = F.pad(self.u.weight, (0, 0, 0, spare))
        v = F.pad(self.v.weight, (0, spare))
        return F.linear(F.linear(x, u), v, self.v.bias)

    @property
    def in_features(self) -> int:
        return self.u.in_features

    @property
    def out_features(self) -> int:
        return self.v.out_features

    @property
    def rank(self) -> int:
        return self.u.out_features

    @property
    def weight(self) -> Tensor:
        return self.v.weight @ self.u.weight

    @property
    def bias(self) -> Tensor | None:
        return self.v.bias

    def dense(self) -> nn.Linear:
        """An independent nn.Linear with the weight V · U, multiplied in at least float32."""
        v, u = self.v.weight.detach(), self.u.weight.detach()
        precise = torch.promote_types(v.dtype, torch.float32)
        weight = (v.to(precise) @ u.to(precise)).to(v.dtype)
        bias = None if self.v.bias is None else self.v.bias.detach().clone()
        return _linear(weight, bias, self.v)


def plan_of(model: nn.Module) -> dict[str, int]:
    """The rank of every low-rank layer of the model, by name.

    Raises:
        ValueError: if the model has no low-rank layer.
    """
    plan = {name: layer.rank for name, layer in low_rank_layers(model).items()}
    if not plan:
        raise ValueError(
            f"{type(model).__name__} has no low-rank layer: call factorize(model) first"
        )
    return plan


def low_rank_layers(model: nn.Module) -> dict[str, LowRankLinear]:
    """The low-rank layers of the model, by name."""
    return {n: module for n, module in model.named_modules() if isinstance(module, LowRankLinear)}


def plan_uniform(
    model: nn.Module, ratio: float = 2.0, skip: Sequence[str] = SKIP
) -> dict[str, int]:
    """The paper's ranks: every layer keeps 1/ratio of its parameters.

    Args:
        model: a dense model, on the meta device too.
        ratio: κ; 2 halves the parameters and multiply-adds.
        skip: layers to leave alone, see `find_layers`.

    Raises:
        ValueError: if ratio is not above 0, leaves a layer rank 0, asks for more than the full
            rank, or there is nothing to factorise.
    """
    if not 0 < ratio < float("inf"):
        raise ValueError(f"ratio is {ratio}: expected a number above 0, 2 halves the parameters")
    kappa = Fraction(str(float(ratio)))  # 0.4 as written: in floats 3072 // (0.4 · 128) is 59
    plan = {}
    for name, layer in find_layers(model, skip).items():
        inputs, outputs = layer.in_features, layer.out_features
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
        plan[name] = rank
    return plan


def find_layers(model: nn.Module, skip: Sequence[str] = SKIP) -> dict[str, nn.Linear]:
    """The layers to factorise: every nn.Linear that skip leaves, by name.

    Subclasses of nn.Linear are left alone: their owners use them in ways of their own. So are
    layers with fewer than 10 outputs, as in the released code.

    Args:
        model: a dense model.
        skip: patterns of whole name parts, wildcards allowed: "attn.proj" is found in
            "blocks.3.attn.proj", "head" in "head.fc" but not in "overhead".

    Raises:
        ValueError: if the model is low-rank already, a pattern outside the defaults fits no
            module, a weight is shared with another module, or nothing is left to factorise.
    """
    if low_rank_layers(model):
        raise ValueError(f"{type(model).__name__} is low-rank already: merge(model) first")
    if isinstance(skip, str):
        raise ValueError(f"skip is the string {skip!r}: expected a list of patterns, [{skip!r}]")
    names = [name for name, _ in model.named_modules()]
    for pattern in skip:
        if pattern not in SKIP and not any(_fits(name, pattern) for name in names):
            linear = [n for n, module in model.named_modules() if type(module) is nn.Linear]
            raise ValueError(
                f"skip pattern {pattern!r} fits no module of {type(model).__name__}: its linear "
                f"layers are {_some(linear)}"
            )
    layers = {
        name: module
        for name, module in model.named_modules()
        if name
        and type(module) is nn.Linear
        and module.out_features >= MIN_OUTPUTS
        and not any(_fits(name, pattern) for pattern in skip)
    }
    if not layers:
        raise ValueError(
            f"nothing to factorise in {type(model).__name__}: no nn.Linear with at least "
            f"{MIN_OUTPUTS} outputs is left by skip {list(skip)}"
        )
    _refuse_shared(model, layers)
    return layers


def factorize(
    model: nn.Module,
    ratio: float = 2.0,
    skip: Sequence[str] = SKIP,
    ranks: Mapping[str, int] | None = None,
    method: Method = "svd",
    moments: Mapping[str, Tensor] | None = None,
    progress: Progress | None = None,
) -> nn.Module:
    """Replace every fully connected layer by two of low rank, in place.

    Nothing is changed before all layers are known to be sound. On the meta device only the
    shapes change.

    Args:
        model: a dense model: timm, transformers or any other.
        ratio: κ; 2 halves the parameters and multiply-adds.
        skip: layers to leave alone, see `find_layers`. The released code keeps "attn.proj" of
            Swin, too.
        ranks: a plan to follow instead of ratio and skip: exactly its layers, at its ranks.
        method: "svd" (exact, see `factors`), "randomized" (torch.svd_lowrank; near the exact
            error, and faster at ranks of a tenth of full, not at κ = 2) or "empty" (no values,
            for weights that are about to be loaded). Computed in at least float32 and rounded to
            the weight's type at the end.
        moments: second moments (d_in, d_in) of the layers' inputs by layer name, from
            `Calibration`: the factors then minimise the error of the layer's output.
        progress: is called as progress(done, total, name) after each layer.

    Returns:
        The same model; `plan_of(model)` is its plan.

    Raises:
        ValueError: if ratio, skip or ranks do not fit the model, a weight has NaN or infinite
            values, or moments lack a layer.
    """
    if method not in ("svd", "randomized", "empty"):
        raise ValueError(f"unknown method {method!r}: expected 'svd', 'randomized' or 'empty'")
    plan = plan_uniform(model, ratio, skip) if ranks is None else dict(ranks)
    layers = _planned_layers(model, plan)
    if method != "empty":
        for name, layer in layers.items():
            if not layer.weight.is_meta and not torch.isfinite(layer.weight).all():
                raise ValueError(f"{name}.weight has NaN or infinite values: load sound weights")
            if moments is not None and name not in moments:
                raise ValueError(f"moments lack {name}: calibrate with the same skip and model")
    places = _places(model, layers)
    for done, (name, layer) in enumerate(layers.items(), 1):
        if method == "empty" or layer.weight.is_meta:
            u = layer.weight.new_empty(plan[name], layer.in_features)
            v = layer.weight.new_empty(layer.out_features, plan[name])
        else:
            moment = None if moments is None else moments[name]
            u, v = factors(layer.weight, plan[name], method == "randomized", moment)
        bias = None if layer.bias is None else layer.bias.detach()
        low_rank = LowRankLinear(_linear(u, None, layer), _linear(v, bias, layer))
        for parent, child in places[name]:
            setattr(parent, child, low_rank.train(layer.training))
        if progress is not None:
            progress(done, len(layers), name)
    return model


def merge(model: nn.Module) -> nn.Module:
    """Replace every low-rank layer by a dense nn.Linear with the product of its factors, in place.

    Returns:
        The same model: plain, computes the same, at the cost of the dense one.

    Raises:
        ValueError: if the model has no low-rank layer.
    """
    plan_of(model)
    layers = low_rank_layers(model)
    for name, places in _places(model, layers).items():
        dense = layers[name].dense()
        for parent, child in places:
            setattr(parent, child, dense)
    return model


@torch.no_grad()
def factors(
    weight: Tensor, rank: int, randomized: bool = False, moment: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The two factors of a weight: U (rank, d_in) and V (d_out, rank), in the weight's type.

    Only one side's singular vectors are decomposed for, as eigenvectors of the smaller of WᵀW and
    WWᵀ; the other side's are W times those. V · U is therefore W projected on them, and its squared
    error exceeds the discarded singular values' by rounding of the order of σ₁² times the type's
    precision (1e-7 for float32), wherever the spectrum is cut.

    Args:
        weight: (d_out, d_in).
        rank: singular values to keep.
        randomized: torch.svd_lowrank instead of torch.linalg.svd, seeded by itself.
        moment: second moment E[x xᵀ] of the layer's input, (d_in, d_in).
    """
    matrix, root = _whitened(weight, moment)
    if matrix.is_cuda:
        matrix = matrix.double()  # float32 products may be TF32 there
    wide = matrix.shape[0] < matrix.shape[1]
    tall = matrix.T if wide else matrix
    with torch.autocast(matrix.device.type, enabled=False):
        basis = _leading_basis(tall, rank, randomized)
        other = tall @ basis  # Σ times the basis of the other side
        scale = other.norm(dim=0).clamp(min=torch.finfo(other.dtype).tiny).sqrt()
        v, u = other / scale, (basis * scale).T
    if wide:
        v, u = u.T, v.T
    if root is not None:
        u = torch.linalg.solve_triangular(root, u.to(root), upper=False, left=False)
    return u.to(weight.dtype).contiguous(), v.to(weight.dtype).contiguous()


def _leading_basis(tall: Tensor, rank: int, randomized: bool) -> Tensor:
    """The right singular vectors (n, rank) of the largest singular values of a matrix (m ≥ n, n).

    Those are the eigenvectors of tallᵀ · tall, which take a fraction of the decomposition's time.
    """
    if not randomized:
        gram = tall.new_zeros(tall.shape[1], tall.shape[1])
        width = -(-tall.shape[1] // 4)
        for start in range(0, tall.shape[1], width):  # of a symmetric matrix one triangle is enough
            rows = slice(start, start + width)
            gram[rows, start:] = tall[:, rows].T @ tall[:, start:]
        return torch.linalg.eigh(gram, UPLO="U").eigenvectors[:, -rank:].flip(1)
    with torch.random.fork_rng([tall.device] if tall.is_cuda else []):
        torch.manual_seed(0)
        return torch.svd_lowrank(tall, q=min(rank + 16, tall.shape[1]), niter=4)[2][:, :rank]


@torch.no_grad()
def singular_values(weight: Tensor, moment: Tensor | None = None) -> Tensor:
    """The singular values, decreasing, of a weight or of W · L (see above).

    The squares of those that a rank discards sum to the squared error of the factors.
    """
    return torch.linalg.svdvals(_whitened(weight, moment)[0])


def _whitened(weight: Tensor, moment: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The matrix to decompose, and L where there are moments.

    Inputs that never vary make the moment singular; a millionth of its mean diagonal is added.
    """
    if moment is None:
        return weight.detach().to(torch.promote_types(weight.dtype, torch.float32)), None
    moment = moment.to(weight.device, torch.float64)
    damping = 1e-6 * moment.diagonal().mean().clamp(min=1e-30)
    root = torch.linalg.cholesky(moment + damping * torch.eye(len(moment)).to(moment))
    return weight.detach().double() @ root, root


def _planned_layers(model: nn.Module, plan: Mapping[str, int]) -> dict[str, nn.Linear]:
    """The layers of a plan, in its order."""
    if low_rank_layers(model):
        raise ValueError(f"{type(model).__name__} is low-rank already: merge(model) first")
    if not plan:
        raise ValueError("nothing to factorise: the plan names no layer")
    modules = dict(model.named_modules())
    layers: dict[str, nn.Linear] = {}
    for name, rank in plan.items():
        layer = modules.get(name)
        if not name or not isinstance(layer, nn.Linear):
            linear = [n for n, module in modules.items() if type(module) is nn.Linear]
            raise ValueError(
                f"the plan does not fit {type(model).__name__}: {name!r} is not a linear layer of "
                f"it, those are {_some(linear)}; take a plan made for this architecture"
            )
        full = min(layer.in_features, layer.out_features)
        if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= full:
            raise ValueError(
                f"the plan gives {name} ({layer.in_features} → {layer.out_features}) rank {rank}: "
                f"expected a whole number from 1 to its full rank {full}"
            )
        layers[name] = layer
    _refuse_shared(model, layers)
    return layers


def _refuse_shared(model: nn.Module, layers: Mapping[str, nn.Linear]) -> None:
    """Factorising one of two tied layers would untie them without a word."""
    uses = Counter(id(p) for m in model.modules() for p in m._parameters.values() if p is not None)
    for name, layer in layers.items():
        if uses[id(layer.weight)] > 1:
            raise ValueError(
                f"{name}.weight is shared with another module: add {name!r} to skip, or untie them"
            )


def _places(
    model: nn.Module, layers: Mapping[str, nn.Module]
) -> dict[str, list[tuple[nn.Module, str]]]:
    """Where each layer hangs, as (parent, name in it); one used twice hangs in two places."""
    names = {id(layer): name for name, layer in layers.items()}
    places: dict[str, list[tuple[nn.Module, str]]] = {name: [] for name in layers}
    for parent in model.modules():
        for child, module in parent._modules.items():
            if id(module) in names:
                places[names[id(module)]].append((parent, child))
    return places


def _linear(weight: Tensor, bias: Tensor | None, like: nn.Linear) -> nn.Linear:
    """An nn.Linear of these tensors that trains when `like` does."""
    outputs, inputs = weight.shape
    linear = nn.Linear(inputs, outputs, bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, like.weight.requires_grad)
    if bias is not None:
        assert like.bias is not None
        linear.bias = nn.Parameter(bias, like.bias.requires_grad)
    return linear.train(like.training)


def _fits(name: str, pattern: str) -> bool:
    """Whether the pattern is a run of whole parts of the dotted name."""
    parts, wanted = name.split("."), pattern.split(".")
    return any(
        all(fnmatchcase(part, want) for part, want in zip(parts[i:], wanted, strict=False))
        for i in range(len(parts) - len(wanted) + 1)
    )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (", …" if len(names) > 4 else "") if names else "none"
