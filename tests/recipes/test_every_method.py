"""Every method's stage: killed and resumed it ends as if nothing had happened, on one process and
on two (DDP and FSDP2), and its checkpoint loads under weights_only.

A stage is added by a line in STAGES. (MatFormer's own draws are in test_resume and
test_distributed.)
"""

import json
from functools import cache

import pytest
import timm
import torch

from lightning_modules.albef import Repair, build
from lightning_modules.pela import PELA
from lightning_modules.self_distillation import Adaptation, MaskedAutoencoder, mae_decoder
from recipes.cli import parse
from tests.recipes import stage_runs
from tests.recipes.stage_runs import Killed, assert_same, logged, under_both_strategies

REPAIR, DISTIL = "pela/deit_b", "self_distillation/images_adapt"
ALBEF_REPAIR, APET = "albef/repair", "apet/encoder"
VIT = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 3, "num_heads": 2}
BERT = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2
}  # fmt: skip
NOISE = {"drop_path_rate": 0.2, "proj_drop_rate": 0.1}
VALIDATED, BY_STEPS = "--trainer.check_val_every_n_epoch=1", "--trainer.val_check_interval=4"
SCENES = ['--data.generate={"train": 25, "val": 3}', "--data.batch_size=4", VALIDATED]
# 24 captions: three batches, of which each of two ranks makes one; and a queue that wraps
PAIRS = [
    '--data.generate={"train": 12, "val": 3, "test": 3, "size": 48}',
    *("--data.batch_size=8", "--data.eval_batch_size=2", VALIDATED),
]
STAGES = {
    # stage → further options; its `tiny` preset has several epochs of a few batches
    "vera/glue": ["--data.limit=80"],
    "vera/e2e": ["--data.limit=80"],
    "self_distillation/images_finetune": ["--data.per_class=20", "--model.method=mars", BY_STEPS],
    "self_distillation/text_finetune": [
        "--model.method=recadam",
        '--model.method_args={"anneal_t0": 4, "pretrain_cof": 200}',
        BY_STEPS,
    ],
    "self_distillation/text_adapt": [BY_STEPS],
    DISTIL: [
        "--model.distil=hidden",
        "--model.match=all",
        BY_STEPS,
    ],
    REPAIR: [
        f"--model.model_args={json.dumps(VIT | NOISE)}",
        # forms of the losses whose gradients no other part could hide
        *("--model.setting=paper", "--model.p=2.0", "--model.beta=1.0", "--model.warmup_steps=2"),
        *("--data.batch_size=208", VALIDATED),
    ],
    APET: [
        f"--model.model_args={json.dumps(BERT)}",
        *("--data.limit=80", "--model.method_args.budget=3000", BY_STEPS),
    ],
    "apet/decoder": ["--data.limit=80", BY_STEPS],
    "matformer/matlm": ["--data.max_bytes=60000", "--data.eval_tokens=1000", BY_STEPS],
    ALBEF_REPAIR: [
        *PAIRS,
        *("--model.setting=paper", "--model.p=2.0", "--model.fd_weight=1.0e-3"),
        "--model.warmup_steps=2",
    ],
    "albef/vqa": [*PAIRS, "--model.tuning=lora"],
    "pela/segmentation": SCENES,
    "pela/detection": SCENES,
}
# ALBEF's other distillations
TINYBERT, MASKALIGN = (f"--model.distillation={name}" for name in ("tinybert", "maskalign"))
STEPS, KILLED_AT, RESUMED_AT = 8, 5, 4


@cache
def dense_weights():
    """Of what PELA's stage repairs."""
    return scattered(timm.create_model("vit_tiny_patch16_224", num_classes=10, **VIT))


@cache
def further_weights():
    """Of what self-distillation's student learns from."""
    vit = {"img_size": 8, "patch_size": 2, "embed_dim": 32, "depth": 2, "num_heads": 2}
    encoder = timm.create_model("vit_tiny_patch16_224", num_classes=0, **vit)
    return scattered(MaskedAutoencoder(encoder, mae_decoder(encoder, depth=1, width=16, heads=2)))


@cache
def albef_weights():
    """Of the dense ALBEF that its repair starts from."""
    sizes = parse(stage_runs.RECIPES / f"{ALBEF_REPAIR}.yaml", "tiny").model.init_args.sizes
    return {**scattered(build("pretrain", **sizes)), "temp": torch.tensor([0.07])}


def scattered(model):
    """A teacher's weights, of which any change shows."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return dict(model.state_dict())


TEACHERS = {PELA: dense_weights, Adaptation: further_weights, Repair: albef_weights}


class Witness(stage_runs.Witness):
    """Sees to it, too, that a teacher stays as it was and takes no part in training."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        without = pl_module.hparams.get("distil", "always") is None  # further pre-training
        if type(pl_module) not in TEACHERS or without:
            return
        teacher = pl_module.teacher
        assert not teacher.training and not any(p.requires_grad for p in teacher.parameters())
        assert_same(dict(teacher.state_dict()), TEACHERS[type(pl_module)]())
        # DistributedDataParallel, where there is one: its parameters are its buckets'
        held = {id(p) for p in trainer.strategy.model.parameters()}
        assert not held & {id(p) for p in teacher.parameters()}


