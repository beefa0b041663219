from typing_extensions import Buffer

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
