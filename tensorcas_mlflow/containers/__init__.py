"""File formats that hold tensors, taken apart as they pass by: from bytes to parts, and never the other way.

A file comes back as the parts put one after the other, so a splitter that is wrong about a file costs deduplication
and never a byte. No splitter trusts a file: what it says is checked before memory or time is spent on it.
"""

from tensorcas_mlflow.containers._array_views import ArrayView, RecordField, fields_of
from tensorcas_mlflow.containers._bhckpt import bhckpt_header, bhckpt_header_bytes, is_bhckpt
from tensorcas_mlflow.containers._bintensors import MAX_HEADER_BYTES as BINTENSORS_MAX_HEADER_BYTES
from tensorcas_mlflow.containers._bintensors import bintensors_header, is_bintensors
from tensorcas_mlflow.containers._checkpoint_file import is_checkpoint_file
from tensorcas_mlflow.containers._dtype_words import dtype_called
from tensorcas_mlflow.containers._gguf import GgufHeader, aligned, is_gguf
from tensorcas_mlflow.containers._json import SPACE as JSON_SPACE
from tensorcas_mlflow.containers._json import TEXT as JSON_TEXT
from tensorcas_mlflow.containers._json import entries, strict_json, whole
from tensorcas_mlflow.containers._npy import NpyHeader, is_npy, read_npy_header
from tensorcas_mlflow.containers._onnx import ONNX_DTYPES, is_onnx, onnx_field
from tensorcas_mlflow.containers._parts import Learned, More, Part, Plain, Skeleton, Tensor
from tensorcas_mlflow.containers._pickle import is_pickle
from tensorcas_mlflow.containers._pickle_file import walk_pickles
from tensorcas_mlflow.containers._pickle_machine import Machine
from tensorcas_mlflow.containers._pickle_symbols import Blob, Made, Persistent, Symbol, name_of
from tensorcas_mlflow.containers._pt2 import PT2_DEFAULT_MODEL, PT2_PICKLED_TENSOR, PT2_TABLE, pt2_payloads
from tensorcas_mlflow.containers._safetensors import MAX_HEADER_BYTES as SAFETENSORS_MAX_HEADER_BYTES
from tensorcas_mlflow.containers._safetensors import PACKED_BITS as SAFETENSORS_PACKED_BITS
from tensorcas_mlflow.containers._safetensors import SAFETENSORS_DTYPES, is_safetensors, safetensors_header
from tensorcas_mlflow.containers._split import UNREADABLE, split
from tensorcas_mlflow.containers._tape import Readable, SkippingTape, Tape
from tensorcas_mlflow.containers._tensor_fact import TensorFact, check_shape, in_order, item_bytes
from tensorcas_mlflow.containers._torch_legacy import LegacyTorchFile, is_torch_legacy
from tensorcas_mlflow.containers._torch_pickle import size_of, storage_of, torch_dtype, walk_torch_pickle
from tensorcas_mlflow.containers._torch_views import TensorView, views_of
from tensorcas_mlflow.containers._ubjson import UBJSON_DTYPES, is_xgboost
from tensorcas_mlflow.containers._zip import is_zip

__all__ = [
    "BINTENSORS_MAX_HEADER_BYTES",
    "JSON_SPACE",
    "JSON_TEXT",
    "ONNX_DTYPES",
    "PT2_DEFAULT_MODEL",
    "PT2_PICKLED_TENSOR",
    "PT2_TABLE",
    "SAFETENSORS_DTYPES",
    "SAFETENSORS_MAX_HEADER_BYTES",
    "SAFETENSORS_PACKED_BITS",
    "UBJSON_DTYPES",
    "UNREADABLE",
    "ArrayView",
    "Blob",
    "GgufHeader",
    "Learned",
    "LegacyTorchFile",
    "Machine",
    "Made",
    "More",
    "NpyHeader",
    "Part",
    "Persistent",
    "Plain",
    "Readable",
    "RecordField",
    "Skeleton",
    "SkippingTape",
    "Symbol",
    "Tape",
    "Tensor",
    "TensorFact",
    "TensorView",
    "aligned",
    "bhckpt_header",
    "bhckpt_header_bytes",
    "bintensors_header",
    "check_shape",
    "dtype_called",
    "entries",
    "fields_of",
    "in_order",
    "is_bhckpt",
    "is_bintensors",
    "is_checkpoint_file",
    "is_gguf",
    "is_npy",
    "is_onnx",
    "is_pickle",
    "is_safetensors",
    "is_torch_legacy",
    "is_xgboost",
    "is_zip",
    "item_bytes",
    "name_of",
    "onnx_field",
    "pt2_payloads",
    "read_npy_header",
    "safetensors_header",
    "size_of",
    "split",
    "storage_of",
    "strict_json",
    "torch_dtype",
    "views_of",
    "walk_pickles",
    "walk_torch_pickle",
    "whole",
]
