"""One table out of an Arrow IPC stream that anybody may have written.

Arrow trusts what it reads: where offsets point, and what compressed buffers will unpack to. So whatever comes from a
store is read here, and nothing of it is touched before it has been looked through.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from tensorcas_mlflow.errors import FormatError

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
"""What pyarrow, json and a constructor raise for bytes that are not what they should be."""


def check_is_of_bytes(error: Exception) -> None:
    """See that an error, one of `UNREADABLE`, says something of the bytes that were read, and not of this machine.

    Raises:
        MemoryError: There is not enough memory.
        OSError: The system has refused something.
        ImportError: A package that pyarrow imports does not work here, whatever error it ends in.
    """
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno is not None):
        raise error
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code.co_name == "<module>" and traceback is not error.__traceback__:
            path = traceback.tb_frame.f_code.co_filename
            raise ImportError(f"a package cannot be imported here ({path}): {error}") from error
        traceback = traceback.tb_next


FILE_MAGIC = b"ARROW1"
_FILE_HEAD = FILE_MAGIC + b"\0\0"


def read_schema(stream: Any) -> pa.Schema:
    """Read what a stream says its table is; raises one of `UNREADABLE` if it is none."""
    return pa.ipc.open_stream(pa.py_buffer(stream)).schema


def read_batch(stream: Any, schema: pa.Schema, *, what: str, max_rows: int | None = None) -> Any:
    """Read the one record batch of a stream, without copying it.

    Args:
        stream: The bytes.
        schema: The columns it must have; metadata may differ.
        what: What it is, for messages.
        max_rows: More rows are refused before they are looked at.

    Returns:
        The batch, every offset and length in which is sound.

    Raises:
        FormatError: It has other columns, is compressed inside, or holds more than one record batch.
        Exception: One of `UNREADABLE`: it is no such stream.
    """
    reader = pa.ipc.open_stream(pa.py_buffer(stream))
    if not reader.schema.equals(schema, check_metadata=False):
        raise FormatError(f"{what} has other columns than it should")
    _check_messages(stream, what)
    try:
        batch = reader.read_next_batch()
    except StopIteration as error:
        raise FormatError(f"{what} holds no table") from error
    if max_rows is not None and batch.num_rows > max_rows:
        raise FormatError(f"{what} of {batch.num_rows} rows, more than {max_rows}")
    # Arrow reads out of bounds, and the process dies, where offsets lead out of their buffers.
    for column in batch.columns:
        _validate(column)
    return batch


def text_buffers(texts: Any) -> tuple[Any, Any]:
    """View an array of texts: where each begins among the bytes and, last, where the last one ends; and the bytes.

    Args:
        texts: A pyarrow array of utf8, its offsets sound.
    """
    _, offsets, data = texts.buffers()
    if offsets is None or len(texts) == 0:
        return np.zeros(1, np.int32), np.empty(0, np.uint8)
    at = np.frombuffer(offsets, np.int32)[texts.offset : texts.offset + len(texts) + 1]
    return at - at[0] if at[0] else at, np.frombuffer(data or b"", np.uint8)[at[0] : at[-1]]


def values_of(numbers: Any) -> Any:
    """View an array of whole numbers as one of numpy's.

    pyarrow's own `to_numpy` imports pandas, wherever it is installed, which takes longer than to read a checkpoint.

    Args:
        numbers: A pyarrow array, validated.

    Raises:
        ValueError: It has nulls.
    """
    if numbers.null_count:
        raise ValueError("a column of numbers leaves some out")
    return values_or_any(numbers)


def values_or_any(numbers: Any) -> Any:
    """View an array of whole numbers as one of numpy's, as `values_of`, with any number in place of a null."""
    dtype = np.dtype(str(numbers.type))
    if len(numbers) == 0:
        return np.empty(0, dtype)
    return np.frombuffer(numbers.buffers()[1], dtype)[numbers.offset : numbers.offset + len(numbers)]


def validity_of(values: Any) -> Any:
    """Tell for each value of a pyarrow array whether it is there; without pandas, which `fill_null` imports."""
    bits = values.buffers()[0]
    if bits is None or values.null_count == 0:
        return np.ones(len(values), dtype=bool)
    stop = values.offset + len(values)
    return np.unpackbits(np.frombuffer(bits, np.uint8), count=stop, bitorder="little")[values.offset :].astype(bool)


