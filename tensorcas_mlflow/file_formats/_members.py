"""Members of archives that are files of other formats."""

from __future__ import annotations

from collections.abc import Callable

from tensorcas_mlflow.errors import MalformedFileError
from tensorcas_mlflow.file_formats._listing import Listing, LocationTable
from tensorcas_mlflow.file_formats._source import ByteSource, FileRange, MemberSource

ListMember = Callable[[ByteSource], "Listing | str | None"]
"""Lists a member of an archive. Returns the reason for which it is left out, or None for a member without tensors."""


def add_member(table: LocationTable, member: FileRange, lists: ListMember, *, has_checksum: bool = False) -> None:
    """Add the tensors of a member as ``<member>/<name>``; leave out a member that is malformed, or of no format.

    Args:
        table: Table of the archive, its first source.
        member: The member; it is not compressed.
        lists: Lists it.
        has_checksum: Whether the archive has a CRC-32 of the member.

    Raises:
        FormatError: Two tensors have one name, or one has no valid name.
        CorruptError: The stored bytes of the member are damaged.
        BackendError: The storage does not give them.
    """
    source = MemberSource(table.sources[0], member)
    try:
        listing = lists(source)
        source.is_listed = has_checksum
    except MalformedFileError as error:
        listing = f"malformed {error.format}"
    if isinstance(listing, str):
        table.leave_out(table.unused(member.name), listing)
    elif listing is not None:
        table.join(listing, lambda name: f"{member.name}/{name}", numbered=True)
