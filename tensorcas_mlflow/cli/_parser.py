"""The words of the command line, and their help."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from tensorcas_mlflow.chunking import DEFAULT_CHUNK_BYTES
from tensorcas_mlflow.cli import _change, _compare, _copy, _look, _optimize, _reading, _repair, _stats, _verify
from tensorcas_mlflow.cli._exchange_words import add_exchange
from tensorcas_mlflow.cli._options import add_checkpoint, add_yes, hours, part, percent, share_of
from tensorcas_mlflow.maintenance import DEFAULT_GRACE_S, DEFAULT_MAX_WASTE, DEFAULT_QUARANTINE_S
from tensorcas_mlflow.readplan import WAYS

_Command = Callable[[str, str, str], argparse.ArgumentParser]

_EXAMPLES = """\
examples:
  tensorcas list --root /data/mlflow            what is kept, run by run
  tensorcas stats --root /data/mlflow           how much of it is the same, and bytes on disk
  tensorcas show --run 8f3c21 --step 20         the tensors of one checkpoint
  tensorcas diff --run 8f3c21 --steps 10 20     what changed between two
  tensorcas verify --full                       read every chunk and compare it with its digest
  tensorcas repair --from /backup/mlflow        mend what is damaged, with a backup
  tensorcas delete --run 8f3c21 --step 3        drop one checkpoint
  tensorcas gc                                  delete what nothing needs any more
  tensorcas optimize                            store all of it in less room
  tensorcas copy /data/mlflow /backup/mlflow    back a store up, or bring the backup up to date
  tensorcas import m.safetensors --run 8f3c21 --step 0   make a checkpoint of a file
  tensorcas export --run 8f3c21 m.safetensors   write the tensors of a checkpoint into a file
  tensorcas convert m.pt m.safetensors          write those of a file into another one

