"""Speed and memory of low-rank models (PELA, arXiv 2310.10700) relative to dense ones.

    python -m benchmarks.pela_speed                       five to ten minutes on one core
    python -m benchmarks.pela_speed --only factorize      one of the four tables
    python -m benchmarks.pela_speed --quick               seconds: only checks that it runs

1. inference: time of a forward pass, dense over low-rank (κ = 2), and the ratio of their
   multiply-adds; the goal is at least 0.9 of the latter. Measured with the paper's ranks and with
   ranks rounded down to multiples of 16 (`multiple=16`), for which matrix products are faster.
2. training: the same for forward, backward and AdamW step.
3. tuning: time and peak memory of a training step relative to peft's LoRA on the dense model, for
   the low-rank model with all weights trained and with LoRA. The goal is less of both.
4. factorize: time of `factorize` on deit_base against the released code's method, a singular value
   decomposition of each weight with full matrices; the goal is five times faster.

Candidates are timed in turn, and a ratio is the median over rounds (paired.py).
"""

import cpu_torchvision  # noqa: F401  (first: see its docstring)

import copy
import multiprocessing
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import timm
import torch
from torch import nn

from benchmarks.paired import ImageCase, command_line, heading, markdown, parsed
from lightning_modules.counting import count_macs, count_parameters
from lightning_modules.pela import factorize, low_rank_layers, plan_uniform
from recipes.machine import ratio, rounds

KAPPA = 2.0
MULTIPLES = (1, 16)  # of ranks; 1: the paper's
SPEED_UP, FACTORIZE = 0.9, 5.0  # goals: share of the multiply-add ratio; times faster
LORA_RANK = 16
CLASSES = 1000
SYSTEMS = ("dense, all weights", "dense, LoRA", "low-rank, all weights", "low-rank, LoRA")


class Case(ImageCase):
    """See `ImageCase`."""

    def build(self, low_rank: bool, device: torch.device, multiple: int = 1) -> nn.Module:
        """The model with random weights or random factors, whose values do not affect time."""
        torch.manual_seed(0)
        model = timm.create_model(self.name, num_classes=CLASSES, **self.model_args)
        if low_rank:
            factorize(model, KAPPA, method="empty", multiple=multiple)
            # uninitialised factors may hold denormals, which are slow
            for layer in low_rank_layers(model).values():
                nn.init.normal_(layer.u.weight, std=0.02)
                nn.init.normal_(layer.v.weight, std=0.02)
        return model.to(device)


QUICK = Case("vit_tiny_patch16_224", 2, {"img_size": 32, "depth": 2})
INFERENCE = [Case("vit_base_patch16_224", 16), Case("vit_small_patch16_224", 16)]
TRAINING = {
    "cpu": [Case("vit_base_patch16_224", 4), Case("vit_small_patch16_224", 16)],
    "cuda": [Case("vit_base_patch16_224", 64), Case("vit_small_patch16_224", 64)],
}
TUNING = {"cpu": Case("vit_base_patch16_224", 4), "cuda": Case("vit_base_patch16_224", 64)}
FACTORIZED = "deit_base_patch16_224"


def speed_up(
    case: Case, train: bool, repeats: int, seconds: float, device: torch.device
) -> list[list[str]]:
    """Table rows: the speed-up of low rank, and the ratio of multiply-adds, by MULTIPLES."""
    models = {0: case.build(False, device)}
    models |= {multiple: case.build(True, device, multiple) for multiple in MULTIPLES}
    macs = {key: count_macs(model, case.input_shape) for key, model in models.items()}
    if train:
        calls = {str(key): training_step(model, case, device) for key, model in models.items()}
        measured = rounds(calls, repeats, seconds, device)
    else:
        for model in models.values():
            model.eval()
        images = torch.randn(case.input_shape, device=device)
        calls = {str(key): (lambda model=model: model(images)) for key, model in models.items()}
        with torch.no_grad():
            measured = rounds(calls, repeats, seconds, device)
    rows = []
    for multiple in MULTIPLES:
        speedup, expected = ratio(measured, "0", str(multiple)), macs[0] / macs[multiple]
        rows.append(
            [
                str(case),
                "the paper's" if multiple == 1 else f"multiples of {multiple}",
                f"{macs[0] / case.batch / 1e9:.3f} G → {macs[multiple] / case.batch / 1e9:.3f} G",
                f"{expected:.3f}",
                f"{speedup:.3f}",
                f"{speedup / expected:.3f}",
                "met" if speedup >= SPEED_UP * expected else "missed",
                str(len(measured)),
            ]
        )
    return rows


def training_step(model: nn.Module, case: Case, device: torch.device) -> Callable[[], None]:
    """Forward, backward and AdamW step on a fixed batch."""
    images = torch.randn(case.input_shape, device=device)
    labels = torch.randint(CLASSES, (case.batch,), device=device)
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


def system(name: str, case: Case, device: torch.device) -> nn.Module:
    """One of SYSTEMS; LoRA acts on every layer that PELA factorises, and the head is trained."""
    low_rank, lora = name.startswith("low-rank"), name.endswith("LoRA")
    model = case.build(low_rank, device)
    if not lora:
        return model
    from peft import LoraConfig, get_peft_model

    with torch.device("meta"):
        dense = timm.create_model(case.name, num_classes=CLASSES, **case.model_args)
    targets = list(plan_uniform(dense, KAPPA))
    if low_rank:
        targets = [f"{target}.{part}" for target in targets for part in "uv"]
    config = LoraConfig(r=LORA_RANK, target_modules=targets, modules_to_save=["head"])
    return get_peft_model(model, config)  # type: ignore[arg-type]


