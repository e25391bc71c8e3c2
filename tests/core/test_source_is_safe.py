"""What our own source never does: unpickle, evaluate text, or load YAML that makes objects."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULES = frozenset(
    ["pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "torch"]
)
BUILTINS = frozenset(["eval", "exec", "__import__"])
YAML_NAMES = frozenset(
    [
        *("Loader", "CLoader", "FullLoader", "CFullLoader", "UnsafeLoader", "CUnsafeLoader"),
        *("full_load", "full_load_all", "unsafe_load", "unsafe_load_all"),
    ]
)


def faults(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if top(name.name) in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            if top(node.module) in MODULES:
                yield node.module
            if top(node.module) == "yaml":
                yield from (name.name for name in node.names if name.name in YAML_NAMES)
        elif isinstance(node, ast.Call):
            yield from call_faults(node)
        elif isinstance(node, ast.Attribute) and owner(node) == "yaml" and node.attr in YAML_NAMES:
            yield f"yaml.{node.attr}"


def call_faults(call: ast.Call) -> Iterator[str]:
    given = {word.arg: word.value for word in call.keywords}
    for name in ("allow_pickle", "shell"):
        value = given.get(name)
        if value is not None and not (isinstance(value, ast.Constant) and value.value is False):
            yield name
    if isinstance(call.func, ast.Name) and call.func.id in BUILTINS:
        yield call.func.id
    if isinstance(call.func, ast.Attribute):
        name = f"{owner(call.func)}.{call.func.attr}"
        if name in ("np.load", "numpy.load") and "allow_pickle" not in given:
            yield name
        if name in ("yaml.load", "yaml.load_all") and "Loader" not in given:
            yield name


def owner(node: ast.Attribute) -> str:
    return node.value.id if isinstance(node.value, ast.Name) else ""


def top(module: str) -> str:
    return module.partition(".")[0]


def sources() -> list[Path]:
    found = [*(ROOT / "sdkit_dispatch").rglob("*.py"), *(ROOT / "vendors").rglob("*.py")]
    assert len(found) > 100
    return found


def test_our_source_unpickles_and_evaluates_nothing():
    found = {
        path.relative_to(ROOT).as_posix(): complaints
        for path in sources()
        if (complaints := list(faults(path.read_text(encoding="utf-8"))))
    }
    # Peers of the benchmark run in environments and processes of their own, on given weights.
    peers = [name for name in found if name.startswith("sdkit_dispatch/peer_scripts/")]
    assert {complaint for name in peers for complaint in found.pop(name)} == {"torch"}
    assert found == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import torch.nn as nn",
        "from pickle import loads",
        "import marshal as m",
        "np.load(x)",
        "numpy.load(x, allow_pickle=True)",
        "np.load(x, allow_pickle=flag)",
        "f(allow_pickle=True)",
        "yaml.load(x)",
        "yaml.load(x, Loader=yaml.Loader)",
        "yaml.unsafe_load(x)",
        "from yaml import FullLoader",
        "eval(x)",
        "exec(x)",
        "__import__(x)",
        "subprocess.run(x, shell=True)",
    ],
)
def test_it_would_be_seen(source):
    assert list(faults(source))


@pytest.mark.parametrize(
    "source",
    [
        "np.load(x, allow_pickle=False)",
        "yaml.load(x, Loader=yaml.SafeLoader)",
        "model.eval()",
        "re.compile(x)",
        "from .pickle import x",
    ],
)
def test_what_is_harmless_is_not(source):
    assert not list(faults(source))
