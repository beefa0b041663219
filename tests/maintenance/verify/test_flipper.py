"""Every blob of a store, damaged in every way: what loads is right, and what does not says what is damaged."""

from __future__ import annotations

import random
from functools import cache

import pytest

from tensorcas_mlflow.errors import CorruptError
from tensorcas_mlflow.maintenance import Problem
from tests.maintenance.verify.stores import PREFIXES, SWAPPED, Made, backend_of, damages, failures, make, put, told

made_once = cache(make)
MATTERS = ("packs", "manifests", "refs")
"""Blobs without which something that is kept cannot be loaded; the others only help."""


def check(made: Made, key: str, what: str, data: bytes | None) -> None:
    """Damage a blob, load all, look at the store, and see that errors and problems name what they should."""
    backend = backend_of(made.blobs, is_remote=made.is_remote)
    backend.delete(key)
    if data is not None:
        put(backend, key, data)
    failed = failures(made, backend)
    problems = told(backend)
    where = f"{what} of {key}"

    if not key.startswith(MATTERS):
        assert not failed, where
    # Nothing in a pack says what its name is.
    is_known = not (key.startswith("packs") and what == SWAPPED)
    for ref, error in failed.items():
        assert key in str(error) or not is_known, f"{where}: {error}"
        if not key.startswith("refs"):
            assert made.labels[ref] in str(error), f"{where}: {error}"
        if key.startswith("packs"):
            assert any(repr(name) in str(error) for name in made.kept[ref]), f"{where}: {error}"
        assert any(is_of(problem, made, ref) for problem in problems), f"{where}: {problems}"
    for problem in problems:
        assert key in str(problem) or not is_known, f"{where}: {problem}"
    if key.startswith("packs") and data is not None and failed:
        assert any(problem.tensors for problem in problems if problem.checkpoint), where


def is_of(problem: Problem, made: Made, ref: str) -> bool:
    return problem.key == ref or problem.checkpoint == made.labels[ref]


def flip(*, is_remote: bool, prefix: str, n_flips: int, most: int, seed: int) -> None:
    made = made_once(is_remote=is_remote)
    chance = random.Random(seed)
    cases = [
        (key, what, data)
        for key in made.blobs
        if key.startswith(f"{prefix}/")
        for what, data in damages(made.blobs, key, n_flips, chance)
    ]
    swapped = [case for case in cases if case[1] == SWAPPED][:1]  # whole, so that nothing but its name tells
    for case in swapped + chance.sample(cases, min(most - len(swapped), len(cases))):
        check(made, *case)


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("is_remote", [False, True], ids=["local", "remote"])
def test_a_damaged_blob_gives_no_wrong_tensor_and_is_told(is_remote: bool, prefix: str) -> None:
    flip(is_remote=is_remote, prefix=prefix, n_flips=6, most=8, seed=1)


@pytest.mark.long
@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("is_remote", [False, True], ids=["local", "remote"])
def test_damage_anywhere_gives_no_wrong_tensor_and_is_told(is_remote: bool, prefix: str) -> None:
    flip(is_remote=is_remote, prefix=prefix, n_flips=400, most=150, seed=2)


def test_a_sound_store_loads_and_has_no_problem() -> None:
    for is_remote in (False, True):
        made = made_once(is_remote=is_remote)
        backend = backend_of(made.blobs, is_remote=is_remote)
        endings = {key.rpartition(".")[2] for key in made.blobs}

        assert endings >= ({"arrow", "pack"} if is_remote else {"arrow", "pack", "loose"})

        assert failures(made, backend) == {}
        assert told(backend) == ()


def test_damaged_format_blob_is_reported_and_opens_no_other_store() -> None:
    made = made_once(is_remote=False)
    for what, data in damages(made.blobs, "format", 1_000, random.Random(3)):
        if data is None:
            continue
        backend = backend_of({**made.blobs, "format": data}, is_remote=False)
        error = None
        try:
            failed = failures(made, backend)
        except CorruptError as caught:
            failed, error = {}, caught

        assert failed == {}, what
        assert error is None or error.key == "format", what


def test_stored_bytes_that_have_changed_are_told_without_decoding() -> None:
    made = made_once(is_remote=False)
    key = max((key for key in made.blobs if key.startswith("packs/")), key=lambda key: len(made.blobs[key]))
    data = bytearray(made.blobs[key])
    data[100] ^= 4
    backend = backend_of({**made.blobs, key: bytes(data)}, is_remote=False)

    assert told(backend, full=False) == ()
    assert [problem.key for problem in told(backend)] == [key]
