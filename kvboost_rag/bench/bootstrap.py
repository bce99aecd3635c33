"""How sure a mean difference between two methods on the same samples is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["paired_difference"]

_RESAMPLES = 10_000
_BLOCK = 500


def paired_difference(values: Sequence[float], reference: Sequence[float], seed: int = 0) -> tuple[float, float, float]:
    """Estimate the mean of ``values - reference`` with a 95 % interval.

    Percentile bootstrap over the samples (Efron, "Bootstrap Methods: Another Look at the Jackknife", 1979): 10,000
    times, as many samples as there are are drawn with replacement, each together with its reference.

    Parameters
    ----------
    values, reference
        Figures of the same samples in the same order, at least one.
    seed
        Of the draws.

    Returns
    -------
    tuple[float, float, float]
        Mean, and the interval's lower and upper end. Both ends equal the mean where all differences are alike.
    """
    differences = np.asarray(values, dtype=np.float64) - np.asarray(reference, dtype=np.float64)
    rng, n = np.random.default_rng(seed), len(differences)
    # In blocks, so that many samples do not take much memory.
    means = [differences[rng.integers(n, size=(_BLOCK, n))].mean(axis=1) for _ in range(_RESAMPLES // _BLOCK)]
    lower, upper = np.percentile(np.concatenate(means), (2.5, 97.5))
    return float(differences.mean()), float(lower), float(upper)
