"""Every contender of the benchmark gives back, bit for bit, what it was given."""

from __future__ import annotations

import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from benchmarks.contenders import FILES, OURS, TOOLS, Contender, Durable, PickleFile, ZipnnFile, ZstdTorchFile, chosen
from benchmarks.data import Case, bytes_of, same_bytes
from benchmarks.harness import Options, Section

ALL = [one for one in (*FILES, *OURS, ZstdTorchFile(), ZipnnFile(), Durable(FILES[0])) if one.missing is None]


@pytest.fixture
def case() -> Case:
    draw = np.random.default_rng(0)
    return Case(
        "small",
        {
            "a.weight": draw.standard_normal((40, 30), np.float32),
            "b.weight": draw.standard_normal((700, 800), np.float32).astype(ml_dtypes.bfloat16),
            "c.count": np.array(7),
        },
    )


def all_options(tmp_path: Path, *only: str) -> Options:
    return Options(is_smoke=True, sizes=None, only=only, n_rounds=None, data=tmp_path, scratch=tmp_path)


@pytest.mark.parametrize("contender", ALL, ids=lambda one: one.name)
def test_a_model_comes_back_in_every_way(contender: Contender, case: Case, tmp_path: Path) -> None:
    contender.prepare(tmp_path)
    contender.save(case, tmp_path)
    out = case.like()
    contender.load_into(tmp_path, out)

    assert same_bytes(contender.load(tmp_path), case.tensors)
    assert same_bytes(out.arrays, case.arrays)
    assert np.array_equal(bytes_of(contender.read_one(tmp_path, "b.weight")), bytes_of(case.arrays["b.weight"]))
    assert contender.find(tmp_path, "a.weight") == (40, 30)


@pytest.mark.long
@pytest.mark.parametrize("tool", [tool for tool in TOOLS if tool.missing is None], ids=lambda tool: tool.name)
def test_a_tool_gives_an_earlier_step_back(tool: object, case: Case, tmp_path: Path) -> None:
    from safetensors.torch import load, save_file

    place = tmp_path / "place"
    tool.prepare(place)  # type: ignore[attr-defined]
    for step, state in enumerate((case, case.changed(50, 0))):
        save_file(state.tensors, tmp_path / "file")
        tool.keep(place, tmp_path / "file", step)  # type: ignore[attr-defined]

    assert same_bytes(load(tool.give_back(place, 0)), case.tensors)  # type: ignore[attr-defined]


def test_durable_file_is_synced_with_its_folder(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        synced.append(os.path.realpath(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    Durable(FILES[0]).save(case, tmp_path)

    assert synced == [str(tmp_path / "model.safetensors"), str(tmp_path)]


class Absent(PickleFile):
    name = "absent"

    @property
    def missing(self) -> str | None:
        return "it is nowhere"


def test_unavailable_contender_is_left_out_with_a_note(tmp_path: Path) -> None:
    section = Section("", "")

    present = chosen([Absent()], all_options(tmp_path), section)

    assert present == []
    assert section.notes == ["left out: absent, it is nowhere"]


def test_baseline_of_the_comparison_cannot_be_left_out(tmp_path: Path) -> None:
    names = [one.name for one in chosen(FILES, all_options(tmp_path, "pickle"), Section("", ""))]

    assert names == ["safetensors", "pickle 5"]
