"""The rules of the house, read off the source with `ast`.

A rule is a function from a root folder to its violations, one sentence each. Each is tested twice:
this repository breaks none, and a small tree that breaks it is caught (a rule that cannot fail
holds nothing).
"""

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from recipes.cli import parse, presets

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = ("lightning_modules", "datamodules", "callbacks")  # the rooms that recipes are made of
PACKAGES = ("recipes", *LIBRARY)


def sources(root: Path, *rooms: str) -> Iterator[tuple[Path, ast.Module]]:
    """Every Python file of these rooms, parsed, with its path relative to root."""
    for room in rooms:
        for path in sorted((root / room).rglob("*.py")):
            yield path.relative_to(root), ast.parse(path.read_text(encoding="utf-8"), str(path))


def imports(path: Path, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every imported name as (line, full dotted name); relative imports are made absolute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            package = path.parent.parts[: len(path.parent.parts) - node.level + 1]
            base = ".".join((*(package if node.level else ()), *filter(None, [node.module])))
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}".removeprefix(".")


def mathematics_without_lightning(root: Path) -> list[str]:
    """Only module.py, …_module.py and the __init__.py that offers them may import lightning."""

    def is_lightning(name: str) -> bool:
        parts = name.split(".")
        return parts[0] in ("lightning", "pytorch_lightning", "lightning_fabric") or (
            parts[0] == "lightning_modules" and parts[2:3] != [] and parts[2].endswith("module")
        )

    return [
        f"{path}:{line} imports {name}"
        for path, tree in sources(root, "lightning_modules")
        if len(path.parts) == 2 or not path.name.endswith(("module.py", "__init__.py"))
        for line, name in imports(path, tree)
        if is_lightning(name)
    ]


def doors(root: Path) -> list[str]:
    """The library's rooms import neither each other nor recipes, but callbacks a method's ideas.

    And a LightningModule the callbacks that it offers, inside of configure_callbacks.
    """

    def is_mathematics(name: str) -> bool:
        room, method, *rest = name.split(".")
        folder = root / room / method
        if room != "lightning_modules" or not folder.is_dir() or not rest:
            return False
        if rest[0].endswith("module"):
            return False
        if (folder / rest[0]).with_suffix(".py").exists():
            return True
        # `from lightning_modules.pela import merge`: the method's __init__.py says where it lies.
        offers = (
            offer.split(".")
            for init, tree in sources(root, f"{room}/{method}")
            if init == Path(room, method, "__init__.py")
            for _, offer in imports(init, tree)
        )
        homes = [home for *package, home, offer in offers if offer == rest[0]]
        return homes != [] and not any(home.endswith("module") for home in homes)

    def is_offered(path: Path, tree: ast.AST, line: int, name: str) -> bool:
        offering = (
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef) and node.name == "configure_callbacks"
        )
        inside = any(node.lineno < line <= (node.end_lineno or 0) for node in offering)
        return inside and path.name.endswith("module.py") and name.split(".")[0] == "callbacks"

    return [
        f"{path}:{line} imports {name}"
        for path, tree in sources(root, *LIBRARY)
        for line, name in imports(path, tree)
        if name.split(".")[0] in PACKAGES and name.split(".")[0] != path.parts[0]
        if not (path.parts[0] == "callbacks" and "." in name and is_mathematics(name))
        if not is_offered(path, tree, line, name)
    ]


def no_utils(root: Path) -> list[str]:
    """A file is named after what it holds."""
    rooms = (*PACKAGES, "tests", "benchmarks")
    found = [path for room in rooms for path in (root / room).rglob("utils*")]
    return [
        f"{path.relative_to(root)} says nothing about what it holds"
        for path in sorted([*root.glob("utils*"), *found])
        if path.is_dir() or path.suffix == ".py"
    ]


