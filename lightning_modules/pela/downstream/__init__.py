"""PELA's low-rank model as the backbone of segmentation and detection (PELA, Section 4)."""

from lightning_modules.pela.downstream.detection import Detector
from lightning_modules.pela.downstream.module import Detection, Segmentation
from lightning_modules.pela.downstream.pyramid import Pyramid, build_backbone
from lightning_modules.pela.downstream.segmentation import Segmenter

__all__ = ["Detection", "Detector", "Pyramid", "Segmentation", "Segmenter", "build_backbone"]
