"""Loading, training, storing and comparing tokenizers; tokens of prompts; padded batches."""

import hashlib
import json
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from datamodules.loading import IGNORED, PartsData


def load_tokenizer(name: str) -> Any:
    """The transformers tokenizer of this name or in this folder; it always has a padding token.

    One without a padding token (GPT-2's, Llama's) pads with its end-of-text token.

    Raises:
        OSError: there is no such tokenizer, or no network to fetch it.
        ValueError: the tokenizer has neither a padding token nor an end-of-text token.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        # without files of one, transformers may make an empty tokenizer of the model's type
        if len(tokenizer.get_vocab().keys() - tokenizer.get_added_vocab().keys()) < 2:
            raise OSError("its files hold no vocabulary")
    except (OSError, ValueError) as error:
        raise OSError(
            f"The tokenizer {name!r} cannot be loaded, expected a folder with its files or a name "
            f"that transformers can fetch ({str(error).splitlines()[0]}): correct --data.tokenizer."
        ) from error
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ValueError(
                f"The tokenizer {name!r} has neither a padding nor an end-of-text token, expected "
                "one of them: add a pad_token to its files."
            )
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Any:
    """Train a byte-level BPE tokenizer on texts; it can encode any text.

    One sentence becomes `<s> a </s>`, two `<s> a </s> b </s>`. Ids: 0 `<pad>`, 1 `<s>` (begin,
    class), 2 `</s>` (end, separator), then the 256 bytes, then merges.

    Raises:
        ValueError: `vocab_size` leaves no room for the bytes.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<s>", "</s>"]
    if vocab_size < 256 + len(special):
        raise ValueError(
            f"vocab_size is {vocab_size}, expected {256 + len(special)} or more: one entry for "
            "each byte and three special ones."
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> $B </s>",
        special_tokens=[("<s>", 1), ("</s>", 2)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        cls_token="<s>",
        eos_token="</s>",
        sep_token="</s>",
        model_max_length=1_000_000,
        model_input_names=["input_ids", "attention_mask"],
    )


SPECIAL_TOKENS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


def tokenizer_state(tokenizer: Any) -> dict[str, Any]:
    """A tokenizer in plain types, for a checkpoint; its name only, if it is no fast tokenizer."""
    if not getattr(tokenizer, "is_fast", False):
        return {"name": tokenizer.name_or_path}
    tokens = {f"{name}_token": getattr(tokenizer, f"{name}_token", None) for name in SPECIAL_TOKENS}
    return {
        "tokenizer": tokenizer.backend_tokenizer.to_str(),
        "tokens": {name: str(token) for name, token in tokens.items() if token is not None},
        "model_input_names": list(tokenizer.model_input_names),
    }


def tokenizer_from(state: dict[str, Any]) -> Any:
    """The tokenizer that `tokenizer_state` has stored."""
    if "name" in state:
        return load_tokenizer(state["name"])
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(state["tokenizer"]),
        model_input_names=state["model_input_names"],
        **state["tokens"],
    )


def fingerprint(tokenizer: Any) -> str:
    """SHA-256 of all settings of a transformers tokenizer that affect a text's tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        rules: Any = sorted(tokenizer.get_vocab().items())
    else:
        rules = json.loads(backend.to_str())
        # calling the tokenizer sets these two, and they stay set
        rules.update(truncation=None, padding=None)
    settings = [rules, tokenizer.eos_token_id]
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def require_same(owner: str, state: dict[str, Any], tokenizer: Any, cure: str) -> None:
    """Refuse a model of another tokenizer than the data's: it would read other tokens.

    Args:
        owner: the model, as the message names it.
        state: its tokenizer, from `tokenizer_state`.
        tokenizer: the data's.
        cure: what to do about it.

    Raises:
        ValueError: naming both tokenizers.
    """
    theirs = tokenizer_from(state)
    ours = tokenizer_from(tokenizer_state(tokenizer))  # in the same form, to compare
    if fingerprint(theirs) != fingerprint(ours):
        raise ValueError(
            f"{owner} has another tokenizer, of {len(theirs)} tokens, than the data, "
            f"{tokenizer.name_or_path!r} of {len(ours)}: {cure}"
        )


class WithTokenizer(PartsData):
    """The base of the DataModules with a tokenizer, whose state is in what `describe` returns."""

    @property
    def tokenizer(self) -> Any:
        """The tokenizer; a subclass implements it."""
        raise NotImplementedError

    @property
    def tokenizer_cure(self) -> str:
        """What to do about a checkpoint of another one."""
        return "set --data.tokenizer to the one that it was trained with"

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refuse a checkpoint of another tokenizer, too; see `require_same`."""
        super().load_state_dict(state_dict)
        if "description" in state_dict:
            state = state_dict["description"]["tokenizer"]
            require_same("the checkpoint", state, self.tokenizer, self.tokenizer_cure)

    def refuse_another_tokenizer(self, model: str) -> None:
        """Refuse a model with another tokenizer than the data's; warn if it comes with none.

        Args:
            model: a folder, or a name on the hub.

        Raises:
            ValueError: naming both tokenizers.
        """
        if model == self.tokenizer.name_or_path:
            return
        try:
            tokenizer = load_tokenizer(model)
        except OSError as error:
            reason = str(error.__cause__).partition("\n")[0]
            warnings.warn(
                f"no tokenizer of the model {model} can be loaded ({reason}), so the data's, "
                f"{self.tokenizer.name_or_path!r}, is taken for its own: if the model was trained "
                "with another, set --data.tokenizer to that",
                stacklevel=2,
            )
            return
        state = tokenizer_state(tokenizer)
        require_same(f"the model {model}", state, self.tokenizer, how_to_set(model))


