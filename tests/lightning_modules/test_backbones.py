"""Backbones by name."""

import types

import pytest
import timm
import torch
from timm.models import save_for_hf

from lightning_modules.backbones import build_text, build_vision, data_parallel, text_inputs
from lightning_modules.pela import factorize
from lightning_modules.standalone import save

TINY = {"img_size": 28, "embed_dim": 32, "depth": 2, "num_heads": 2}


class TestLocalFolder:
    def test_brings_its_settings_and_weights(self, tmp_path):
        torch.manual_seed(0)
        model = timm.create_model("vit_small_patch14_dinov2", num_classes=0, **TINY).eval()
        save_for_hf(model, tmp_path, model_args={**TINY, "num_classes": 0}, safe_serialization=True)
        loaded = build_vision(f"local-dir:{tmp_path}", 0, {}, pretrained=True).eval()
        images = torch.randn(2, 3, 28, 28)
        torch.testing.assert_close(loaded(images), model(images), rtol=0, atol=0)
        other = build_vision(f"local-dir:{tmp_path}", 7, {"img_size": 42}, pretrained=True)
        assert other(torch.randn(1, 3, 42, 42)).shape == (1, 7)

    @pytest.mark.parametrize(("classes", "new"), [(7, {"head.weight", "head.bias"}), (5, set())])
    def test_a_classifier_of_other_classes_is_drawn_at_random(self, tmp_path, classes, new):
        model = timm.create_model("vit_small_patch14_dinov2", num_classes=5, **TINY)
        arguments = {**TINY, "num_classes": 5}
        save_for_hf(model, tmp_path, model_args=arguments, safe_serialization=True)
        loaded = build_vision(f"local-dir:{tmp_path}", classes, {}, pretrained=True)
        assert loaded.at_random == new
        files = model.state_dict()
        assert new == {n for n, v in loaded.state_dict().items() if not torch.equal(v, files[n])}

    def test_without_pretrained_it_is_random(self, tmp_path):
        model = timm.create_model("vit_small_patch14_dinov2", num_classes=0, **TINY)
        save_for_hf(model, tmp_path, model_args={**TINY, "num_classes": 0}, safe_serialization=True)
        loaded = build_vision(f"local-dir:{tmp_path}", 0, {})
        assert not torch.equal(loaded.patch_embed.proj.weight, model.patch_embed.proj.weight)

    def test_one_that_only_its_own_loader_loads_is_refused(self, tmp_path):
        """timm would leave all low-rank layers at random, since the classes differ."""
        model = timm.create_model("vit_small_patch14_dinov2", num_classes=5, **TINY)
        factorize(model, 2.0)
        save(model, tmp_path)
        with pytest.raises(ValueError, match=rf"has a load.py, .* --model.init_from {tmp_path}"):
            build_vision(f"local-dir:{tmp_path}", 7, {}, pretrained=True)
        with pytest.raises(ValueError, match="has a load.py"):
            build_text(str(tmp_path), "causal", {}, pretrained=True)

    def test_a_missing_folder_is_said_with_the_cure(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"nowhere has no config\.json.*make weights"):
            build_vision(f"local-dir:{tmp_path}/nowhere", 10, {})


def test_an_unknown_name_suggests_similar_ones():
    with pytest.raises(ValueError, match=r"no model 'vit_bas_patch16_224'; similar: vit_base"):
        build_vision("vit_bas_patch16_224", 10, {})


@pytest.mark.parametrize(
    ("name", "arguments", "pretrained", "said"),
    [
        ("vit_tiny_patch16_224.mae", {}, False, r"Invalid pretrained tag \(mae\)"),
        ("vit_small_patch16_36x1_224", {}, True, "No pretrained weights exist"),
        ("vit_tiny_patch16_224", {"num_heads": 5}, False, "divisible by num_heads"),
        ("vit_tiny_patch16_224", {"heads": 4}, False, "argument 'heads'"),
    ],
)
def test_what_timm_refuses_is_said_in_a_sentence(name, arguments, pretrained, said):
    with pytest.raises(ValueError, match=f"{name}: .*{said}.*; correct model.architecture or"):
        build_vision(name, 10, arguments, pretrained)


SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
SMALL |= {"num_attention_heads": 2, "vocab_size": 50, "max_position_embeddings": 34}
BART = {
    "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "vocab_size": 50, "max_position_embeddings": 34,
    "bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip
OPT = {
    "hidden_size": 16, "word_embed_proj_dim": 16, "ffn_dim": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "vocab_size": 50, "max_position_embeddings": 34,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "task", "sizes", "longest"),
    [
        ("bert", "classification", SMALL, 34),
        ("roberta", "classification", SMALL, 32),
        ("xlm-roberta", "classification", SMALL, 32),
        ("camembert", "masked", SMALL, 32),
        ("mpnet", "classification", SMALL, 32),
        ("roberta", "classification", {**SMALL, "pad_token_id": 0}, 33),
        ("roberta", "causal", {**SMALL, "is_decoder": True}, 32),
        ("bart", "seq2seq", BART, 34),  # two more embeddings than the configuration says
        ("opt", "causal", OPT, 34),
    ],
)
def test_a_text_may_have_as_many_tokens_as_there_are_positions_for(kind, task, sizes, longest):
    model = build_text(kind, task, sizes).eval()

    def batch(length):
        ids = torch.full((1, length), 5)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    model(**text_inputs(batch(longest), model))
    with pytest.raises(ValueError, match=f"{longest} positions: set data.max_length to {longest} "):
        text_inputs(batch(longest + 1), model)
    with pytest.raises((IndexError, RuntimeError)):  # what the check spares the user
        model(**batch(longest + 1))


@pytest.mark.parametrize("kind", ["deberta", "deberta-v2"])
def test_a_model_of_relative_positions_takes_texts_of_any_length(kind):
    relative = {"relative_attention": True, "position_biased_input": False}
    relative |= {"pos_att_type": ["c2p", "p2c"], "norm_rel_ebd": "layer_norm"}
    model = build_text(kind, "classification", {**SMALL, **relative}).eval()
    ids = torch.randint(5, 50, (1, 80))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    assert model(**text_inputs(batch, model)).logits.isfinite().all()


def test_tensor_parallelism_is_refused():
    mesh = {"tensor_parallel": types.SimpleNamespace(size=lambda: 2)}
    with pytest.raises(ValueError, match="tensor_parallel_size is 2, .* --trainer.strategy fsdp2"):
        data_parallel(mesh)
