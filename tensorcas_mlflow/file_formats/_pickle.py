"""Pickles and files of joblib: walked to find the arrays and tensors in them, and never run.

A pickle is a program; the bytes of arrays are arguments of its opcodes. The specification is ``Lib/pickletools.py`` of
CPython. A file is taken for a pickle only if it begins with PROTO (protocols 2 to 5): protocol 0 is text, and protocols
up to 2 hold an array's bytes as a text, in which some bytes take two.

Large arrays become tensors, and all else skeleton: text, other bytes, and the rest of a pickle that is too long to be
walked. The pickles of one model at several steps share most of it, though not at the same positions.
"""

from __future__ import annotations

from collections.abc import Iterator

from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.file_formats._dcp import is_dcp, list_dcp
from tensorcas_mlflow.file_formats._listing import Listing
from tensorcas_mlflow.file_formats._numpy import UNNAMED_ARRAY
from tensorcas_mlflow.file_formats._pickle_arrays import (
    JOBLIB_WRAPPERS,
    UNKNOWN_ARRAY,
    ArrayInfo,
    ArrayView,
    array_info,
    array_of_call,
    array_of_state,
    comes_from_buffer,
    wrapped_array,
)
from tensorcas_mlflow.file_formats._pickle_machine import (
    LARGE_BYTES,
    Pause,
    Persistent,
    PickleLimits,
    PickleMachine,
    RawBytes,
    global_name,
)
from tensorcas_mlflow.file_formats._pickle_walk import PickleWalker, WalkEnd, name_of_next
from tensorcas_mlflow.file_formats._source import ByteSource, FileRange, OpenSibling, SliceSource, SourceStream
from tensorcas_mlflow.file_formats._tape import FilePart, Skeleton, SkippingTape, Tape, Tensor
from tensorcas_mlflow.file_formats._torch import LegacyTorchFile, split_storage
from tensorcas_mlflow.file_formats._torch_pickle import (
    STORAGE_FROM_BYTES,
    TORCH_LIMITS,
    PickleTable,
    TensorView,
    storage_of,
    views_of,
)

_LIMITS = PickleLimits(max_ops=2_000_000, max_items=64, max_memo=1 << 18)
"""About a second's work. No wrapper of joblib has more attributes, and hardly any record more fields."""
_MAX_DEPTH = 8
_LOOK_AHEAD_BYTES = 16 << 20
"""Largest array that is looked past for its dtype and shape, which protocol 5 puts behind it."""
_LOOK_AHEAD_OPS = 1024
"""A record takes some 45 opcodes per field."""
_REST_BYTES = 16 << 20
_HEAD_BYTES = 16
_BLOCK_BYTES = 256 << 10
_COUNT_BYTES = 8


def is_pickle(head: bytes | memoryview) -> bool:
    """Recognise a pickle of protocol 2 to 5 by its first opcode."""
    return len(head) > 2 and head[0] == 0x80 and 2 <= head[1] <= 5


def split_pickle(tape: Tape) -> Iterator[FilePart]:
    """Announce the parts of a file of one or more pickles."""
    return _PickleSplitter(tape).parts()