def array_of_bools(values: Any) -> Any:
    """Make an array of truth values, without pandas, which `pyarrow.array` imports."""
    bits = np.packbits(values, bitorder="little")
    return pa.Array.from_buffers(pa.bool_(), len(values), [None, pa.py_buffer(bits.data)])


def array_of_numbers(values: Any, dtype: pa.DataType) -> Any:
    """Make an array of whole numbers, of memory of numpy's where it has the type; as `values_of`, without pandas."""
    data = np.ascontiguousarray(values, dtype=str(dtype))
    return pa.Array.from_buffers(dtype, len(data), [None, pa.py_buffer(data.data)])


def array_of_texts(texts: Sequence[str | None]) -> Any:
    """Make an array of texts, or of nulls among them, without pandas.

    Raises:
        UnicodeEncodeError: A text cannot be encoded.
        ValueError: They have 2 GiB or more.
    """
    data = [b"" if text is None else text.encode() for text in texts]
    at = np.zeros(len(data) + 1, dtype=np.int64)
    np.cumsum(np.fromiter(map(len, data), dtype=np.int64, count=len(data)), out=at[1:])
    if at[-1] >= 1 << 31:
        raise ValueError("texts of 2 GiB or more do not go into one array")
    given = None
    if None in texts:
        bits = np.packbits([text is not None for text in texts], bitorder="little")
        given = pa.py_buffer(bits.data)
    offsets, joined = pa.py_buffer(at.astype(np.int32).data), pa.py_buffer(b"".join(data))
    return pa.StringArray.from_buffers(len(data), offsets, joined, given)


def _validate(column: Any) -> None:
    """See that every offset and length of a column is sound, and that every text is one."""
    column.validate()  # that buffers are as long as they must be, and where the first and the last offset lead
    if column.type == pa.utf8() and column.null_count == 0:
        # Arrow goes through texts one by one. Bytes below 128 are UTF-8 wherever they are parted.
        at, data = text_buffers(column)
        if (at[1:] >= at[:-1]).all() and (len(data) == 0 or data.max() < 128):
            return
    column.validate(full=True)


def stream_in_file(data: Any) -> memoryview:
    """Take the stream out of an Arrow IPC file; what its footer says is not needed, and so not believed.

    Raises:
        FormatError: It is no such file, or was cut off.
    """
    view = memoryview(data)
    if view[: len(_FILE_HEAD)] != _FILE_HEAD or view[-len(FILE_MAGIC) :] != FILE_MAGIC:
        raise FormatError("it is no Arrow file, or not all of one")
    return view[len(_FILE_HEAD) :]


def _check_messages(stream: Any, what: str) -> None:
    """Refuse any stream but one schema and one batch without Arrow's own compression.

    Compressed, a small stream could unpack to any size before a byte of it is checked.
    """
    kinds: list[str] = []
    messages = pa.ipc.MessageReader.open_stream(pa.py_buffer(stream))
    with contextlib.suppress(StopIteration):
        while True:
            message = messages.read_next_message()
            kinds.append(message.type)
            if kinds == ["schema"]:
                continue
            # A Message is a flatbuffer: its third field is the header, and of a record batch the fourth compression.
            head = memoryview(message.metadata)
            header = _field(head, struct.unpack_from("<I", head, 0)[0], 2)
            table = header + struct.unpack_from("<I", head, header)[0]
            if kinds != ["schema", "record batch"] or _field(head, table, 3):
                raise FormatError(f"{what} holds one plain record batch")


def _field(flatbuffer: memoryview, table: int, number: int) -> int:
    """Find a field of a flatbuffer's table: its position, or 0 if it is left out."""
    vtable = table - struct.unpack_from("<i", flatbuffer, table)[0]
    at = 4 + 2 * number
    if at >= struct.unpack_from("<H", flatbuffer, vtable)[0]:
        return 0
    offset = struct.unpack_from("<H", flatbuffer, vtable + at)[0]
    return table + offset if offset else 0
