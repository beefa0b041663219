"""Torch files from before torch 1.6, or made with ``_use_new_zipfile_serialization=False``.

The format is that of ``_legacy_save`` in ``torch/serialization.py``: five pickles (a magic number, a version, what the
machine was like, the object, the keys of its storages), then of each storage its number of elements in 8 bytes and the
elements. A tensor that is pickled without `torch.save` is such a file too, of one storage, as bytes within the pickle.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator

from tensorcas_mlflow.containers._parts import Part, Tensor
from tensorcas_mlflow.containers._pickle_machine import Machine, Pause
from tensorcas_mlflow.containers._pickle_symbols import LIST, Made, Symbol
from tensorcas_mlflow.containers._pickle_walker import End, Walker
from tensorcas_mlflow.containers._tape import Tape
from tensorcas_mlflow.containers._torch_pickle import LIMITS, facts_of
from tensorcas_mlflow.errors import FormatError

STORAGE_FROM_BYTES = "torch.storage._load_from_bytes"
"""What is called for a storage in a pickle of another kind, with bytes as its argument."""

_MAGIC = b"\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."
_MAX_MAGIC_AT = 16
_N_PICKLES = 5
_MACHINE, _OBJECT, _KEYS = 2, 3, 4
_MIN_BYTES = 64
_COUNT_BYTES = 8


def is_torch_legacy(head: bytes | memoryview) -> bool:
    """Tell whether a file begins with a pickle of the magic number."""
    return len(head) > 2 and head[0] == 0x80 and _MAGIC in bytes(head[: _MAX_MAGIC_AT + len(_MAGIC)])


def split_torch_legacy(tape: Tape) -> Iterator[Part]:
    """Announce the parts of such a file."""
    is_sound = yield from _split(tape, None, "")
    if not is_sound:
        raise FormatError("a torch file that is damaged")


def split_storage(tape: Tape, n_bytes: int, *, name: str) -> Iterator[Part]:
    """Announce the parts of such a file that is a part of another, and ends after so many bytes.

    What is left of it where it is not understood is left to the caller.
    """
    if is_torch_legacy(tape.peek(_MAX_MAGIC_AT + len(_MAGIC))):
        yield from _split(tape, tape.position + n_bytes, name)


class LegacyTorchFile:
    """What such a file says before its storages, which follow from where the tape stands then.

    Each storage is its number of elements, in 8 bytes, and its elements.
    """

    def __init__(self, tape: Tape) -> None:
        """Read from a file's first byte to its first storage.

        Raises:
            FormatError: It is damaged.
        """
        walker = Walker(tape, LIMITS, places=True)
        pickles = _pickles(walker, None)
        while True:
            try:
                tape.take(next(pickles).n_bytes)
            except StopIteration as over:
                machines = over.value
                break
        keys = _keys(machines[_KEYS]) if machines is not None else None
        if machines is None or keys is None or not all(type(key) is str for key in keys):
            raise FormatError("its pickles are damaged")
        self.object: Machine = machines[_OBJECT]
        """What was saved."""
        self.keys: list[str] = keys
        """Of the storages, in the order in which they lie."""
        self.storages = facts_of(self.object)
        """By key."""
        tape.take(walker.at - tape.position)


def _split(tape: Tape, end: int | None, name: str) -> Generator[Part, None, bool]:
    """Announce the parts, none of them beyond the end; tell whether all was understood."""
    walker = Walker(tape, LIMITS)
    machines = yield from _pickles(walker, end)
    if machines is None:
        return False
    yield from walker.walked()
    return (yield from _storages(walker, machines, end, name))


def _pickles(walker: Walker, end: int | None) -> Generator[Part, None, list[Machine] | None]:
    """Walk the pickles, and announce what was walked; None if they are not sound or go beyond the end."""
    machines: list[Machine] = []
    while len(machines) < _N_PICKLES:
        reason = walker.go_on()
        if end is not None and walker.at > end:
            return None
        if reason is Pause.PAYLOAD:
            walker.pass_payload()
        elif reason is Pause.STOP:
            machines.append(walker.machine)
            walker.begin()
        elif reason is not End.WINDOW:
            return None
        if end is None:
            yield from walker.walked()
    return machines


def _storages(walker: Walker, machines: list[Machine], end: int | None, name: str) -> Generator[Part, None, bool]:
    """Announce the storages, which lie one after the other."""
    facts = facts_of(machines[_OBJECT])
    is_little = _is_little_endian(machines[_MACHINE])
    for key in _keys(machines[_KEYS]) or ():
        fact = facts.get(key) if type(key) is str else None
        head = walker.peek(_COUNT_BYTES)
        if fact is None or len(head) < _COUNT_BYTES or int.from_bytes(head, "little") != fact.n_elements:
            return False
        walker.skip(_COUNT_BYTES)
        if end is not None and walker.at + fact.n_bytes > end:
            return False
        yield from walker.walked()
        if fact.n_bytes >= _MIN_BYTES:
            dtype = fact.dtype if is_little else None
            yield Tensor(n_bytes=fact.n_bytes, name=fact.name or name, dtype=dtype, shape=fact.shape if dtype else None)
        walker.skip(fact.n_bytes)
    yield from walker.walked()
    return True


def _keys(machine: Machine) -> list[Symbol] | None:
    """Read the fifth pickle, a list of storages' keys; None if it is not one."""
    keys = machine.stack[-1] if machine.stack else None
    if type(keys) is not Made or not keys.is_made_by(LIST.name) or len(keys.elements) != keys.n_elements:
        return None
    return keys.elements


def _is_little_endian(machine: Machine) -> bool:
    """Read the third pickle, which says what kind of machine wrote the file."""
    facts = machine.stack[-1] if machine.stack else None
    return type(facts) is Made and facts.get("little_endian") is True
