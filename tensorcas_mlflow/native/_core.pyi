from collections.abc import Sequence

from typing_extensions import Buffer

ZSTD_VERSION: str

# hash.c

def digest(data: Buffer, /) -> bytes: ...
def hash_each(pieces: Sequence[Buffer], out: Buffer, n_threads: int, /) -> None: ...
def copy_rows(
    rows: Sequence[Buffer],
    chunk_at: Buffer,
    sizes: Buffer,
    known: Buffer | None,
    copy: Buffer,
    is_copied: Buffer,
    out: Buffer,
    n_threads: int,
    /,
) -> None: ...
def check_stored(
    sources: Buffer, starts: Buffer, sizes: Buffer, expected: Buffer, is_good: Buffer, n_threads: int, /
) -> None: ...
def hash_kernels() -> list[str]: ...
def use_hash_kernel(name: str, /) -> None: ...

# header.c

def list_header(
    header: Buffer, kinds: Buffer, item_bytes: Buffer, /
) -> tuple[int, int, bytes, bytes, bytes, bytes, bytes, bytes, bytes] | None: ...

# decode_methods.c

def decode(
    reads: Buffer,
    links: Buffer,
    chunks: Buffer,
    parts: Buffer,
    sources: Sequence[Buffer],
    blocks: Sequence[Buffer],
    verifies: bool,
    n_threads: int,
    /,
) -> bytes: ...

# encode.c
def decode_payload(codec: int, payload: Buffer, out: Buffer, base: Buffer | None, /) -> int: ...
def encode_group(
    data: Sequence[Buffer],
    bases: Sequence[Buffer | None] | None,
    itemsizes: Buffer,
    how: Buffer,
    is_sampled: Buffer,
    begins_row: Buffer,
    digests: Buffer,
    recipes: Buffer,
    checks: bool,
    entries: Buffer,
    named: Buffer | None,
    tables: tuple[Buffer, Buffer, Buffer, Buffer, Buffer] | None,
    /,
) -> tuple[int, int, Buffer, int, int]: ...
def encode_best(raw: Buffer, itemsize: int, /) -> tuple[int, int, bytes | None]: ...
def compress(data: Buffer, level: int, /) -> bytes: ...
def encode_records(raw: Buffer, itemsize: int, /) -> bytes: ...
def encode_planes(raw: Buffer, itemsize: int, codings: bytes | None, effort: int, /) -> bytes: ...
def encode_delta(
    raw: Buffer, itemsize: int, base: Buffer, transform: int, unit: int, codings: bytes | None, effort: int, /
) -> bytes: ...
def choose_codings(raw: Buffer, width: int, base: Buffer | None, /) -> bytes: ...
def choose_transform(
    raw: Buffer, width: int, base: Buffer, codings: bytes, at_any_cost: bool, /
) -> tuple[int, int]: ...
def estimate_share(raw: Buffer, width: int, base: Buffer | None, /) -> float: ...

# cuts.c

def find_cut(before: Buffer, data: Buffer, first: int, stop: int, small: int, gears: Buffer, /) -> int: ...

# deflate.c

def deflate(data: Buffer, level: int, out: Buffer, /) -> int: ...
def deflates_to(data: Buffer, level: int, expected: Buffer, /) -> bool: ...
