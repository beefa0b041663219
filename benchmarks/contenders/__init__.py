"""Contenders: our store through its public interface, and the common alternatives."""

from benchmarks.contenders._arrow import ArrowFile
from benchmarks.contenders._contender import Contender, Durable, chosen, save_all
from benchmarks.contenders._numpy_files import NumpyZip, PickleFile
from benchmarks.contenders._ours import OURS, Ours, RunStore, StoreCalls, Write, fastest_peer, policies_of_ours
from benchmarks.contenders._tensor_files import BintensorsFile, SafetensorsFile
from benchmarks.contenders._tools import TOOLS, Tool
from benchmarks.contenders._torch_files import TorchFile, ZstdTorchFile
from benchmarks.contenders._zipnn import ZipnnFile

SAFETENSORS = SafetensorsFile()

FILES: tuple[Contender, ...] = (
    SAFETENSORS,
    SafetensorsFile(kind="numpy"),
    BintensorsFile(),
    TorchFile(),
    TorchFile(is_mapped=True),
    PickleFile(),
    NumpyZip(),
    ArrowFile(),
)
"""Formats of one plain file; the first one is the baseline for all."""

__all__ = [
    "FILES",
    "OURS",
    "SAFETENSORS",
    "TOOLS",
    "ArrowFile",
    "BintensorsFile",
    "Contender",
    "Durable",
    "NumpyZip",
    "Ours",
    "PickleFile",
    "RunStore",
    "SafetensorsFile",
    "StoreCalls",
    "Tool",
    "TorchFile",
    "Write",
    "ZipnnFile",
    "ZstdTorchFile",
    "chosen",
    "fastest_peer",
    "policies_of_ours",
    "save_all",
]