class _PickleSplitter:
    """Splitter of one file."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._walker = PickleWalker(tape, _LIMITS, watched=JOBLIB_WRAPPERS)
        self._ahead: Pause | WalkEnd | None = None
        """The walker's stop while it looked past an array."""
        self._is_lost = False
        """True if the position of the next opcode is unknown."""

    def parts(self) -> Iterator[FilePart]:
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
            elif reason is WalkEnd.BUDGET:
                self._is_lost = True
            elif reason is WalkEnd.MALFORMED:
                raise FormatError(f"the bytes from {walker.at} on are not a pickle")
            elif reason is WalkEnd.FILE:
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

    def _payload(self) -> Iterator[FilePart]:
        """Announce large bytes or a large text."""
        walker, machine = self._walker, self._walker.machine
        payload = machine.payload
        is_bytes = machine.payload_is_bytes
        fact = array_of_state(machine) if is_bytes else None
        if fact is not None:
            yield from self._tensor(payload.n_bytes, fact)
        elif is_bytes and comes_from_buffer(machine):
            yield from self._tensor_before_its_fact(payload)
        else:
            if is_bytes and global_name(machine.stack[-1] if machine.stack else None) == STORAGE_FROM_BYTES:
                yield from walker.walked()
                yield from split_storage(self._tape, payload.n_bytes, name=self._name())
            walker.pass_payload()

    def _tensor(self, n_bytes: int, fact: ArrayInfo) -> Iterator[FilePart]:
        walker = self._walker
        yield from walker.walked()
        yield Tensor(n_bytes=n_bytes, name=self._name(), dtype=fact.dtype, shape=fact.shape)
        walker.skip(n_bytes)
        walker.push(RawBytes(n_bytes))

    def _tensor_before_its_fact(self, blob: RawBytes) -> Iterator[FilePart]:
        """Announce an array whose dtype and shape follow its bytes; look past the bytes of a small one for them."""
        walker = self._walker
        yield from walker.walked()
        name = self._name()
        walker.skip(blob.n_bytes)
        walker.push(blob)
        fact = None
        for _ in range(_LOOK_AHEAD_OPS if blob.n_bytes <= _LOOK_AHEAD_BYTES else 0):
            self._ahead = walker.go_on(1)
            fact = array_of_call(walker.machine, blob)
            if fact is not None or self._ahead is not None:
                break
        fact = fact or UNKNOWN_ARRAY
        yield Tensor(n_bytes=blob.n_bytes, name=name, dtype=fact.dtype, shape=fact.shape)

    def _wrapped(self) -> Iterator[FilePart]:
        """Announce an array that joblib has written behind its wrapper."""
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
                fact = array_info(array.shape, array.dtype, array.n_bytes, is_fortran=array.is_fortran)
                yield from self._tensor(array.n_bytes, fact)
                walker.machine.stack.pop()

    def _name(self) -> str:
        return ".".join(filter(None, map(name_of_next, self._walker.machines)))


def list_pickle(source: ByteSource, beside: OpenSibling | None = None) -> Listing | None:
    """List a file of pickles: ``.metadata`` of a distributed checkpoint, or any other; None for one without arrays.

    Args:
        source: The file.
        beside: Opens files beside it, by name.

    Raises:
        FormatError: The file is malformed. The others of `UNREADABLE` say the same.
        BackendError: A file beside it is missing.
    """
    machines = walk_pickles(source)
    return list_dcp(source, machines[0], beside) if is_dcp(machines) else list_pickles(source, machines)


def walk_pickles(source: ByteSource) -> list[PickleMachine]:
    """Walk every pickle of a file, with the arrays that joblib has written into it.

    Raises:
        FormatError: The file is malformed or too long to be walked, or bytes follow the last pickle.
    """
    tape, file_bytes = SkippingTape(SourceStream(source), block_bytes=_BLOCK_BYTES), source.size
    walker = PickleWalker(tape, TORCH_LIMITS, watched=JOBLIB_WRAPPERS, positions=True)
    walked: list[PickleMachine] = []
    while True:
        reason = walker.go_on()
        if reason is Pause.PAYLOAD:
            walker.pass_payload()
        elif reason is Pause.BUILT:
            _pass_array(walker)
        elif reason is Pause.STOP:
            over = walker.machine
            if len(walker.machines) > 1:
                walker.leave()
                # The pickle in the array's place makes the array that the wrapper stands for.
                walker.machine.stack[-1].args = (over.stack[-1],)
                walker.machine.is_cut |= over.is_cut
            else:
                walked.append(over)
                if walker.at == file_bytes:
                    return walked
                if not is_pickle(walker.peek(_HEAD_BYTES)):
                    raise FormatError(f"{file_bytes - walker.at} bytes follow the pickle")
                walker.begin()
        elif reason is WalkEnd.BUDGET:
            raise FormatError("its pickle is too long to be walked")
        elif reason is not WalkEnd.WINDOW:
            raise FormatError(f"the bytes from {walker.at} on are not a pickle, or the file ends there")
        if walker.at > file_bytes:
            raise FormatError("it ends in its pickle")
        tape.skip(walker.at - tape.position)


