"""`promote` and `withdraw` over objects, under every schedule of their requests, with deaths and lost answers."""

from __future__ import annotations

import pytest

from tensorcas_mlflow.backends import Backend
from tensorcas_mlflow.errors import BlobNotFoundError
from tests.protocol.buckets import HISTORY, Kept, objects, use_memory
from tests.protocol.interleave import Run
from tests.protocol.promotes import DEST, OLD, START, Play, ref_of
from tests.protocol.schedules import Exploration, Script

BOTH = pytest.mark.parametrize("replace", [True, False], ids=["replacing", "not replacing"])
ALL = pytest.mark.parametrize("start", list(START))
CREATE = f"put if absent {DEST}"
SWAP = f"put if unchanged {DEST}"


@pytest.fixture(autouse=True)
def _bucket_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    use_memory(monkeypatch)


def one(start: str, *, replace: bool) -> Play:
    """A promote against a withdraw of its source."""
    return Play(START[start]).promoter("p", replace=replace).withdrawer("w", "intents/p")


def assert_holds(found: Exploration) -> None:
    print(found)
    assert found.failure is None, str(found)
    assert found.is_exhausted


# --- every schedule


@ALL
@BOTH
def test_promote_and_withdraw_exclude_each_other_though_the_promoter_may_die(start: str, replace: bool) -> None:
    assert_holds(one(start, replace=replace).explore(deaths=["p"]))


@ALL
@BOTH
def test_promote_and_withdraw_exclude_each_other_in_a_bucket_with_versions(start: str, replace: bool) -> None:
    assert_holds(one(start, replace=replace).explore(deaths=["p"], has_versions=True))
    assert_holds(one(start, replace=replace).losing("p", 3).explore(has_versions=True))


@pytest.mark.long
@ALL
@BOTH
def test_promote_and_two_withdraws_exclude_each_other(start: str, replace: bool) -> None:
    assert_holds(one(start, replace=replace).withdrawer("w2", "intents/p").explore())


@pytest.mark.long
@ALL
@BOTH
def test_promote_and_withdraw_exclude_each_other_beside_a_deletion_of_the_destination(
    start: str, replace: bool
) -> None:
    assert_holds(one(start, replace=replace).deleter("d").explore(deaths=["p"]))


@pytest.mark.long
@ALL
@BOTH
def test_promote_and_withdraw_exclude_each_other_beside_a_withdraw_of_the_destination(
    start: str, replace: bool
) -> None:
    assert_holds(one(start, replace=replace).withdrawer("d", DEST).explore(deaths=["p"]))


TWO = [("absent", True, True), ("absent", False, False), ("absent", True, False), ("absent", False, True)]
TWO += [("a blob", True, True), ("a void", True, True), ("a void", False, False)]


@pytest.mark.long
@pytest.mark.parametrize(("start", "replace", "other"), TWO)
def test_promote_and_withdraw_exclude_each_other_beside_another_promote(start: str, replace: bool, other: bool) -> None:
    assert_holds(one(start, replace=replace).promoter("q", replace=other).explore())


@pytest.mark.long
def test_promote_and_withdraw_exclude_each_other_beside_another_replacement() -> None:
    assert_holds(one("a blob", replace=True).promoter("q", replace=True).explore())


@ALL
def test_one_of_two_promotes_that_replace_nothing_is_refused(start: str) -> None:
    assert_holds(Play(START[start]).promoter("p", replace=False).promoter("q", replace=False).explore(deaths=["p"]))


@ALL
def test_a_blob_that_is_put_where_another_is_withdrawn_is_not_lost(start: str) -> None:
    assert_holds(Play(START[start]).putter("u").withdrawer("w", DEST).promoter("p", replace=True).explore())


@pytest.mark.long
@ALL
@BOTH
def test_void_of_an_object_store_never_shows(start: str, replace: bool) -> None:
    for look in (by_get, by_stat, by_list, by_read):
        cast = Play(START[start]).promoter("p", replace=replace).withdrawer("d", DEST)
        assert_holds(cast.looker("look", look).explore())


def by_get(backend: Backend) -> bytes | None:
    try:
        return backend.get(DEST).rstrip()
    except BlobNotFoundError:
        return None


def by_stat(backend: Backend) -> bytes | None:
    info = backend.stat(DEST)
    return None if info is None else blob_of_size(info.size)


def by_list(backend: Backend) -> bytes | None:
    sizes = [info.size for info in backend.list("refs")]
    return blob_of_size(sizes[0]) if sizes else None


def by_read(backend: Backend) -> bytes | None:
    out = bytearray(4)
    try:
        backend.read_into(DEST, 0, memoryview(out))
    except BlobNotFoundError:
        return None
    return next((blob for blob in (OLD, ref_of("p")) if blob.startswith(out)), bytes(out))


def blob_of_size(size: int) -> bytes:
    """The blob that has so many bytes, as it was written or with what a withdraw adds."""
    return next((blob for blob in (OLD, ref_of("p")) if size in (len(blob), len(blob) + 129)), b"%d bytes" % size)


# --- lost answers


@pytest.mark.parametrize("number", range(1, 6))
@ALL
@BOTH
def test_lost_answer_of_a_promote_or_withdraw_changes_nothing(start: str, replace: bool, number: int) -> None:
    assert_holds(one(start, replace=replace).losing("p", number).explore())
    assert_holds(one(start, replace=replace).losing("w", number).explore())


@pytest.mark.long
@pytest.mark.parametrize("number", range(1, 6))
@ALL
@BOTH
def test_lost_answer_beside_a_deletion_of_the_destination_changes_nothing(
    start: str, replace: bool, number: int
) -> None:
    assert_holds(one(start, replace=replace).deleter("d").losing("p", number).explore())
    assert_holds(one(start, replace=replace).deleter("d").losing("w", number).explore())


