import numpy as np
import pytest

from sdkit_dispatch.check import (
    LIMITS,
    SAFER,
    Case,
    Recording,
    judge,
    limits_for,
    load_recording,
    measure,
    save_recording,
)
from sdkit_dispatch.contract import Precision

RNG = np.random.default_rng(3)
EXPECTED = RNG.standard_normal((2, 4, 8, 8)).astype(np.float32)
CASES = [Case(feeds={"x": EXPECTED}, outputs={"y": EXPECTED})]


def verdict(actual: np.ndarray, precision: Precision = "fp32", cases=CASES):
    return judge(cases, [{"y": actual}], LIMITS[precision], reference="test 1")


def test_equal_outputs_pass_with_no_error():
    result = verdict(EXPECTED.copy())
    assert result.status == "passed"
    assert result.metrics["y"]["max_abs"] == 0
    assert result.metrics["y"]["cosine"] == pytest.approx(1)
    assert result.reference == "test 1"


def test_rounding_passes_and_its_size_is_recorded():
    noise = 1e-5 * RNG.standard_normal(EXPECTED.shape)
    result = verdict((EXPECTED + noise).astype(np.float32))
    assert result.status == "passed"
    assert 1e-6 < result.metrics["y"]["max_abs"] < 1e-4


@pytest.mark.parametrize("precision", LIMITS)
def test_half_precision_rounding_passes_where_it_should(precision):
    result = verdict(EXPECTED.astype(np.float16).astype(np.float32), precision)
    assert result.status == "passed"


WRONG = {
    "NaN": (lambda x: np.where(x > 2, np.nan, x), "not finite"),
    "infinite": (lambda x: np.where(x > 2, np.inf, x), "not finite"),
    "constant": (lambda x: np.full_like(x, 0.5), "flat"),
    "zeros": (lambda x: np.zeros_like(x), "flat"),
    "scaled": (lambda x: x * 1.02, "off by"),
    "shifted": (lambda x: np.roll(x, 1, axis=-1), "cosine"),
    "one wrong value": (lambda x: x + (np.arange(x.size).reshape(x.shape) == 77), "off by"),
    "transposed": (lambda x: x.swapaxes(-1, -2), "cosine"),
    "another shape": (lambda x: x[:1], "has the shape"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_outputs_fail_with_the_reason(wrong):
    change, words = WRONG[wrong]
    result = verdict(change(EXPECTED).astype(np.float32))
    assert result.status == "failed"
    assert words in result.reason


@pytest.mark.parametrize("precision", LIMITS)
def test_another_models_output_fails_at_every_precision(precision):
    other = RNG.standard_normal(EXPECTED.shape).astype(np.float32)
    assert verdict(other, precision).status == "failed"


def test_a_missing_output_fails():
    assert judge(CASES, [{}], LIMITS["fp32"], reference="").status == "failed"


def test_whole_numbers_must_be_equal():
    cases = [Case(feeds={}, outputs={"y": np.array([1, 2], np.int64)})]
    assert verdict(np.array([1, 2], np.int64), cases=cases).status == "passed"
    assert verdict(np.array([1, 3], np.int64), cases=cases).status == "failed"


def test_a_reference_that_is_flat_itself_may_be_met():
    flat = np.full((1, 4), 0.25, np.float32)
    cases = [Case(feeds={}, outputs={"y": flat})]
    assert verdict(flat.copy(), cases=cases).status == "passed"


def test_the_worst_of_all_cases_is_recorded():
    cases = CASES * 2
    off = EXPECTED.copy()
    off[0, 0, 0, 0] += 1e-4
    result = judge(cases, [{"y": off}, {"y": EXPECTED}], LIMITS["fp32"], reference="")
    assert result.metrics["y"]["max_abs"] == pytest.approx(1e-4, rel=1e-2)


def test_measure_of_zeros_and_of_nothing():
    assert measure(np.zeros(3), np.zeros(3))["cosine"] == 1
    assert measure(np.ones(3), np.zeros(3))["relative_max"] == 1
    assert measure(np.zeros(0), np.zeros(0))["max_abs"] == 0


def test_every_safer_precision_is_known_and_leads_to_fp32():
    for precision in LIMITS:
        for _ in LIMITS:
            precision = SAFER.get(precision, precision)
        assert precision == "fp32"


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("precision", LIMITS)
def test_limits_are_the_looser_ones_of_engine_and_graph(precision, dtype):
    limits = limits_for(precision, dtype)
    graph = LIMITS[{"float16": "fp16", "bfloat16": "bf16"}.get(dtype, "fp32")]
    for own in (LIMITS[precision], graph):
        assert limits["relative_max"] >= own["relative_max"]
        assert limits["cosine"] <= own["cosine"]
    assert limits["relative_max"] in (LIMITS[precision]["relative_max"], graph["relative_max"])


def test_a_reference_that_is_not_finite_passes_nothing():
    cases = [Case(feeds={}, outputs={"y": np.array([1, np.nan], np.float32)})]
    for actual in ([1, 2], [1, np.nan]):
        assert verdict(np.array(actual, np.float32), cases=cases).status == "failed"


def test_without_any_case_nothing_is_called_passed():
    assert judge([], [], LIMITS["fp32"], reference="").status == "unchecked"
    silent = [Case(feeds={}, outputs={})]
    assert judge(silent, [{}], LIMITS["fp32"], reference="").status == "unchecked"


def test_a_recording_survives_the_disk(tmp_path):
    path = tmp_path / "a" / "recording.npz"
    save_recording(path, Recording(reference="test 1", cases={"unet": tuple(CASES)}))
    loaded = load_recording(path)
    assert loaded.reference == "test 1"
    np.testing.assert_array_equal(loaded.cases["unet"][0].outputs["y"], EXPECTED)
    assert [file.name for file in path.parent.iterdir()] == ["recording.npz"]


@pytest.mark.parametrize("position", [0, 40, 2000, -30])
def test_a_damaged_recording_is_none(tmp_path, position):
    path = tmp_path / "recording.npz"
    save_recording(path, Recording(reference="test 1", cases={"unet": tuple(CASES)}))
    content = bytearray(path.read_bytes())
    content[position] ^= 0xFF
    path.write_bytes(content)
    assert load_recording(path) is None


def test_a_truncated_recording_is_none(tmp_path):
    path = tmp_path / "recording.npz"
    save_recording(path, Recording(reference="test 1", cases={"unet": tuple(CASES)}))
    path.write_bytes(path.read_bytes()[:1000])
    assert load_recording(path) is None
    assert load_recording(tmp_path / "none.npz") is None
