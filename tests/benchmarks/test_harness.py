"""The benchmark's measuring and reporting: what a figure in a table is."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

import pytest

from benchmarks import __main__ as command
from benchmarks.harness import (
    WHOLE,
    Chart,
    Hashing,
    Job,
    Options,
    Program,
    Section,
    Series,
    Table,
    Turn,
    at_least,
    at_most,
    counts_of,
    drop_from_cache,
    interleave,
    interleave_apart,
    interleave_fresh,
    parse_bytes,
    resident_share,
    series_of,
    show_bytes,
    write_durably,
    write_results,
)


def test_a_ratio_is_taken_round_by_round() -> None:
    # The second round was slow for both: it must not make one look slower than the other.
    ours, theirs = Series((1.0, 30.0, 1.0)), Series((2.0, 60.0, 2.0))

    assert ours.over(theirs).values == (0.5, 0.5, 0.5)


def test_series_of_other_lengths_are_not_divided() -> None:
    with pytest.raises(ValueError, match="longer"):
        Series((1.0,)).over(Series((1.0, 2.0)))


def test_a_series_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing was measured"):
        Series(())


def test_the_middle_half_of_one_value_is_that_value() -> None:
    assert Series((3.0,)).quartiles == (3.0, 3.0)


def test_the_middle_half_lies_between_the_quartiles() -> None:
    assert Series((1.0, 2.0, 3.0, 4.0, 100.0)).quartiles == (2.0, 4.0)


@pytest.mark.long
def test_each_round_begins_with_another_turn() -> None:
    order: list[str] = []
    turns = {name: Turn(lambda name=name: order.append(name)) for name in "abc"}  # type: ignore[misc]

    interleave(turns, 3, n_warm=0)

    assert "".join(order) == "abcbcacab"


@pytest.mark.long
def test_warm_rounds_do_not_count() -> None:
    calls: list[int] = []

    taken = interleave({"only": Turn(lambda: calls.append(1))}, 4, n_warm=2)

    assert (len(calls), len(taken["only"].values)) == (6, 4)


@pytest.mark.long
def test_after_hook_gets_the_measured_result() -> None:
    seen: list[object] = []

    interleave({"only": Turn(lambda: "answer", after=seen.append)}, 1, n_warm=0)

    assert seen == ["answer"]


@pytest.mark.parametrize(
    ("target", "got", "is_met"),
    [
        (at_most(1.25, "x", "save"), 1.25, True),
        (at_most(1.25, "x", "save"), 1.26, False),
        (at_least(500, "MB/s", "restore"), 500, True),
        (at_least(500, "MB/s", "restore"), 499, False),
    ],
)
def test_a_target_is_met_up_to_its_bound(target: object, got: float, *, is_met: bool) -> None:
    assert target.judge("", got).is_met == is_met  # type: ignore[attr-defined]


def test_a_row_must_fill_the_columns() -> None:
    with pytest.raises(ValueError, match="1 cells for 2 columns"):
        Table("times", ("who", "ms")).add("ours")


@pytest.mark.long
def test_results_are_text_figures_and_a_picture(tmp_path: Path) -> None:
    section = Section("save", "saves")
    table = Table("first", ("who", "ms"))
    table.add("ours", "1.00")
    section.tables.append(table)
    section.keep("first", {"ours": Series((0.001, 0.002))})
    section.charts.append(Chart("first", "ms", {"ours": Series((1.0, 2.0))}))
    section.verdicts.append(at_most(2, "x", "first save").judge("13 MB", 1.5))

    text, figures, picture = write_results(
        [section], {"memory": "24 GiB"}, "python -m benchmarks save", tmp_path, "day"
    )

    assert "| first save | 13 MB | at most 2 x | 1.5 x | yes |" in text.read_text()
    assert f"![save]({picture.name})" in text.read_text()
    assert json.loads(figures.read_text())["parts"][0]["samples"] == {"first/ours/s": [0.001, 0.002]}
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_file_is_dropped_from_the_page_cache(disk: Path) -> None:
    (disk / "file").write_bytes(os.urandom(1 << 20))
    before = resident_share(disk)

    drop_from_cache(disk)

    assert (before, resident_share(disk)) == (1.0, 0.0)


def test_a_durable_write_has_all_buffers(tmp_path: Path) -> None:
    write_durably(tmp_path / "file", [b"ab", memoryview(b"cd")])

    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == b"abcd"


def test_the_hashing_floor_shares_all_bytes_among_the_threads() -> None:
    hashing = Hashing([bytes(3 << 20), b"", bytes(5)], 1 << 20)

    assert sum(len(piece) for share in hashing._shares for piece in share) == (3 << 20) + 5


def test_sizes_are_powers_of_ten() -> None:
    assert [parse_bytes(text) for text in ("300KB", "1.5 MB", "2gb")] == [300_000, 1_500_000, 2_000_000_000]
    assert [show_bytes(n) for n in (300_000, 1_500_000, 2e9)] == ["300 KB", "1.50 MB", "2.00 GB"]


def test_a_size_without_a_unit_is_refused() -> None:
    with pytest.raises(ValueError, match="not a size"):
        parse_bytes("300")


def test_a_smoke_test_is_small_unless_sizes_are_given(tmp_path: Path) -> None:
    smoke = Options(is_smoke=True, sizes=None, only=(), n_rounds=None, data=tmp_path, scratch=tmp_path)
    asked = Options(is_smoke=True, sizes=(7,), only=(), n_rounds=None, data=tmp_path, scratch=tmp_path)

    assert max(smoke.sizes_or((10**9,))) < 10**6
    assert asked.sizes_or((10**9,)) == (7,)


def test_a_part_that_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks", "saave"])

    with pytest.raises(SystemExit):
        command.main()

    assert "no part is called 'saave'" in capsys.readouterr().err


def _reading(path: Path) -> object:
    return path.read_bytes


def _failing() -> object:
    raise ValueError("nothing to measure")


@pytest.mark.long
def test_a_process_of_its_own_sees_the_disk_and_the_memory(tmp_path: Path) -> None:
    n_bytes = 32 << 20
    path = tmp_path / "file"
    path.write_bytes(os.urandom(n_bytes))
    jobs = {
        "cold": Job(prepare=_reading, args=(path,), cold=tmp_path),
        "warm": Job(prepare=_reading, args=(path,)),
    }

    usages = interleave_apart(jobs, 1, Section("", ""))

    assert series_of(usages["cold"], "read_bytes").median >= n_bytes
    assert abs(series_of(usages["warm"], "peak_bytes").median - n_bytes) < 4 << 20
    assert usages["warm"][0].called_read_bytes >= n_bytes


@pytest.mark.long
def test_error_of_a_measured_process_is_reported() -> None:
    with pytest.raises(RuntimeError, match="ValueError: nothing to measure"):
        interleave_apart({"only": Job(prepare=_failing, args=())}, 1, Section("", ""))


def test_percentile_is_the_value_that_so_many_per_cent_do_not_exceed() -> None:
    series = Series(tuple(float(value) for value in range(100, 0, -1)))

    assert (series.percentile(50), series.percentile(95), series.percentile(99)) == (50, 95, 99)
    assert Series((3.0,)).percentile(99) == 3


def test_counts_of_a_call_have_its_threads_and_its_fsyncs(tmp_path: Path) -> None:
    def sync_file() -> None:
        with open(tmp_path / "file", "wb") as file:
            os.fsync(file.fileno())

    def act() -> None:
        sync_file()
        thread = threading.Thread(target=sync_file)
        thread.start()
        thread.join()

    counts = counts_of(act)

    assert counts.n_fsyncs == 2
    assert counts.n_calls > counts_of(sync_file).n_calls
    assert counts.n_modules >= 2


def test_program_reports_its_time_its_modules_and_its_own_figures() -> None:
    found = interleave_fresh({"one": Program(text="figures = {'answer': 42}", args=())}, 2, n_warm=0)

    assert found["one"]["answer"].values == (42, 42)
    assert found["one"]["seconds"].least >= 0
    assert found["one"]["modules"].least > 10
    assert found["one"][WHOLE].least > found["one"]["seconds"].least
