"""ALBEF (arXiv 2107.07651): "align before fuse" of an image and a text.

A ViT encodes the image, the lower half of a BERT the text, and its upper half fuses both by
cross-attention. The heads depend on the task. Parameter names are those of ALBEF's checkpoints.
"""

import difflib
from typing import Any, Literal, get_args

import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import BertConfig

from lightning_modules.albef.bert import Bert, TokenBert
from lightning_modules.backbones import build_vision, name_in_errors

Task = Literal["pretrain", "retrieval", "entailment", "vqa"]
# layers that PELA's released code leaves dense in addition to pela.layers.SKIP
SKIP = ("cls_head", "vision_proj", "text_proj")
TEMPERATURES = (0.001, 0.5)  # the range of τ, as in ALBEF's code


class ALBEF(nn.Module):
    """The encoders of all tasks.

    Args:
        vision: a timm ViT without a head.
        text_encoder: `Bert`, or `TokenBert` for pre-training.
    """

    # methods besides forward that run the model, for which FSDP2 has to gather parameters
    methods: tuple[str, ...] = ("encode_image", "encode_text", "fuse")

    def __init__(self, vision: nn.Module, text_encoder: Bert | TokenBert):
        super().__init__()
        self.visual_encoder = vision
        self.text_encoder = text_encoder

    @property
    def bert(self) -> Bert:
        """The text and fusion layers."""
        encoder = self.text_encoder
        return encoder.bert if isinstance(encoder, TokenBert) else encoder

    @property
    def text_width(self) -> int:
        """Features D of the text's states."""
        return self.bert.config.hidden_size

    def encode_image(self, images: Tensor) -> Tensor:
        """States (B, N, C) of images (B, 3, H, W), class token first, after the final norm."""
        return self.visual_encoder.forward_features(images)  # type: ignore[operator]

    def encode_text(self, ids: Tensor, mask: Tensor) -> Tensor:
        """States (B, L, D) of the text layers for tokens (B, L) and their mask."""
        return self.bert.text(ids, mask)

    def fuse(self, text: Tensor, mask: Tensor, image: Tensor) -> Tensor:
        """Fused states (B, L, D) of texts (B, L, D) and images (B, N, C), pair by pair."""
        return self.bert.fuse(text, mask, image)


class RetrievalModel(ALBEF):
    """ALBEF with projections for the contrastive loss and a head for image–text matching.

    Args:
        projection: features of the common space.
        temperature: initial τ, which is learned within the range `TEMPERATURES`.
        **encoders: see `ALBEF`.
    """

    methods = (*ALBEF.methods, "project_image", "project_text", "similarity", "match")

    def __init__(self, projection: int, temperature: float, **encoders: Any):
        super().__init__(**encoders)
        self.vision_proj = nn.Linear(self.visual_encoder.num_features, projection)  # type: ignore
        self.text_proj = nn.Linear(self.text_width, projection)
        # a vector of one number, because FSDP2 does not shard scalars
        self.temp = nn.Parameter(torch.full((1,), temperature))
        self.itm_head = nn.Linear(self.text_width, 2)

    def project_image(self, states: Tensor) -> Tensor:
        """Unit vectors (B, projection) of the class tokens of image states (B, N, C)."""
        return F.normalize(self.vision_proj(states[:, 0]).float(), dim=-1)

    def project_text(self, states: Tensor) -> Tensor:
        """Unit vectors (B, projection) of the class tokens of text states (B, L, D)."""
        return F.normalize(self.text_proj(states[:, 0]).float(), dim=-1)

    def match(self, fused: Tensor) -> Tensor:
        """Logits (B, 2) for "do not match" and "match", of fused states (B, L, D)."""
        return self.itm_head(fused[:, 0])

    def similarity(self, features: Tensor, keys: Tensor) -> Tensor:
        """s(a, b) / τ (B, K) of unit vectors (B, projection) and (projection, K); Eq. 1."""
        with torch.autocast(features.device.type, enabled=False):
            return features @ keys.to(features) / self.temp

    @torch.no_grad()
    def limit_temperature(self) -> None:
        """Clamp τ to its range, in place; to be called before each step."""
        self.temp.clamp_(*TEMPERATURES)


class PretrainModel(RetrievalModel):
    """A `RetrievalModel` with a head for masked tokens."""

    methods = (*RetrievalModel.methods, "masked_states", "predict_tokens")

    def masked_states(self, ids: Tensor, mask: Tensor, image: Tensor) -> Tensor:
        """Fused states (B, L, D) of masked texts (B, L) and image states (B, N, C)."""
        return self.bert(ids, mask, image)

    def predict_tokens(self, states: Tensor) -> Tensor:
        """Logits (…, vocabulary) of states (…, D)."""
        return self.text_encoder.predict(states)  # type: ignore[operator]


