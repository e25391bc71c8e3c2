"""The commands of the store and JSON errors, as installers and users see them."""

import json
import sys
from pathlib import Path

import jsonschema
import pytest
from PIL import Image
from typer.testing import CliRunner

import sdkit_dispatch
from sdkit_dispatch import __main__ as program
from sdkit_dispatch.cache import EngineStore
from sdkit_dispatch.cli import app
from sdkit_dispatch.errors import ERROR_KINDS
from store_examples import REQUEST, publish
from toy_pipeline import make_toy_pipeline

SCHEMA = Path(sdkit_dispatch.__file__).with_name("_data") / "schemas" / "error.schema.json"


@pytest.fixture(scope="module")
def schema():
    return json.loads(SCHEMA.read_text(encoding="utf-8"))


@pytest.fixture
def home(tmp_path):
    store = EngineStore(tmp_path / "home")
    publish(store, size_bytes=2_000_000)
    store.let_go()
    return store.home


def run(home: Path, *words: str) -> str:
    done = CliRunner().invoke(app, ["--home", str(home), *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def as_program(monkeypatch, capsys, *words: str) -> tuple[int, str, str]:
    """Runs the program as a process would, within this one."""
    monkeypatch.setattr(sys, "argv", ["sdkit-dispatch", *words])
    with pytest.raises(SystemExit) as ended:
        program.main()
    return (ended.value.code, *capsys.readouterr())


FAILURES = {
    "no such pipeline": (["build", "no-such-folder", "--json"], "PipelineError", 2),
    "a wrong value": (["cache", "list", "--sort", "x", "--json"], "ConfigError", 2),
    "a wrong option": (["plan", "--wrong", "--json"], "UsageError", 2),
    "a wrong device": (["plan", "--gpu", "gpu:99", "--json"], "ConfigError", 2),
    "a key of nothing": (["cache", "explain", "abcdef", "--json"], "ConfigError", 2),
}


@pytest.mark.parametrize(("words", "kind", "code"), FAILURES.values(), ids=FAILURES)
def test_with_json_a_failure_is_a_document_on_stdout(
    monkeypatch, capsys, schema, words, kind, code
):
    exit_code, out, err = as_program(monkeypatch, capsys, *words)
    document = json.loads(out)
    jsonschema.validate(document, schema)
    assert (document["error"]["kind"], document["error"]["exit_code"]) == (kind, code)
    assert exit_code == code
    assert document["error"]["message"].splitlines()[0] in err.replace("│ ", "")
    exit_code, out, _ = as_program(monkeypatch, capsys, *words[:-1])
    assert (exit_code, out) == (code, "")


def test_with_json_a_bug_is_a_document_too(monkeypatch, capsys, schema):
    def fail(*, as_json):
        raise ZeroDivisionError("a mistake of ours")

    monkeypatch.setattr(program, "_devices", fail)
    code, out, err = as_program(monkeypatch, capsys, "devices", "--json")
    document = json.loads(out)
    jsonschema.validate(document, schema)
    assert code == document["error"]["exit_code"] == 70
    assert document["error"]["kind"] == "Bug"
    assert "Traceback" in err


def test_the_schema_knows_every_error(schema):
    kinds = schema["properties"]["error"]["properties"]["kind"]["enum"]
    assert set(ERROR_KINDS) <= set(kinds)


def test_list_shows_size_times_shapes_and_verdict(home):
    text = run(home, "cache", "list")
    for words in (
        *(REQUEST.key[:12], "null", "unet", "fp32", "2.0 MB", "built 2026-11-01", "used 20"),
        *("sample 2x4x8x8, timestep -", "checked"),
    ):
        assert words in text
    (row,) = json.loads(run(home, "cache", "list", "--json"))["engines"]
    assert row["last_use"] >= "2026"
    assert (row["is_shared"], row["size_bytes"]) == (False, 2_000_000)
    assert json.loads(run(home, "cache", "list", "--json", "--vendor", "cpu"))["engines"] == []
    assert "0 engines" in run(home, "cache", "list", "--damaged")


def test_explain_of_a_key_says_what_it_is(home):
    text = run(home, "cache", "explain", REQUEST.key[:8])
    assert "sound: it is the only engine of its component" in text
    assert "unet for null (null 1), fp32" in text
    assert json.loads(run(home, "cache", "explain", REQUEST.key, "--json"))["status"] == "sound"


def test_du_and_prune_say_what_they_take_and_free(home):
    assert "2.0 MB  null" in run(home, "cache", "du")
    document = json.loads(run(home, "cache", "du", "--json"))
    assert document["engines_bytes"] > 2_000_000
    for options in (["--older-than", "1d"], ["--max-size", "1MB"], ["--superseded"]):
        text = run(home, "cache", "prune", "--dry-run", *options)
        assert "1 engines would be removed, 2.0 MB" in text, options
    assert "1 engines" in run(home, "cache", "list").splitlines()[-1]
    assert "1 engines removed, 2.0 MB" in run(home, "cache", "prune", "--max-size", "1MB")
    assert "0 engines" in run(home, "cache", "list").splitlines()[-1]


def test_a_shared_engine_is_listed_and_not_removed(home, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SDKIT_DISPATCH_SHARED_STORES", str(home))
    own = str(tmp_path / "own")
    assert "(shared)" in run(Path(own), "cache", "list")
    words = ("--home", own, "cache", "remove", REQUEST.key)
    code, _, err = as_program(monkeypatch, capsys, *words)
    assert (code, "shared store" in err) == (2, True)
    assert "0 engines would be removed" in run(
        Path(own), "cache", "prune", "--max-size", "0MB", "--dry-run"
    )


def test_every_step_and_what_ran_are_in_the_png(tmp_path, monkeypatch):
    """The first way fails, the second one serves: the file itself says so."""
    from sdkit_dispatch.api import Dispatcher
    from sdkit_dispatch.choice import Choice

    pipeline = make_toy_pipeline(tmp_path / "pipeline")
    with Dispatcher(home=tmp_path / "home") as dispatcher:
        choice = Choice(vendor="null", gpu="cpu", must_check=False)
        loaded = dispatcher.load(pipeline, choice)
        cpu, spec = loaded.plans[0].device, dispatcher.specs["null"]
        bad = dispatcher.workers.probe(spec, cpu, None, {"fault": "compile_error"})
        loaded.plans = [bad, *loaded.plans]
        (file,) = loaded.generate("a fox", steps=1).save(tmp_path / "x.png")
    with Image.open(file) as picture:
        facts = json.loads(picture.text["sdkit_dispatch"])
    assert "as asked" in facts["steps"][0]["reason"]
    assert facts["device"]["id"] == "cpu"
    assert set(facts["ran"]) == {"text_encoder", "unet", "vae_decoder"}
    assert all("device" in one for one in facts["ran"].values())
    assert facts["is_stored"] is True
