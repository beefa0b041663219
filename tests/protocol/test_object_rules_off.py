"""Each rule of a promote over objects, switched off: some schedule must break the contract."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import pytest

from tensorcas_mlflow.backends import ObjectBackend, Token
from tensorcas_mlflow.backends._buckets import TakenError
from tensorcas_mlflow.backends._objects import _VOID, _Move
from tensorcas_mlflow.base.digest import Buffer
from tensorcas_mlflow.errors import BlobNotFoundError
from tests.protocol.buckets import Kept, objects, use_memory
from tests.protocol.interleave import Run
from tests.protocol.promotes import DEST, START, Play
from tests.protocol.schedules import explore
from tests.protocol.test_object_schedules import deleted_and_saved_again, save_against_collection

Patch = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(autouse=True)
def _bucket_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    use_memory(monkeypatch)


class PreventsNothing(ObjectBackend):
    """A withdraw that swaps the source and leaves the destination as it is."""

    def _prevent(self, move: _Move) -> bool:
        return True


class PreventsOnlyVoids(ObjectBackend):
    """A withdraw that takes another token at the destination for a promote that is done."""

    def _prevent(self, move: _Move) -> bool:
        found = self._bucket.get(move.dest)
        return found is not None and found[1].token == move.before and super()._prevent(move)


class LeavesNothingWhereNothingIs(ObjectBackend):
    """A withdraw that takes a promote that has not begun to write for one that cannot write any more."""

    def _prevent(self, move: _Move) -> bool:
        return self._bucket.get(move.dest) is None or super()._prevent(move)


class SaysItOnce(ObjectBackend):
    """A promote that, when somebody was faster, tries again without saying so."""

    def promote(self, source: str, dest: str, data: Buffer, *, token: Token, replace: bool) -> None:
        before = self._token_at(dest)
        if self._bucket.swap(source, _Move(dest=dest, before=before, data=bytes(data)).to_bytes(), token) is None:
            raise BlobNotFoundError(source)
        while self._put_if(dest, bytes(data), before) is None:
            before = self._token_at(dest)
        self._bucket.delete(source)

    def _token_at(self, dest: str) -> Token | None:
        info = self._bucket.head(dest)
        return None if info is None else info.token

    def _put_if(self, dest: str, content: bytes, before: Token | None) -> Token | None:
        if before is not None:
            return self._bucket.swap(dest, content, before)
        try:
            return self._bucket.create(dest, content)
        except TakenError:
            return None


class SaysNothing(SaysItOnce):
    """A promote that takes its source away first."""

    def promote(self, source: str, dest: str, data: Buffer, *, token: Token, replace: bool) -> None:
        before = self._token_at(dest)
        if self._bucket.swap(source, bytes(data), token) is None:
            raise BlobNotFoundError(source)
        while self._put_if(dest, bytes(data), before) is None:
            before = self._token_at(dest)
        self._bucket.delete(source)


class DeletesItsVoids(ObjectBackend):
    """A withdraw that leaves nothing behind at any key."""

    def withdraw(self, key: str, token: Token, *, own: Iterable[str] | None = None) -> bool:
        is_withdrawn = super().withdraw(key, token, own=own)
        if is_withdrawn:
            self._bucket.delete(key)
        return is_withdrawn


class DeletesItsBlobs(ObjectBackend):
    """A deletion that asks for whatever is there to be removed."""

    def _delete(self, key: str) -> None:
        self._bucket.delete(key)


class DeletesUntilNothingIsThere(ObjectBackend):
    """A deletion that looks again after its request, and takes what has come meanwhile for what it was to delete."""

    def _delete(self, key: str) -> None:
        while (info := self.stat(key)) is not None and not self._void(key, info.token):
            pass


class DeletesWhatItHasSeen(ObjectBackend):
    """A deletion that takes other white space at the end for another blob."""

    def _delete(self, key: str) -> None:
        if (info := self.stat(key)) is not None:
            self._void(key, info.token)


_ONLY_VOID = _VOID + b"0" * 32


def keep_the_bytes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("tensorcas_mlflow.backends._objects._renewed", lambda blob: blob)


def make_all_voids_alike(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("tensorcas_mlflow.backends._objects.new_void", lambda: _ONLY_VOID)


@dataclass(frozen=True)
class RuleOff:
    name: str
    play: Callable[[], Play]
    kind: type[ObjectBackend] = ObjectBackend
    patch: Patch | None = None


def one(start: str, *, replace: bool = True) -> Play:
    """A promote against a withdraw of its source."""
    return Play(START[start]).promoter("p", replace=replace).withdrawer("w", "intents/p")


def late_creation() -> Play:
    """The same, and the network carries out the creation of the source twice."""
    cast = Play(START["absent"]).promoter("p", replace=True, declares=True).withdrawer("w", "intents/p")
    return cast.keeping("p", 1, Kept.TWICE)


def over_a_void_like_all_others() -> Play:
    """A promote against a withdraw of its source, over a void with the bytes that the rule lets all voids have."""
    return Play({DEST: _ONLY_VOID}).promoter("p", replace=True).withdrawer("w", "intents/p")


RULES = [
    RuleOff("a withdraw prevents the promote", lambda: one("absent"), PreventsNothing),
    RuleOff("also where a blob is to be replaced", lambda: one("a blob"), PreventsNothing),
    RuleOff("another token is not the promote's own", lambda: one("a blob").deleter("d"), PreventsOnlyVoids),
    RuleOff(
        "a withdraw leaves a void where a promote is to create", lambda: one("absent"), LeavesNothingWhereNothingIs
    ),
    RuleOff("a promote says every attempt", lambda: one("a blob").promoter("q", replace=True), SaysItOnce),
    RuleOff("a promote says what it does", lambda: one("absent"), SaysNothing),
    RuleOff(
        "a void stays where a blob may come",
        lambda: Play(START["a blob"]).promoter("p", replace=True).withdrawer("w", DEST),
        DeletesItsVoids,
    ),
    RuleOff("a void stays where an intent may come late", late_creation, DeletesItsVoids),
    RuleOff("what is prevented has other bytes", lambda: one("a void"), patch=keep_the_bytes),
    RuleOff("also where a blob is to be replaced", lambda: one("a blob"), patch=keep_the_bytes),
    RuleOff(
        "a deletion is a swap",
        lambda: Play(START["a blob"]).deleter("d").promoter("p", replace=True).network(),
        DeletesItsBlobs,
    ),
    RuleOff(
        "a deletion removes one blob and no more",
        lambda: Play(START["a blob"]).deleter("d").promoter("p", replace=True).losing("d", 1),
        DeletesUntilNothingIsThere,
    ),
    RuleOff(
        "a deletion removes a blob though its end changes", lambda: one("a blob").deleter("d"), DeletesWhatItHasSeen
    ),
    RuleOff("no two voids are alike", over_a_void_like_all_others, patch=make_all_voids_alike),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_promote_without_one_of_its_rules_breaks_the_contract(rule: RuleOff, monkeypatch: pytest.MonkeyPatch) -> None:
    if rule.patch is not None:
        rule.patch(monkeypatch)

    found = rule.play().explore(rule.kind)

    print(f"{rule.name}: {found.n_schedules} schedules: {found.failure}")
    assert found.failure is not None, str(found)


@pytest.mark.long
@pytest.mark.parametrize(
    "kind", [PreventsNothing, LeavesNothingWhereNothingIs, SaysItOnce, SaysNothing, DeletesItsBlobs]
)
def test_object_backend_without_one_of_its_rules_loses_a_checkpoint(kind: type[ObjectBackend]) -> None:
    cast = deleted_and_saved_again() if kind is DeletesItsBlobs else save_against_collection()

    def check(run: Run) -> str | None:
        problem = cast.check(run)
        return problem if problem is not None and problem.startswith("LOSS after the run") else None

    found = explore(
        cast.blobs(),
        cast.actors,
        check,
        max_preemptions=2,
        max_schedules=2000,
        view=objects(kind),
        is_remote=True,
    )

    print(f"{kind.__name__}: lost after {found.n_schedules} schedules")
    assert found.failure is not None, str(found)
