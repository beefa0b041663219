"""Which format a file is in, told from its first bytes, and its parts."""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Iterator

from tensorcas_mlflow.containers._bhckpt import is_bhckpt, split_bhckpt
from tensorcas_mlflow.containers._bintensors import is_bintensors, split_bintensors
from tensorcas_mlflow.containers._checkpoint_file import is_checkpoint_file, split_checkpoint_file
from tensorcas_mlflow.containers._gguf import is_gguf, split_gguf
from tensorcas_mlflow.containers._npy import is_npy, split_npy
from tensorcas_mlflow.containers._onnx import is_onnx, split_onnx
from tensorcas_mlflow.containers._parts import Learned, Part, Plain, Skeleton, Splitter
from tensorcas_mlflow.containers._pickle import is_pickle, split_pickle
from tensorcas_mlflow.containers._safetensors import is_safetensors, split_safetensors
from tensorcas_mlflow.containers._tape import Tape
from tensorcas_mlflow.containers._torch_legacy import is_torch_legacy, split_torch_legacy
from tensorcas_mlflow.containers._ubjson import is_xgboost, split_xgboost
from tensorcas_mlflow.containers._zip import is_zip, split_zip
from tensorcas_mlflow.errors import FormatError

_log = logging.getLogger(__name__)

_HEAD_BYTES = 4096
_REST_BYTES = 16 << 20

# What reading a file that is not what it seems may end in.
UNREADABLE = (FormatError, ValueError, IndexError, KeyError, TypeError, OverflowError, RecursionError, struct.error)

_FORMATS: tuple[tuple[str, Callable[[memoryview], bool], Splitter], ...] = (
    ("self-contained", is_checkpoint_file, split_checkpoint_file),
    ("safetensors", is_safetensors, split_safetensors),  # whose header may have a length that looks like a pickle
    ("torch (legacy)", is_torch_legacy, split_torch_legacy),
    ("pickle", is_pickle, split_pickle),
    ("zip", is_zip, split_zip),
    ("npy", is_npy, split_npy),
    ("GGUF", is_gguf, split_gguf),
    ("bhckpt", is_bhckpt, split_bhckpt),
    ("bintensors", is_bintensors, split_bintensors),
    ("XGBoost", is_xgboost, split_xgboost),
    ("ONNX", is_onnx, split_onnx),  # the last one: it has no magic number
)
"""Name, test of a file's first bytes, and splitter; the first whose test passes is taken."""


def split(tape: Tape) -> Iterator[Part | Learned]:
    """Take a file apart.

    Yields:
        Its parts in order, to its very end. The caller takes each part's bytes from the tape before it asks for the
        next one; the tape gives fewer bytes than a part announces only where the file ends.
    """
    head = tape.peek(_HEAD_BYTES)
    for name, recognizes, splitter in _FORMATS:
        if recognizes(head):
            try:
                for part in splitter(tape):
                    if tape.is_at_end():
                        break  # what a header goes on about is not there
                    yield part
            except UNREADABLE as error:
                _log.debug("not a sound %s file, plain bytes from byte %d on: %s", name, tape.position, error)
            break
    is_text = tape.position == 0 and _is_text(head)
    while not tape.is_at_end():
        yield Skeleton(n_bytes=_REST_BYTES) if is_text else Plain(n_bytes=_REST_BYTES)


def _is_text(head: memoryview) -> bool:
    """Tell whether a file begins as a text does: valid UTF-8, perhaps cut off in a character, and no NUL."""
    data = bytes(head)
    if b"\0" in data:
        return False
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return len(head) == _HEAD_BYTES and error.start > len(data) - 4
    return True
