"""Makes ``import torchvision`` work beside a CPU-only torch.

PyPI's torchvision is built for CUDA. With a CPU build of torch its compiled operators do not load,
and ``import torchvision`` fails because ``torchvision::nms`` is not declared; lightning,
torchmetrics and timm import torchvision and fail too. This module declares the two operators
itself. Transforms, datasets and models then work; calling nms (box suppression) does not.

Every package of this repository imports this module first.
"""

import sys

import torch

_declared: list[torch.library.Library] = []  # a Library undoes its definitions when it is collected

try:
    import torchvision
except RuntimeError as error:
    if "torchvision::nms" not in str(error):
        raise
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]
    library = torch.library.Library("torchvision", "FRAGMENT")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _declared.append(library)
    import torchvision  # noqa: F401
