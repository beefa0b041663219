"""Measuring and reporting: in turns, in processes of their own, as tables with targets."""

from benchmarks.harness._cache import drop_from_cache, resident_share
from benchmarks.harness._counts import Counts, counts_of
from benchmarks.harness._floors import Hashing, sync, write_durably
from benchmarks.harness._folders import clear, disk_bytes, n_files
from benchmarks.harness._fresh import WHOLE, Program, interleave_fresh
from benchmarks.harness._machine import describe_machine
from benchmarks.harness._options import Options, parse_bytes
from benchmarks.harness._own_process import Job, Usage, interleave_apart, series_of
from benchmarks.harness._report import Chart, Section, Table, Verdict, write_results
from benchmarks.harness._series import Series
from benchmarks.harness._show import in_ms, show_bytes, show_ms, show_ratio
from benchmarks.harness._targets import Target, at_least, at_most
from benchmarks.harness._turns import Turn, interleave

__all__ = [
    "WHOLE",
    "Chart",
    "Counts",
    "Hashing",
    "Job",
    "Options",
    "Program",
    "Section",
    "Series",
    "Table",
    "Target",
    "Turn",
    "Usage",
    "Verdict",
    "at_least",
    "at_most",
    "clear",
    "counts_of",
    "describe_machine",
    "disk_bytes",
    "drop_from_cache",
    "in_ms",
    "interleave",
    "interleave_apart",
    "interleave_fresh",
    "n_files",
    "parse_bytes",
    "resident_share",
    "series_of",
    "show_bytes",
    "show_ms",
    "show_ratio",
    "sync",
    "write_durably",
    "write_results",
]
