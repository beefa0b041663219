"""What a store keeps, in figures: chunks and bytes as they were logged, every byte on disk, and whose they are."""

from tensorcas_mlflow.stats._figures import DiskUsage, RunStats, StoreStats, disk_usage, run_stats, store_stats
from tensorcas_mlflow.stats._owners import By, Owner
from tensorcas_mlflow.stats._shares import Share, Shares, find_shares

__all__ = [
    "By",
    "DiskUsage",
    "Owner",
    "RunStats",
    "Share",
    "Shares",
    "StoreStats",
    "disk_usage",
    "find_shares",
    "run_stats",
    "store_stats",
]
