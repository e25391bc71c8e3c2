"""`sdkit-dispatch bundle ...`, from the words to the exit code."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bundle_examples import REQUEST, publish, tree
from sdkit_dispatch.api import Dispatcher
from sdkit_dispatch.cache import EngineStore
from sdkit_dispatch.choice import Choice
from sdkit_dispatch.cli import app
from sdkit_dispatch.errors import CacheError, ConfigError
from sdkit_dispatch.wanted import wanted
from toy_pipeline import make_toy_pipeline


def run(home: Path, *words: object) -> str:
    done = CliRunner().invoke(app, ["--home", str(home), *map(str, words)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture
def home(tmp_path) -> Path:
    return publish(tmp_path / "home").home


def test_engines_named_by_their_keys_go_out_and_come_in(home, tmp_path):
    out = tmp_path / "a.sdkit"
    made = json.loads(run(home, "bundle", "export", REQUEST.key[:6], "--out", out, "--json"))
    assert [one["key"] for one in made["engines"]] == [REQUEST.key]
    assert made["size_bytes"] == out.stat().st_size
    shown = json.loads(run(home, "bundle", "show", out, "--json"))
    assert shown["engines"] == made["engines"]
    assert shown["signer"]["status"] == "unsigned"
    with pytest.raises(CacheError, match="built with 0 as the revision of the graph"):
        run(tmp_path / "there", "bundle", "import", out)
    taken = json.loads(run(tmp_path / "there", "bundle", "import", out, "--force", "--json"))
    assert [one["state"] for one in taken["engines"]] == ["added"]
    assert EngineStore(tmp_path / "there").read(REQUEST.key) is not None


def test_keys_sign_and_are_trusted_by_option_or_by_folder(home, tmp_path):
    key, out, there = tmp_path / "k", tmp_path / "a.sdkit", tmp_path / "there"
    public = run(home, "bundle", "keygen", "--out", key).split()[-1]
    run(home, "bundle", "export", REQUEST.key[:6], "-o", out, "--sign", key)
    assert "(trusted)" in run(there, "bundle", "import", out, "--force", "--trust", f"{key}.pub")
    with pytest.raises(CacheError, match="unknown signer"):
        run(there, "bundle", "import", out, "--force", "--require-signature")
    (there / "trusted-signers").mkdir()
    (there / "trusted-signers" / "maker.pub").write_text(f"{public}\n")
    assert "(trusted)" in run(there, "bundle", "import", out, "--force", "--require-signature")


def test_a_pipeline_is_all_its_stored_engines_or_those_of_a_size(tmp_path):
    pipeline = make_toy_pipeline(tmp_path / "toy")
    home = tmp_path / "home"
    with Dispatcher(home=home) as dispatcher:
        read = dispatcher.read(pipeline)
        want = wanted(
            read, dispatcher.request(read, Choice(), prompt=""), token_chunks=1, memo=home / "memo"
        )
    for target in ("sm_89", "sm_120"):
        for component, shapes in want.shapes.items():
            graph, weights = want.digests[component]
            ours = replace(
                REQUEST,
                component=component,
                shapes=shapes,
                graph_digest=graph,
                weights_digest=weights,
                target=target,
            )
            publish(home, ours)
            publish(home, replace(ours, shapes={"x": (1,)}))
    publish(home)
    out = tmp_path / "a.sdkit"
    words = ("bundle", "export", pipeline, "--out", out, "--no-reference", "--json")
    made = json.loads(run(home, *words))
    assert len(made["engines"]) == 4 * len(want.shapes)
    made = json.loads(run(home, *words, "--width", want.request.width_px))
    assert len(made["engines"]) == 2 * len(want.shapes)
    made = json.loads(run(home, *words, "--target", "sm_89"))
    assert {one["request"]["target"] for one in made["engines"]} == {"sm_89"}
    before = tree(tmp_path)
    with pytest.raises(ConfigError, match="no engine of text_encoder, unet, vae_decoder"):
        run(home, *words, "--vendor", "other")
    with pytest.raises(ConfigError, match="no engine of"):
        run(home, *words, "--width", 64)
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    "words",
    [
        ("export", "abcdef", "-o", "x"),
        ("export", "no/such/folder", "-o", "x"),
        ("export", "sample", "-o", "x", "--sign", "no-such-key"),
        ("import", "no-such-file"),
        ("show", "no-such-file"),
        ("keygen", "--out", "no/such/folder/key"),
    ],
)
def test_what_is_not_there_is_named(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    from sdkit_dispatch.errors import DispatchError

    with pytest.raises(DispatchError) as caught:
        run(tmp_path / "home", "bundle", *words)
    assert caught.value.exit_code == 2
    assert not (tmp_path / "x").exists()


def test_a_size_within_the_range_of_an_engine_takes_that_engine_along(tmp_path):
    pipeline = make_toy_pipeline(tmp_path / "toy")
    home, profile, out = tmp_path / "home", tmp_path / "ranges.yaml", tmp_path / "a.sdkit"
    ranges = "{unet: [{height: [4, 8, 16], width: [4, 8, 16]}]}"
    profile.write_text(f"options: {{null: {{profiles: {ranges}}}}}\n")
    choice = Choice(vendor="null", gpu="cpu", profile=str(profile), must_check=False)
    with Dispatcher(home=home) as dispatcher:
        built = dispatcher.build(pipeline, choice, width_px=32, height_px=32)
    words = ("--profile", profile, "--no-reference", "--json", "-o", out)
    sizes = ("--width", 32, "--height", 32)
    made = json.loads(run(home, "bundle", "export", pipeline, *sizes, *words))
    assert {one["key"] for one in made["engines"]} == {p.engine.key for p in built.components}
    with pytest.raises(ConfigError, match="no engine of"):
        run(home, "bundle", "export", pipeline, "--width", 48, "--height", 32, *words)
