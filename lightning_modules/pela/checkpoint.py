"""Loads initial weights that may contain low-rank layers.

Their ranks are read from the shapes, so that nothing is decomposed again. Such weights are in
checkpoints of PELA and in folders written by lightning_modules/standalone.py.
"""

from pathlib import Path

from torch import nn

from lightning_modules.layouts import inside
from lightning_modules.pela.factorize import factorize
from lightning_modules.weights import LoadReport, load_weights, read_state_dict


def start_from(
    model: nn.Module, source: str | Path, ratio: float | None = None
) -> tuple[dict[str, int], LoadReport]:
    """Load a file's weights into a dense model; its layers become low-rank where the file's are.

    Args:
        model: a dense model, changed in place.
        source: weights as `load_weights` takes them: dense ones, a checkpoint of PELA, or a folder
            with model.safetensors.
        ratio: κ that the caller will apply to dense weights; not allowed with low-rank ones.

    Returns:
        The rank of every low-rank layer by name (empty for dense weights), and the report.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if a ratio is given and the weights are low-rank, or the weights do not fit the
            model.
    """
    suffix = ".u.weight"
    state = read_state_dict(source)
    ranks = {n.removesuffix(suffix): len(value) for n, value in state.items() if n.endswith(suffix)}
    if ranks and ratio is not None:
        raise ValueError(
            f"init_from {source} is low-rank already, so ratio {ratio:g} would do nothing: set "
            "model.ratio to null"
        )
    if ranks:
        factorize(model, ranks=ranks, method="empty")
    report = load_weights(model, source)
    uninitialised = [name for name in report.missing + report.reshaped if inside(name, list(ranks))]
    if uninitialised:
        raise ValueError(
            f"init_from {source} does not fit {type(model).__name__}: {uninitialised[0]}; give "
            "the architecture and model_args that it was made with"
        )
    return ranks, report
