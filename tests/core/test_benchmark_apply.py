"""`bench --apply` from the command to the image: what was fastest here is what draws here."""

import json

import pytest
from typer.testing import CliRunner

import sdkit_dispatch.api as api
from fake_speeds import SPECS
from fake_speeds.adapter import VERSION
from sdkit_dispatch import reference
from sdkit_dispatch.cli import app
from sdkit_null import SPEC as NULL
from toy_pipeline import make_toy_pipeline

SIZE = ["--width", "32", "--height", "16", "--steps", "2"]


@pytest.fixture(scope="module", autouse=True)
def fake_vendors():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "find_vendors", lambda: {**SPECS, NULL.name: NULL})
        patch.setattr(reference, "VENDOR", "null")
        patch.setattr(reference, "OPTIONS", {})
        yield


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return str(make_toy_pipeline(tmp_path_factory.mktemp("toy") / "pipeline"))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs a command in a home of its own; returns its standard output."""
    home = str(tmp_path_factory.mktemp("home"))

    def run(*words: str) -> str:
        done = CliRunner().invoke(app, ["--home", home, *words], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.stdout

    return run


def plans_of(run) -> list[dict]:
    return json.loads(run("plan", "--gpu", "auto", "--json"))["decision"]["plans"]


@pytest.fixture(scope="module")
def applied(run, toy):
    before = [plan["vendor"] for plan in plans_of(run)]
    run("bench", toy, "--sizes", "32x16", "--steps", "2", "--rounds", "3", "--image-rounds", "0",
        "--threads", "1", "--no-install", "--quiet", "--apply")  # fmt: skip
    return before


def test_what_was_fastest_here_is_planned_first_and_says_so(applied, run):
    assert applied == ["fake-broken", "fake-slow", "fake-swift"]
    plans = plans_of(run)
    assert [plan["vendor"] for plan in plans] == ["fake-swift", "fake-slow", "fake-broken"]
    assert plans[0]["reasons"][0].startswith("measured here on ")
    assert "fake-slow" in plans[0]["reasons"][0]
    assert "it failed here on" in plans[2]["reasons"][0]
    assert "measured here on" in run("plan")


def test_what_was_fastest_here_draws(applied, run, toy, tmp_path):
    out = str(tmp_path / "image.png")
    told = run("generate", "x", "--pipeline", toy, "--out", out, *SIZE, "--json", "--no-install")
    result = json.loads(told)["result"]
    assert (result["vendor"], result["steps"]) == ("fake-swift", [])


def test_with_another_runtime_the_order_is_forgotten_until_the_measured_one_is_back(
    applied, run, monkeypatch
):
    with monkeypatch.context() as patch:
        patch.setenv(VERSION, "2")
        assert [plan["vendor"] for plan in plans_of(run)] == applied
    assert plans_of(run)[0]["vendor"] == "fake-swift"


def test_what_was_measured_can_be_forgotten(applied, run):
    assert "forgotten" in run("bench", "--apply", "--forget")
    assert [plan["vendor"] for plan in plans_of(run)] == applied
