"""The command line, ``tensorcas``; ``docs/command-line.md`` is its page."""

from tensorcas_mlflow.cli._main import main

__all__ = ["main"]