def cure_comes_first(root: Path) -> list[str]:
    """Each package imports cpu_torchvision before anything else."""
    wrong = []
    for package in PACKAGES:
        path = root / package / "__init__.py"
        body = ast.parse(path.read_text(encoding="utf-8")).body if path.exists() else []
        statements = [node for node in body if not is_docstring(node)]
        if not statements or ast.unparse(statements[0]) != "import cpu_torchvision":
            wrong.append(f"{package}/__init__.py does not begin with `import cpu_torchvision`")
    return wrong


def is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def documented(root: Path) -> list[str]:
    """Every public function and class of the library says what it is."""
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return [
        f"{path}:{node.lineno} {node.name} has no docstring"
        for path, tree in sources(root, *LIBRARY)
        for node in tree.body
        if isinstance(node, definitions) and not node.name.startswith("_")
        if "overload" not in map(ast.unparse, node.decorator_list)
        if not ast.get_docstring(node)
    ]


# [text](link) and ![text](link); src="link" and href="link"; [reference]: link
LINK = re.compile(r"""\]\(\s*<?([^)\s>]+)|(?:src|href)="([^"]+)"|^\[[^\]]+\]:\s*(\S+)""", re.M)


def links_lead_somewhere(root: Path) -> list[str]:
    """Every relative link and picture in the README and in the methods' cards exists."""
    wrong = []
    for page in sorted([*root.glob("README.md"), *root.glob("recipes/*/README.md")]):
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for link in map("".join, LINK.findall(text)):
            target = link.partition("#")[0]
            if re.match(r"[a-z][a-z+.-]*:", link) or not target:
                continue
            if not (page.parent / target).exists():
                wrong.append(f"{page.relative_to(root)} links to {link}, which does not exist")
    return wrong


# Beside each rule: files that keep it, and files each of which must be caught.
CURE = "import cpu_torchvision\n"
IDEA = {"lightning_modules/m/idea.py": "", "lightning_modules/m/__init__.py": "from .idea import f"}
RULES: list[tuple[Callable[[Path], list[str]], dict[str, str], dict[str, str]]] = [
    (
        mathematics_without_lightning,
        {
            "lightning_modules/m/module.py": "import lightning",
            "lightning_modules/m/part_module.py": "import lightning",
            "lightning_modules/m/__init__.py": "from lightning_modules.m.module import M",
            "lightning_modules/m/clean.py": "import torch, lightning_like",
            "callbacks/sampling.py": "from lightning import Callback",
        },
        {
            "lightning_modules/m/plain.py": "import lightning",
            "lightning_modules/m/deep.py": "def f():\n    from lightning.pytorch import Trainer",
            "lightning_modules/m/old.py": "import pytorch_lightning as pl",
            "lightning_modules/m/roundabout.py": "from .module import M",
            "lightning_modules/m/roundabout_too.py": "from .part_module import M",
            "lightning_modules/m/part/__main__.py": "from lightning import fabric",
            "lightning_modules/optim.py": "import lightning.pytorch",
            "lightning_modules/__init__.py": "import lightning",
        },
    ),
    (
        doors,
        IDEA
        | {
            "callbacks/idea.py": "from lightning_modules.m.idea import f",
            "callbacks/module_itself.py": "import lightning_modules.m.idea",
            "callbacks/offered.py": "from lightning_modules.m import f",
            "lightning_modules/m/offers_module.py": "def configure_callbacks(self):\n"
            "    from callbacks.idea import f",
            "callbacks/own.py": "from . import idea\nfrom callbacks.idea import f",
            "recipes/m/run.py": "import callbacks, datamodules, lightning_modules.m.module",
        },
        {
            "lightning_modules/m/up.py": "from recipes import cli",
            "lightning_modules/m/module.py": "from callbacks.idea import f",
            "lightning_modules/m/across.py": "import datamodules",
            "lightning_modules/m/offers.py": "def configure_callbacks(self):\n"
            "    from callbacks.idea import f",
            "lightning_modules/m/elsewhere_module.py": "def fit(self):\n"
            "    from callbacks.idea import f",
            "lightning_modules/m/climbing.py": "from ...datamodules import glue",
            "datamodules/glue.py": "def f():\n    from lightning_modules.m.idea import f",
            "datamodules/e2e.py": "import callbacks.idea",
            "callbacks/trained.py": "from lightning_modules.m.module import M",
            "callbacks/trained_part.py": "from lightning_modules.m.part_module import M",
            "callbacks/trained_too.py": "from lightning_modules.m import module",
            "callbacks/unknown.py": "from lightning_modules.m import M",
            "callbacks/shared.py": "from lightning_modules import weights",
            "callbacks/data.py": "import datamodules.glue",
        },
    ),
    (
        no_utils,
        {"callbacks/reports.py": "", "docs/utils.txt": ""},
        {"utils.py": "", "tests/m/utils.py": "", "recipes/utils/": ""},
    ),
    (
        cure_comes_first,
        {"recipes/__init__.py": '"""Recipes."""\n' + CURE, "callbacks/__init__.py": CURE},
        {"lightning_modules/__init__.py": "import torch\n" + CURE, "datamodules/__init__.py": ""},
    ),
    (
        documented,
        {
            "lightning_modules/m/idea.py": 'def f():\n    """Is said."""\n\ndef _g(): ...',
            "callbacks/method.py": 'class C:\n    """Is said."""\n    def on_fit_start(self): ...',
            "recipes/m/run.py": "def main(): ...",
        },
        {
            "lightning_modules/m/mute.py": "def f(): ...",
            "datamodules/mute.py": "class C: ...",
            "callbacks/mute.py": "async def f(): ...",
        },
    ),
    (
        links_lead_somewhere,
        {
            "results/plot.png": "",
            "recipes/README.md": "[not looked at](nowhere)",
            "recipes/good/README.md": "[web](https://a.b/c) [here](#x)\n"
            "![plot](../../results/plot.png)\n```\n[code](nowhere)\n```\n",
        },
        {
            "README.md": "[card](recipes/good/CARD.md#settings)",
            "recipes/picture/README.md": '<img src="plot.png">',
            "recipes/reference/README.md": "see [it]\n\n[it]: nowhere.md",
        },
    ),
]


