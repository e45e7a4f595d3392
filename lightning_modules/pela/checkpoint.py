"""Loads initial weights that may contain low-rank layers.

Their ranks are read from the shapes, so that nothing is decomposed again. Such weights are in
checkpoints of PELA and in folders written by lightning_modules/standalone.py.
"""

from collections.abc import Mapping
from pathlib import Path

from torch import nn

from lightning_modules.layouts import inside
from lightning_modules.pela.factorize import factorize
from lightning_modules.weights import LoadReport, load_weights, read_state_dict


def start_from(
    model: nn.Module,
    source: str | Path,
    ratio: float | None = None,
    planned: Mapping[str, int] | None = None,
) -> tuple[dict[str, int], LoadReport]:
    """Load a file's weights into a dense model; its layers become low-rank where the file's are.

    Args:
        model: a dense model, changed in place.
        source: weights as `load_weights` takes them: dense ones, a checkpoint of PELA, or a folder
            with model.safetensors.
        ratio: κ that the caller will apply to dense weights; not allowed with low-rank ones.
        planned: ranks that the caller will apply to dense weights; low-rank ones must have them.

    Returns:
        The rank of every low-rank layer by name (empty for dense weights), and the report.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the weights are low-rank and a ratio or other ranks are given, or if they do
            not fit the model.
    """
    suffix = ".u.weight"
    state = read_state_dict(source)
    ranks = {n.removesuffix(suffix): len(value) for n, value in state.items() if n.endswith(suffix)}
    if ranks:
        require_same_plan(source, ranks, ratio, planned)
        factorize(model, ranks=ranks, method="empty")
    report = load_weights(model, source)
    uninitialised = [name for name in report.missing + report.reshaped if inside(name, list(ranks))]
    if uninitialised:
        raise ValueError(
            f"init_from {source} does not fit {type(model).__name__}: {uninitialised[0]}; give "
            "the architecture and model_args that it was made with"
        )
    return ranks, report


def require_same_plan(
    source: str | Path,
    ranks: Mapping[str, int],
    ratio: float | None,
    planned: Mapping[str, int] | None,
) -> None:
    """Refuse settings that low-rank weights would ignore.

    Args:
        source: of the weights, for the message.
        ranks: those of the weights.
        ratio: κ in the settings.
        planned: ranks in the settings.

    Raises:
        ValueError: if a ratio or other ranks are set.
    """
    if ratio is not None:
        raise ValueError(
            f"init_from {source} is low-rank already, so ratio {ratio:g} would do nothing: set "
            "model.ratio to null"
        )
    if planned is not None and planned != ranks:
        raise ValueError(
            f"init_from {source} is low-rank already, with ranks other than those given: set "
            "model.ranks to null"
        )
