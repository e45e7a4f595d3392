"""APET: any number of trainable parameters at any positions (arXiv 2306.02320)."""

from lightning_modules.apet.insert import Apet, apet_of, attach, insert, merge, strip, tunables
from lightning_modules.apet.label_words import LabelWords
from lightning_modules.apet.placement import Placement, adapter, bitfit, draw, lora, prompt
from lightning_modules.apet.storage import load, save

__all__ = [
    "Apet",
    "LabelWords",
    "Placement",
    "adapter",
    "apet_of",
    "attach",
    "bitfit",
    "draw",
    "insert",
    "load",
    "lora",
    "merge",
    "prompt",
    "save",
    "strip",
    "tunables",
]