def how_to_set(tokenizer: str) -> str:
    """What to do about another tokenizer than the model's."""
    return f"set --data.tokenizer to {tokenizer} (one that is trained here depends on the text)"


Role = Literal["text", "text_target"]  # what a model reads or writes, as tokenizers call it


def encode(texts: Sequence[str], tokenizer: Any, role: Role = "text") -> list[list[int]]:
    """The tokens of each text, without special ones."""
    given = {role: list(texts)}
    return tokenizer(**given, add_special_tokens=False, return_attention_mask=False)["input_ids"]


def encode_behind(
    before: str, texts: Sequence[str], tokenizer: Any, role: Role = "text"
) -> list[list[int]]:
    """The tokens of texts that stand behind another one, without that one's.

    Encoded alone, each text would get one more space before it from Llama's tokenizer.
    """
    first, *ids = encode([before, *(f"{before}{text}" for text in texts)], tokenizer, role)
    return [one[len(first) :] for one in ids]


def framed(
    texts: Sequence[str],
    tokenizer: Any,
    length: int,
    begin: Sequence[int] = (),
    end: Sequence[int] = (),
    seconds: Sequence[str] = (),
) -> list[list[int]]:
    """The tokens of `Input: {text} Output:`, the prompt of every task in APET (arXiv 2306.02320).

    Args:
        texts: inputs; one that is too long is truncated, and ` Output:` still follows it.
        tokenizer: a transformers tokenizer.
        length: most tokens of a prompt.
        begin: special tokens to put before it.
        end: special tokens to put after it.
        seconds: second sentences of the inputs, if they are pairs; of a pair that is too long, the
            longer sentence is truncated first.

    Raises:
        ValueError: if nothing is left for the input.
    """
    [before] = encode(["Input:"], tokenizer)
    spaced = [f" {text.strip()}" for text in texts]
    after, *inputs = encode_behind("Input:", [" Output:", *spaced], tokenizer)
    room = length - len(begin) - len(before) - len(after) - len(end)
    if room < 1:
        raise ValueError(
            f"max_length leaves {length} tokens to the prompt and none of them to the input "
            "itself: set --data.max_length higher."
        )
    if seconds:
        others = encode_behind("Input:", [f" {text.strip()}" for text in seconds], tokenizer)
        inputs = [joined(*pair, room) for pair in zip(inputs, others, strict=True)]
    return [[*begin, *before, *ids[:room], *after, *end] for ids in inputs]


def require_tokens(texts: Sequence[Sequence[int]]) -> None:
    """Refuse texts without a token, of which a model would read the padding alone.

    Raises:
        ValueError: with their number.
    """
    if empty := sum(not ids for ids in texts):
        raise ValueError(
            f"{empty} text{'s are' if empty > 1 else ' is'} empty, and the tokenizer adds no token "
            "of its own, so that the model has nothing to read: fill in or remove such lines."
        )


def joined(first: list[int], second: list[int], length: int) -> list[int]:
    """Two sentences' tokens, at most `length` together; the longer is truncated first."""
    kept = min(len(second), max(length - len(first), length // 2))
    return first[: length - kept] + second[:kept]


def special_tokens(tokenizer: Any, role: Role = "text") -> tuple[list[int], list[int]]:
    """The special tokens that a tokenizer adds before and after a text."""
    [plain], ids = encode(["a"], tokenizer, role), tokenizer(**{role: "a"})["input_ids"]
    start = next(i for i in range(len(ids)) if ids[i : i + len(plain)] == plain)
    return ids[:start], ids[start + len(plain) :]


def filling(tokenizer: Any) -> dict[str, int]:
    """The padding value of each of a tokenizer's columns."""
    return {
        "input_ids": tokenizer.pad_token_id,
        "attention_mask": 0,
        "token_type_ids": getattr(tokenizer, "pad_token_type_id", 0),
        "labels": IGNORED,
    }


def pad(
    samples: Sequence[dict[str, Any]], fill: dict[str, int], left: bool = False
) -> dict[str, Tensor]:
    """A batch of samples: lists are padded to the longest (B, L), numbers become one tensor (B,).

    Args:
        samples: all with the same keys; a list may be a tensor (L,).
        fill: padding value of each list, by key.
        left: whether to pad on the left, as generation needs it.
    """
    batch = {}
    for key, first in samples[0].items():
        values = [_plain(sample[key]) for sample in samples]
        if isinstance(first, (int, float)):
            batch[key] = torch.tensor(values)
            continue
        longest = max(map(len, values))
        rows = []
        for value in values:
            extra = [fill[key]] * (longest - len(value))
            rows.append(extra + value if left else value + extra)
        batch[key] = torch.tensor(rows)
    return batch


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else value
