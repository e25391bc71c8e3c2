"""What engines take on the disk, and which of them go."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from sdkit_dispatch.cache import EngineStore
from sdkit_dispatch.cli_cleaning import bytes_from_text, seconds_from_text
from sdkit_dispatch.errors import ConfigError
from sdkit_dispatch.store_cleaning import (
    over_size,
    remove_unused,
    shrink,
    superseded,
    unused_since,
    usage,
    used_at_s,
)
from store_examples import REQUEST, look_up, publish

OTHER = replace(REQUEST, component="vae_decoder")
SHAPED = replace(REQUEST, shapes={"sample": (1, 4, 8, 8), "timestep": ()})


@pytest.fixture
def store(tmp_path):
    return EngineStore(tmp_path / "home")


def use_at(store: EngineStore, request, seconds: float) -> None:
    """Makes an engine look as if it had been used then, and not in use any more."""
    look_up(store, request)
    (note,) = (store.memo / "uses").rglob(f"{request.key}.json")
    os.utime(note, (seconds, seconds))
    store.let_go()


def link_pair(store: EngineStore, tmp_path: Path) -> None:
    """Two engines of the same weights: one file with two names."""
    weights = tmp_path / "weights.bin"
    weights.write_bytes(bytes(5000))
    publish(store, REQUEST, size_bytes=100, linked=weights)
    publish(store, SHAPED, size_bytes=200, linked=weights)
    weights.unlink()


def test_shared_weights_count_once(store, tmp_path):
    link_pair(store, tmp_path)
    publish(store, OTHER, size_bytes=50)
    unet, decoder = usage(store.entries())
    manifests = sum(path.stat().st_size for path in store.home.rglob("manifest.json"))
    assert (unet.component, unet.engines) == ("unet", 2)
    assert unet.size_bytes - unet.own_bytes == 5000
    assert unet.own_bytes + decoder.own_bytes == 5000 + 100 + 200 + 50 + manifests


def test_removing_one_of_two_engines_frees_only_what_it_has_alone(store, tmp_path):
    link_pair(store, tmp_path)
    entries = list(store.entries())
    both = over_size(store, entries, limit_bytes=0)
    assert both[0].frees_bytes < 5000
    assert both[1].frees_bytes > 5000


def test_the_longest_unused_go_until_the_rest_fits(store):
    for index, request in enumerate((REQUEST, OTHER, SHAPED)):
        publish(store, request, size_bytes=100_000)
        use_at(store, request, 2e9 - index)
    gone = shrink(store, limit_bytes=250_000)
    assert [one.key for one in gone] == [SHAPED.key]
    assert {entry.key for entry in store.entries()} == {REQUEST.key, OTHER.key}
    assert shrink(store, limit_bytes=250_000) == []


def test_an_engine_in_use_stays_and_the_next_one_goes(store):
    for index, request in enumerate((REQUEST, OTHER)):
        publish(store, request, size_bytes=100_000)
        use_at(store, request, 2e9 + index)
    user = EngineStore(store.home)
    look_up(user, REQUEST)
    os.utime(next((store.memo / "uses").rglob(f"{REQUEST.key}.json")), (1e9, 1e9))
    gone, kept = shrink(store, limit_bytes=150_000)
    assert (gone.key, gone.kept) == (OTHER.key, "")
    assert kept.key == REQUEST.key
    assert "in use" in kept.kept
    user.let_go()
    assert [one.key for one in shrink(store, limit_bytes=0)] == [REQUEST.key]


def test_damaged_entries_go_first(store):
    publish(store, REQUEST, size_bytes=100_000)
    (publish(store, OTHER, size_bytes=100_000) / "manifest.json").write_text("{")
    store.let_go()
    assert [one.key for one in shrink(store, limit_bytes=150_000)] == [OTHER.key]


def test_engines_that_were_not_used_for_long_are_named(store):
    publish(store, REQUEST)
    publish(store, OTHER)
    use_at(store, REQUEST, 2.0e9)
    found = unused_since(store, list(store.entries()), before_s=1.9e9)
    assert [one.key for one in found] == [OTHER.key]  # never used: it counts from when it was built
    assert used_at_s(store, store.read(REQUEST.key)) == 2.0e9
    store.let_go()
    remove_unused(store, found)
    assert [entry.key for entry in store.entries()] == [REQUEST.key]


HERE = {"revisions": {"null": 1}, "passes": 0, "runtimes": {"null": frozenset({"null 1"})}}


@pytest.mark.parametrize(
    ("change", "here", "words"),
    [
        ({}, {}, None),
        ({"revision": 2}, {}, "revision 2"),
        ({"passes": 3}, {}, "passes"),
        ({"runtime": "null 0"}, {}, "null 0"),
        ({"runtime": "null 0"}, {"runtimes": {}}, "is newer"),
        ({"runtime": "null 0", "shapes": {"x": (1,)}}, {"runtimes": {}}, None),
        ({"vendor": "another"}, {}, None),
    ],
)
def test_superseded_is_what_can_no_longer_be_hit(store, change, here, words):
    publish(store, REQUEST, created_at="2026-11-02T00:00:00.000+00:00")
    other = replace(REQUEST, **change)
    if other != REQUEST:
        publish(store, other)
    found = superseded(list(store.entries()), **(HERE | here))
    assert [one.key for one in found] == ([other.key] if words else [])
    assert all(words in one.reason for one in found)


@pytest.mark.parametrize(
    ("text", "seconds"), [("12h", 43200), ("30d", 30 * 86400), ("1.5w", 907200)]
)
def test_ages_are_read(text, seconds):
    assert seconds_from_text(text) == seconds


@pytest.mark.parametrize(
    ("text", "size"), [("20GB", 20 * 10**9), ("1.5 tb", 1500 * 10**9), ("0", 0)]
)
def test_sizes_are_read(text, size):
    assert bytes_from_text(text) == size


@pytest.mark.parametrize("text", ["", "30", "d", "-1d", "1e9d", "9" * 30 + "d", "30 days"])
def test_other_ages_are_refused(text):
    with pytest.raises(ConfigError, match="--older-than"):
        seconds_from_text(text)
