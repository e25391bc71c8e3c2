from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdkit_dispatch.config import (
    Config,
    Profile,
    available_profiles,
    home_folder,
    load_config,
    load_profile,
    shipped_folder,
)
from sdkit_dispatch.config.profile import PROFILE_FIELDS
from sdkit_dispatch.config.settings import CONFIG_FIELDS
from sdkit_dispatch.config.strict_yaml import read_yaml, scalar_from_text
from sdkit_dispatch.errors import ConfigError


def profile_of(tmp_path: Path, text: str) -> Profile:
    file = tmp_path / "mine.yaml"
    file.write_text(text, "utf-8")
    return load_profile(file)


def error_of(tmp_path: Path, text: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        profile_of(tmp_path, text)
    return caught.value


def test_shipped_default_profile_is_the_profile_without_a_file() -> None:
    assert load_profile("default") == Profile()


def test_shipped_config_is_the_config_without_a_file(tmp_path: Path) -> None:
    assert load_config(home=tmp_path, environ={}) == Config()


def test_shipped_files_have_every_key_in_the_default_one() -> None:
    profile = read_yaml(shipped_folder("profiles") / "default.yaml")
    assert set(profile.data) == set(PROFILE_FIELDS) - {"name"}
    assert set(read_yaml(shipped_folder("configs") / "default.yaml").data) == set(CONFIG_FIELDS)


def test_every_field_of_the_records_can_be_set_by_a_file() -> None:
    assert {f.name for f in dataclasses.fields(Profile)} == {*PROFILE_FIELDS, "source"}
    assert {f.name for f in dataclasses.fields(Config)} == {*CONFIG_FIELDS, "sources"}


def test_every_shipped_profile_loads_and_is_named_as_its_file(tmp_path: Path) -> None:
    profiles = available_profiles(home=tmp_path)
    assert set(profiles) >= {"default", "sd15", "sdxl", "sample"}
    for name in profiles:
        assert load_profile(name, home=tmp_path).name == name


def test_sample_profile_is_that_of_the_sample_pipeline() -> None:
    sample = load_profile("sample")
    assert (sample.width_px, sample.height_px, sample.steps, sample.guidance) == (32, 32, 8, 3.0)
    assert sample.scheduler == "dpmpp_2m"


def test_profile_of_the_user_hides_the_shipped_one_of_that_name(tmp_path: Path) -> None:
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / "sd15.yaml").write_text("width_px: 768\n", "utf-8")
    assert load_profile("sd15", home=tmp_path).width_px == 768


def test_unknown_profile_is_refused_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_profile("sdx1", home=tmp_path)
    assert "default, sample, sd15, sdxl" in caught.value.message
    assert "'sdxl'" in caught.value.hint


def test_path_with_spaces_and_other_alphabets_is_read(tmp_path: Path) -> None:
    file = tmp_path / "мой 設定.yaml"
    file.write_bytes("\ufeffname: 日本\r\nwidth_px: 64\r\n".encode())
    assert (load_profile(file).name, load_profile(file).width_px) == ("日本", 64)


def test_vendor_options_are_kept_as_they_are(tmp_path: Path) -> None:
    text = "options:\n  openvino:\n    hint: LATENCY\n    streams: 2\n    off: no\n  cpu:\n"
    assert profile_of(tmp_path, text).options == {
        "openvino": {"hint": "LATENCY", "streams": 2, "off": "no"},
        "cpu": {},
    }


def test_unknown_key_is_refused_with_file_line_and_the_nearest_known_one(tmp_path: Path) -> None:
    error = error_of(tmp_path, "# a comment\n\nwidht_px: 64\n")
    assert error.message == f"{tmp_path / 'mine.yaml'}:3: widht_px: unknown key"
    assert error.hint == "did you mean 'width_px'?"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("width_px: 100", "a multiple of 8"),
        ("width_px: 1e9", "'auto' or a whole number"),
        ("width_px: true", "'auto' or a whole number"),
        ("width_px: [64]", "'auto' or a whole number"),
        ("batch: 0", "a whole number from 1"),
        ("precision: half", "one of fp32, fp16"),
        ("scheduler: karras", "one of euler, "),
        ("steps: '8'", "a whole number"),
        ("guidance: much", "a number from 0 to 100"),
        ("name:", "a text"),
        ("options: fast", "a mapping"),
        ("options: {openvino: fast}", "'openvino' is not"),
    ],
)
def test_wrong_value_is_refused_with_line_key_and_what_it_may_be(
    tmp_path: Path, line: str, expected: str
) -> None:
    error = error_of(tmp_path, f"# first\n{line}\n")
    assert error.message.startswith(f"{tmp_path / 'mine.yaml'}:2: {line.split(':')[0]}: is ")
    assert expected in error.message


