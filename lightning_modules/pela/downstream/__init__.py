"""PELA's low-rank model as the backbone of segmentation and detection (PELA, Section 4)."""

from lightning_modules.pela.downstream.detection import Detector
from lightning_modules.pela.downstream.detection_module import Detection, MaskDetection
from lightning_modules.pela.downstream.mask_rcnn import MaskDetector
from lightning_modules.pela.downstream.pyramid import Pyramid, build_backbone
from lightning_modules.pela.downstream.segmentation import Segmenter
from lightning_modules.pela.downstream.segmentation_module import Segmentation

__all__ = [
    "Detection",
    "Detector",
    "MaskDetection",
    "MaskDetector",
    "Pyramid",
    "Segmentation",
    "Segmenter",
    "build_backbone",
]