# --- requests to delete that are carried out twice, the second time late


@pytest.mark.parametrize("number", [0, *range(1, 4)])
@ALL
@BOTH
def test_a_deletion_that_is_carried_out_again_and_late_removes_no_blob(start: str, replace: bool, number: int) -> None:
    cast = Play(START[start]).deleter("d").promoter("p", replace=replace).network()
    assert_holds((cast.losing("d", number) if number else cast).explore(deaths=["p", "d"] if number == 0 else []))


@pytest.mark.long
@pytest.mark.parametrize("number", [0, *range(1, 5)])
@ALL
@BOTH
def test_late_repeated_deletion_beside_a_withdraw_removes_no_blob(start: str, replace: bool, number: int) -> None:
    cast = one(start, replace=replace).deleter("d").network()
    assert_holds((cast.losing("d", number) if number else cast).explore())


@pytest.mark.long
@ALL
def test_a_deletion_whose_answer_gets_lost_does_not_remove_what_came_after_it(start: str) -> None:
    two = Play(START[start]).deleter("d").promoter("p", replace=True).promoter("q", replace=True)
    assert_holds(two.losing("d", 1).explore())


# --- any request that the network carries out twice, or late

KEPT = pytest.mark.parametrize("kept", list(Kept))


def declared(start: str, *, replace: bool) -> Play:
    """A promote that creates its source, against a withdraw of it."""
    return Play(START[start]).promoter("p", replace=replace, declares=True).withdrawer("w", "intents/p")


@pytest.mark.long
@KEPT
@pytest.mark.parametrize("number", [1, 3, *(pytest.param(number, marks=pytest.mark.long) for number in (2, 4, 5))])
@ALL
@BOTH
def test_request_of_a_promote_that_is_carried_out_late_changes_nothing(
    start: str, replace: bool, number: int, kept: Kept
) -> None:
    assert_holds(declared(start, replace=replace).keeping("p", number, kept).explore())


@KEPT
@pytest.mark.parametrize("number", [1, *(pytest.param(number, marks=pytest.mark.long) for number in (2, 3))])
@ALL
@BOTH
def test_request_of_a_withdraw_that_is_carried_out_late_changes_nothing(
    start: str, replace: bool, number: int, kept: Kept
) -> None:
    assert_holds(declared(start, replace=replace).keeping("w", number, kept).explore())


@pytest.mark.long
@KEPT
@pytest.mark.parametrize("who", ["p", "q"])
@pytest.mark.parametrize("number", range(1, 5))
def test_late_request_beside_another_promote_changes_nothing(number: int, who: str, kept: Kept) -> None:
    two = Play(START["a blob"]).promoter("p", replace=True, declares=True).promoter("q", replace=True)
    assert_holds(two.keeping(who, number, kept).explore())


@pytest.mark.long
@KEPT
@pytest.mark.parametrize("who", ["p", "d"])
@pytest.mark.parametrize("number", range(1, 5))
@ALL
def test_late_request_beside_a_deletion_of_the_destination_changes_nothing(
    start: str, number: int, who: str, kept: Kept
) -> None:
    two = Play(START[start]).promoter("p", replace=True, declares=True).deleter("d")
    assert_holds(two.keeping(who, number, kept).explore())


# --- schedules that once broke the contract


def play(cast: Play, *steps: tuple[str, str]) -> str | None:
    run = Run({**cast.start, HISTORY: b""}, cast.actors, Script(*steps), view=objects(loses=cast.loses))
    return cast.check(run)


def with_a_deletion(number: int) -> Play:
    """One promote that is to replace what another, which loses an answer, has written, and that is withdrawn."""
    two = Play({}).promoter("p", replace=True).promoter("q", replace=True)
    return two.withdrawer("w", "intents/q").deleter("d").losing("p", number)


def test_blob_of_a_promote_that_is_deleted_before_the_answer_does_not_come_again() -> None:
    steps = [("p", f"again: {CREATE}"), ("q", SWAP), ("d", ""), ("w", ""), ("p", ""), ("q", "")]

    assert play(with_a_deletion(2), *steps) is None


def test_void_of_a_withdraw_that_is_replaced_before_the_answer_does_not_come_again() -> None:
    two = Play({}).promoter("p", replace=True).promoter("q", replace=True).withdrawer("w", "intents/p").deleter("d")
    steps = [("p", CREATE), ("w", f"again: {CREATE}"), ("q", ""), ("d", ""), ("w", ""), ("p", "")]

    assert play(two.losing("w", 1), *steps) is None


def test_promote_and_withdraw_that_both_create_the_destination_exclude_each_other() -> None:
    for first, second in (("p", "w"), ("w", "p")):
        cast = one("absent", replace=False)
        assert play(cast, ("p", CREATE), ("w", CREATE), (first, ""), (second, "")) is None


def test_a_promote_whose_answer_gets_lost_knows_its_blob_though_a_withdraw_has_changed_its_end() -> None:
    two = Play({}).promoter("p", replace=False).promoter("q", replace=True).withdrawer("w", "intents/q").losing("p", 2)

    assert play(two, ("p", f"again: {CREATE}"), ("q", SWAP), ("w", ""), ("p", ""), ("q", "")) is None


def test_a_promote_that_was_refused_twice_can_be_tried_again() -> None:
    cast = Play({}).promoter("p", replace=False, times=3)
    for n in (1, 2):
        cast.promoter(f"q{n}", replace=False).deleter(f"d{n}")
    steps: list[tuple[str, str]] = []
    for n in (1, 2):
        steps += [("p", CREATE), (f"q{n}", ""), ("p", "put if unchanged intents/p"), (f"d{n}", "")]

    assert play(cast, *steps, ("p", "")) is None
