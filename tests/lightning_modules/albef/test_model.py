"""ALBEF's model: exact sizes, what each token sees, and checkpoints by their released names."""

import types

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM

from lightning_modules.albef import Entailment, build, skipped
from lightning_modules.albef.checkpoint import load_albef, start_text, start_vision
from lightning_modules.backbones import build_vision
from lightning_modules.counting import count_parameters
from lightning_modules.pela import factorize, plan_of

TEXT = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 20,
}
SIZES = {
    "vision": "vit_tiny_patch16_224",
    "vision_args": {"patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 2},
    "image_size": 16,
    "text": TEXT,
    "text_layers": 2,
    "fusion_layers": 3,
    "projection": 12,
    "decoder_layers": 3,
}
TASKS = ("pretrain", "retrieval", "entailment", "vqa")


def small(task="pretrain", **sizes):
    torch.manual_seed(0)
    return build(task, **{**SIZES, **sizes}).eval()


def tokens(rows=2, length=7):
    ids = torch.arange(rows * length).reshape(rows, length) % 40 + 5
    return ids, torch.ones_like(ids)


@pytest.mark.parametrize(
    ("task", "ratio", "expected"),
    [
        ("pretrain", None, 209_968_247),
        ("pretrain", 1.5, 148_515_959),
        ("pretrain", 2, 117_918_839),
        ("pretrain", 3, 87_137_399),
        ("vqa", None, 290_366_580),
        ("vqa", 3, 129_750_132),
        ("entailment", None, 209_758_467),
        ("entailment", 3, 86_927_619),
        ("retrieval", None, 209_560_835),
        ("retrieval", 3, 86_729_987),
    ],
)
def test_the_papers_sizes(task, ratio, expected):
    with torch.device("meta"):
        model = build(task)
    if ratio:
        factorize(model, ratio, skip=skipped(model))
    assert count_parameters(model) == expected


def test_a_text_token_sees_those_behind_it():
    model, (ids, mask) = small(), tokens()
    image = model.encode_image(torch.randn(2, 3, 16, 16))
    changed = ids.clone()
    changed[:, -1] = 1
    one, other = (model.encode_text(t, mask) for t in (ids, changed))
    assert (one[:, 0] - other[:, 0]).abs().max() > 1e-4
    # in the fusion layers alone, too, which transformers would make causal
    states = one.clone()
    states[:, -1] += 1.0
    fused = [model.fuse(s, mask, image)[:, 0] for s in (one, states)]
    assert (fused[0] - fused[1]).abs().max() > 1e-4


def test_padding_is_not_seen_and_the_image_is():
    model, (ids, mask) = small(), tokens()
    image = model.encode_image(torch.randn(2, 3, 16, 16))
    mask[:, 5:] = 0
    changed = ids.clone()
    changed[:, 5:] = 3
    for_image = [model.fuse(model.encode_text(t, mask), mask, image) for t in (ids, changed)]
    torch.testing.assert_close(for_image[0][:, :5], for_image[1][:, :5])
    short = model.fuse(model.encode_text(ids[:, :5], mask[:, :5]), mask[:, :5], image)
    torch.testing.assert_close(for_image[0][:, :5], short)
    other = model.fuse(model.encode_text(ids, mask), mask, image.flip(0))
    assert (other[:, 0] - for_image[0][:, 0]).abs().max() > 1e-4


def test_the_answer_decoder_does_not_look_ahead():
    model, (ids, mask) = small("vqa"), tokens()
    question = model.encode_question(torch.randn(2, 3, 16, 16), ids, mask)
    changed = ids.clone()
    changed[:, 4] = 1
    one, other = (model.decode(a, mask, question, mask) for a in (ids, changed))
    torch.testing.assert_close(one[:, :4], other[:, :4])
    assert (one[:, 4:] - other[:, 4:]).abs().max() > 1e-4


def test_layers_are_those_of_transformers_bert():
    """With equal weights and no cross-attention, the text is encoded as by transformers."""
    model, (ids, mask) = small(), tokens()
    mask[0, 4:] = 0
    config = BertConfig(**TEXT, num_hidden_layers=2, attn_implementation="eager")
    reference = BertForMaskedLM(config).eval()
    names = reference.bert.state_dict().keys() - {"pooler.dense.weight", "pooler.dense.bias"}
    own = model.bert.state_dict()
    reference.bert.load_state_dict({name: own[name] for name in names}, strict=False)
    expected = reference.bert(ids, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(model.encode_text(ids, mask)[mask == 1], expected[mask == 1])


@pytest.mark.parametrize("task", TASKS)
def test_a_checkpoint_of_albef_loads_into_every_task(task, tmp_path):
    """By the released names: text_encoder.bert.…, scalar temp, momentum copies and a queue."""
    # equally wide, as the paper's: the decoder's cross-attention is then that of the fusion layers
    sizes = {**SIZES, "vision_args": {**SIZES["vision_args"], "embed_dim": 32}}
    original = small("pretrain", **{**sizes, "image_size": 24})
    source = original.state_dict()
    released = dict(source)
    released["temp"] = released["temp"].reshape(())
    released |= {
        name.replace("encoder.", "encoder_m.", 1): value
        for name, value in source.items()
        if "_encoder." in name
    }
    released["queue_ptr"] = torch.zeros(1)
    torch.save({"model": released, "epoch": 29}, tmp_path / "ALBEF.pth")
    torch.manual_seed(1)
    model = build(task, **sizes)
    report = load_albef(model, tmp_path / "ALBEF.pth")
    assert report.resampled == ["visual_encoder.pos_embed (1, 10, 32) for (1, 5, 32)"]
    assert "queue_ptr" in report.unexpected and not report.reshaped
    new = {"entailment": "cls_head."}.get(task)
    assert all(new and name.startswith(new) for name in report.missing), report.missing
    assert bool(report.missing) == bool(new)
    loaded = model.bert.state_dict()
    for name, value in original.bert.state_dict().items():
        assert torch.equal(loaded[name], value), name
    if task == "vqa":
        decoder = model.text_decoder.bert
        for layer, origin in zip(decoder.layers, model.bert.layers[2:], strict=True):
            for one, other in zip(layer.parameters(), origin.parameters(), strict=True):
                assert torch.equal(one, other)
        predictions = model.text_decoder.cls["predictions"]
        assert torch.equal(
            predictions.transform.dense.weight, source[
                "text_encoder.cls.predictions.transform.dense.weight"
            ]
        )  # fmt: skip


@pytest.mark.parametrize("task", TASKS)
def test_a_compressed_checkpoint_loads_into_every_task(task, tmp_path):
    """As low-rank as it is, the answer decoder that starts from it too."""
    sizes = {**SIZES, "vision_args": {**SIZES["vision_args"], "embed_dim": 32}}
    original = small("pretrain", **sizes)
    factorize(original, 2, skip=skipped(original))
    state = {f"model.{name}": value for name, value in original.state_dict().items()}
    state["momentum.model.temp"] = torch.zeros(1)
    torch.save({"state_dict": state}, tmp_path / "low.ckpt")
    model = small(task, **sizes)
    report = load_albef(model, tmp_path / "low.ckpt")
    assert all(name.startswith("cls_head.") for name in report.missing) and not report.reshaped
    expected = build(task, **sizes)
    factorize(expected, 2, skip=skipped(expected))
    assert plan_of(model) == plan_of(expected)
    if task != "vqa":
        images, (ids, mask) = torch.randn(2, 3, 16, 16), tokens()
        fused = [m.bert(ids, mask, m.encode_image(images)) for m in (model, original)]
        assert torch.equal(*fused)


def test_a_compressed_checkpoint_of_other_sizes_is_refused(tmp_path):
    """Its low-rank layers would be left uninitialised."""
    sizes = {**SIZES, "vision_args": {**SIZES["vision_args"], "embed_dim": 32}}
    original = small("retrieval", **sizes)
    factorize(original, 2, skip=skipped(original))
    torch.save(original.state_dict(), tmp_path / "low.pt")
    with pytest.raises(ValueError, match="low.pt does not fit RetrievalModel: text_encoder"):
        load_albef(small("retrieval"), tmp_path / "low.pt")


def test_equal_output_biases_count_once():
    model = small()
    head = model.text_encoder.cls["predictions"]
    states = torch.randn(3, 32)
    bias = torch.randn(50)
    with torch.no_grad():
        head.bias.copy_(bias)
        head.decoder.bias.copy_(bias)
    expected = head.transform(states) @ model.bert.embeddings.word_embeddings.weight.T + bias
    torch.testing.assert_close(model.predict_tokens(states), expected)


def test_starts_from_any_vit_and_bert(tmp_path):
    vit = build_vision("vit_tiny_patch16_224", 0, {**SIZES["vision_args"], "img_size": 32})
    torch.save(vit.state_dict(), tmp_path / "vit.pt")
    config = BertConfig(**TEXT, num_hidden_layers=4)
    bert = BertForMaskedLM(config)
    bert.save_pretrained(tmp_path / "bert")
    model = small(text=str(tmp_path / "bert"))
    report = start_vision(model, tmp_path / "vit.pt")
    assert not report.missing and len(report.resampled) == 1
    report = start_text(model, tmp_path / "bert")
    assert not report.unexpected and not report.reshaped
    rest = [name for name in report.missing if name.startswith("text_encoder")]
    # its fourth layer is the second of three fusion layers
    assert all("crossattention" in name or "layer.4." in name for name in rest)
    weight = bert.bert.encoder.layer[3].attention.self.query.weight
    assert torch.equal(model.bert.layers[3].attention.self.query.weight, weight)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "retreival"}, "task is 'retreival': expected one of .*did you mean 'retrieval'"),
        ({"fusion_layers": 0}, "fusion_layers is 0: expected at least 1"),
        ({"vision": "resnet18"}, "resnet18"),
        ({"vision": "vit_base_patch16_siglip_224"}, "not a ViT with a class token"),
    ],
)
def test_what_is_no_albef_is_refused(changes, message):
    if "siglip" in str(changes):
        changes = {**changes, "vision_args": {"embed_dim": 48, "depth": 1, "num_heads": 2}}
    arguments = {"task": "pretrain", **SIZES, **changes}
    with pytest.raises(ValueError, match=message):
        build(**arguments)


