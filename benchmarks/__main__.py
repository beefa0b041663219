"""``python -m benchmarks``: run some parts or all, print their tables, and write them to files."""

from __future__ import annotations

import argparse
import datetime
import importlib
import shlex
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.harness import Options, Section, describe_machine, parse_bytes, write_results

PARTS = (
    "save",
    "load",
    "tiny",
    "one",
    "opening",
    "parts",
    "first_read",
    "checkpoint",
    "loops",
    "ranks",
    "log_model",
    "listing",
    "scale",
    "memory",
    "histories",
    "deltas",
    "peers",
    "regimes",
    "collection",
    "import_time",
    "server_upload",
    "remote",
)
"""Modules of this package, in the order of their runs."""

NOT_SMOKE = ("import_time", "server_upload", "remote")
"""Parts omitted from a smoke test unless named: they start servers, or start MLflow repeatedly."""

HERE = Path(__file__).resolve().parent


def main() -> None:
    """Read the command line, run, and report."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure how fast, small and frugal the store is, beside its peers.",
        epilog=f"parts: {', '.join(PARTS)}; each says in its module what it measures",
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help="all unless given")
    parser.add_argument("--smoke", action="store_true", help="see that all of it runs, on small data; seconds")
    parser.add_argument("--size", action="append", type=parse_bytes, metavar="SIZE", help="of models: 300KB, 47MB, 2GB")
    parser.add_argument("--only", action="append", metavar="TEXT", help="contenders whose names hold it, and baselines")
    parser.add_argument("--rounds", type=int, metavar="N", help="that count; unless given, more of what is quick")
    parser.add_argument("--out", type=Path, metavar="DIR", help="for what is found (default: results, beside the code)")
    parser.add_argument(
        "--data",
        type=Path,
        default=Path(tempfile.gettempdir(), "tensorcas-benchmark"),
        metavar="DIR",
        help="where trained models are kept from run to run (default: %(default)s)",
    )
    parser.add_argument("--scratch", type=Path, metavar="DIR", help="on the disk to measure (default: DIR of --data)")
    given = parser.parse_args()
    for part in given.parts:
        if part not in PARTS:
            parser.error(f"no part is called {part!r}: there are {', '.join(PARTS)}")
    scratch = given.scratch or given.data
    scratch.mkdir(parents=True, exist_ok=True)
    options = Options(
        is_smoke=given.smoke,
        sizes=None if given.size is None else tuple(given.size),
        only=tuple(given.only or ()),
        n_rounds=given.rounds,
        data=given.data,
        scratch=scratch,
    )
    if given.smoke:
        # Waking threads takes longer than their work.
        torch.set_num_threads(1)
    parts = given.parts or [part for part in PARTS if not (given.smoke and part in NOT_SMOKE)]
    sections = [_run(part, options) for part in parts]
    command = shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]])
    stem = "-".join([datetime.date.today().isoformat(), *(parts if given.parts else ()), *(["smoke"] * given.smoke)])
    with options.folder() as temporary:
        # A smoke test's figures mean nothing; writing them tests the writing.
        out = given.out or (temporary if given.smoke else HERE / "results")
        written = write_results(sections, describe_machine(scratch), command, out, stem)
        if out != temporary:
            print("written:", *written, file=sys.stderr)


def _run(part: str, options: Options) -> Section:
    begin = time.perf_counter()
    section: Section = importlib.import_module(f"benchmarks.{part}").run(options)
    if options.is_smoke:
        # One round of a small model can neither meet nor miss a target.
        section.verdicts.clear()
    print(f"{section.as_markdown()}\n", flush=True)
    print(f"{part}: {time.perf_counter() - begin:.1f} s", file=sys.stderr, flush=True)
    return section


if __name__ == "__main__":
    main()
