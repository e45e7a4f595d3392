"""Methods meet on one model: every ordered pair works, or is refused in one sentence.

Works: the same output at the start, the right number of trained parameters, training moves what is
trained and nothing else, a resumed run continues to the bit, and the product exports to an ordinary
model. Refused: before the first change. README's table is what this test found: after a change,
`COMPOSITION=write python -m pytest tests/test_composition.py` writes it again.
"""

import copy
import os
import re
from collections.abc import Callable
from itertools import permutations, product
from pathlib import Path

import pytest
import timm
import torch
import transformers
from torch import nn
from transformers.pytorch_utils import Conv1D

from lightning_modules import apet, pela, vera
from lightning_modules.matformer import extract, granularity, importance, nest, reorder
from lightning_modules.matformer.nested_layers import Nested
from lightning_modules.tuning import trainable

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- composition -->", "<!-- /composition -->"
QUARTERS = (1 / 4, 1 / 2, 3 / 4, 1)


def vit() -> nn.Module:
    small = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 4}
    return timm.create_model("vit_tiny_patch16_224", num_classes=10, **small)


def decoder(kind: str, **settings) -> nn.Module:
    small = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 50}
    config = transformers.AutoConfig.for_model(kind, **small | settings)
    config.use_cache = False
    for name in ("attn_pdrop", "embd_pdrop", "resid_pdrop"):
        setattr(config, name, 0.0)
    config.bos_token_id = config.eos_token_id = 0
    return transformers.AutoModelForCausalLM.from_config(config)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "ViT": vit,
    "GPT-2": lambda: decoder("gpt2"),
    "Llama": lambda: decoder("llama", num_key_value_heads=2, intermediate_size=64),
}
QKV = {"ViT": ["attn.qkv:q,v"], "GPT-2": ["attn.c_attn:q,v"], "Llama": ["q_proj", "v_proj"]}
FFN = {"ViT": ["mlp.fc1"], "GPT-2": ["mlp.c_fc"], "Llama": ["up_proj"]}


def linear_layers(model: nn.Module) -> dict[str, int]:
    """The full rank of every layer that `factorize` takes; at full rank nothing changes."""
    layers = pela.layers.find_layers(model)
    return {name: min(pela.layers.sizes(layer)) for name, layer in layers.items()}


# A method's name in the table → what it does to a model. One line each.
METHODS: dict[str, Callable[[nn.Module, str], nn.Module]] = {
    "nest, feed-forward": lambda model, _: nest(model, QUARTERS),
    "nest, heads": lambda model, _: nest(model, (1 / 2, 1), "heads"),
    "factorize": lambda model, _: pela.factorize(model, ranks=linear_layers(model)),
    "add_vera, attention": lambda model, kind: vera.add_vera(model, 4, QKV[kind]),
    "add_vera, feed-forward": lambda model, kind: vera.add_vera(model, 4, FFN[kind]),
    "insert": lambda model, _: apet.insert(model, 200, 0, ("add", "concat")),
}
PAIRS = [p for p in permutations(METHODS, 2) if p[0].split(",")[0] != p[1].split(",")[0]]
found: dict[tuple[str, str], dict[str, str]] = {}


def build(kind: str, *methods: str) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[kind]().double().train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    for method in methods:
        METHODS[method](model, kind)
    return model


