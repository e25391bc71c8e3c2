"""The recipe that `vendors build ggml` follows; with --nightly it is followed for real."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from string import Formatter

import pytest

from ggml_harness import ggml_adapter
from sdkit_dispatch.env.download import TARGETS
from sdkit_dispatch.native.recipe import recipe_of
from sdkit_ggml import SPEC
from sdkit_ggml.runtime.providers import BUILT_VARIABLE, FOLDER_VARIABLE
from test_ggml_runtime import run_python

RECIPE = recipe_of(SPEC)


def test_recipe_names_the_variables_that_the_runtime_reads() -> None:
    assert (RECIPE.variable, RECIPE.only_variable) == (BUILT_VARIABLE, FOLDER_VARIABLE)


@pytest.mark.parametrize("name", RECIPE.variants)
def test_a_variant_has_a_hint_wherever_it_can_be_built(name: str) -> None:
    variant = RECIPE.variants[name]
    systems = {platform.partition("-")[0] for platform in variant.platforms or TARGETS}
    assert set(variant.hints) == systems
    assert set(variant.platform_flags) <= systems
    assert "cmake" in variant.needs


@pytest.mark.parametrize("name", RECIPE.variants)
def test_a_flag_names_only_tools_that_were_looked_for(name: str) -> None:
    variant = RECIPE.variants[name]
    flags = [*variant.flags, *(one for own in variant.platform_flags.values() for one in own)]
    fields = {field for flag in flags for _, field, _, _ in Formatter().parse(flag) if field}
    assert fields <= set(variant.needs)
    assert all("=" in flag for flag in (*RECIPE.flags, *flags))


@pytest.mark.nightly
def test_a_real_build_for_the_processor_gives_the_same_numbers(tmp_path: Path) -> None:
    """About 100 CPU-seconds; fetches 8 MB."""
    ggml_adapter()
    if shutil.which("cmake") is None:
        pytest.skip("there is no cmake here")
    command = [sys.executable, "-m", "sdkit_dispatch", "--home", str(tmp_path / "home")]
    done = subprocess.run(
        [*command, "vendors", "build", "ggml", "--with", "cpu", "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads(done.stdout)
    assert answer["build"]["runtime"].startswith("ggml 0.")
    code = (
        "import sys; from pathlib import Path; from ggml_harness import *; "
        "path = SAMPLE / 'unet' / 'model.onnx'; "
        "session = compiled(path, shapes_for(path), Path(sys.argv[1])).load(); "
        "print(session.facts['runtime'], max(differences(path, session).values()), sep='|')"
    )
    run = run_python(
        code, str(tmp_path / "out"), SDKIT_GGML_BUILT_DIR=answer["folder"], SDKIT_GGML_DIR=""
    )
    assert run.returncode == 0, run.stderr[-2000:]
    runtime, difference = run.stdout.strip().split("|")
    assert answer["build"]["fingerprint"][:8] in runtime
    assert float(difference) <= 5e-6
