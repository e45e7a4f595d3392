"""Speed of MatFormer submodels relative to plain models of the same width, as ratios of times.

    python -m benchmarks.matformer_latency             under three minutes on two cores
    python -m benchmarks.matformer_latency --quick     a few seconds: only checks that it runs

1. Inference: a submodel extracted from a nested ViT, and the nested ViT itself with its layers
   sliced in place, against a timm ViT built at that width. All do the same multiply-adds. The
   extracted one has the same layers as the timm model, so their times should differ by noise
   alone: the goal is a ratio within 3 % of 1.
2. Training: forward, backward and AdamW step of the nested ViT at each granularity against the
   same step at XL, and the ratio of their multiply-adds for comparison (MatFormer, arXiv
   2310.07707: a sampled step costs 0.646 of one at XL on average, if only feed-forward networks
   and projections count); and the time that `freeze_idle_tail` adds to a step.

Candidates are timed in turn, A B C A B C …, and a ratio is the median over rounds of the ratio
within a round, so that a slow moment of the machine affects all of them. Only ratios are printed,
since times in milliseconds depend on the machine.
"""

import cpu_torchvision  # noqa: F401  (first: see its docstring)

import statistics
from collections.abc import Callable, Sequence

import timm
import torch
from torch import nn

from benchmarks.paired import ImageCase, command_line, heading, markdown, parsed
from lightning_modules.counting import count_macs
from lightning_modules.matformer import extract, nest, set_granularity
from lightning_modules.matformer.idle_tail import freeze_idle_tail
from lightning_modules.matformer.nest import GRANULARITIES
from recipes.machine import ratio, rounds

FRACTIONS = (1 / 8, 1 / 4, 1 / 2, 1.0)
TOLERANCE = 0.03
CLASSES = 1000


class Case(ImageCase):
    """See `ImageCase`."""

    def build(self, fraction: float, device: torch.device) -> nn.Module:
        """A timm model whose feed-forward networks have this share of their hidden neurons."""
        torch.manual_seed(0)
        model = timm.create_model(
            self.name, num_classes=CLASSES, mlp_ratio=4.0 * fraction, **self.model_args
        )
        return model.to(device)


QUICK = Case("vit_tiny_patch16_224", 2, {"img_size": 32, "depth": 2})
INFERENCE = [
    Case("vit_base_patch16_224", 1),
    Case("vit_base_patch16_224", 8),
    Case("vit_tiny_patch16_224", 1, {"img_size": 64}),
    Case("vit_tiny_patch16_224", 8, {"img_size": 64}),
]
TRAINING = {
    "cpu": Case("vit_small_patch16_224", 4, {"depth": 4}),
    "cuda": Case("vit_base_patch16_224", 64),
}


@torch.no_grad()
def inference(case: Case, repeats: int, seconds: float, device: torch.device) -> list[list[str]]:
    """Table rows: extracted and nested submodels against native models.

    Raises:
        RuntimeError: if an extracted model does not do exactly a native model's multiply-adds.
    """
    nested = nest(case.build(1.0, device).eval(), FRACTIONS)
    images = torch.randn(case.input_shape, device=device)
    rows = []
    for name, fraction in zip(GRANULARITIES, FRACTIONS, strict=True):
        native, small = case.build(fraction, device).eval(), extract(nested, name)
        macs, expected = count_macs(small, case.input_shape), count_macs(native, case.input_shape)
        if macs != expected:
            raise RuntimeError(f"{case}, {name}: {macs} multiply-adds, natively {expected}")
        set_granularity(nested, name)
        candidates = {"native": native, "extracted": small, "nested": nested}
        calls = {key: (lambda model=model: model(images)) for key, model in candidates.items()}
        measured = rounds(calls, repeats, seconds, device)
        extracted = ratio(measured, "extracted", "native")
        verdict = "met" if abs(extracted - 1) <= TOLERANCE else "missed"
        in_place = ratio(measured, "nested", "native")
        rows.append(
            [
                str(case),
                name,
                f"{macs / case.batch / 1e9:.3f} G, equal",
                f"{extracted:.3f}",
                verdict,
                f"{in_place:.3f}",
                str(len(measured)),
            ]
        )
    return rows


def training(case: Case, repeats: int, seconds: float, device: torch.device) -> list[list[str]]:
    """Table rows: a training step at each granularity against one at XL."""
    images = torch.randn(case.input_shape, device=device)
    labels = torch.randint(CLASSES, (case.batch,), device=device)

    def trainer(frozen: bool) -> Callable[[str], None]:
        model = nest(case.build(1.0, device).train(), FRACTIONS)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        if frozen:
            freeze_idle_tail(optimizer, model)

        def step(granularity: str) -> None:
            set_granularity(model, granularity)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()

        return step

    policies = {"frozen": trainer(True), "moving": trainer(False)}
    calls = {
        f"{policy} {name}": (lambda step=step, name=name: step(name))
        for name in GRANULARITIES
        for policy, step in policies.items()
    }
    measured = rounds(calls, repeats, seconds, device)
    macs = [count_macs(case.build(fraction, device), case.input_shape) for fraction in FRACTIONS]
    table = [
        [
            cost / macs[-1],
            ratio(measured, f"moving {name}", "moving XL"),
            ratio(measured, f"frozen {name}", "frozen XL"),
            ratio(measured, f"frozen {name}", f"moving {name}"),
        ]
        for name, cost in zip(GRANULARITIES, macs, strict=True)
    ]
    table.append([statistics.fmean(column) for column in zip(*table, strict=True)])
    return [
        [str(case), name, *(f"{value:.3f}" for value in values), str(len(measured))]
        for name, values in zip((*GRANULARITIES, "mean"), table, strict=True)
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print Markdown."""
    parser = command_line("matformer_latency", __doc__, 40, 50, "table")
    options = parsed(parser, argv)
    device = options.device
    cases = [QUICK] if options.quick else INFERENCE
    repeats = options.repeats
    share = options.seconds / len(cases) / len(FRACTIONS)
    served = [row for case in cases for row in inference(case, repeats, share, device)]
    case = QUICK if options.quick else TRAINING[device.type]
    trained = training(case, repeats, options.seconds, device)
    print(heading("matformer_latency", argv, device))
    goal = f"goal: extracted within {TOLERANCE:.0%}"
    print(f"Inference, time over the native timm model's of that width; {goal}.")
    print("At XL all three are the same model: how far those ratios are from 1 is the noise.\n")
    header = ["model", "size", "multiply-adds / image", "extracted", "goal", "nested in place"]
    print(markdown([*header, "rounds"], served))
    print("\nTraining step, time over XL's, and what frozen idle tails add to a step.\n")
    header = ["model", "size", "predicted (multiply-adds)", "plain AdamW", "frozen idle tails"]
    print(markdown([*header, "frozen / plain", "rounds"], trained))


if __name__ == "__main__":
    main()
