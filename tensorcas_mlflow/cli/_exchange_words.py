"""The words of the commands that speak other formats."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from tensorcas_mlflow.cli import _exchange
from tensorcas_mlflow.cli._options import add_checkpoint, count, size
from tensorcas_mlflow.file_formats import FORMATS_IN, FORMATS_OUT


def add_exchange(command: Callable[[str, str, str], argparse.ArgumentParser]) -> None:
    """Add the commands ``import``, ``export`` and ``convert``."""
    taken = command(
        "import",
        "make a checkpoint of a file of another format, or of a folder of such files that belong together",
        "import model.safetensors --run 8f3c21 --step 0\n"
        "import bert-base/ --run 8f3c21 --step 0 --name base\n"
        "import model.gguf --run 8f3c21 --step 0 --skip-unknown",
    )
    taken.add_argument("path", metavar="PATH", help="the file or folder")
    taken.add_argument("--run", metavar="ID", required=True, help="the run that the checkpoint is to belong to")
    taken.add_argument("--step", metavar="N", type=int, required=True, help="its step")
    taken.add_argument("--name", help="what it is called, where a run has several of one step")
    _add_source(taken)
    taken.add_argument("--overwrite", action="store_true", help="replace a checkpoint of that name")
    taken.add_argument("-q", "--quiet", action="store_true", help="tell no progress")
    taken.set_defaults(act=_exchange.take_in)

    given = command(
        "export",
        "write the tensors of a checkpoint into a file or folder of another format",
        "export --run 8f3c21 --step 20 model.safetensors\n"
        "export --run 8f3c21 model/ --to safetensors --shard-size 5GB\n"
        "export --run 8f3c21 experts.npz --match '*.experts.*'\n"
        "export --run 8f3c21 served/ --to serverlessllm --partitions 4 --dry-run",
    )
    add_checkpoint(given, step_help="its step (default: the last one)", is_step_required=False)
    _add_out(given)
    given.add_argument("--skip-unknown", action="store_true", help="leave tensors out that no array holds")
    given.set_defaults(act=_exchange.give_out)

    convert = command(
        "convert",
        "write the tensors of a file into one of another format; no store is needed",
        "convert model.pt model.safetensors\nconvert llama/ served/ --to serverlessllm --partitions 4",
    )
    convert.add_argument("path", metavar="IN", help="the file or folder to read")
    _add_source(convert)
    _add_out(convert)
    convert.set_defaults(act=_exchange.convert)


def _add_source(made: argparse.ArgumentParser) -> None:
    made.add_argument(
        "--from",
        dest="source_format",
        choices=FORMATS_IN,
        help="its format (default: what it begins with)",
    )
    made.add_argument(
        "--skip-unknown", action="store_true", help="leave tensors out that cannot be stored, such as quantized ones"
    )


def _add_out(made: argparse.ArgumentParser) -> None:
    made.add_argument("out", metavar="OUT", help="the file or folder to write; it appears whole or not at all")
    made.add_argument("--to", choices=list(FORMATS_OUT), help="its format (default: as its name ends)")
    made.add_argument(
        "--shard-size",
        type=size,
        metavar="SIZE",
        help="for safetensors: a folder of files with so many bytes of tensors at most, such as 5GB, and an index",
    )
    made.add_argument(
        "--partitions", type=count, metavar="N", help="for serverlessllm: how many files to spread the tensors over"
    )
    made.add_argument("--match", metavar="GLOB", help="only tensors whose names match, such as '*.attn.*'")
    made.add_argument("--overwrite", action="store_true", help="replace what such a command has written there")
    made.add_argument("--dry-run", action="store_true", help="tell what would be written and stop")
    made.add_argument("-q", "--quiet", action="store_true", help="tell no progress")
