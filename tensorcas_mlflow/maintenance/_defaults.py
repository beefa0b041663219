"""Defaults of a collection, without the collection: they stand in signatures that every program imports."""

DEFAULT_GRACE_S = 24 * 3600.0
DEFAULT_MAX_WASTE = 0.3
DEFAULT_QUARANTINE_S = 30 * 24 * 3600.0
