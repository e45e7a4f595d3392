"""Builds timm and transformers models by name, feeds them batches, and shards them (FSDP2)."""

import difflib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import timm
import torch
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard


@contextmanager
def name_in_errors(name: str) -> Iterator[None]:
    """Context for loading a model by name, in which errors of timm and transformers get that name.

    Args:
        name: of the model, which the libraries' own errors often leave out.

    Raises:
        OSError: if there is no such folder, and the hub has no such model or does not answer.
    """
    try:
        yield
    except OSError as error:
        reason = str(error).partition("\n")[0]
        raise OSError(
            f"the model {name!r} cannot be loaded, expected a folder with its config.json and "
            f"weights, or a name that the hub knows ({reason}); `make weights` puts some folders "
            "under weights/"
        ) from error


def build_vision(
    architecture: str, num_classes: int, model_args: dict[str, Any], pretrained: bool = False
) -> nn.Module:
    """A timm model.

    Args:
        architecture: timm name, such as "vit_base_patch16_224"; or "local-dir:" and the path of a
            folder that timm wrote (config.json and weights); or "hf-hub:" and a hub name.
        num_classes: outputs of the head; 0 leaves the head out.
        model_args: further keyword arguments of timm.create_model (img_size, embed_dim, …).
        pretrained: weights of that folder or from the hub (which needs a network or a filled
            cache); random otherwise.

    Returns:
        The model. A pre-trained one has an attribute `at_random`, as `build_text`'s has: the names
        of the classifier's parameters, if the files are of another number of classes. What else
        `model_args` add to the files' model, such as a pooling with weights, is not among them.

    Raises:
        ValueError: if timm has no such model or weights of it, or refuses an argument; or for
            weights of a folder that only its own load.py can load.
        OSError: if there is no such folder, or the hub does not answer.
    """
    folder = architecture.removeprefix("local-dir:")
    if folder != architecture and not Path(folder, "config.json").is_file():
        raise FileNotFoundError(
            f"architecture {architecture}: {Path(folder).absolute()} has no config.json; a folder "
            "that timm wrote is expected (`make weights` makes those under weights/)"
        )
    if pretrained:
        _refuse_own_loader(folder)
    if ":" not in architecture and not timm.is_model(architecture):
        near = difflib.get_close_matches(architecture, timm.list_models(), n=5)
        raise ValueError(
            f"timm has no model {architecture!r}; similar: {', '.join(near) or 'none'} "
            "(timm.list_models() names all)"
        )
    try:
        with name_in_errors(architecture):
            model = timm.create_model(
                architecture, pretrained=pretrained, num_classes=num_classes, **model_args
            )
    except (TypeError, RuntimeError, AssertionError) as error:  # timm raises all of these
        raise ValueError(
            f"{architecture}: {error}; correct model.architecture or model.model_args"
        ) from error
    if pretrained:
        model.at_random = _new_classifier(model)  # type: ignore[assignment]
    return model


def _refuse_own_loader(folder: str) -> None:
    """Refuse the weights of an exported folder that its library alone cannot load.

    timm and transformers would build its parent and leave at random what does not fit.

    Raises:
        ValueError: naming the folder, and what to give instead.
    """
    if Path(folder, "load.py").is_file() and Path(folder, "manifest.json").is_file():
        raise ValueError(
            f"architecture {folder} has a load.py, without which its weights cannot be loaded: "
            "give the architecture and model_args that it was made of, and, if it is of low rank, "
            f"--model.init_from {folder}"
        )


def _new_classifier(model: Any) -> frozenset[str]:
    """Names of a pre-trained timm model's classifier, if its files are of other classes.

    timm then drops the files' classifier, without saying so.
    """
    names = model.pretrained_cfg.get("classifier") or ()
    names = [names] if isinstance(names, str) else names  # a distilled model has two
    is_new = model.num_classes != model.pretrained_cfg["num_classes"]
    return frozenset(n for n in model.state_dict() if is_new and n.rpartition(".")[0] in names)


TEXT_TASKS = {
    "classification": transformers.AutoModelForSequenceClassification,
    "causal": transformers.AutoModelForCausalLM,
    "masked": transformers.AutoModelForMaskedLM,
    "seq2seq": transformers.AutoModelForSeq2SeqLM,
}