@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16])
def test_it_runs_in_bfloat16(default):
    """Also as Lightning runs it under bf16-true, where bfloat16 is the default type."""
    model, (ids, mask) = small("retrieval"), tokens()
    mask[1, 4:] = 0
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))

    def states(images):
        with torch.no_grad():
            context = model.encode_image(images)
            return model.bert(ids, mask, context, torch.ones(context.shape[:2]))

    expected = states(images)
    model.bfloat16()
    torch.set_default_dtype(default)
    try:
        found = states(images.bfloat16())
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, atol=0.1, rtol=0.1)


@pytest.mark.parametrize(
    ("tokens", "max_length", "message"),
    [(SIZES["text"]["vocab_size"] + 1, 4, "the tokenizer has .* vocab_size in model.sizes.text"),
     (5, 10_000, "data.max_length is 10000 and the model has .* positions")],
)  # fmt: skip
def test_data_of_another_tokenizer_are_refused(tokens, max_length, message, monkeypatch):
    data = types.SimpleNamespace(tokenizer=range(tokens), max_length=max_length)
    trainer = types.SimpleNamespace(
        precision="32-true", accumulate_grad_batches=1, datamodule=data, strategy=None
    )
    module = Entailment(sizes=SIZES)
    module.configure_model()
    monkeypatch.setattr(Entailment, "trainer", trainer)
    with pytest.raises(ValueError, match=message):
        module.on_fit_start()
    data.tokenizer, data.max_length = range(5), 4
    module.on_fit_start()


@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
def test_training_in_sixteen_bits_is_refused(precision, monkeypatch):
    trainer = types.SimpleNamespace(precision=precision, accumulate_grad_batches=1)
    monkeypatch.setattr(Entailment, "trainer", trainer)
    with pytest.raises(ValueError, match=f"precision is {precision}, .* set it to bf16-mixed"):
        Entailment(sizes=SIZES).on_fit_start()
