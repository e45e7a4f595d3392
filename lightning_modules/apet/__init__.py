"""APET (arXiv 2306.02320): tunes any number of parameters at any positions of a model."""

from lightning_modules.apet.insert import Apet, apet_of, attach, insert, merge, strip, tunables
from lightning_modules.apet.label_words import LabelWords
from lightning_modules.apet.placement import Placement, bitfit, draw, prompt
from lightning_modules.apet.storage import load, save

__all__ = [
    "Apet",
    "LabelWords",
    "Placement",
    "apet_of",
    "attach",
    "bitfit",
    "draw",
    "insert",
    "load",
    "merge",
    "prompt",
    "save",
    "strip",
    "tunables",
]
