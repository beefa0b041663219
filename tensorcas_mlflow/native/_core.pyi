from collections.abc import Sequence

from typing_extensions import Buffer

ZSTD_VERSION: str

# words.c

def number_units(base: Buffer, width: int, thresholds: Buffer, unit: int, classes: Buffer, /) -> list[int]: ...
def split(
    words: Buffer,
    planes: Buffer,
    width: int,
    base: Buffer | None,
    classes: Buffer | None,
    n_groups: int,
    unit: int,
    /,
) -> None: ...
def join(
    words: Buffer,
    planes: Buffer,
    width: int,
    base: Buffer | None,
    classes: Buffer | None,
    n_groups: int,
    unit: int,
    /,
) -> None: ...

# hash.c

def digest(data: Buffer, /) -> bytes: ...
def hash_each(pieces: Sequence[Buffer], out: Buffer, n_threads: int, /) -> None: ...
def hash_spans(data: Buffer, starts: Buffer, stops: Buffer, out: Buffer, n_threads: int, /) -> None: ...
def hash_kernels() -> list[str]: ...
def use_hash_kernel(name: str, /) -> None: ...

# decode.c

# encode.c
