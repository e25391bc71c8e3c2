"""What a few noisy timings allow us to say: medians, paired ratios with intervals, drift.

Nothing here assumes a distribution. Timings have long tails and come in bursts, so ratios are taken
of pairs that were measured in the same round, and the interval of their median is that of the sign
test: it needs no variance, no random numbers and no large sample.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

CONFIDENCE = 0.999
"""Of every interval, where there are rounds enough (11). A report holds dozens of ratios, and none
of them may be called the wrong way round: on a machine with 10 % noise, 99 % did so once in 1,000.
"""
FEWEST_ROUNDS = 8
"""For a word on who is faster. The whole range of 8 ratios covers their median 99.2 % of times."""
DRIFT = 0.03
"""Change over a run, relative to its middle, that is worth a word ..."""
DRIFT_CHANCE = 0.01
"""... if an order as regular as this comes about by chance less often than this."""

Call = Literal["faster", "slower", "noise", "too few rounds"]


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """The median of paired ratios a / b, and what it allows one to say of a.

    Attributes:
        low: Lower end of the interval of the median.
        coverage: How often such an interval covers the true median, at least.
        call: What a is against b: "noise" where the interval holds 1.
    """

    median: float
    low: float
    high: float
    coverage: float
    rounds: int
    call: Call


@dataclass(frozen=True, kw_only=True)
class Drift:
    """How a series changed from its first round to its last.

    Attributes:
        change: Relative; +0.1 means 10 % slower at the end.
        chance: How often an order as regular comes about where nothing drifts.
    """

    change: float
    chance: float
    is_flagged: bool


def percentile(values: Sequence[float], share: float) -> float:
    """Returns the value below which `share` (0..1) of the sample lies, between two linearly."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Returns (low, high, coverage) of the median: the narrowest pair of order statistics.

    Source: the interval that belongs to the sign test (Conover, Practical Nonparametric
    Statistics, section 3.2). With too few values for `CONFIDENCE` it is their whole range.
    """
    ordered, count = sorted(values), len(values)
    # How often the median lies outside of the rank-th smallest and largest value.
    missed = [
        2 * sum(math.comb(count, index) for index in range(rank)) / 2**count
        for rank in range(1, (count + 1) // 2 + 1)
    ]
    rank = max(1, sum(chance <= 1 - CONFIDENCE for chance in missed))
    return ordered[rank - 1], ordered[-rank], max(0.0, 1 - missed[rank - 1])


def paired_ratio(a: Sequence[float], b: Sequence[float]) -> Ratio:
    """Compares two series that were measured round by round, side by side.

    Raises:
        ValueError: They have different lengths, or are empty.
    """
    ratios = [one / other for one, other in zip(a, b, strict=True)]
    if not ratios:
        raise ValueError("no rounds were measured")
    low, high, coverage = median_interval(ratios)
    return Ratio(
        median=median(ratios),
        low=low,
        high=high,
        coverage=coverage,
        rounds=len(ratios),
        call=_call(low, high, len(ratios)),
    )


def unpaired_ratio(a: Sequence[float], b: Sequence[float]) -> Ratio:
    """Compares two series of different runs: from the ends of both medians' intervals.

    Wider than need be, and never narrower: nothing is known of what the two runs share.

    Raises:
        ValueError: One of them is empty.
    """
    if not a or not b:
        raise ValueError("no rounds were measured")
    (a_low, a_high, a_coverage), (b_low, b_high, b_coverage) = map(median_interval, (a, b))
    rounds = min(len(a), len(b))
    low, high = a_low / b_high, a_high / b_low
    return Ratio(
        median=median(a) / median(b),
        low=low,
        high=high,
        coverage=max(0.0, a_coverage + b_coverage - 1),  # both intervals hold at least that often
        rounds=rounds,
        call=_call(low, high, rounds),
    )


def _call(low: float, high: float, rounds: int) -> Call:
    if rounds < FEWEST_ROUNDS:
        return "too few rounds"
    if high < 1:
        return "faster"
    return "slower" if low > 1 else "noise"


def drift_of(series: Sequence[float]) -> Drift:
    """Judges whether a series rises or falls: Theil-Sen slope, Mann-Kendall test.

    Source: H. B. Mann, Nonparametric tests against trend (1945); P. K. Sen (1968).
    """
    count = len(series)
    if count < FEWEST_ROUNDS:
        return Drift(change=0.0, chance=1.0, is_flagged=False)
    pairs = [(i, j) for i in range(count) for j in range(i + 1, count)]
    rises = sum((series[j] > series[i]) - (series[j] < series[i]) for i, j in pairs)
    slope = median([(series[j] - series[i]) / (j - i) for i, j in pairs])
    spread = math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    score = max(0.0, abs(rises) - 1) / spread  # 1: the continuity correction
    chance = math.erfc(score / math.sqrt(2))
    change = slope * (count - 1) / median(series)
    return Drift(
        change=change,
        chance=chance,
        is_flagged=chance < DRIFT_CHANCE and abs(change) >= DRIFT,
    )


def machine_drift(series: Mapping[str, Sequence[float]]) -> Drift:
    """Judges what all entrants share: the mean of their series, each over its own median."""
    relative = [[value / median(values) for value in values] for values in series.values()]
    if not relative:
        return drift_of([])
    rounds = min(len(values) for values in relative)
    return drift_of(
        [sum(values[index] for values in relative) / len(relative) for index in range(rounds)]
    )