def batch(kind: str, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if kind == "ViT":
        return torch.randn(2, 3, 16, 16, dtype=torch.float64, generator=generator)
    return torch.randint(50, (2, 7), generator=generator)


def output(model: nn.Module, kind: str, seed: int = 0) -> torch.Tensor:
    out = model(batch(kind, seed))
    return out if isinstance(out, torch.Tensor) else out.logits


def picture(model: nn.Module) -> dict[str, object]:
    """What a surgery could change: types, parameters, and what is trained."""
    return {name: type(module) for name, module in model.named_modules()} | {
        name: (id(p), p._version, p.requires_grad) for name, p in model.named_parameters()
    }


def trained(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def expected_trained(kind: str, first: str, second: str) -> int:
    """By arithmetic on the model that only the first method has changed."""
    before = build(kind, first)
    if second.startswith("nest"):
        return trained(before)  # nesting trains what was trained
    if second.startswith("factorize"):
        replaced = pela.layers.find_layers(before)
        count = trained(before)
        for layer in replaced.values():
            inputs, outputs = pela.layers.sizes(layer)
            rank = min(inputs, outputs)
            count += (rank * (inputs + outputs) - inputs * outputs) * layer.weight.requires_grad
        return count
    if second == "insert":
        return 200
    vectors = 0
    for name in (QKV if "attention" in second else FFN)[kind]:
        ends = name.partition(":")[0]
        blocks = {"q,v": 3}.get(name.partition(":")[2], 1)
        for path, layer in before.named_modules():
            if not path.endswith(ends):
                continue
            parts = [layer] if not isinstance(layer, nn.Sequential) else list(layer)
            if isinstance(layer, nn.Sequential) and blocks > 1:
                parts = parts[1:]
            for part in parts:
                outputs = part.nf if isinstance(part, Conv1D) else part.out_features
                vectors += (outputs // blocks + 4) * (2 if blocks > 1 else 1)
    return vectors


def steps(model: nn.Module, kind: str, optimizer, seeds) -> None:
    for seed in seeds:
        optimizer.zero_grad()
        output(model, kind, seed).square().mean().backward()
        optimizer.step()


def to_plain(model: nn.Module) -> nn.Module:
    """An ordinary model again: merged, and the largest granularity taken out."""
    if hasattr(model, "nesting"):
        model = extract(model, len(next(iter(model.nesting.axes.values()))) - 1)
    if hasattr(model, "vera"):
        vera.strip(vera.merge(model))
    if hasattr(model, "apet"):
        apet.merge(model)
    return model


@pytest.mark.parametrize(("kind", "pair"), list(product(MODELS, PAIRS)))
def test_a_pair_works_or_is_refused(kind, pair):
    first, second = pair
    model = build(kind, first)
    start, before = output(model, kind).detach(), picture(model)
    try:
        METHODS[second](model, kind)
    except ValueError as error:
        sentence = str(error)
        assert picture(model) == before, "refused after the first change"
        torch.testing.assert_close(output(model, kind), start, rtol=0, atol=0)
        assert "\n" not in sentence and len(sentence) > 30
        found.setdefault(pair, {})[kind] = sentence
        return
    torch.testing.assert_close(output(model, kind), start, rtol=1e-8, atol=1e-10)
    assert trained(model) == expected_trained(kind, first, second)

    frozen = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    moving = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    steps(model, kind, optimizer, (1, 2))
    for name, parameter in model.named_parameters():
        if name in frozen:
            assert torch.equal(parameter, frozen[name]), name
    assert any(not torch.equal(p, moving[n]) for n, p in model.named_parameters() if n in moving)

    resumed = build(kind, first, second)
    resumed.load_state_dict(model.state_dict())
    again = torch.optim.AdamW([p for p in resumed.parameters() if p.requires_grad], lr=0.01)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    steps(model, kind, optimizer, (3, 4))
    steps(resumed, kind, again, (3, 4))
    other = resumed.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other[name]), name

    model.eval()
    if hasattr(model, "nesting"):  # every size is what its slice computes
        with torch.no_grad(), granularity(model, 0):
            sliced = output(model, kind)
        small = extract(model, 0)
        torch.testing.assert_close(output(small, kind), sliced, rtol=1e-9, atol=1e-11)
        assert (sliced - output(model, kind)).abs().max() > 1e-6
    end = output(model, kind).detach()
    plain = to_plain(model)
    torch.testing.assert_close(output(plain, kind), end, rtol=1e-8, atol=1e-10)
    ordinary = {type(m) for m in MODELS[kind]().modules()} | {nn.Sequential, nn.Linear}
    assert {type(m) for m in plain.modules()} <= ordinary
    assert not any(isinstance(m, Nested) for m in plain.modules())
    found.setdefault(pair, {})[kind] = "works"


def table() -> str:
    """Rows are what is done first, columns what is done second."""
    notes: list[str] = []

    def cell(first: str, second: str) -> str:
        outcomes = found.get((first, second))
        if outcomes is None:
            return "–"
        shown = []
        for kind, outcome in outcomes.items():
            if outcome != "works":
                sentence = re.sub(r"\b\w+(\.\w+)*\.\d+(\.\w+)*", "a layer", outcome)
                sentence = re.sub(r"\s+", " ", sentence).split(": ")[-1]
                sentence = sentence.replace("'a layer'", "it")
                if sentence not in notes:
                    notes.append(sentence)
                outcome = f"refused [{notes.index(sentence) + 1}]"
            shown.append((kind, outcome))
        if len({outcome for _, outcome in shown}) == 1:
            return shown[0][1]
        return "; ".join(f"{kind}: {outcome}" for kind, outcome in shown)

    lines = [f"| first ↓, then → | {' | '.join(METHODS)} |", "|---" * (len(METHODS) + 1) + "|"]
    lines += [f"| {a} | {' | '.join(cell(a, b) for b in METHODS)} |" for a in METHODS]
    listed = "\n".join(f"{i}. {note}" for i, note in enumerate(notes, 1))
    return "\n".join(lines) + f"\n\n{listed}"


def test_the_readme_says_what_was_found():
    for kind, pair in product(MODELS, PAIRS):
        if kind not in found.get(pair, {}):  # another process of pytest-xdist has tried it
            test_a_pair_works_or_is_refused(kind, pair)
    text = README.read_text()
    assert text.count(BEGIN) == text.count(END) == 1
    head, rest = text.split(BEGIN)
    old, tail = rest.split(END)
    if os.environ.get("COMPOSITION") == "write":
        README.write_text(f"{head}{BEGIN}\n{table()}\n{END}{tail}")
    else:
        assert old.strip() == table(), "COMPOSITION=write writes README's table again"


def test_lora_on_one_block_is_refused_by_name():
    """Before, only the other blocks became nested."""
    from peft import LoraConfig, get_peft_model

    model = build("ViT")
    config = LoraConfig(r=2, target_modules=["blocks.1.mlp.fc1"])
    adapted = get_peft_model(model, config)
    before = picture(adapted)
    with pytest.raises(ValueError, match=r"blocks.1.mlp.fc1 is a peft\..*Linear, and only"):
        nest(adapted)
    assert picture(adapted) == before


def lora(model: nn.Module, _: str) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    targets = ["mlp.fc1", "mlp.c_fc", "up_proj"]
    return get_peft_model(model, LoraConfig(r=2, target_modules=targets)).base_model.model


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("adapt", [METHODS["add_vera, feed-forward"], METHODS["insert"], lora])
def test_sorting_an_adapted_model_is_refused(kind, adapt):
    """Before, it moved the weights and not the adaptation's vectors, so that outputs changed."""
    model = build(kind)
    scores = importance(model, [batch(kind)])
    model = adapt(model, kind)
    start, before = output(model.eval(), kind).detach(), picture(model)
    with pytest.raises(ValueError, match="sort and nest the model before it is adapted"):
        reorder(model, scores)
    assert picture(model) == before
    torch.testing.assert_close(output(model, kind), start, rtol=0, atol=0)


def test_only_the_layers_that_a_method_takes_stand_in_its_way():
    """VeRA on attention leaves feed-forward networks to nest, in every block."""
    model = nest(build("ViT", "add_vera, attention"))
    assert [layer.name for layer in model.nesting.layers] == ["blocks.0.mlp", "blocks.1.mlp"]
    assert len(trainable(model)) == 2 * 2 * 2  # b and d, of q and v, in two blocks
