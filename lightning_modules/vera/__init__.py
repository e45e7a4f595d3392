"""VeRA (arXiv 2310.11454): fine-tunes two scaling vectors per layer of shared random matrices."""

from lightning_modules.vera.adapter import load_adapter, save_adapter
from lightning_modules.vera.image_module import ImageTuning
from lightning_modules.vera.interop import from_peft, lora_factors, to_lora, to_peft
from lightning_modules.vera.language_module import LanguageTuning
from lightning_modules.vera.many import Adapters
from lightning_modules.vera.text_module import TextTuning
from lightning_modules.vera.vera import add_vera, merge, strip, unmerge

__all__ = [
    "Adapters",
    "ImageTuning",
    "LanguageTuning",
    "TextTuning",
    "add_vera",
    "from_peft",
    "load_adapter",
    "lora_factors",
    "merge",
    "save_adapter",
    "strip",
    "to_lora",
    "to_peft",
    "unmerge",
]
