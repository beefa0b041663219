"""Figures as tables show them."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.harness._series import Series

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def show_bytes(n_bytes: float) -> str:
    """Write a size to three figures, by powers of ten."""
    unit, size = next(((unit, size) for unit, size in reversed(_UNITS.items()) if n_bytes >= size), ("KB", 1000))
    return f"{_figure(n_bytes / size)} {unit}"


def show_ms(series: Series) -> tuple[str, str]:
    """Write seconds as milliseconds: the median, and the middle half."""
    low, high = series.quartiles
    return _figure(series.median * 1000), f"{_figure(low * 1000)} to {_figure(high * 1000)}"


def in_ms(seconds: Mapping[str, Series]) -> dict[str, Series]:
    """Milliseconds for seconds."""
    return {name: series.times(1000) for name, series in seconds.items()}


def show_ratio(series: Series) -> str:
    """Write the median of a series of quotients."""
    return f"{_figure(series.median)} x"


def _figure(value: float) -> str:
    """To three figures, and no exponent."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.2f}" if value >= 1 or value == 0 else f"{value:.2g}"