@pytest.mark.parametrize(
    ("text", "line", "expected"),
    [
        ("steps: 8\nsteps: 9\n", 2, "twice, first in line 1"),
        ("options: {cpu: {a: 1,\n a: 2}}\n", 2, "options.cpu.a: the key is here twice"),
        ("options: &a {}\n", 1, "anchors"),
        ("options: {x: &a {}, y: *a}\n", 1, "anchors"),
        ("steps: !!python/object/apply:os.getcwd []\n", 1, "tag"),
        ("steps: !mine 8\n", 1, "tag"),
        ("steps: [8\n", 2, "is not YAML"),
        ("steps: 8\n  batch: 1\n", 2, "is not YAML"),
        ("steps: 8\n---\nsteps: 9\n", 2, "is not YAML"),
        ("- steps\n", 1, "key: value"),
        ("{a: 1}: 2\n", 1, "a key must be a word"),
        ("options: " + "[" * 100_000, 1, "nested deeper"),
    ],
)
def test_what_is_not_plain_yaml_is_refused_with_its_line(
    tmp_path: Path, text: str, line: int, expected: str
) -> None:
    error = error_of(tmp_path, text)
    assert error.message.startswith(f"{tmp_path / 'mine.yaml'}:{line}: ")
    assert expected in error.message


def test_billion_laughs_are_refused_at_the_first(tmp_path: Path) -> None:
    rows = ["a0: &a0 [ha]"] + [
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)
    ]
    assert "anchors" in error_of(tmp_path, "\n".join(rows)).message


def test_file_that_is_too_large_not_text_or_missing_is_refused(tmp_path: Path) -> None:
    assert "larger" in error_of(tmp_path, "# " + "x" * (1 << 20)).message
    (tmp_path / "latin.yaml").write_bytes(b"steps: 8\nname: \xe9\n")
    with pytest.raises(ConfigError, match=r"latin.yaml:2: is not UTF-8"):
        load_profile(tmp_path / "latin.yaml")
    with pytest.raises(ConfigError, match=r"none.yaml: cannot be read"):
        load_profile(tmp_path / "none.yaml")


def assert_profile_or_error(file: Path) -> None:
    message = str(file)
    try:
        load_profile(file)
    except ConfigError as error:
        message = error.message
    assert str(file) in message


@given(data=st.binary(max_size=200))
def test_any_bytes_are_a_profile_or_a_config_error(
    data: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.getbasetemp() / "any.yaml"
    file.write_bytes(data)
    assert_profile_or_error(file)


@given(text=st.text(alphabet="a1:{}[]&*!#'\"\n -,.?|>%@`", max_size=60))
def test_any_punctuation_is_a_profile_or_a_config_error(
    text: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.getbasetemp() / "punctuation.yaml"
    file.write_text(text, "utf-8")
    assert_profile_or_error(file)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("no", "no"),
        ("on", "on"),
        ("12:30", "12:30"),
        ("010", 10),
        ("0x10", "0x10"),
        ("1e3", 1000.0),
        ("-.5", -0.5),
        (".", "."),
        ("~", None),
        ("True", True),
    ],
)
def test_unquoted_scalars_mean_what_yaml_1_2_says(text: str, value: object) -> None:
    assert scalar_from_text(text) == value
    assert type(scalar_from_text(text)) is type(value)


