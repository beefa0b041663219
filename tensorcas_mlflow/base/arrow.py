"""Reading and building of Arrow tables; a stream may be untrusted."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from tensorcas_mlflow.base.texts import Texts
from tensorcas_mlflow.errors import FormatError

# Arrow's allocator sets itself up under a lock. An import is the place for it: forks wait for imports.
pa.allocate_buffer(1)

UNREADABLE = (
    pa.ArrowException,
    KeyError,
    TypeError,
    ValueError,
    AttributeError,
    OSError,
    RecursionError,
    OverflowError,
    struct.error,
)
"""Exceptions of pyarrow, json and a constructor for invalid bytes."""


def check_is_of_bytes(error: Exception) -> None:
    """Check that an error, one of `UNREADABLE`, concerns the bytes read, and not this machine.

    Raises:
        MemoryError: There is not enough memory.
        OSError: The system has refused a call.
        ImportError: A package imported by pyarrow does not work here, whatever its error.
    """
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno is not None):
        raise error
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code.co_name == "<module>" and traceback is not error.__traceback__:
            path = traceback.tb_frame.f_code.co_filename
            raise ImportError(f"a package cannot be imported here ({path}): {error}") from error
        traceback = traceback.tb_next


def read_schema(stream: Any) -> pa.Schema:
    """Read the schema of a stream; raise one of `UNREADABLE` if it has none."""
    return pa.ipc.open_stream(pa.py_buffer(stream)).schema


def read_batch(stream: Any, schema: pa.Schema, *, what: str, max_rows: int | None = None) -> Any:
    """Read the one record batch of a stream, without copying it.

    Args:
            stream: The bytes.
            schema: The columns it must have; metadata may differ.
            what: Name of the data, for messages.
            max_rows: Maximum number of rows; more are refused unseen.

    Returns:
        The batch, with every offset and length validated.

    Raises:
        FormatError: It has other columns, is compressed inside, or holds more than one record batch.
        Exception: One of `UNREADABLE`: it is no such stream.
    """
    reader = pa.ipc.open_stream(pa.py_buffer(stream))
    if not reader.schema.equals(schema, check_metadata=False):
        raise FormatError(f"{what} has unexpected columns")
    _check_messages(stream, what)
    try:
        batch = reader.read_next_batch()
    except StopIteration as error:
        raise FormatError(f"{what} holds no table") from error
    if max_rows is not None and batch.num_rows > max_rows:
        raise FormatError(f"{what} of {batch.num_rows} rows, more than {max_rows}")
    # If offsets lead out of their buffers, Arrow reads out of bounds and the process dies.
    for column in batch.columns:
        _validate(column)
    return batch


def text_buffers(texts: Any) -> tuple[Any, Any]:
    """View an array of texts as the start of each among the bytes and, last, the end of the last one; and the bytes.

    Args:
        texts: A pyarrow array of utf8 with valid offsets.
    """
    _, offsets, data = texts.buffers()
    if offsets is None or len(texts) == 0:
        return np.zeros(1, np.int32), np.empty(0, np.uint8)
    at = np.frombuffer(offsets, np.int32)[texts.offset : texts.offset + len(texts) + 1]
    return at - at[0] if at[0] else at, np.frombuffer(data or b"", np.uint8)[at[0] : at[-1]]


def values_of(numbers: Any) -> Any:
    """View an array of whole numbers as a numpy array.

    pyarrow's own `to_numpy` imports pandas if it is installed, and this takes longer than reading a checkpoint.

    Args:
        numbers: A pyarrow array, validated.

    Raises:
        ValueError: It has nulls.
    """
    if numbers.null_count:
        raise ValueError("a column of numbers has nulls")
    return values_or_any(numbers)


def values_or_any(numbers: Any) -> Any:
    """View an array of whole numbers as a numpy array, like `values_of`, with any number in place of a null."""
    dtype = np.dtype(str(numbers.type))
    if len(numbers) == 0:
        return np.empty(0, dtype)
    return np.frombuffer(numbers.buffers()[1], dtype)[numbers.offset : numbers.offset + len(numbers)]


def validity_of(values: Any) -> Any:
    """Return for each value of a pyarrow array whether it is not null; without the pandas import of `fill_null`."""
    bits = values.buffers()[0]
    if bits is None or values.null_count == 0:
        return np.ones(len(values), dtype=bool)
    stop = values.offset + len(values)
    return np.unpackbits(np.frombuffer(bits, np.uint8), count=stop, bitorder="little")[values.offset :].astype(bool)


def array_of_bools(values: Any) -> Any:
    """Build an array of truth values, without the pandas import of `pyarrow.array`."""
    bits = np.packbits(values, bitorder="little")
    return pa.Array.from_buffers(pa.bool_(), len(values), [None, pa.py_buffer(bits.data)])


def array_of_numbers(values: Any, dtype: pa.DataType) -> Any:
    """Build an array of whole numbers, over numpy's memory if the type fits; without pandas, like `values_of`."""
    data = np.ascontiguousarray(values, dtype=str(dtype))
    return pa.Array.from_buffers(dtype, len(data), [None, pa.py_buffer(data.data)])


