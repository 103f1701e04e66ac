"""Changes between two runs with confidence intervals: a block bootstrap. Pure.

Successive steps of a job are alike (a checkpoint, a neighbour on the network, the temperature). Single steps must not be drawn as if they
were independent: the interval would be far too narrow. So each run is cut into ``BLOCKS`` blocks of successive steps, and whole blocks
are drawn, with the steps of all ranks and the operations in them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

#: Blocks of a run. Fewer, longer blocks hold more of the correlation, but the spread between them is known less well.
BLOCKS = 10
#: Confidence of the intervals.
CONFIDENCE = 0.99
_DRAWS, _SEED = 2000, 22
#: The percentiles of a bootstrap over few blocks are too close together. Student's t with 9 degrees of freedom instead of the normal
#: distribution, both at 99%; and the variance of a sample of 10.
_WIDER = 3.250 / 2.576 * sqrt(BLOCKS / (BLOCKS - 1))
#: Samples that must lie beyond a quantile on either side.
LEAST_BEYOND = 20
#: Blocks that must have samples for an interval of a ratio.
LEAST_FILLED = 8
#: A cut of the warm-up is as good if its error is at most so many times the least; and by how many standard errors a warm-up differs.
_AS_GOOD, _NO_CHANCE = 1.1, 4.0
#: Errors, as parts of the square of the mean, that may be those of rounding.
_ROUNDING = 1e-12
#: A warm-up has at most this part of the steps, or this number where that is more. A longer first part is another speed.
_WARM_UP_PART, _WARM_UP_STEPS = 0.2, 25
#: A change of speed: it lasts for such a part of the steps at least, is that large, and so many batches of either part are on its side of the middle.
_LASTS, _LEAST_SHIFT, _APART = 0.15, 0.1, 0.9
#: Batches that each part must have.
_LEAST_BATCHES = 4
#: Logarithmic bins of the draws: their time does not grow with the number of samples, and a quantile is at most 0.05% off.
_BIN = 1e-3
#: Draws that are computed together, which limits the memory.
_TOGETHER = 200


class Samples(NamedTuple):
    """Positive values, and the block of each."""

    values: Floats
    block: Ints


class Sums(NamedTuple):
    """The sums by block of a ratio ``above / below``, both of length ``BLOCKS``."""

    above: Floats
    below: Floats


class Change(NamedTuple):
    """How much B differs from A, and the confidence interval: ``b / a - 1``, or of shares ``b - a``."""

    change: float
    low: float
    high: float


@dataclass(frozen=True)
class Shift:
    """A change of speed amid a run: how many steps were before it, and the median steps in s before and after."""

    at: int
    before_s: float
    after_s: float


def warm_up(durations: Floats) -> int:
    """Return how many steps at the begin of a run are warm-up, at most a fifth of them or 25, by the rule MSER-5 (White 1997).

    A longer first part of another speed is no warm-up; what may be one is at its begin.
    """
    most = max(_WARM_UP_PART * len(durations), _WARM_UP_STEPS)
    cut = _first_part(durations)
    while cut > most:
        cut = _first_part(durations[:cut])
    return cut


def _first_part(durations: Floats) -> int:
    """Return how many steps at the begin, at most half of them, are unlike the rest.

    It cuts where the remaining steps, in batches of five, have the smallest standard error of their mean. Of a short or noisy run, that alone may be
    anywhere: the cut is the first one that is nearly as good, and nothing is cut whose mean does not differ from that of the rest by more than chance.
    """
    batches = durations[: len(durations) // 5 * 5].reshape(-1, 5).mean(axis=1)
    if not len(batches):
        return 0
    errors = [batches[cut:].var() / (len(batches) - cut) for cut in range(len(batches) // 2 + 1)]
    # Steps that are all alike differ by rounding.
    least = _AS_GOOD * min(errors) + _ROUNDING * batches.mean() ** 2
    cut = int(np.flatnonzero(np.array(errors) <= least)[0])
    if not cut:
        return 0
    before, rest = batches[:cut], batches[cut:]
    error = sqrt(rest.var() * (1 / len(before) + 1 / len(rest)))
    return 5 * cut if abs(before.mean() - rest.mean()) > _NO_CHANCE * error else 0


def shift(durations: Floats) -> Shift | None:
    """Return where the speed of a run changed and stayed so, by medians of five steps; ``None``: nowhere, or it cannot be told from noise."""
    batches = np.median(durations[: len(durations) // 5 * 5].reshape(-1, 5), axis=1)
    least = max(_LEAST_BATCHES, round(_LASTS * len(batches)))
    cuts = range(least, len(batches) - least + 1)
    if not cuts:
        return None
    at = min(cuts, key=lambda cut: float(cut * batches[:cut].var() + (len(batches) - cut) * batches[cut:].var()))
    before, after = float(np.median(batches[:at])), float(np.median(batches[at:]))
    above = batches > (before + after) / 2
    apart = min(np.mean(above[:at] == (before > after)), np.mean(above[at:] == (after > before)))
    if apart < _APART or abs(after - before) < _LEAST_SHIFT * min(before, after):
        return None
    return Shift(5 * at, before, after)


def blocks_of(number: int) -> Ints:
    """Return the block of each of ``number`` successive steps."""
    return np.arange(number, dtype=np.int64) * BLOCKS // max(1, number)


def quantile(samples: Samples, q: float) -> float | None:
    """Return a quantile by nearest rank, as in summaries; ``None``: there are no samples."""
    return float(np.quantile(samples.values, q, method="inverted_cdf")) if len(samples.values) else None


def ratio(sums: Sums) -> float | None:
    """Return the ratio over all blocks; ``None``: it is not defined."""
    below = float(sums.below.sum())
    return float(sums.above.sum()) / below if below > 0 else None


def change_of_quantile(a: Samples, b: Samples, q: float) -> Change | None:
    """Return the relative change of a quantile; ``None``: too few samples for an interval."""
    if any(len(run.values) * min(q, 1 - q) < LEAST_BEYOND for run in (a, b)):
        return None
    of_a, of_b = (np.array([quantile(run, q)]) for run in (a, b))
    drawn_a, drawn_b = (_quantiles(run, q, _draws(number)) for number, run in enumerate((a, b)))
    return _change(np.log(of_b / of_a), np.log(drawn_b / drawn_a), relative=True)


def change_of_ratio(a: Sums, b: Sums, *, relative: bool) -> Change | None:
    """Return the change of a ratio, relative or as a difference; ``None``: it is not defined, or most blocks have no part in it."""
    if any(np.count_nonzero(run.below) < LEAST_FILLED for run in (a, b)):
        return None
    totals = [np.array([ratio(run) or np.nan]) if relative else np.array([ratio(run)], float) for run in (a, b)]
    if np.isnan(totals).any():
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        drawn = [(_draws(number) @ run.above) / (_draws(number) @ run.below) for number, run in enumerate((a, b))]
        if relative:
            return _change(np.log(totals[1] / totals[0]), np.log(drawn[1] / drawn[0]), relative=True)
    return _change(totals[1] - totals[0], drawn[1] - drawn[0], relative=False)


def _draws(run: int) -> Floats:
    """Return how often each draw has each block: [draws, blocks]. The same for all figures of a run, and others for the other run."""
    chance = np.random.default_rng([_SEED, run])
    return chance.multinomial(BLOCKS, [1 / BLOCKS] * BLOCKS, _DRAWS).astype(float)


def _quantiles(samples: Samples, q: float, draws: Floats) -> Floats:
    """Return the quantile of each draw."""
    bins, index = np.unique(np.round(np.log(samples.values) / _BIN), return_inverse=True)
    cells = np.bincount(samples.block * len(bins) + index, minlength=BLOCKS * len(bins))
    counts = cells.reshape(BLOCKS, len(bins)).astype(float)
    found = []
    for some in np.array_split(draws, -(-len(draws) // _TOGETHER)):
        upto = (some @ counts).cumsum(axis=1)
        found.append((upto >= q * upto[:, -1:]).argmax(axis=1))
    return np.asarray(np.exp(bins[np.concatenate(found)] * _BIN), float)


def _change(total: Floats, drawn: Floats, *, relative: bool) -> Change | None:
    """Return the change with the interval between the percentiles of the draws, widened."""
    drawn = drawn[np.isfinite(drawn)]
    if not len(drawn) or not np.isfinite(total).all():
        return None
    ends = np.quantile(drawn, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    low, high = total + (ends - total) * _WIDER
    found = (float(each) for each in (total[0], low, high))
    return Change(*(float(np.expm1(each)) if relative else each for each in found))
