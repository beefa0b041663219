"""Pickles, and what joblib makes of them: walked to find the arrays in them, and never run.

A pickle is a program; the bytes of arrays are arguments of its opcodes. The specification is ``Lib/pickletools.py`` of
CPython. Only what begins with PROTO (protocols 2 to 5) is taken for a pickle: protocol 0 is text, and protocols up to 2
hold an array's bytes as a text, in which some take two bytes.

All but arrays of some size is skeleton, texts and bytes that are no arrays included, and so is what is left where a
pickle is too long to be walked on: pickles of one model at several steps share most of it, though not at one place.
"""

from __future__ import annotations

from collections.abc import Iterator

from tensorcas_mlflow.containers._joblib import WRAPPERS, wrapped_array
from tensorcas_mlflow.containers._parts import Part, Skeleton, Tensor
from tensorcas_mlflow.containers._pickle_arrays import (
    UNKNOWN,
    ArrayFact,
    array_fact,
    comes_from_buffer,
    fact_of_call,
    fact_of_state,
)
from tensorcas_mlflow.containers._pickle_machine import LARGE_BYTES, Limits, Pause
from tensorcas_mlflow.containers._pickle_names import name_of_next
from tensorcas_mlflow.containers._pickle_symbols import Blob, name_of
from tensorcas_mlflow.containers._pickle_walker import End, Walker
from tensorcas_mlflow.containers._tape import Tape
from tensorcas_mlflow.containers._torch_legacy import STORAGE_FROM_BYTES, split_storage
from tensorcas_mlflow.errors import FormatError

_LIMITS = Limits(max_ops=2_000_000, max_items=64, max_memo=1 << 18)
"""About a second's work. No wrapper of joblib has more attributes, and hardly a record more fields."""
_MAX_DEPTH = 8
_LOOK_AHEAD_BYTES = 16 << 20
"""Up to this size an array is looked past for its dtype and shape, which protocol 5 puts after it."""
_LOOK_AHEAD_OPS = 1024
"""A record takes some 45 a field."""
_REST_BYTES = 16 << 20
_HEAD_BYTES = 16


def is_pickle(head: bytes | memoryview) -> bool:
    """Tell whether a file begins as a pickle does."""
    return len(head) > 2 and head[0] == 0x80 and 2 <= head[1] <= 5


def split_pickle(tape: Tape) -> Iterator[Part]:
    """Announce the parts of a file of one or several pickles."""
    return _Splitting(tape).parts()


class _Splitting:
    """One file under way."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._walker = Walker(tape, _LIMITS, watched=WRAPPERS)
        self._ahead: Pause | End | None = None
        """What the walker came upon while it looked past an array."""
        self._is_lost = False
        """Nobody knows where the next opcode is."""

    def parts(self) -> Iterator[Part]:
        walker = self._walker
        while not self._is_lost:
            reason, self._ahead = self._ahead or walker.go_on(), None
            if reason is Pause.PAYLOAD:
                yield from self._payload()
            elif reason is Pause.BUILT:
                yield from self._wrapped()
            elif reason is Pause.STOP:
                if not self._begins_another():
                    break
            elif reason is End.BUDGET:
                self._is_lost = True
            elif reason is End.MALFORMED:
                raise FormatError(f"what follows byte {walker.at} is no pickle")
            elif reason is End.FILE:
                break
            if reason is not Pause.STOP:
                yield from walker.walked()
        yield from walker.walked()
        while self._is_lost and not self._tape.is_at_end():
            yield Skeleton(n_bytes=_REST_BYTES)

    def _begins_another(self) -> bool:
        if len(self._walker.machines) > 1:
            self._walker.leave()
        elif is_pickle(self._walker.peek(_HEAD_BYTES)):
            self._walker.begin()
        else:
            return False
        return True

    def _payload(self) -> Iterator[Part]:
        """Pass large bytes or a large text."""
        walker, machine = self._walker, self._walker.machine
        payload = machine.payload
        is_bytes = machine.payload_is_bytes
        fact = fact_of_state(machine) if is_bytes else None
        if fact is not None:
            yield from self._tensor(payload.n_bytes, fact)
        elif is_bytes and comes_from_buffer(machine):
            yield from self._tensor_before_its_fact(payload)
        else:
            if is_bytes and name_of(machine.stack[-1] if machine.stack else None) == STORAGE_FROM_BYTES:
                yield from walker.walked()
                yield from split_storage(self._tape, payload.n_bytes, name=self._name())
            walker.pass_payload()

    def _tensor(self, n_bytes: int, fact: ArrayFact) -> Iterator[Part]:
        walker = self._walker
        yield from walker.walked()
        yield Tensor(n_bytes=n_bytes, name=self._name(), dtype=fact.dtype, shape=fact.shape)
        walker.skip(n_bytes)
        walker.push(Blob(n_bytes))

    def _tensor_before_its_fact(self, blob: Blob) -> Iterator[Part]:
        """Announce an array of which dtype and shape follow its bytes, looking past them if they are not too many."""
        walker = self._walker
        yield from walker.walked()
        name = self._name()
        walker.skip(blob.n_bytes)
        walker.push(blob)
        fact = None
        for _ in range(_LOOK_AHEAD_OPS if blob.n_bytes <= _LOOK_AHEAD_BYTES else 0):
            self._ahead = walker.go_on(1)
            fact = fact_of_call(walker.machine, blob)
            if fact is not None or self._ahead is not None:
                break
        fact = fact or UNKNOWN
        yield Tensor(n_bytes=blob.n_bytes, name=name, dtype=fact.dtype, shape=fact.shape)

    def _wrapped(self) -> Iterator[Part]:
        """Pass an array that joblib has put after its wrapper."""
        walker = self._walker
        array = wrapped_array(walker.machine.stack[-1])
        if array is None or len(walker.machines) > _MAX_DEPTH:
            self._is_lost = True
        elif array.dtype.hasobject:
            walker.enter()
        else:
            if array.is_padded:
                n_padding = walker.peek(1)
                walker.skip(1 + n_padding[0] if n_padding else 0)
            if array.n_bytes < LARGE_BYTES:
                walker.skip(array.n_bytes)
            else:
                fact = array_fact(array.shape, array.dtype, array.n_bytes, is_fortran=array.is_fortran)
                yield from self._tensor(array.n_bytes, fact)
                walker.machine.stack.pop()

    def _name(self) -> str:
        return ".".join(filter(None, map(name_of_next, self._walker.machines)))
