"""Statistics of repeated measurements: `summarize` and `percentiles`; `shown_range`."""

import math
import statistics
from collections.abc import Sequence


def summarize(values: Sequence[float]) -> dict[str, float | list[float] | None]:
    """Return median, minimum, sample standard deviation (None for a single value), and the values themselves."""
    spread = statistics.stdev(values) if len(values) > 1 else None
    return {"median": statistics.median(values), "min": min(values), "stddev": spread, "all": list(values)}


def named_percentiles(values: Sequence[float], *percents: int) -> dict[str, float]:
    """Return percentiles by name, such as "p50"; see `percentiles`."""
    return {f"p{percent}": value for percent, value in zip(percents, percentiles(values, percents), strict=True)}


def percentiles(values: Sequence[float], percents: Sequence[float]) -> list[float]:
    """Return percentiles with linear interpolation between neighbours (NumPy's default; Hyndman & Fan, type 7)."""
    ordered = sorted(values)
    results = []
    for percent in percents:
        place = (len(ordered) - 1) * percent / 100
        low = math.floor(place)
        high = min(low + 1, len(ordered) - 1)
        results.append(ordered[low] + (ordered[high] - ordered[low]) * (place - low))
    return results


def shown_range(ends: tuple[int, int]) -> str:
    """Return a range as its option takes it: 32:256, or 32 if both ends are 32."""
    return str(ends[0]) if ends[0] == ends[1] else f"{ends[0]}:{ends[1]}"
