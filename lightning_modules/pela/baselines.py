"""Distillation baselines for PELA, applied to the same low-rank student.

Each runs student and teacher on a batch and returns the student's logits and the loss that replaces
L_fd in PELA's Eq. 7 (arXiv 2310.10700).
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain, islice
from typing import Any

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_modules.layouts import uncalled_layers
from lightning_modules.pela.features import Features, feature_layers

VISIBLE = 0.3  # share of the patches that MaskAlign's student gets


def tinybert(student: nn.Module, teacher: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    """TinyBERT's Transformer distillation (arXiv 1909.10351, Eqs 7–11), layer by layer.

        L = MSE(E_s, E_t) + Σ_layers [ MSE(H_s, H_t) + MSE(A_s, A_t) ] + CE(z_t, z_s)

    with E the embedded patches, H a block's output, A its attention scores Q Kᵀ/√d before the
    softmax (the MSE also averages over heads), of normalised Q and K where the model normalises
    them (timm's qk_norm), and z the logits at temperature 1. Student and
    teacher are equally wide and deep, so that TinyBERT's learned projections W are the identity,
    and each layer is matched with the teacher's layer of the same index.

    Args:
        student: a low-rank timm model with fused qkv layers, such as ViT or Swin.
        teacher: the dense one.
        images: (B, 3, H, W).

    Returns:
        The student's logits (B, classes), and the loss, computed in float32.

    Raises:
        ValueError: if the model has no such layers or does not call them, its positions are rotary,
            or its scores differ in shape.
    """
    modules = dict(student.named_modules())
    start = "norm_pre" if "norm_pre" in modules else "patch_embed"
    hidden = [start, *feature_layers(student, "blocks")]
    attention = [name for name in modules if name.endswith("attn.qkv")]
    if not attention:
        raise ValueError(
            f"{type(student).__name__} has no layers called attn.qkv: TinyBERT's attention loss "
            "needs them"
        )
    why = ""
    if unseen := uncalled_layers(student).intersection(attention):
        why = f"reads the weights of {min(unseen)} without calling it"
    elif "rope" in modules:
        why = "turns queries and keys by rotary positions behind attn.qkv"
    if why:
        raise ValueError(
            f"{type(student).__name__} {why}, so that its attention scores are not known: choose "
            "method lillama, which compares outputs of blocks only"
        )
    heads = [modules[name.removesuffix(".qkv")].num_heads for name in attention]
    read = [_read(name, modules) for name in attention]
    names = [*hidden, *chain(*read)]
    with Features(student, names) as of_student, Features(teacher, names) as of_teacher:
        logits = student(images)
        with torch.no_grad():
            target = teacher(images)
        pairs = list(zip(of_student.take(), of_teacher.take(), strict=True))
    with torch.autocast(images.device.type, enabled=False):
        terms = [F.mse_loss(s.float(), t.float()) for s, t in pairs[: len(hidden)]]
        of_attention = iter(pairs[len(hidden) :])
        for parts, count in zip(read, heads, strict=True):
            s, t = zip(*islice(of_attention, len(parts)), strict=True)
            terms.append(F.mse_loss(_scores(s, count), _scores(t, count)))
        terms.append(F.cross_entropy(logits.float(), target.float().softmax(-1)))
        return logits, torch.stack(terms).sum()


def maskalign(student: nn.Module, teacher: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    """MaskAlign: `visible_alignment`, and the logits of a pass over the full images.

    Args:
        student: a low-rank timm ViT.
        teacher: the dense one.
        images: (B, 3, H, W).

    Returns:
        The student's logits (B, classes) on the full images, and the loss, computed in float32.

    Raises:
        ValueError: if tokens cannot be left out of the model, as in Swin with its windows and in
            EVA with its rotary positions.
    """
    logits = student(images)
    return logits, visible_alignment(student, teacher, images, student, teacher)


def visible_alignment(
    student: nn.Module,
    teacher: nn.Module,
    images: Tensor,
    encode_student: Callable[[Tensor], Tensor],
    encode_teacher: Callable[[Tensor], Tensor],
) -> Tensor:
    """MaskAlign's loss (arXiv 2211.08887): the student gets a part of the patches, the teacher all.

    A random 30 % of the patch tokens go through the student's blocks. Each block's outputs are
    matched with the teacher's at the same positions by mean squared error, averaged over blocks;
    both are first normalised over channels (a LayerNorm without weights). Student and teacher have
    the same blocks, so that each is matched with the one of the same index, without the paper's
    learned mixing of levels.

    Args:
        student: a low-rank timm ViT.
        teacher: the dense one.
        images: (B, 3, H, W).
        encode_student: runs the student on images: the student itself, or the method of a model
            around it that FSDP2 gathers parameters for.
        encode_teacher: the same for the teacher.

    Returns:
        A scalar, computed in float32.

    Raises:
        ValueError: if tokens cannot be left out of the model, as in Swin with its windows and in
            EVA with its rotary positions.
    """
    if not isinstance(student, VisionTransformer):
        raise ValueError(
            f"{type(student).__name__} cannot leave tokens out: MaskAlign needs a timm ViT"
        )
    embedding: Any = student.patch_embed
    prefix, patches = student.num_prefix_tokens, embedding.num_patches
    visible_patches = max(1, round(VISIBLE * patches))
    order = torch.rand(len(images), patches, device=images.device).argsort(1)
    special = torch.arange(prefix, device=images.device).expand(len(images), -1)
    visible = torch.cat([special, prefix + order[:, :visible_patches].sort(1).values], dim=1)

    def take(tokens: Tensor) -> Tensor:
        return tokens.gather(1, visible[..., None].expand(-1, -1, tokens.shape[-1]))

    handle = student.blocks.register_forward_pre_hook(lambda _, inputs: (take(inputs[0]),))
    try:
        with Features(student) as of_student, Features(teacher) as of_teacher:
            encode_student(images)
            with torch.no_grad():
                encode_teacher(images)
            pairs = list(zip(of_student.take(), of_teacher.take(), strict=True))
    finally:
        handle.remove()
    with torch.autocast(images.device.type, enabled=False):
        terms = [F.mse_loss(_normalised(s), _normalised(take(t))) for s, t in pairs]
        return torch.stack(terms).mean()


def lillama(student: nn.Module, teacher: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    """Lillama, first called SlimLlama (arXiv 2412.16719): blocks learn separately, without labels.

        L = Σ_blocks [ d(f(x_t), y_t) + d(f(x_s), y_t) ],   d(a, y) = mean|a − y| − log σ(cos(a, y))

    with f a block of the student, x_t and y_t the input and output of the teacher's block, and x_s
    the student's own input to the block (the joint teacher–student loss). Gradients do not pass
    from one block to another. The means are over channels, tokens and images.

    Args:
        student: a low-rank timm model whose blocks take tokens (B, …, C) first.
        teacher: the dense one.
        images: (B, 3, H, W).

    Returns:
        The student's logits (B, classes), whose gradient reaches the last block only, and the
        loss, computed in float32.

    Raises:
        ValueError: if the model has no blocks with known names.
    """
    names = feature_layers(student, "blocks")
    teacher_inputs: list[tuple[Any, Any]] = []  # EVA's blocks take rotary positions, too
    hooks = [
        teacher.get_submodule(name).register_forward_pre_hook(
            lambda _, *inputs: teacher_inputs.append(inputs), with_kwargs=True
        )
        for name in names
    ]
    hooks += [
        student.get_submodule(name).register_forward_pre_hook(lambda _, x: (x[0].detach(), *x[1:]))
        for name in names
    ]
    try:
        with Features(student) as of_student, Features(teacher) as of_teacher:
            logits = student(images)
            with torch.no_grad():
                teacher(images)
            from_student, targets = of_student.take(), of_teacher.take()
        from_teacher = [
            student.get_submodule(name)(*inputs, **named)
            for name, (inputs, named) in zip(names, teacher_inputs, strict=True)
        ]
    finally:
        for hook in hooks:
            hook.remove()
    with torch.autocast(images.device.type, enabled=False):
        triples = zip(from_teacher, from_student, targets, strict=True)
        terms = [_distance(t, y) + _distance(s, y) for t, s, y in triples]
        return logits, torch.stack(terms).sum()


def _distance(outputs: Tensor, targets: Tensor) -> Tensor:
    """d of `lillama`."""
    outputs, targets = outputs.float(), targets.float()
    cosine = F.cosine_similarity(outputs, targets, dim=-1)
    return F.l1_loss(outputs, targets) - F.logsigmoid(cosine).mean()


def _read(qkv: str, modules: Mapping[str, nn.Module]) -> list[str]:
    """The modules whose outputs have the queries and keys behind a fused layer.

    timm's attention calls q_norm and k_norm even where they are identities; Swin's has none.
    """
    norms = [qkv.removesuffix("qkv") + name for name in ("q_norm", "k_norm")]
    return norms if norms[0] in modules else [qkv]


def _scores(parts: Sequence[Tensor], heads: int) -> Tensor:
    """Attention scores (B, heads, N, N) from the outputs of `_read`'s modules."""
    q, k, *_ = (
        parts
        if len(parts) == 2
        else parts[0].unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    )
    return q.float() @ k.float().transpose(-2, -1) * q.shape[-1] ** -0.5


def _normalised(tokens: Tensor) -> Tensor:
    return F.layer_norm(tokens.float(), tokens.shape[-1:])
