"""HDF5 files with each layout, index and kind of group, written by h5py."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import h5py
import ml_dtypes
import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Write = Callable[[h5py.File], None]

VERSIONS: Mapping[str, Any] = {
    "earliest": "earliest",
    "1.8": ("v108", "v108"),
    "1.10": ("v110", "v110"),
    "latest": "latest",
}
DRAW = np.random.default_rng(0)
WEIGHT = DRAW.normal(size=(70, 90)).astype(np.float32)


def hdf5_file(write: Write, **settings: Any) -> bytes:
    """Write a file, and return its bytes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file.h5"
        with h5py.File(path, "w", **settings) as file:
            write(file)
        return path.read_bytes()


def hdf5_of(arrays: Mapping[str, Array], *, is_chunked: bool = False) -> Write:
    """Return a writer of some arrays; with ``is_chunked``, those with sides in chunks of every index."""

    def write(file: h5py.File) -> None:
        for nth, (name, array) in enumerate(arrays.items()):
            most: Any = [array.shape, (None, *array.shape[1:]), [None] * array.ndim][nth % 3]
            small = tuple(max(1, side // 2) for side in array.shape)
            settings = {"chunks": small, "maxshape": most} if is_chunked and array.shape else {}
            file.create_dataset(name, data=array, **settings)

    return write


def arrays_in(data: bytes) -> tuple[dict[str, Array], dict[str, str]]:
    """Read a file with h5py.

    Returns:
        The data sets that numpy has a dtype for, and the kinds of the others, both by their paths.
    """
    found: dict[str, Array] = {}
    others: dict[str, str] = {}

    entered: set[int] = set()

    def look(group: h5py.Group, path: str) -> None:
        address = h5py.h5o.get_info(group.id).addr
        if address in entered:
            return
        entered.add(address)
        for name in group:
            link = group.get(name, getlink=True)
            if isinstance(link, h5py.ExternalLink):
                others[f"{path}{name}"] = "a link to another file"
            if not isinstance(link, h5py.HardLink):
                continue
            each = group[name]
            if isinstance(each, h5py.Group):
                look(each, f"{path}{name}/")
            elif isinstance(each, h5py.Dataset):
                kind = _kind_of(each)
                if kind:
                    others[f"{path}{name}"] = kind
                else:
                    found[f"{path}{name}"] = _read(each)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file.h5"
        path.write_bytes(data)
        with h5py.File(path) as file:
            look(file, "")
    return found, others


def _read(each: h5py.Dataset) -> Array:
    array = np.asarray(each[()])
    said = each.attrs.get("dtype")
    return array.view(said) if said else array


def _kind_of(each: h5py.Dataset) -> str:
    if each.shape is None:
        return "no elements"
    if each.compression not in (None, "gzip") or each.scaleoffset is not None:
        return "compressed"
    if each.is_virtual:
        return "virtual"
    if each.external:
        return "in another file"
    if each.dtype.kind == "O":
        return "of variable length"
    if each.dtype.base.kind == "V" and not each.dtype.names and "dtype" not in each.attrs:
        return "opaque"
    if each.dtype == np.longdouble:
        return "floating-point numbers of 80 bits"
    is_chunked = each.chunks is not None
    n_chunks = int(np.prod([-(-s // c) for s, c in zip(each.shape, each.chunks, strict=True)])) if is_chunked else 0
    if is_chunked and each.id.get_num_chunks() < n_chunks:
        return "not written in part"
    if not is_chunked and each.id.get_offset() is None and each.size and each.id.get_storage_size() == 0:
        return "not written"
    return ""


def contiguous(file: h5py.File) -> None:
    for name, array in {
        "encoder/weight": WEIGHT,
        "encoder/bias": WEIGHT[0].astype(np.float16),
        "head/weight": DRAW.normal(size=(3, 4, 5)),
        "steps": np.arange(7),
        "scalar": np.array(3, np.int32),
        "empty": np.zeros((0, 4), np.float32),
        "unsigned": np.arange(40, dtype=np.uint16),
    }.items():
        file[name] = array


def kinds(file: h5py.File) -> None:
    """Write one data set of each type."""
    file["swapped"] = np.arange(70).astype(">i4")
    file["swapped floats"] = np.arange(70).astype(">f8")
    file["bits"] = np.arange(90) % 3 == 0
    file["complex"] = np.arange(9).astype(np.complex64)
    file["texts"] = np.array([b"a", b"bcd"])
    file["records"] = np.ones(5, [("x", "f4"), ("y", "i8")])
    file["padded"] = np.ones(5, np.dtype([("x", "u1"), ("y", "f8")], align=True))
    file["records of arrays"] = np.ones(5, [("x", "f4", (3,)), ("y", "i8")])
    file["long texts"] = ["a", "bcd"]
    file["long"] = np.ones(2, np.longdouble)
    file["opaque"] = np.ones(3, "V5")
    for name in ("bfloat16", "float8_e4m3fn"):
        file[name] = (
            np.arange(60).astype(getattr(ml_dtypes, name)).view(f"V{np.dtype(getattr(ml_dtypes, name)).itemsize}")
        )
        file[name].attrs["dtype"] = name
    file["enumerated"] = np.arange(4, dtype=np.int16) % 2
    file.create_dataset("enum", data=[0, 1, 1], dtype=h5py.enum_dtype({"a": 0, "b": 1}, basetype="i2"))
    file.create_dataset("array type", (6,), dtype=np.dtype(("f4", (2, 3))))[...] = np.ones((6, 2, 3), "f4")
    file["type"] = np.dtype("f4")
    file.create_dataset("of a type", data=WEIGHT[0], dtype=file["type"])
    file.create_dataset("null", data=h5py.Empty("f4"))
    file.create_dataset("of variable length", (2,), dtype=h5py.vlen_dtype(np.int32))


def layouts(file: h5py.File) -> None:
    """Write one data set in each layout."""
    file.create_dataset("chunked", data=WEIGHT, chunks=(20, 40))
    file.create_dataset("rows", data=WEIGHT, chunks=(16, 90))
    file.create_dataset("single", data=WEIGHT, chunks=WEIGHT.shape)
    file.create_dataset("many", data=np.arange(10000, dtype=np.int32), chunks=(16,))
    file.create_dataset("cube", data=DRAW.normal(size=(9, 10, 11)), chunks=(4, 3, 5))
    file.create_dataset("limited", data=WEIGHT, chunks=(20, 40), maxshape=(100, 200))
    file.create_dataset("growing in two", data=WEIGHT, chunks=(20, 40), maxshape=(None, None))
    file.create_dataset("gzip", data=WEIGHT, chunks=(20, 40), compression="gzip")
    file.create_dataset("shuffled", data=WEIGHT, chunks=(20, 40), shuffle=True)
    file.create_dataset("checked", data=WEIGHT, chunks=(20, 40), fletcher32=True)
    file.create_dataset("all filters", data=WEIGHT, chunks=(20, 40), compression="gzip", shuffle=True, fletcher32=True)
    file.create_dataset("single gzip", data=WEIGHT, chunks=WEIGHT.shape, compression="gzip")
    file.create_dataset("growing gzip", data=WEIGHT, chunks=(2, 40), maxshape=(None, 90), compression="gzip")
    file.create_dataset("gzip growing in two", data=WEIGHT, chunks=(20, 40), maxshape=(None, None), compression=1)
    file.create_dataset("lzf", data=WEIGHT, chunks=(20, 40), compression="lzf")
    file.create_dataset("in part", (70, 90), "f4", chunks=(20, 40))[:20, :40] = 1
    file.create_dataset("nothing", (70, 90), "f4")
    file.create_dataset("empty chunks", (0, 90), "f4", chunks=(20, 40), maxshape=(None, 90))
    compact = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    compact.set_layout(h5py.h5d.COMPACT)
    made = h5py.h5d.create(file.id, b"compact", h5py.h5t.NATIVE_FLOAT, h5py.h5s.create_simple((3, 90)), compact)
    made.write(h5py.h5s.ALL, h5py.h5s.ALL, WEIGHT[:3].copy())
    early = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    early.set_chunk((20, 40))
    early.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    for name, most in ((b"early", WEIGHT.shape), (b"early, limited", (100, 200))):
        made = h5py.h5d.create(file.id, name, h5py.h5t.NATIVE_FLOAT, h5py.h5s.create_simple(WEIGHT.shape, most), early)
        made.write(h5py.h5s.ALL, h5py.h5s.ALL, WEIGHT)
    layout = h5py.VirtualLayout(WEIGHT.shape, "f4")
    layout[...] = h5py.VirtualSource("other.h5", "x", WEIGHT.shape)
    with contextlib.suppress(ValueError):  # no version before 1.10 has them
        file.create_virtual_dataset("virtual", layout)
    file.create_dataset("outside", WEIGHT.shape, "f4", external=[("/nowhere/x.bin", 0, h5py.h5f.UNLIMITED)])


def growing(file: h5py.File) -> None:
    """Write data sets that grow along one side."""
    file.create_dataset("rows", data=WEIGHT, chunks=(7, 90), maxshape=(None, 90))
    file.create_dataset("pieces", data=WEIGHT, chunks=(2, 40), maxshape=(None, 90))
    file.create_dataset("columns", data=WEIGHT, chunks=(20, 4), maxshape=(70, None))
    file.create_dataset("many", data=np.arange(20_000, dtype=np.int32), chunks=(8,), maxshape=(None,))


def groups(file: h5py.File) -> None:
    """Write small groups and large ones, with all kinds of links."""
    for nth in range(300):
        file[f"many/data set {nth} of many"] = np.arange(nth, nth + 20, dtype=np.int16)
    for nth in range(40):
        file[f"layers/{nth}/vars/0"] = WEIGHT[nth % 7 :]
        file[f"layers/{nth}"].attrs["note"] = "x" * 50 * nth
    file["a/b/c/d/e"] = WEIGHT
    file["tied"] = file["a/b/c/d/e"]
    file["soft"] = h5py.SoftLink("/tied")
    file["elsewhere"] = h5py.ExternalLink("other.h5", "/x")
    file["a/b/round"] = file["a"]
    file["tied"].attrs["long"] = np.arange(7000)
    for nth in range(20):
        file["tied"].attrs[f"attribute {nth}"] = np.arange(nth)


WRITES: Mapping[str, Write] = {
    "contiguous": contiguous,
    "kinds": kinds,
    "layouts": layouts,
    "growing": growing,
    "groups": groups,
}


def hdf5_samples() -> dict[str, Callable[[], bytes]]:
    """Return makers of all samples, by name."""
    made: dict[str, Callable[[], bytes]] = {
        f"{name}, {version}": lambda write=write, libver=libver: hdf5_file(write, libver=libver)
        for name, write in WRITES.items()
        for version, libver in VERSIONS.items()
    }
    made["user block"] = lambda: hdf5_file(contiguous, userblock_size=512)
    made["ordered"] = lambda: hdf5_file(groups, track_order=True)
    return made