def tuning(case: Case, repeats: int, seconds: float, device: torch.device) -> list[list[str]]:
    """Table rows: a fine-tuning step's time and peak memory over those of LoRA on dense."""
    models = {name: system(name, case, device) for name in SYSTEMS}
    trained = {
        name: sum(p.numel() for p in model.parameters() if p.requires_grad)
        for name, model in models.items()
    }
    sizes = {name: count_parameters(model) for name, model in models.items()}
    calls = {name: training_step(model, case, device) for name, model in models.items()}
    measured = rounds(calls, repeats, seconds, device)
    del models, calls
    peaks = {name: peak_memory(name, case, device) for name in SYSTEMS}
    rows = []
    for name in SYSTEMS:
        time_ratio = ratio(measured, name, "dense, LoRA")
        memory_ratio = peaks[name] / peaks["dense, LoRA"]
        verdicts = ["met" if value < 1 else "missed" for value in (time_ratio, memory_ratio)]
        if name.startswith("dense"):
            verdicts = ["", ""]
        rows.append(
            [
                f"{case}: {name}",
                f"{sizes[name] / 1e6:.1f} M",
                f"{trained[name] / 1e6:.1f} M",
                f"{time_ratio:.3f}",
                verdicts[0],
                f"{peaks[name] / 2**20:,.0f} MiB",
                f"{memory_ratio:.3f}",
                verdicts[1],
                str(len(measured)),
            ]
        )
    return rows


def peak_memory(name: str, case: Case, device: torch.device) -> int:
    """Peak bytes in use over three training steps, without what the libraries use.

    Allocated memory on a GPU; on a CPU the resident memory of a process that does nothing else.
    """
    if device.type == "cuda":
        return _steps_in_memory(name, case, "cuda")
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(_steps_in_memory, name, case, "cpu").result()


def _steps_in_memory(name: str, case: Case, kind: str) -> int:
    import peft  # noqa: F401  (so that every process includes the same libraries)

    device = torch.device(kind)
    torch.set_num_threads(1)
    if kind == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    else:
        before = _resident("VmRSS")
    step = training_step(system(name, case, device), case, device)
    for _ in range(3):
        step()
    after = torch.cuda.max_memory_allocated(device) if kind == "cuda" else _resident("VmHWM")
    return after - before


def _resident(field_name: str) -> int:
    # getrusage would include the parent's peak
    status = Path("/proc/self/status").read_text()
    match = re.search(rf"^{field_name}:\s+(\d+) kB$", status, re.M)
    if match is None:
        raise RuntimeError(f"/proc/self/status has no {field_name}: peak memory needs Linux")
    return int(match.group(1)) * 1024


def factorizing(name: str, repeats: int, seconds: float, device: torch.device) -> list[str]:
    """Table row: `factorize` against the released code's decomposition."""
    torch.manual_seed(0)
    model = timm.create_model(name).to(device)
    plan = plan_uniform(model, KAPPA)
    weights = {layer: model.get_submodule(layer).weight.detach() for layer in plan}

    def full_matrices() -> None:
        for layer, weight in weights.items():
            a, sigma, b = torch.linalg.svd(weight)
            root = sigma[: plan[layer]].sqrt()
            a[:, : plan[layer]] * root
            root[:, None] * b[: plan[layer]]

    # `factorize` changes its model, so that each call needs a copy; they are made beforehand
    copies = iter([copy.deepcopy(model) for _ in range(repeats + 1)])
    calls = {"full": full_matrices, "ours": lambda: factorize(next(copies), ranks=plan)}
    measured = rounds(calls, repeats, seconds, device)
    speedup = ratio(measured, "full", "ours")
    verdict = "met" if speedup >= FACTORIZE else "missed"
    return [name, f"{len(plan)}", f"{speedup:.2f}", verdict, str(len(measured))]


TABLES = ("inference", "training", "tuning", "factorize")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print Markdown."""
    parser = command_line("pela_speed", __doc__, 20, 60, "table")
    parser.add_argument("--only", choices=TABLES, help="one table (default: all)")
    options = parsed(parser, argv)
    device, repeats = options.device, options.repeats
    tables = [options.only] if options.only else TABLES
    print(heading("pela_speed", argv, device).strip())
    for table, train in (("inference", False), ("training", True)):
        if table in tables:
            cases = TRAINING[device.type] if train else INFERENCE
            cases = [QUICK] if options.quick else cases
            share = options.seconds / len(cases)
            rows = [row for case in cases for row in speed_up(case, train, repeats, share, device)]
            print(f"\n{table.capitalize()}: time of dense over time of low-rank, κ = {KAPPA:g};")
            print(f"goal: at least {SPEED_UP} of the ratio of multiply-adds.\n")
            header = ["model", "ranks", "multiply-adds / image", "their ratio", "speed-up"]
            print(markdown([*header, "share", "goal", "rounds"], rows))
    if "tuning" in tables:
        case = QUICK if options.quick else TUNING[device.type]
        rows = tuning(case, repeats, options.seconds, device)
        print(f"\nTuning: one step, over LoRA (rank {LORA_RANK}) on the dense model;")
        print("goals: less time, less memory.\n")
        header = ["system", "parameters", "trained", "time", "goal", "peak memory", "over LoRA's"]
        print(markdown([*header, "goal", "rounds"], rows))
    if "factorize" in tables:
        name = "vit_tiny_patch16_224" if options.quick else FACTORIZED
        row = factorizing(name, repeats, options.seconds, device)
        print("\nFactorising: time of SVDs with full matrices over time of `factorize`, κ = 2;")
        print(f"goal: at least {FACTORIZE:g}.\n")
        print(markdown(["model", "layers", "times faster", "goal", "rounds"], [row]))


if __name__ == "__main__":
    main()
