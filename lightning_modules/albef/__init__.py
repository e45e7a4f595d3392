"""ALBEF (arXiv 2107.07651): vision-language pre-training and its tasks, which PELA compresses."""

from lightning_modules.albef.model import build, skipped

__all__ = ["build", "skipped"]
