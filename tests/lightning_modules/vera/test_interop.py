"""peft 0.21.2 and this repository read each other's adapters and compute the same."""

import copy
import json
import warnings

import pytest
import timm
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from lightning_modules.vera import (
    add_vera,
    from_peft,
    load_adapter,
    lora_factors,
    save_adapter,
    to_lora,
    to_peft,
)
from lightning_modules.vera.vera import projections_of, vectors_of

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
IDS = torch.arange(3, 27).view(3, 8)


def roberta():
    torch.manual_seed(0)
    config = RobertaConfig(
        vocab_size=30,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=20,
        num_labels=3,
    )
    return RobertaForSequenceClassification(config).eval()


def gpt2():
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=30,
        n_embd=24,
        n_layer=2,
        n_head=2,
        n_positions=20,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config).eval()


CASES = {
    "roberta": (roberta, ["query", "value"], ["classifier"]),
    "roberta, mixed shapes": (roberta, ["key", "output.dense", "intermediate.dense"], []),
    "gpt2": (gpt2, ["c_attn", "c_fc"], []),
}
every_case = pytest.mark.parametrize(("build", "targets", "heads"), CASES.values(), ids=CASES)


def peer(build, targets, heads, **config):
    """peft's model of the same adaptation."""
    config = peft.VeraConfig(
        r=16,
        target_modules=targets,
        modules_to_save=heads or None,
        projection_prng_key=7,
        d_initial=0.1,
        **config,
    )
    return peft.get_peft_model(build(), config).eval()


def ours(build, targets, heads, **arguments):
    return add_vera(build(), 16, targets, seed=7, heads=heads, **arguments)


def scramble(parameters, seed=1):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(parameters):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)


def plain_name(name):
    """peft's name of a parameter as ours."""
    name = name.removeprefix("base_model.model.").replace(".modules_to_save.default", "")
    for letter in "bd":
        name = name.replace(f".vera_lambda_{letter}.default", f".vera_{letter}")
    return name


def trained(model):
    return [(plain_name(n), p) for n, p in model.named_parameters() if p.requires_grad]