class EntailmentModel(ALBEF):
    """ALBEF with a two-layer classifier on the fused class token.

    Args:
        classes: number of classes.
        **encoders: see `ALBEF`.
    """

    methods = ()

    def __init__(self, classes: int, **encoders: Any):
        super().__init__(**encoders)
        width = self.text_width
        self.cls_head = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, classes))

    def forward(self, images: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        """Logits (B, classes) for images (B, 3, H, W) and tokens (B, L) with their mask."""
        fused = self.bert(ids, mask, self.encode_image(images))
        return self.cls_head(fused[:, 0])


class AnswerModel(ALBEF):
    """ALBEF with a causal decoder that generates answers from the fused states.

    Args:
        decoder_layers: number of decoder layers, all with cross-attention.
        **encoders: see `ALBEF`.
    """

    methods = ("encode_question", "decode")

    def __init__(self, decoder_layers: int, **encoders: Any):
        super().__init__(**encoders)
        config = self.bert.config
        decoder = Bert(config, 0, decoder_layers, config.hidden_size, causal=True)
        self.text_decoder = TokenBert(decoder)

    def encode_question(self, images: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        """Fused states (B, L, D) of images (B, 3, H, W) and questions (B, L) with their mask."""
        return self.bert(ids, mask, self.encode_image(images))

    def decode(self, ids: Tensor, mask: Tensor, question: Tensor, question_mask: Tensor) -> Tensor:
        """Logits (B, A, vocabulary) for the token after each of the answers' tokens (B, A)."""
        decoder = self.text_decoder
        return decoder.predict(decoder.bert(ids, mask, question, question_mask))


def build(
    task: Task = "pretrain",
    vision: str = "vit_base_patch16_224",
    vision_args: dict[str, Any] | None = None,
    image_size: int | None = None,
    text: str | dict[str, Any] | None = None,
    text_layers: int = 6,
    fusion_layers: int = 6,
    projection: int = 256,
    temperature: float = 0.07,
    classes: int = 3,
    decoder_layers: int = 6,
) -> Any:
    """An ALBEF with a task's heads and random weights; the default sizes are the paper's.

    Args:
        task: "pretrain", "retrieval", "entailment" or "vqa".
        vision: timm name of a ViT.
        vision_args: further arguments of timm.create_model (embed_dim, depth, …).
        image_size: side of the images, in pixels; None: 256 for pre-training, else 384.
        text: a BERT's configuration: a folder or hub name, or values of transformers' BertConfig;
            None for BERT-base, uncased.
        text_layers: number of layers without cross-attention.
        fusion_layers: number of layers with cross-attention above them.
        projection: features of the common space (pre-training and retrieval).
        temperature: initial τ of the contrastive loss (pre-training and retrieval).
        classes: number of classes (entailment).
        decoder_layers: number of layers of the answer decoder (VQA).

    Returns:
        A `PretrainModel`, `RetrievalModel`, `EntailmentModel` or `AnswerModel`.

    Raises:
        ValueError: for an unknown task, a model that is not a ViT with a class token, or less than
            one text or fusion layer.
        OSError: if `text` is a name or folder from which no BERT configuration can be read.
    """
    if task not in get_args(Task):
        near = difflib.get_close_matches(str(task), get_args(Task), n=1)
        hint = f", did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"task is {task!r}: expected one of {', '.join(get_args(Task))}{hint}")
    for name, value in (("text_layers", text_layers), ("fusion_layers", fusion_layers)):
        if value < 1:
            raise ValueError(f"{name} is {value}: expected at least 1; the paper's ALBEF has 6")
    size = image_size or (256 if task == "pretrain" else 384)
    arguments = {"img_size": size, **(vision_args or {})}
    encoder = build_vision(vision, 0, arguments)
    if not isinstance(encoder, timm.models.VisionTransformer) or encoder.cls_token is None:
        raise ValueError(
            f"{vision} is not a ViT with a class token: ALBEF contrasts that token; give a timm "
            "model such as vit_base_patch16_224"
        )
    if isinstance(text, str):
        with name_in_errors(text):
            config = BertConfig.from_pretrained(text)
    else:
        config = BertConfig(**(text or {}))
    bert = Bert(config, text_layers, fusion_layers, encoder.num_features)
    parts: dict[str, Any] = {"vision": encoder, "text_encoder": bert}
    if task == "entailment":
        return EntailmentModel(classes, **parts)
    if task == "vqa":
        return AnswerModel(decoder_layers, **parts)
    if task == "retrieval":
        return RetrievalModel(projection, temperature, **parts)
    return PretrainModel(projection, temperature, vision=encoder, text_encoder=TokenBert(bert))


def skipped(model: nn.Module) -> tuple[str, ...]:
    """The layers of this model that PELA's released code leaves dense, for `factorize(skip=…)`.

    The matching head also stays dense, as all layers with fewer than 10 outputs do.
    """
    parts = {part for name, _ in model.named_modules() for part in name.split(".")}
    return tuple(name for name in SKIP if name in parts)