def array_of_texts(texts: Sequence[str | None], rows: Any = None) -> Any:
    """Build an array of texts and nulls, without pandas and without the import of `pyarrow.compute`.

    Args:
        texts: Texts and nulls.
        rows: For each item of the array the position of its text in ``texts``; by default each text once.

    Raises:
        UnicodeEncodeError: A text cannot be encoded.
        ValueError: They have 2 GiB or more.
    """
    known = Texts.of("" if text is None else text for text in texts)
    is_given = np.array([text is not None for text in texts], dtype=bool)
    if rows is not None:
        known, is_given = known.take(rows), is_given[rows]
    return array_over(known, None if is_given.all() else is_given)


def array_over(texts: Texts, is_given: Any = None) -> Any:
    """View texts as a pyarrow array; where they are not given, they are null."""
    at = np.ascontiguousarray(texts.at, dtype=np.int32)
    data = np.ascontiguousarray(texts.data)
    bits = None if is_given is None else pa.py_buffer(np.packbits(is_given, bitorder="little").data)
    return pa.StringArray.from_buffers(len(texts), pa.py_buffer(at.data), pa.py_buffer(data.data), bits)


def _validate(column: Any) -> None:
    """Check every offset and length of a column, and that every text is UTF-8."""
    column.validate()  # checks the sizes of buffers, and the targets of the first and the last offset
    if column.type == pa.utf8() and column.null_count == 0:
        # Arrow checks texts one by one. Bytes below 128 are UTF-8 wherever they are split.
        at, data = text_buffers(column)
        if (at[1:] >= at[:-1]).all() and (len(data) == 0 or data.max() < 128):
            return
    column.validate(full=True)


def _check_messages(stream: Any, what: str) -> None:
    """Refuse any stream except one schema and one batch without Arrow's own compression.

    A small compressed stream could unpack to any size before a byte of it is checked.
    """
    kinds: list[str] = []
    messages = pa.ipc.MessageReader.open_stream(pa.py_buffer(stream))
    with contextlib.suppress(StopIteration):
        while True:
            message = messages.read_next_message()
            kinds.append(message.type)
            if kinds == ["schema"]:
                continue
            # A Message is a flatbuffer: its third field is the header, and a record batch's fourth is its compression.
            head = memoryview(message.metadata)
            header = _field(head, struct.unpack_from("<I", head, 0)[0], 2)
            table = header + struct.unpack_from("<I", head, header)[0]
            if kinds != ["schema", "record batch"] or _field(head, table, 3):
                raise FormatError(f"{what} holds one plain record batch")


def _field(flatbuffer: memoryview, table: int, number: int) -> int:
    """Return the position of a field in a flatbuffer's table, or 0 if the field is absent."""
    vtable = table - struct.unpack_from("<i", flatbuffer, table)[0]
    at = 4 + 2 * number
    if at >= struct.unpack_from("<H", flatbuffer, vtable)[0]:
        return 0
    offset = struct.unpack_from("<H", flatbuffer, vtable + at)[0]
    return table + offset if offset else 0
