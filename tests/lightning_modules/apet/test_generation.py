"""Decoders and encoder–decoders that write: the loss, and decoding of batches."""

import pytest
import torch

from lightning_modules.apet.module import TextToTextTuning
from lightning_modules.decoding import generate

T5 = {
    "vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2,
    "decoder_start_token_id": 0, "dropout_rate": 0.0,
}  # fmt: skip


class Tokenizer:
    """What `generate` asks of a tokenizer."""

    eos_token_id, pad_token_id = 1, 0

    def batch_decode(self, ids, **_):
        return [" ".join(str(token) for token in row if token > 1) for row in ids.tolist()]


def t5(**arguments):
    torch.manual_seed(0)
    module = TextToTextTuning("t5", **{"model_args": T5, "method": "full", **arguments})
    module.configure_model()
    with torch.no_grad():  # a new T5 writes nothing
        for parameter in module.model.parameters():
            parameter.normal_(std=0.5)
        for name, parameter in module.model.named_parameters():
            if "relative_attention_bias" in name:
                parameter.normal_(std=5)  # distances count
    return module


def test_the_loss_of_an_encoder_decoder_is_transformers():
    module = t5()
    ids = torch.tensor([[5, 6, 7, 1], [8, 1, 0, 0]])
    labels = torch.tensor([[9, 10, 1], [11, 1, -100]])
    batch = {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels}
    logits, targets = module.outputs(batch)
    assert targets.tolist() == [9, 10, 1, 11, 1]
    ours = torch.nn.functional.cross_entropy(logits, targets)
    assert torch.allclose(ours, module.model(**batch).loss)


def test_a_target_longer_than_the_model_s_positions_is_said():
    sizes = {
        "vocab_size": 40, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1,
        "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 16,
        "decoder_ffn_dim": 16, "max_position_embeddings": 8,
    }  # fmt: skip
    module = TextToTextTuning("bart", model_args=sizes, method="full")
    module.configure_model()
    ids = torch.full((1, 8), 5)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    assert module.outputs(batch)[0].shape == (8, 40)
    batch["labels"] = torch.full((1, 9), 5)
    with pytest.raises(ValueError, match="a target has 9 tokens and the model 8 positions: set"):
        module.outputs(batch)


@pytest.mark.parametrize("method", [{"method": "full"}, {"method": "prompt", "rank": 3}])
def test_an_encoder_decoder_writes_the_same_alone_and_in_a_padded_batch(method):
    """With a prompt too, whose distance to the text is that of training, without padding."""
    module = t5(**method)
    texts = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 1], [12, 1], [14, 15, 1], [16, 17, 18, 1]]
    width = max(map(len, texts))
    ids = torch.tensor([[0] * (width - len(text)) + text for text in texts])  # as PromptSet pads
    prompts = {"input_ids": ids, "attention_mask": (ids > 0).long()}
    together = generate(module.model, prompts, Tokenizer(), max_new_tokens=6)
    alone = [
        generate(
            module.model,
            {"input_ids": torch.tensor([text]), "attention_mask": torch.ones(1, len(text)).long()},
            Tokenizer(), max_new_tokens=6,
        )[0]
        for text in texts
    ]  # fmt: skip
    assert together == alone and all(together)


def test_batches_for_the_other_kind_of_model_are_refused():
    class Trainer:
        class datamodule:
            encoder_decoder, vocab_size, pad_token_id = False, 40, 0

    module = TextToTextTuning("t5", model_args=T5, method="full")
    module._trainer = Trainer()
    with pytest.raises(ValueError, match="encoder_decoder is false, and t5 is an encoder–decoder"):
        module.build()


def test_a_t5_of_sizes_alone_starts_its_texts_with_padding():
    sizes = {key: value for key, value in T5.items() if key != "decoder_start_token_id"}
    module, expected = t5(model_args=sizes), t5()
    ids = torch.tensor([[5, 6, 7, 1]])
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    assert torch.equal(module.outputs(batch)[0], expected.outputs(batch)[0])
    texts, expected_texts = (
        generate(one.model, batch, Tokenizer(), max_new_tokens=6) for one in (module, expected)
    )
    assert texts == expected_texts