def _pass_array(walker: PickleWalker) -> None:
    """Announce an array that joblib has written behind its wrapper."""
    wrapper = walker.machine.stack[-1]
    array = wrapped_array(wrapper)
    if array is None or len(walker.machines) > _MAX_DEPTH:
        raise FormatError("it has an array of joblib's that is not understood")
    if array.dtype.hasobject:
        walker.enter()
        return
    if array.is_padded:
        n_padding = walker.peek(1)
        walker.skip(1 + n_padding[0] if n_padding else 0)
    wrapper.add_elements([RawBytes(array.n_bytes, walker.at)], 1)
    walker.skip(array.n_bytes)


def list_pickles(source: ByteSource, machines: list[PickleMachine]) -> Listing | None:
    """List the arrays and tensors of a file of pickles; those of the second pickle as ``1.…``.

    A name is the keys, attributes and positions that lead to an array, with dots between. Left out are arrays of
    objects, arrays of subclasses with a state of their own, large bytes that are not an array, and arrays whose bytes
    are not in the file (the buffers of protocol 5).

    Args:
        source: The file.
        machines: The machines that have walked it.

    Returns:
        None for pickles without any of these.

    Raises:
        FormatError: An array or a tensor has a form that numpy or torch does not write, or objects nest too often.
    """
    found = PickleTable(source)
    storages = _Storages(source)
    for nth, machine in enumerate(machines):
        prefix = f"{nth}" if len(machines) > 1 else ""
        found.add(_below(prefix, views_of(machine, storages.storage_in)), storages.at, only=UNNAMED_ARRAY)
    return found.table.listing("pickle") if found.table or found.table.left_out else None


def _below(prefix: str, views: Iterator[TensorView | ArrayView]) -> Iterator[TensorView | ArrayView]:
    for view in views:
        yield view._replace(name=".".join(filter(None, (prefix, view.name)))) if prefix else view


class _Storages:
    """Storages of tensors pickled without `torch.save`: each is a whole torch file of one storage."""

    def __init__(self, source: ByteSource) -> None:
        self._source = source
        self._found: dict[str, FileRange] = {}

    def storage_in(self, blob: RawBytes) -> Persistent:
        """Read the torch file of a storage; see `views_of`."""
        part = SliceSource(self._source, blob.at, blob.n_bytes, self._source.name)
        tape = Tape(SourceStream(part), block_bytes=_COUNT_BYTES << 10)
        file = LegacyTorchFile(tape)
        root = file.object.stack[-1] if file.object.stack else None
        if type(root) is not Persistent or storage_of(root.id) is None or file.keys != [root.id[2]]:
            raise FormatError("a tensor's storage is not a torch file of one storage")
        storage, start = file.storages[file.keys[0]], tape.position
        n_bytes = start + _COUNT_BYTES + storage.n_bytes
        if n_bytes != part.size or int.from_bytes(part.read(start, _COUNT_BYTES), "little") != storage.n_elements:
            raise FormatError("a tensor's storage has another size than it says")
        key = f"{blob.at}"
        begin = blob.at + start + _COUNT_BYTES
        self._found[key] = FileRange(key, begin, storage.n_bytes, storage.n_bytes)
        return Persistent((*root.id[:2], key, *root.id[3:]))

    def at(self, view: TensorView) -> FileRange:
        """Return the storage of a tensor."""
        return self._found[view.key]