def build_text(
    architecture: str,
    task: Literal["classification", "causal", "masked", "seq2seq"],
    model_args: dict[str, Any],
    pretrained: bool = False,
    quantize: Literal["nf4", "int8"] | None = None,
) -> nn.Module:
    """A transformers model in training mode.

    Args:
        architecture: a hub name, a folder with config.json, or a model type such as "gpt2".
        task: which head it has.
        model_args: values of its configuration (num_labels, n_layer, …).
        pretrained: with the weights of that name or folder, in float32; random otherwise.
        quantize: hold the pre-trained weights in 4 or 8 bits (bitsandbytes, CUDA), and compute in
            bfloat16.

    Returns:
        The model. A pre-trained one has an attribute `at_random`: the names of the parameters that
        are not among the pre-trained weights and were initialised, such as those of a new head.

    Raises:
        OSError: if there is no such name or folder.
        ValueError: if `pretrained` is set for a model type, which has no weights, or for a folder
            that only its own load.py can load; or `quantize` without `pretrained`.
    """
    auto_class = TEXT_TASKS[task]
    if not pretrained:
        if quantize:
            raise ValueError(
                f"quantize: {quantize} needs pretrained: true; random weights are not quantised"
            )
        if architecture in transformers.CONFIG_MAPPING:
            config = transformers.AutoConfig.for_model(architecture, **model_args)
        else:
            with name_in_errors(architecture):
                config = transformers.AutoConfig.from_pretrained(architecture, **model_args)
        if task == "seq2seq" and getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = config.pad_token_id  # T5's configuration has none
        return auto_class.from_config(config, dtype=torch.float32)
    if architecture in transformers.CONFIG_MAPPING and not Path(architecture).is_dir():
        raise ValueError(
            f"{architecture!r} is a model type and has no weights: give a hub name or a folder as "
            "architecture, or pretrained: false"
        )
    _refuse_own_loader(architecture)
    loading: dict[str, Any] = {"dtype": torch.float32}
    if quantize:
        quantization = transformers.BitsAndBytesConfig(
            load_in_4bit=quantize == "nf4",
            load_in_8bit=quantize == "int8",
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
        loading = {"quantization_config": quantization, "dtype": torch.bfloat16}
    with name_in_errors(architecture):
        model, info = auto_class.from_pretrained(
            architecture, output_loading_info=True, **loading, **model_args
        )
    model.at_random = frozenset(info["missing_keys"])
    # from_pretrained returns it in eval mode; Lightning would keep that and train without dropout
    return model.train()


def match_tokenizer(model: Any, trainer: Any, weights: str | None = None) -> None:
    """Check the model's vocabulary against the DataModule's tokenizer, if the trainer has one.

    A pre-trained model needs its own tokenizer: with another one that has no more tokens it would
    read other words, without an error.

    A model without a padding token (GPT-2, which needs one as a classifier) gets the tokenizer's,
    and so does every decoder that classifies: it reads the last token that is no padding.

    Args:
        model: a transformers model; its configuration may get a `pad_token_id`.
        trainer: a Lightning Trainer, or None.
        weights: name or folder of the pre-trained weights, if the model has such.

    Raises:
        ValueError: if the tokenizer has tokens that the model has no embedding of, or is not the
            one that belongs to the weights.
    """
    data: Any = getattr(trainer, "datamodule", None)
    tokens, config = getattr(data, "vocab_size", 0), model.config
    if tokens > config.vocab_size:
        raise ValueError(
            f"the tokenizer has {tokens} tokens and the model embeds {config.vocab_size}: set "
            "data.tokenizer to the model's own, or vocab_size in model.model_args and data alike"
        )
    if config.pad_token_id is None or hasattr(model, "score"):  # transformers' decoders name it so
        config.pad_token_id = getattr(data, "pad_token_id", config.pad_token_id)
    if weights is not None and hasattr(data, "refuse_another_tokenizer"):
        data.refuse_another_tokenizer(weights)


def classifier_names(model: Any) -> list[str]:
    """The names of a timm model's `classifiers`."""
    found = classifiers(model)
    return [name for name, part in model.named_modules() if part in found]


def classifiers(model: Any) -> tuple[nn.Module, ...]:
    """A timm model's classifier, or both of a distilled one."""
    found = model.get_classifier()
    return found if isinstance(found, tuple) else (found,)


def positions_of(model: Any) -> int | None:
    """How many tokens a transformers model has positions for; None without a limit.

    DeBERTa's positions are distances between tokens, and far ones count alike: it has no limit.
    """
    if getattr(model.config, "position_biased_input", True) is False:
        return None
    names = ("max_position_embeddings", "max_target_positions")  # the second is Whisper's
    rows = next((one for n in names if (one := getattr(model.config, n, None)) is not None), None)
    return None if rows is None else rows - first_position(model)


def first_position(model: Any) -> int:
    """The number of a text's first position in a transformers model's table.

    RoBERTa's family (XLM-R, CamemBERT, MPNet, …) counts positions from behind the padding token's
    index, so that 512 of its 514 position embeddings serve tokens.
    """
    embeddings = getattr(getattr(model, "base_model", None), "embeddings", None)
    padding = getattr(getattr(embeddings, "position_embeddings", None), "padding_idx", None)
    return 0 if padding is None else padding + 1


def soft_tokens(model: Any) -> int:
    """How many soft tokens APET puts before a model's input."""
    return len(getattr(model, "apet_prompt", ()))


def text_inputs(batch: dict[str, Tensor], model: Any) -> dict[str, Tensor]:
    """A batch's keyword arguments for a transformers model: all but its labels.

    Raises:
        ValueError: if a text is longer than the model has positions for, those of its prompt
            excepted.
    """
    length = batch["input_ids"].shape[1]
    longest = positions_of(model)
    prompt = soft_tokens(model)
    if longest is not None and prompt + length > longest:
        before = f" after a prompt of {prompt}" * bool(prompt)
        raise ValueError(
            f"a text has {length} tokens{before} and the model {longest} positions: set "
            f"data.max_length to {longest - prompt} or less"
        )
    return {name: value for name, value in batch.items() if name != "labels"}


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard a model's parameters over a strategy's mesh (FSDP2), block by block, in place.

    The blocks are the members of the model's longest list of modules of one class: a Transformer's
    layers.
    """
    devices = data_parallel(mesh)
    lists = [
        module
        for module in model.modules()
        if isinstance(module, nn.ModuleList | nn.Sequential)
        and len({type(child) for child in module}) == 1
    ]
    for block in max(lists, key=len, default=()):
        fully_shard(block, mesh=devices)
    fully_shard(model, mesh=devices)


def data_parallel(mesh: DeviceMesh) -> DeviceMesh:
    """The dimension of a strategy's mesh over which these modules shard.

    Raises:
        ValueError: the mesh has tensor parallelism, which these modules do not implement.
    """
    if (size := mesh["tensor_parallel"].size()) > 1:
        raise ValueError(
            f"tensor_parallel_size is {size}, and these modules shard over data_parallel_size "
            "alone: use --trainer.strategy fsdp2, or set tensor_parallel_size to 1 and "
            "data_parallel_size to the number of devices"
        )
    return mesh["data_parallel"]


def feature_vector(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    """The features (B, D) that a timm model's head classifies: a ViT's [CLS] token after the norm.

    Args:
        model: a timm model.
        images: (B, 3, H, W).
    """
    return model.forward_head(model.forward_features(images), pre_logits=True)  # type: ignore


def call(model: nn.Module, batch: Any) -> Any:
    """The model's output for a batch: a tensor, a tuple, or a dict of keyword arguments."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, list | tuple) else model(batch)


def to_device(batch: Any, device: torch.device | str) -> Any:
    """The batch with its tensors, in dicts and lists too, on a device."""
    if isinstance(batch, Mapping):
        return {name: to_device(value, device) for name, value in batch.items()}
    if isinstance(batch, list | tuple):
        return [to_device(value, device) for value in batch]
    return batch.to(device) if isinstance(batch, torch.Tensor) else batch
