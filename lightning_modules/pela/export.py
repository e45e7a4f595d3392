"""Exports an image classifier to a file that runs without this repository: ONNX or torch.export.

Both keep the two small products of every low-rank layer, and so its savings, and accept any batch
size. lightning_modules/standalone.py writes folders from which Python loads the model again.
"""

import copy
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from lightning_modules.pela.tome import refuse_merging

TOLERANCE = 1e-4  # largest difference of float32 outputs, relative to the largest output


def to_onnx(model: nn.Module, file: str | Path, example: Tensor) -> Path:
    """Write an ONNX file with the input "images", the output "logits" and a free batch size.

    The file is run with onnxruntime before the function returns.

    Args:
        model: maps one tensor to one tensor; exported in eval mode, on the CPU.
        file: such as "model.onnx"; weights above 2 GB are written beside it to "model.onnx.data".
        example: an input (B, 3, H, W) with B at least 2.

    Returns:
        The file.

    Raises:
        ImportError: if onnx, onnxscript or onnxruntime is not installed.
        ValueError: if example has one image only, or the model merges tokens.
        RuntimeError: if onnxruntime's outputs differ from the model's.
    """
    import onnxruntime

    # PyTorch 2's exporter fails at the attention mask of a merging block
    refuse_merging(model, "which PyTorch cannot write as ONNX")
    file, model, example = _prepare(model, file, example)
    program = torch.onnx.export(
        model,
        (example,),
        input_names=["images"],
        output_names=["logits"],
        dynamic_shapes=({0: torch.export.Dim("batch")},),
        dynamo=True,
        verbose=False,
    )
    assert program is not None
    program.save(file)
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])

    def run(images: Tensor) -> Tensor:
        return torch.from_numpy(session.run(["logits"], {"images": images.numpy()})[0])

    _check(model, run, example, file)
    return file


def to_program(model: nn.Module, file: str | Path, example: Tensor) -> Path:
    """Write a file of torch.export, for `torch.export.load(file).module()`.

    The file is loaded and run before the function returns.

    Args:
        model: as for `to_onnx`.
        file: such as "model.pt2".
        example: as for `to_onnx`.

    Returns:
        The file.

    Raises:
        ValueError: if example has one image only.
        RuntimeError: if the outputs of the file differ from the model's.
    """
    file, model, example = _prepare(model, file, example)
    shapes = ({0: torch.export.Dim("batch")},)
    program = torch.export.export(model, (example,), dynamic_shapes=shapes)
    torch.export.save(program, file)
    _check(model, torch.export.load(file).module(), example, file)
    return file


def _prepare(model: nn.Module, file: str | Path, example: Tensor) -> tuple[Path, nn.Module, Tensor]:
    """The file's path with its folder created, and copies of model and example for tracing."""
    if len(example) < 2:
        raise ValueError(
            f"example is of shape {tuple(example.shape)}: expected at least 2 images, with one "
            "the exporter would fix the batch size at 1"
        )
    file = Path(file)
    file.parent.mkdir(parents=True, exist_ok=True)
    return file, copy.deepcopy(model).cpu().eval(), example.cpu()


@torch.no_grad()
def _check(model: nn.Module, run: Callable[[Tensor], Tensor], example: Tensor, file: Path) -> None:
    """Compare the outputs at the example's batch size and at two others."""
    for images in (example, example[:1], torch.cat([example, example[:1]])):
        expected, outputs = model(images), run(images)
        error = (outputs - expected).abs().max() / expected.abs().max().clamp(min=1e-30)
        if not error <= TOLERANCE:
            raise RuntimeError(
                f"{file} differs from the model by {error:.1e} of the largest output at batch size "
                f"{len(images)}, expected at most {TOLERANCE:.0e}: do not use it"
            )
