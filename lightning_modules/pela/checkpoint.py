"""Starting from weights of which some layers are of low rank.

Their ranks are read off the shapes, so that nothing is decomposed again. What writes such weights:
checkpoints of this method, and folders of lightning_modules/standalone.py.
"""

from pathlib import Path

from torch import nn

from lightning_modules.pela.factorize import factorize
from lightning_modules.weights import LoadReport, load_weights, read_state_dict


def start_from(
    model: nn.Module, source: str | Path, ratio: float | None = None
) -> tuple[dict[str, int], LoadReport]:
    """Give a dense model the weights of a file, and make it low-rank if they are.

    Args:
        model: a dense model, changed in place.
        source: weights as `load_weights` takes them: dense ones, a checkpoint of PELA, or a folder
            with model.safetensors.
        ratio: κ that is to be applied afterwards, which low-rank weights do not allow.

    Returns:
        The rank of every low-rank layer by name (none for dense weights), and what was loaded.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if low-rank weights come with a ratio or do not fit the model.
    """
    end = ".u.weight"
    state = read_state_dict(source)
    ranks = {n.removesuffix(end): len(value) for n, value in state.items() if n.endswith(end)}
    if ranks and ratio is not None:
        raise ValueError(
            f"init_from {source} is low-rank already, so ratio {ratio:g} would do nothing: set "
            "model.ratio to null"
        )
    if ranks:
        factorize(model, ranks=ranks, method="empty")
    report = load_weights(model, source)
    empty = [name for name in report.missing + report.reshaped if name.startswith(tuple(ranks))]
    if empty:
        raise ValueError(
            f"init_from {source} does not fit {type(model).__name__}: {empty[0]}; give the "
            "architecture and model_args that it was made with"
        )
    return ranks, report
