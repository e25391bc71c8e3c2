"""What the benchmark may say: known timings give known numbers; noise is called noise."""

import math
import random

import pytest

from sdkit_dispatch.benchmark.statistics import (
    CONFIDENCE,
    FEWEST_ROUNDS,
    drift_of,
    machine_drift,
    median_interval,
    paired_ratio,
    percentile,
    unpaired_ratio,
)

ROUNDS = 15
RUNS = 1000
NOISES = (0.01, 0.03, 0.10)
"""Of one timing, relative: a quiet desktop, a laptop, two busy cores."""


def noisy(rng: random.Random, true_ms: float, noise: float) -> float:
    """A timing with a long tail, as timings have: one in ten meets something else."""
    burst = rng.expovariate(2.0) if rng.random() < 0.1 else 0.0
    return true_ms * math.exp(rng.gauss(0.0, noise)) * (1 + burst)


def series(rng: random.Random, true_ms: float, noise: float, rounds: int = ROUNDS) -> list[float]:
    return [noisy(rng, true_ms, noise) for _ in range(rounds)]


def test_known_timings_give_the_known_median_and_percentile():
    assert percentile([4.0, 1.0, 3.0, 2.0, 5.0], 0.5) == 3.0
    assert percentile(list(range(1, 12)), 0.9) == 10.0
    assert percentile([1.0, 2.0], 0.9) == pytest.approx(1.9)
    assert percentile([7.0], 0.9) == 7.0


def test_known_timings_give_the_known_ratio():
    """Each round is twice as slow as the one before: only pairs show the 0.5."""
    slow = [float(2**index) for index in range(ROUNDS)]
    ratio = paired_ratio([value / 2 for value in slow], slow)
    assert (ratio.median, ratio.low, ratio.high) == (0.5, 0.5, 0.5)
    assert ratio.call == "faster"
    assert paired_ratio(slow, [value / 2 for value in slow]).call == "slower"
    assert paired_ratio(slow, slow).call == "noise"


@pytest.mark.parametrize(
    ("count", "ranks", "coverage"),
    # The table of the sign test: 9 values, the whole range, 1 - 2 / 2**9; 15 values, 2nd and 14th.
    [(8, (1, 8), 1 - 2 / 2**8), (9, (1, 9), 1 - 2 / 2**9), (15, (2, 14), 1 - 2 * 16 / 2**15)],
)
def test_intervals_are_those_of_the_sign_test(count, ranks, coverage):
    low, high, covered = median_interval([float(index + 1) for index in range(count)])
    assert (low, high) == ranks
    assert covered == pytest.approx(coverage)
    assert covered >= (CONFIDENCE if count > 10 else 0.99)


@pytest.mark.parametrize("count", [1, 2, 3, 5, FEWEST_ROUNDS - 1])
def test_few_rounds_say_so_and_give_their_range(count):
    values = [1.5 + index for index in range(count)]
    ratio = paired_ratio(values, [1.0] * count)
    assert (ratio.low, ratio.high) == (values[0], values[-1])
    assert ratio.call == "too few rounds"
    assert ratio.coverage < CONFIDENCE


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize(("true", "wrong"), [(0.95, "slower"), (1.05, "faster")])
def test_five_percent_is_never_called_the_wrong_way_round(true, wrong, noise):
    rng = random.Random(f"{true} {noise}")
    calls = [
        paired_ratio(series(rng, true, noise), series(rng, 1.0, noise)).call for _ in range(RUNS)
    ]
    assert calls.count(wrong) == 0
    right = "faster" if wrong == "slower" else "slower"
    if noise == min(NOISES):  # and it is no excuse for seeing nothing
        assert calls.count(right) > 0.5 * RUNS
    print(f"noise {noise:.0%}: {calls.count(right)} told apart, {calls.count('noise')} noise")


@pytest.mark.parametrize("noise", NOISES)
def test_equals_are_called_noise_as_often_as_the_interval_promises(noise):
    rng = random.Random(f"equal {noise}")
    calls = [
        paired_ratio(series(rng, 1.0, noise), series(rng, 1.0, noise)).call for _ in range(RUNS)
    ]
    # 1 in 1,000 is promised; 5 is four standard deviations of a thousand runs above it.
    assert RUNS - calls.count("noise") <= 5


def test_intervals_of_paired_ratios_cover_the_truth_as_often_as_they_say():
    rng = random.Random("coverage")
    covered = 0
    for _ in range(RUNS):
        ratio = paired_ratio(series(rng, 0.8, 0.05), series(rng, 1.0, 0.05))
        covered += ratio.low <= 0.8 <= ratio.high
    assert covered >= RUNS - 5


def test_a_drifting_machine_is_flagged():
    """It slows down by 10 % while it is measured, as a laptop that gets hot does."""
    rng = random.Random("drift")
    found = 0
    for _ in range(100):
        slower = [
            noisy(rng, 1 + 0.1 * index / (ROUNDS - 1), min(NOISES)) for index in range(ROUNDS)
        ]
        drift = drift_of(slower)
        found += drift.is_flagged and drift.change > 0
    assert found >= 80  # one timing in ten met something else


def test_a_steady_machine_is_not_flagged():
    rng = random.Random("steady")
    flagged = sum(drift_of(series(rng, 1.0, 0.03)).is_flagged for _ in range(RUNS))
    assert flagged <= 0.022 * RUNS


def test_a_drift_too_small_to_matter_is_not_flagged():
    assert not drift_of([1.0 + 0.001 * index for index in range(ROUNDS)]).is_flagged


def test_what_all_entrants_share_is_the_machine():
    rng = random.Random("shared")
    state = [1 + 0.02 * index for index in range(ROUNDS)]
    entrants = {
        name: [base * one * math.exp(rng.gauss(0, 0.02)) for one in state]
        for name, base in (("a", 10.0), ("b", 25.0), ("c", 3.0))
    }
    drift = machine_drift(entrants)
    assert drift.is_flagged
    assert 0.15 < drift.change < 0.35
    # ... and the ratios of pairs do not see it
    assert paired_ratio(entrants["a"], entrants["b"]).median == pytest.approx(0.4, rel=0.05)


def test_no_entrants_do_not_drift():
    assert not machine_drift({}).is_flagged


def test_series_of_two_runs_are_compared_without_pairs():
    a, b = [float(index) for index in range(90, 110)], [float(index) for index in range(190, 211)]
    ratio = unpaired_ratio(a, b)
    assert ratio.median == pytest.approx(99.5 / 200)
    assert ratio.low < ratio.median < ratio.high
    assert ratio.call == "faster"
    assert unpaired_ratio(a, a).call == "noise"


def test_series_of_different_lengths_are_no_pairs():
    with pytest.raises(ValueError, match="zip"):
        paired_ratio([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="no rounds"):
        paired_ratio([], [])