exit status: 0 done, 1 error, 2 wrong usage, 3 verify found problems or repair left some, 4 copy kept what differs,
5 diff found a difference, 130 interrupted
"""


def parser() -> argparse.ArgumentParser:
    """Make the parser of the program; its results have an ``act`` to call with themselves."""
    # Left out rather than None, so that what stands before the command is not lost to a default after it.
    common = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    common.add_argument(
        "--root",
        metavar="PATH-OR-URI",
        help="the store's root or any place below it, a path or tensorcas:///absolute/path "
        "(default: the environment variable TENSORCAS_STORE, else the working directory)",
    )
    common.add_argument(
        "--format", choices=("text", "json"), help="how to answer: text for people (default), or one JSON document"
    )
    program = argparse.ArgumentParser(
        prog="tensorcas",
        description="Work on a store of deduplicated checkpoints.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[common],
    )
    commands = program.add_subparsers(required=True, metavar="COMMAND", title="commands")

    def command(name: str, what: str, examples: str) -> argparse.ArgumentParser:
        made = commands.add_parser(
            name,
            help=what,
            description=f"{what[0].upper()}{what[1:]}.",
            epilog="examples:\n" + "".join(f"  tensorcas {line}\n" for line in examples.split("\n")),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            parents=[common],
        )
        made.set_defaults(parser=made)
        return made

    _add_looks(command)
    _add_reading(command)
    _add_changes(command)
    _add_optimize(command)
    _add_copy(command)
    add_exchange(command)
    _add_repair(command)
    return program


def _add_looks(command: _Command) -> None:
    listing = command("list", "list the checkpoints, models and files a store keeps", "list\nlist --run 8f3c21")
    listing.add_argument("--run", metavar="ID", help="only what belongs to this run")
    listing.set_defaults(act=_look.list_all)

    stats = command(
        "stats",
        "count what a store or a run keeps, and its bytes on disk",
        "stats\nstats --run 8f3c21 --format json\nstats --by run --top 10",
    )
    stats.add_argument("--run", metavar="ID", help="only what belongs to this run")
    stats.add_argument(
        "--by",
        choices=["experiment", "run", "step"],
        help="tell how many bytes each of these needs alone, shares with others, and added when it was logged",
    )
    stats.add_argument("--top", type=int, metavar="N", help="with --by: only the N that need most bytes alone")
    stats.set_defaults(act=_stats.count)

    show = command(
        "show",
        "show the tensors of one checkpoint, reading none of them",
        "show --run 8f3c21\nshow --run 8f3c21 --step 20",
    )
    add_checkpoint(show, step_help="its step (default: the last one)", is_step_required=False)
    show.add_argument("--tree", action="store_true", help="show what it consists of: blocks, layers, experts")
    show.set_defaults(act=_look.show)

    diff = command(
        "diff",
        "tell what of two checkpoints differs, reading no tensor",
        "diff --run 8f3c21 --steps 10 20\n"
        "diff --run 8f3c21 --step 20 --run 90ab7e --step 20\n"
        "diff --run 8f3c21 --step 20 --name raw --name ema",
    )
    diff.add_argument("--run", metavar="ID", required=True, action="append", help="the run; or twice, one for each")
    diff.add_argument("--steps", metavar=("A", "B"), type=int, nargs=2, help="the two steps")
    diff.add_argument("--step", metavar="N", type=int, action="append", help="the step of both; or twice, one for each")
    diff.add_argument("--name", action="append", help="the name of both, as for show; or twice, one for each")
    diff.add_argument("--values", action="store_true", help="read what has changed, and tell by how much")
    diff.set_defaults(act=_compare.compare)

    verify = command(
        "verify",
        "look whether all is there that a store says it keeps",
        "verify\nverify --full --format json\nverify --sample 5%\nverify --full --part 3/7",
    )
    verify.add_argument(
        "--full", action="store_true", help="read every chunk, decode it and compare it with its digest"
    )
    verify.add_argument(
        "--sample",
        type=percent,
        metavar="N%",
        help="read only so many of the chunks, drawn at random; without --full their stored bytes are compared, which "
        "is faster than decoding",
    )
    verify.add_argument(
        "--part",
        type=share_of,
        metavar="K/N",
        help="read only the K-th of N parts of the chunks, always the same: N calls read all; otherwise as --sample",
    )
    verify.add_argument("--seed", type=int, metavar="N", help="with --sample: draw the same chunks again")
    verify.add_argument(
        "--tracking-uri",
        action="append",
        default=[],
        metavar="URI",
        help="also say which runs and logged models of this MLflow tracking store or server name tensors that no ref "
        "keeps; several times for several",
    )
    verify.add_argument("-q", "--quiet", action="store_true", help="tell no progress")
    verify.set_defaults(act=_verify.check, parser=verify)


def _add_reading(command: _Command) -> None:
    explain = command(
        "explain",
        "say how tensors of one checkpoint would be read now, and why",
        "explain --run 8f3c21\n"
        "explain --run 8f3c21 --step 20 --tensor encoder.weight\n"
        "explain --run 8f3c21 --way direct",
    )
    add_checkpoint(explain, step_help="its step (default: the last one)", is_step_required=False)
    explain.add_argument(
        "--tensor", action="append", default=[], metavar="NAME", help="only this tensor; several times for several"
    )
    explain.add_argument("--map", action="store_true", help="as for reading with copy=False: views of mapped packs")
    explain.add_argument("--way", choices=WAYS, help="as if this way was forced")
    explain.set_defaults(act=_reading.explain)

    calibrate = command(
        "calibrate",
        "measure for some seconds how this machine reads a store best, and follow that from now on",
        "calibrate\ncalibrate --root /data/mlflow --format json",
    )
    calibrate.set_defaults(act=_reading.calibrate)


def _add_changes(command: _Command) -> None:
    init = command("init", "make a store", "init /data/mlflow\ninit tensorcas:///data/mlflow")
    init.add_argument("place", nargs="?", metavar="ROOT", help="where, if it is not said by --root")
    init.add_argument(
        "--chunk-bytes", type=int, default=DEFAULT_CHUNK_BYTES, metavar="N", help="chunk size, fixed for its life"
    )
    init.set_defaults(act=_change.make)

    delete = command(
        "delete",
        "drop one checkpoint; gc then removes what only it needed",
        "delete --run 8f3c21 --step 3\ndelete --run 8f3c21 --step 3 --name ema --yes",
    )
    add_checkpoint(delete, step_help="its step", is_step_required=True)
    add_yes(delete)
    delete.set_defaults(act=_change.delete)

    gc = command(
        "gc",
        "delete what no checkpoint or file needs any more",
        "gc --dry-run\ngc --yes --max-waste 0\ngc --orphans --tracking-uri http://mlflow:5000",
    )
    gc.add_argument(
        "--grace",
        type=hours,
        default=DEFAULT_GRACE_S / 3600,
        metavar="HOURS",
        help="take a save that has been silent for so long for dead (default %(default)g)",
    )
    gc.add_argument(
        "--max-waste",
        type=part,
        default=DEFAULT_MAX_WASTE,
        metavar="PART",
        help="rewrite packs of which more than this part is unneeded, 0 to 1 (default %(default)g)",
    )
    gc.add_argument(
        "--abandon",
        action="append",
        default=[],
        metavar="ID",
        help="give up the save of this id or the damaged ref of this key, which gc has named; several times for "
        "several. Only a save that is dead: one that goes through an MLflow server may otherwise end in a checkpoint "
        "that does not load",
    )
    gc.add_argument(
        "--quarantine",
        type=hours,
        default=DEFAULT_QUARANTINE_S / 3600,
        metavar="HOURS",
        help="delete damaged bytes that a repair has put into quarantine so long ago (default %(default)g)",
    )
    gc.add_argument(
        "--orphans",
        action="store_true",
        help="first drop what is kept for runs, logged models and traces that MLflow has forgotten for longer than the "
        "grace",
    )
    gc.add_argument(
        "--tracking-uri",
        action="append",
        default=[],
        metavar="URI",
        help="with --orphans: MLflow's tracking store or server; several times, if several keep artifacts in the store "
        "(default: MLFLOW_TRACKING_URI)",
    )
    gc.add_argument(
        "--registry-uri",
        action="append",
        default=[],
        metavar="URI",
        help="with --orphans: model registry that is kept apart from the tracking store; several times for several "
        "(default: MLFLOW_REGISTRY_URI)",
    )
    gc.add_argument(
        "--folder",
        action="append",
        default=[],
        metavar="FOLDER",
        help="with --orphans: folder of a deleted experiment, as gc has told it: what is unknown there is gone, though "
        "nothing else shows that it was an experiment of that tracking store",
    )
    gc.add_argument("--dry-run", action="store_true", help="print the plan and stop")
    add_yes(gc)
    gc.set_defaults(act=_change.collect)


def _add_optimize(command: _Command) -> None:
    optimize = command(
        "optimize",
        "store in less room what a store keeps, and delete what that makes unneeded",
        "optimize --dry-run\noptimize --yes\noptimize --effort balanced",
    )
    optimize.add_argument(
        "--effort",
        choices=_optimize.EFFORTS,
        default=_optimize.EFFORTS[0],
        help="small (default): several ways to encode each chunk are tried, slow ones too; balanced: one, as saves do",
    )
    optimize.add_argument("--dry-run", action="store_true", help="tell what is to be done and stop")
    optimize.add_argument("-q", "--quiet", action="store_true", help="tell no progress")
    add_yes(optimize)
    optimize.set_defaults(act=_optimize.optimize)


def _add_copy(command: _Command) -> None:
    copy = command(
        "copy",
        "copy what a store keeps to another one, moving only what is missing there",
        "copy /data/mlflow /backup/mlflow\n"
        "copy /backup/mlflow /data/mlflow --run 8f3c21\n"
        "copy /data/mlflow /backup/mlflow --dry-run",
    )
    copy.add_argument("source", metavar="SRC", help="the store's root or any place below it")
    copy.add_argument("destination", metavar="DST", help="root of the other store, which is made if there is none")
    copy.add_argument(
        "--run",
        action="append",
        default=[],
        metavar="ID",
        help="only what belongs to this run; several times for several",
    )
    copy.add_argument(
        "--path",
        action="append",
        default=[],
        metavar="PATH",
        help="only what lies at or below this artifact path, such as the folder of a model; may be repeated",
    )
    copy.add_argument(
        "--replace", action="store_true", help="replace what the destination has otherwise (default: keep and tell it)"
    )
    copy.add_argument(
        "--new-id", action="store_true", help="give a store that is made an id of its own: both are to be written to"
    )
    copy.add_argument("--dry-run", action="store_true", help="tell what would be copied and stop")
    copy.add_argument("-q", "--quiet", action="store_true", help="tell no progress")
    copy.set_defaults(act=_copy.copy)


def _add_repair(command: _Command) -> None:
    repair = command(
        "repair",
        "mend what is damaged, put aside what cannot be mended, and say what is lost",
        "repair --dry-run\nrepair --from /backup/mlflow\nrepair --from tensorcas-s3://backup/mlflow --yes",
    )
    repair.add_argument(
        "--from",
        dest="sources",
        action="append",
        default=[],
        metavar="STORE",
        help="another store to take from what is lost here, such as a backup; several times for several",
    )
    repair.add_argument(
        "--abandon",
        action="append",
        default=[],
        metavar="KEY",
        help="take away the damaged condemned list of this key, whose collector must be dead, or give up what cannot "
        "be read of the pack of this key; several times for several",
    )
    repair.add_argument("--dry-run", action="store_true", help="read everything, tell what is damaged, and stop")
    repair.add_argument("-y", "--yes", action="store_true", help="do not ask before anything is changed")
    repair.set_defaults(act=_repair.repair)