@pytest.mark.parametrize("rule", [rule for rule, _, _ in RULES], ids=lambda rule: rule.__name__)
def test_the_house_keeps(rule):
    assert rule(ROOT) == []


@pytest.mark.parametrize(
    ("rule", "good", "bad"), RULES, ids=[rule.__name__ for rule, _, _ in RULES]
)
def test_a_breach_is_caught(rule, good, bad, tmp_path):
    for name, text in (good | bad).items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir() if name.endswith("/") else path.write_text(text, encoding="utf-8")

    caught = {re.split(r"[: ]", violation)[0] for violation in rule(tmp_path)}
    assert caught == {name.rstrip("/") for name in bad}


# a grid says what an experiment varies, laid over its stage; its experiment's tests parse it
FILES = sorted(f for f in ROOT.glob("recipes/**/*.yaml") if "_grid" not in f.name)
STAGES = [(file, preset) for file in FILES for preset in presets(file)]


@pytest.mark.parametrize(
    ("stage", "preset"), STAGES, ids=[f"{file.relative_to(ROOT)} {name}" for file, name in STAGES]
)
def test_every_stage_parses_at_every_preset(stage, preset):
    settings = parse(stage, preset)
    assert settings.trainer
    data = settings.data.get("init_args", {})
    if data.get("augmentation") in ("light", "none"):  # training sees whole images
        assert data.crop_pct == 1.0, "evaluation would cut the border off that training has seen"


@pytest.mark.parametrize(
    ("wrong", "named"),
    [("trainer.no_such_setting=1", "no_such_setting"), ("model=no.such.Class", "no.such.Class")],
)
def test_a_wrong_stage_does_not_parse(wrong, named):
    with pytest.raises(ValueError, match=named):
        parse(FILES[0], overrides=[f"--{wrong}"])