def test_later_sources_of_a_setting_win_and_are_named(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("threads: 1\nstrict: true\nlog_level: info\n", "utf-8")
    given_file = tmp_path / "given.yaml"
    given_file.write_text("threads: 2\nrun_timeout_s: 5\nmay_install: no\n", "utf-8")
    environ = {"SDKIT_DISPATCH_THREADS": "3", "SDKIT_DISPATCH_LOG_LEVEL": "error"}
    flags = {"threads": 4, "env": None}
    config = load_config(given_file, home=tmp_path, environ=environ, flags=flags)
    assert config == Config(
        threads=4, strict=True, log_level="error", run_timeout_s=5.0, may_install="no"
    )
    assert config.sources["threads"] == "--threads"
    assert config.sources["log_level"] == "SDKIT_DISPATCH_LOG_LEVEL"
    assert config.sources["run_timeout_s"] == f"{given_file}:2"
    assert config.sources["strict"] == f"{tmp_path / 'config.yaml'}:2"
    assert config.sources["env"].startswith(str(shipped_folder("configs") / "default.yaml:"))


def test_wrong_variable_or_flag_is_named_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"SDKIT_DISPATCH_STRICT is 'yes', but must be true or"):
        load_config(home=tmp_path, environ={"SDKIT_DISPATCH_STRICT": "yes"})
    with pytest.raises(ConfigError, match=r"--may-install is 'maybe', but must be one of ask"):
        load_config(home=tmp_path, environ={}, flags={"may_install": "maybe"})
    with pytest.raises(ConfigError, match=r"--thread: unknown setting"):
        load_config(home=tmp_path, environ={}, flags={"thread": 1})


def test_timeouts_cover_every_request_of_a_worker() -> None:
    config = Config(probe_timeout_s=1, compile_timeout_s=2, load_timeout_s=3, run_timeout_s=4)
    assert config.timeouts_s["compile"] == 2
    assert set(config.timeouts_s) == {
        "probe",
        "plan",
        "compile",
        "load",
        "run",
        "time",
        "generate",
        "record",
    }


def test_home_folder_is_the_variable_or_a_folder_of_the_user(tmp_path: Path) -> None:
    asked = tmp_path / "мой дом"
    assert home_folder({"SDKIT_DISPATCH_HOME": str(asked)}) == asked
    assert home_folder({"SDKIT_DISPATCH_HOME": "relative"}).is_absolute()
    assert home_folder({}).name == "sdkit-dispatch"
    assert home_folder({"SDKIT_DISPATCH_HOME": " "}) == home_folder({})
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="which is not a folder"):
        home_folder({"SDKIT_DISPATCH_HOME": str(tmp_path / "file")})


def test_a_misspelt_variable_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    environ = {"SDKIT_DISPATCH_TREADS": "2", "SDKIT_DISPATCH_GPU": "cpu", "OTHER": "x"}
    assert load_config(home=tmp_path, environ=environ).threads is None
    (record,) = caplog.records
    assert "SDKIT_DISPATCH_TREADS" in record.getMessage()
    assert "THREADS" in record.getMessage()


def test_a_user_without_a_home_gets_no_folder_named_tilde(monkeypatch: pytest.MonkeyPatch) -> None:
    def unresolved_mock(name: str, *, appauthor: bool) -> Path:
        return Path("~/.local/share") / name

    monkeypatch.setattr("platformdirs.user_data_path", unresolved_mock)
    home = home_folder({})
    assert home.is_absolute()
    assert "~" not in home.parts


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("shared_stores: [/a, /b]", ("/a", "/b")), ("shared_stores:", ())],
)
def test_shared_stores_are_a_list_of_folders(tmp_path: Path, text: str, wanted: object) -> None:
    (tmp_path / "config.yaml").write_text(text)
    assert load_config(home=tmp_path, environ={}).shared_stores == wanted


def test_shared_stores_in_a_variable_are_separated_as_in_path(tmp_path: Path) -> None:
    environ = {"SDKIT_DISPATCH_SHARED_STORES": f"/a{os.pathsep}~/b"}
    found = load_config(home=tmp_path, environ=environ).shared_stores
    assert found == ("/a", str(Path.home() / "b"))


@pytest.mark.parametrize("text", ["shared_stores: [a]", "shared_stores: [1]", "shared_stores: 7"])
def test_a_shared_store_that_is_no_absolute_folder_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match="shared_stores"):
        load_config(home=tmp_path, environ={})
