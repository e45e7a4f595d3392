"""Attention by plain products beside torch's fused kernel, on a CPU in bfloat16.

Times forward and backward of a ViT-S, and of the attention alone at several lengths, in turn.
`recipes/attention.py` chooses by such numbers.

    OMP_NUM_THREADS=1 python -m benchmarks.attention_cpu
"""

import cpu_torchvision  # noqa: F401  (first: see its docstring)

import argparse
from collections.abc import Callable, Sequence
from functools import partial

import lightning as L
import timm
import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.paired import heading, markdown, spread
from recipes.attention import plain_attention
from recipes.machine import rounds

TOKENS = (26, 64, 256, 512, 1024)
WIDTH, HEADS, TOTAL = 64, 6, 2048  # of a head; heads; tokens of a batch, so that work is alike


def attention(tokens: int) -> Callable[[], None]:
    """A function that runs forward and backward of the attention of one layer."""
    shape = (max(1, TOTAL // tokens), HEADS, tokens, WIDTH)
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    return lambda: scaled_dot_product_attention(q, k, v).sum().backward()


def vision(batch: int = 64) -> Callable[[], None]:
    """A function that runs forward and backward of a ViT-S/14 at 70 pixels, 26 tokens."""
    model = timm.create_model("vit_small_patch14_dinov2", img_size=70, depth=9, num_classes=50)
    images = torch.randn(batch, 3, 70, 70)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(images).float().logsumexp(-1).mean()
        loss.backward()
        model.zero_grad()

    return step


def main(argv: Sequence[str] | None = None) -> None:
    """Print a table of the ratios."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=15, help="rounds at most (default: 15)")
    parser.add_argument("--seconds", type=float, default=60.0, help="about, a row (default: 60)")
    parser.add_argument("--quick", action="store_true", help="one image, 26 tokens, three rounds")
    options = parser.parse_args(argv)
    cases = {"a step of ViT-S/14, 26 tokens": vision(1 if options.quick else 64)}
    for tokens in TOKENS[:1] if options.quick else TOKENS:
        cases[f"attention, {tokens:,} tokens"] = attention(tokens)
    device, repeats = torch.device("cpu"), 3 if options.quick else options.repeats
    trainer = L.Trainer(
        accelerator="cpu", precision="bf16-mixed", logger=False, enable_model_summary=False
    )

    def plain(step: Callable[[], None]) -> None:
        with plain_attention(trainer, None):
            step()

    print(heading("attention_cpu", argv, device))
    rows = []
    for name, step in cases.items():
        candidates: dict[str, Callable[[], None]] = {"fused": step, "plain": partial(plain, step)}
        measured = rounds(candidates, repeats, options.seconds, device)
        rows.append([name, spread([took["fused"] / took["plain"] for took in measured])])
    print(markdown(["", "fused / plain: median (least–greatest)"], rows))


if __name__ == "__main__":
    main()
