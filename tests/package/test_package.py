"""The wheel, an environment without any vendor runtime, and what the README promises."""

import ast
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import typer

from readme_commands import quick_start_commands
from sdkit_dispatch import cli
from sdkit_dispatch.__main__ import HELP_FILE
from sdkit_dispatch.show_devices import SCHEMA_VERSION

ROOT = Path(__file__).parents[2]
RUNTIMES = ("iree", "onnxruntime", "openvino", "torch", "tensorrt", "tensorrt_rtx")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    code = (
        "import os, sys; from hatchling import build; os.chdir(sys.argv[1]);"
        "print(build.build_wheel(sys.argv[2]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(ROOT), str(folder)],
        capture_output=True,
        text=True,
        check=True,
    )
    return folder / done.stdout.split()[-1]


def test_the_wheel_holds_profiles_configs_vendors_and_the_sample(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    expected = {
        "sdkit_dispatch/contract.py",
        "sdkit_dispatch/py.typed",
        "sdkit_dispatch/_data/profiles/sample.yaml",
        "sdkit_dispatch/_data/profiles/sd15.yaml",
        "sdkit_dispatch/_data/configs/default.yaml",
        "sdkit_dispatch/_data/sample/digits-sd/model_index.json",
        "sdkit_dispatch/_data/sample/digits-sd/unet/model.onnx",
        "sdkit_dispatch/_data/sample/digits-sd/README.md",
        "sdkit_dispatch/detect/gpus.LICENSE",
        "sdkit_ggml/emit/source/CMakeLists.txt",
        "sdkit_ggml/emit/source/main.cpp",
        "sdkit_null/adapter.py",
        "sdkit_onnxruntime/adapter.py",
        "sdkit_openvino/adapter.py",
    }
    assert expected - names == set()
    tops = {name.split("/")[0] for name in names if ".dist-info" not in name}
    packages = {
        path.name for path in (ROOT / "vendors").iterdir() if (path / "__init__.py").exists()
    }
    assert tops == {"sdkit_dispatch", *packages}


def test_every_data_file_of_the_checkout_is_in_the_wheel(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for kind in ("profiles", "configs"):
        for path in (ROOT / kind).glob("*.yaml"):
            assert f"sdkit_dispatch/_data/{kind}/{path.name}" in names


def test_the_wheel_is_small_enough_for_an_installer(wheel):
    assert wheel.stat().st_size < 13e6  # the sample is 11 MB of it


def test_the_base_install_requires_no_vendor_runtime(wheel):
    with zipfile.ZipFile(wheel) as archive:
        name = next(entry for entry in archive.namelist() if entry.endswith("METADATA"))
        metadata = archive.read(name).decode()
    base = [
        line
        for line in metadata.splitlines()
        if line.startswith("Requires-Dist") and "extra" not in line
    ]
    assert base
    for word in (*RUNTIMES, "transformers", "diffusers", "optimum"):
        assert not any(re.search(rf"Dist: {word}\b", line) for line in base)


def without_runtimes(code: str) -> subprocess.CompletedProcess:
    """Runs code in an interpreter in which importing any vendor runtime fails."""
    guard = f"""
import sys
class Guard:
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in {RUNTIMES!r}:
            raise ModuleNotFoundError(f'no {{name}} here', name=name)
sys.meta_path.insert(0, Guard())
"""
    return subprocess.run([sys.executable, "-c", guard + code], capture_output=True, text=True)


def test_importing_works_without_any_vendor_runtime():
    done = without_runtimes(
        "import sdkit_dispatch, sdkit_dispatch.cli, sdkit_dispatch.api, sdkit_dispatch.doctor\n"
        "sdkit_dispatch.Dispatcher, sdkit_dispatch.Choice"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "arguments", [["devices"], ["devices", "--json"], ["--help"], ["--version"]]
)
def test_fast_commands_import_nothing_heavy(arguments):
    code = f"""
import sys
sys.argv = ['sdkit-dispatch', *{arguments!r}]
from sdkit_dispatch.__main__ import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
heavy = {{'numpy', 'onnx', 'PIL', 'tokenizers', 'rich', 'yaml', 'pydantic'}} & set(sys.modules)
if {arguments!r}[0] in ('devices', '--help'):
    heavy |= {{'typer', 'click'}} & set(sys.modules)
assert not heavy, heavy
"""
    done = without_runtimes(code)
    assert done.returncode == 0, done.stderr


def imported_modules(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", sorted((ROOT / "vendors").glob("*/**/*.py")), ids=str)
def test_a_vendor_imports_nothing_of_ours_but_contract_errors_and_graph(path):
    allowed = ("sdkit_dispatch.contract.", "sdkit_dispatch.errors.", "sdkit_dispatch.graph.")
    ours = {name for name in imported_modules(path) if name.startswith("sdkit_dispatch")}
    assert {name for name in ours if not f"{name}.".startswith(allowed)} == set()


def test_the_quick_start_is_two_commands():
    commands = quick_start_commands()
    assert len(commands) == 2
    assert "demo" in commands[0]
    assert "pytest" in commands[1]


def documents() -> list[Path]:
    return [
        path
        for pattern in ("*.md", "vendors/*.md", "tests/**/*.md", "sdkit_dispatch/**/*.md")
        for path in ROOT.glob(pattern)
    ]


@pytest.mark.parametrize("document", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_between_files_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)#]+)\)", document.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (document.parent / target).exists(), target


def all_commands() -> dict[str, typer.core.TyperCommand]:
    found = {}

    def walk(group, words):
        for name, command in group.commands.items():
            if hasattr(command, "commands"):
                walk(command, [*words, name])
            else:
                found[" ".join([*words, name])] = command

    walk(typer.main.get_command(cli.app), [])
    return found


@pytest.mark.parametrize("name", all_commands())
def test_every_command_has_one_line_of_help_and_an_example(name):
    command = all_commands()[name]
    assert command.help.count("\n") == 0
    assert command.epilog.startswith(f"Example: sdkit-dispatch {name}")


def test_help_is_what_typer_says():
    """`--help` is answered from a file, before typer is imported."""
    from typer.testing import CliRunner

    rendered = CliRunner().invoke(cli.app, ["-h"], prog_name="sdkit-dispatch", terminal_width=80)
    assert HELP_FILE.read_text(encoding="utf-8") == rendered.stdout


def test_commands_in_the_readme_exist():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    names = all_commands()
    used = re.findall(r"^sdkit-dispatch ([a-z]+(?: [a-z]+)?)", text, re.M)
    assert used
    for words in used:
        is_known = words in names or words.split()[0] in names
        # `bench` alone means `bench run`
        assert is_known or f"{words.split()[0]} run" in names, words


def test_json_commands_say_their_schema_version():
    done = subprocess.run(
        [sys.executable, "-m", "sdkit_dispatch", "devices", "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    document = json.loads(done.stdout)
    assert document["schema_version"] == SCHEMA_VERSION
    assert document["devices"][-1]["kind"] == "cpu"
