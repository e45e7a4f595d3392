"""LightningDataModules, one file for each family of data."""

import cpu_torchvision  # noqa: F401  (first: see its docstring)

from datamodules.corpus import CorpusData
from datamodules.cub import CUBData
from datamodules.detection import DetectionData
from datamodules.digits import DigitsData, PairedDigitsData
from datamodules.domains import DomainData
from datamodules.e2e import E2EData
from datamodules.glue import GLUEData
from datamodules.grounding import GroundingData
from datamodules.image_folders import ImageFolderData
from datamodules.image_text import CaptionData
from datamodules.image_text_tasks import EntailmentData, VQAData
from datamodules.imagenet import ImageNetData
from datamodules.instructions import InstructionData
from datamodules.reviews import ReviewData
from datamodules.segmentation import SegmentationData
from datamodules.text import TextData
from datamodules.text_to_text import TextToTextData
from datamodules.torchvision_sets import TorchvisionData

__all__ = [
    "CUBData",
    "CaptionData",
    "CorpusData",
    "DetectionData",
    "DigitsData",
    "DomainData",
    "E2EData",
    "EntailmentData",
    "GLUEData",
    "GroundingData",
    "ImageFolderData",
    "ImageNetData",
    "InstructionData",
    "PairedDigitsData",
    "ReviewData",
    "SegmentationData",
    "TextData",
    "TextToTextData",
    "TorchvisionData",
    "VQAData",
]