def same(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@every_case
def test_equal_matrices_logits_and_gradients(build, targets, heads):
    theirs, mine = peer(build, targets, heads), ours(build, targets, heads)
    (projections,) = projections_of(mine)
    a, b = projections.on(torch.device("cpu"), torch.float32)
    assert torch.equal(a, theirs.base_model.vera_A["default"])
    assert torch.equal(b, theirs.base_model.vera_B["default"])

    parameters, others = dict(trained(mine)), dict(trained(theirs))
    assert parameters.keys() == others.keys()
    scramble(parameters.items())
    scramble(others.items())
    for model in (mine, theirs):
        for parameter in model.parameters():
            parameter.grad = None
    one, other = mine(IDS).logits, theirs(IDS).logits
    same(one, other)
    one.square().sum().backward()
    other.square().sum().backward()
    for name, parameter in parameters.items():
        scale = others[name].grad.abs().max()
        same(parameter.grad / scale, others[name].grad / scale)


def reread(base, folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.PeftModel.from_pretrained(base, folder).eval()


@every_case
@pytest.mark.parametrize("projections", [True, False])
def test_to_peft(tmp_path, build, targets, heads, projections):
    mine = ours(build, targets, heads)
    scramble(trained(mine))
    folder = to_peft(mine, tmp_path / "new", projections)
    same(mine(IDS).logits, reread(build(), folder)(IDS).logits)
    back = from_peft(build(), folder)
    assert torch.equal(back(IDS).logits, mine(IDS).logits) and back.vera == mine.vera


def without_pooler(seed):
    """A BERT whose files lacked the pooler, which is drawn from a seed instead."""
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}
    config = BertConfig(vocab_size=30, num_attention_heads=2, num_labels=3, **sizes)
    torch.manual_seed(0)
    model = BertForSequenceClassification(config).eval()
    torch.manual_seed(seed)
    torch.nn.init.normal_(model.bert.pooler.dense.weight)
    model.at_random = frozenset(n for n in model.state_dict() if "bert.pooler" in n)
    return model


def test_what_the_base_s_files_lack_goes_along(tmp_path):
    mine = add_vera(without_pooler(1), 16, ["query", "value"], heads=["classifier"])
    scramble(trained(mine))
    for write in (to_peft, to_lora):
        folder = write(mine, tmp_path / write.__name__)
        same(mine(IDS).logits, reread(without_pooler(2), folder)(IDS).logits)
    back = from_peft(without_pooler(2), tmp_path / "to_peft")
    assert torch.equal(back(IDS).logits, mine(IDS).logits)
    adapted = add_vera(without_pooler(1), 16, ["dense"], heads=["classifier"])
    for write in (to_peft, to_lora):
        with pytest.raises(ValueError, match=r"pooler.dense.* is adapted, .*as a whole"):
            write(adapted, tmp_path / "refused")
    assert not (tmp_path / "refused").exists()


@every_case
@pytest.mark.parametrize("projections", [True, False])
def test_from_peft(tmp_path, build, targets, heads, projections):
    theirs = peer(build, targets, heads, save_projection=projections)
    scramble(trained(theirs))
    theirs.save_pretrained(tmp_path)
    mine = from_peft(build(), tmp_path)
    same(mine(IDS).logits, theirs(IDS).logits)
    assert projections_of(mine)[0].given is None
    again = load_adapter(build(), save_adapter(mine, tmp_path / "ours"))
    assert torch.equal(again(IDS).logits, mine(IDS).logits)
    assert dict(trained(mine)).keys() == dict(trained(theirs)).keys()


def test_matrices_that_no_seed_gives(tmp_path):
    build, targets, heads = CASES["roberta"]
    theirs = peer(build, targets, heads)
    theirs.base_model.vera_A["default"].mul_(1.5)  # as an older generator might have
    scramble(trained(theirs))
    theirs.save_pretrained(tmp_path)
    mine = from_peft(build(), tmp_path)
    same(mine(IDS).logits, theirs(IDS).logits)
    again = load_adapter(build(), save_adapter(mine, tmp_path / "ours"))
    assert torch.equal(again(IDS).logits, mine(IDS).logits)
    same(reread(build(), to_peft(mine, tmp_path / "peft"))(IDS).logits, theirs(IDS).logits)
    with pytest.raises(ValueError, match="peft would draw other matrices"):
        to_peft(mine, tmp_path / "seed", projections=False)


@every_case
def test_to_lora(tmp_path, build, targets, heads):
    mine = ours(build, targets, heads).double()
    scramble(trained(mine))
    lora = reread(build().double(), to_lora(mine, tmp_path)).double()
    torch.testing.assert_close(lora(IDS).logits, mine(IDS).logits, rtol=0, atol=1e-6)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["r"] == config["lora_alpha"] == 16


@pytest.mark.parametrize("init", ["kaiming_normal", "uniform"])
def test_to_lora_of_slices(tmp_path, init):
    """What peft's VeRA cannot say, its LoRA can."""
    mine = ours(gpt2, "c_attn:q,v", [], init=init)
    scramble(trained(mine))
    with pytest.raises(ValueError, match="c_attn is adapted in slices q, v, which peft's"):
        to_peft(mine, tmp_path)
    same(reread(gpt2(), to_lora(mine, tmp_path))(IDS).logits, mine(IDS).logits)


def test_lora_factors_are_exact():
    for shared in (True, False):
        mine = ours(roberta, ["query", "value"], [], shared=shared).double()
        scramble(trained(mine))
        for name, (a, b) in lora_factors(mine).items():
            layer = mine.get_submodule(name)
            delta = layer.delta(layer.slices[0], torch.float64)
            torch.testing.assert_close(b @ a, delta, rtol=0, atol=1e-13)
    unique = ours(gpt2, "c_attn:q,v", [], shared=False)
    with pytest.raises(ValueError, match="c_attn do not share A"):
        lora_factors(unique)
    with pytest.raises(ValueError, match="c_attn is adapted in slices"):
        to_peft(unique, "nowhere")
    with pytest.raises(ValueError, match="projections are not shared"):
        to_peft(ours(gpt2, "c_attn", [], shared=False), "nowhere")


def test_a_timm_model(tmp_path):
    def build():
        torch.manual_seed(0)
        return timm.create_model(
            "vit_tiny_patch16_224",
            img_size=16,
            patch_size=4,
            embed_dim=24,
            depth=2,
            num_heads=2,
            num_classes=3,
        ).eval()

    mine = ours(build, ["blocks.*.attn.proj"], ["head"])
    scramble(trained(mine))
    images = torch.randn(2, 3, 16, 16)
    same(reread(build(), to_peft(mine, tmp_path))(images), mine(images))


def test_bad_directories(tmp_path):
    with pytest.raises(FileNotFoundError, match="no adapter_config.json in"):
        from_peft(roberta(), tmp_path)
    mine = ours(roberta, ["query", "value"], ["classifier"])
    folder = to_peft(mine, tmp_path)
    base = roberta()
    kinds = [type(module) for module in base.modules()]
    with pytest.raises(ValueError, match="does not fit GPT2LMHeadModel: roberta.* no linear layer"):
        from_peft(gpt2(), folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    for change, message in (
        ({"peft_type": "LORA"}, "is of type LORA"),
        ({"bias": "all"}, "with bias 'all': expected VERA with bias 'none'"),
        ({"r": 8}, "vera_lambda_d has shape"),
        ({"modules_to_save": None}, r"classifier.dense.bias has shape \(24,\)"),
    ):
        (folder / "adapter_config.json").write_text(json.dumps(config | change))
        with pytest.raises(ValueError, match=message):
            from_peft(base, folder)
    assert [type(module) for module in base.modules()] == kinds
    assert all(p.requires_grad for p in base.parameters())
    other = copy.deepcopy(base)
    other.classifier.out_proj = nn.Linear(24, 5)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"classifier.out_proj.bias has shape \(3,\)"):
        from_peft(other, folder)
    assert len(vectors_of(from_peft(base, folder))) == 4
