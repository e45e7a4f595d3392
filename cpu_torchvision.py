"""Makes ``import torchvision`` work beside a CPU-only torch.

PyPI's torchvision is built for CUDA. Beside a CPU build of torch its compiled operators do not
load, and its Python code then fails to describe ``torchvision::nms`` at import, which takes
lightning, torchmetrics and timm down with it. Declaring the two operators by hand is enough:
transforms, datasets and models work, only box suppression itself stays unavailable.

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