def options_of(stage, folder):
    if stage == "pela/detection":
        pytest.importorskip("pycocotools")
    options = [
        "--trainer.max_epochs=-1", f"--trainer.max_steps={STEPS}", "--trainer.limit_val_batches=2",
        # no more than are looked at: to gather a sharded one takes longer than a step
        f"--checkpoint.every_n_train_steps={RESUMED_AT}", "--checkpoint.save_last=link",
    ]  # fmt: skip
    if stage == REPAIR:
        torch.save(dense_weights(), folder.parent / "dense.pt")
        options.append(f"--model.init_from={folder.parent / 'dense.pt'}")
    if stage == ALBEF_REPAIR:
        torch.save(albef_weights(), folder.parent / "albef.pt")
        options.append(f"--model.init_from={folder.parent / 'albef.pt'}")
    if stage == DISTIL:
        torch.save(further_weights(), folder.parent / "further.pt")
        options.append(f"--model.teacher_from={folder.parent / 'further.pt'}")
    return [*options, *STAGES[stage]]


def in_one_process(stage, folder, *options, kill_at=None):
    options = (*options_of(stage, folder), *options)
    return stage_runs.in_one_process(stage, folder, *options, witness=Witness, kill_at=kill_at)


def in_two_processes(stage, folder, strategy, *options):
    options = (*options_of(stage, folder), *options)
    return stage_runs.in_two_processes(stage, folder, strategy, *options, witness=Witness)


@pytest.mark.parametrize(
    ("stage", "further"),
    [
        *((stage, []) for stage in STAGES),
        *((ALBEF_REPAIR, [further]) for further in (TINYBERT, MASKALIGN)),
    ],
)
def test_a_killed_run_continues_as_if_nothing_had_happened(stage, further, tmp_path):
    whole = in_one_process(stage, tmp_path / "whole", *further)
    assert len(set(whole["losses"])) == STEPS
    with pytest.raises(Killed):
        in_one_process(stage, tmp_path / "killed", *further, kill_at=KILLED_AT)
    torch.manual_seed(12345)  # another process would not be where this one is
    last = f"--ckpt_path={tmp_path / 'killed' / 'last.ckpt'}"
    resumed = in_one_process(stage, tmp_path / "resumed", *further, last)
    assert resumed["losses"] == whole["losses"][RESUMED_AT:]
    assert_same(resumed["weights"], whole["weights"])
    assert_same_scores(tmp_path)
    one, other = (
        torch.load(tmp_path / run / "last.ckpt", weights_only=True) for run in ("whole", "resumed")
    )
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "hyper_parameters"):
        assert_same(one[part], other[part])
    if stage in (REPAIR, ALBEF_REPAIR):
        assert_terms_are_felt(logged(tmp_path / "whole", "train/share_"))
    if stage == REPAIR:
        with pytest.raises(ValueError, match="another model: its ratio is 2.0, this run's is 3.0"):
            in_one_process(stage, tmp_path / "other", last, "--model.ratio=3.0")


@under_both_strategies
@pytest.mark.parametrize("stage", STAGES)
def test_two_processes_agree_and_resume_to_the_bit(stage, strategy, tmp_path):
    whole = in_two_processes(stage, tmp_path / "whole", strategy)
    assert whole[0]["sharded"] == (strategy != "ddp")
    assert (whole[0]["wrapped"] == "DistributedDataParallel") == (strategy == "ddp")
    assert whole[0]["losses"] != whole[1]["losses"]  # each has data of its own
    assert_same(whole[0]["weights"], whole[1]["weights"])
    [checkpoint] = (tmp_path / "whole").glob(f"*step={RESUMED_AT}.ckpt")
    resumed = in_two_processes(stage, tmp_path / "resumed", strategy, f"--ckpt_path={checkpoint}")
    for before, after in zip(whole, resumed, strict=True):
        assert after["losses"] == before["losses"][RESUMED_AT:]
        assert_same(after["weights"], before["weights"])
    assert_same_scores(tmp_path)


def assert_same_scores(folder):
    """Of validation, which may have state of its own."""
    scores, later = (logged(folder / run, "val/") for run in ("whole", "resumed"))
    assert later
    assert later == scores[len(scores) - len(later) :]


def assert_terms_are_felt(rows):
    """Of every step three shares of the gradient; with p = 2, L_rwp begins at its minimum."""
    assert len(rows) == STEPS
    for row in rows:
        shares = {name.removeprefix("train/share_"): float(x) for name, x in row.items()}
        assert set(shares) == {"base", "distillation", "perturbation"}
        assert sum(shares.values()) == pytest.approx(1) and min(shares.values()) > 0


# all of a stage's data at each step, and no noise that each process draws for itself
DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob")
BERT_WITHOUT = json.dumps(BERT | dict.fromkeys(DROPOUTS, 0.0))
SUPCON = ["--model.mae_weight=0", "--model.distil=null", "--model.supcon_temperature=0.2"]
QUIET = [
    (REPAIR, 256, [f"--model.model_args={json.dumps(VIT)}"]),
    (APET, 16, ["--data.limit=16", f"--model.model_args={BERT_WITHOUT}"]),
    (DISTIL, 40, [*SUPCON, "--data.per_class=8", "--data.augmentation=none"]),
]


@under_both_strategies
@pytest.mark.parametrize(("stage", "size", "quiet"), QUIET)
def test_two_processes_compute_what_one_does(stage, size, quiet, strategy, tmp_path):
    """PELA's teacher and losses, APET's elements of weights that FSDP2 shards, and the contrast of
    each example with all others of the step."""
    alone = in_one_process(stage, tmp_path / "one", *quiet, f"--data.batch_size={size}")
    half = f"--data.batch_size={size // 2}"
    two, other = in_two_processes(stage, tmp_path / "two", strategy, *quiet, half)
    for name, value in alone["weights"].items():
        torch.testing.assert_close(two["weights"][name], value, atol=1e-3, rtol=1e-3, msg=name)
    mean = (torch.tensor(two["losses"]) + torch.tensor(other["losses"])) / 2
    torch.testing.assert_close(mean, torch.tensor(alone["losses"]), atol=1e-4, rtol=1e-4)
