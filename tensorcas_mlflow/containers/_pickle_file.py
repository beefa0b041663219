"""All pickles of a file, walked from its beginning to its end, for who can go anywhere in it."""

from __future__ import annotations

from tensorcas_mlflow.containers._joblib import WRAPPERS, wrapped_array
from tensorcas_mlflow.containers._pickle import is_pickle
from tensorcas_mlflow.containers._pickle_machine import Machine, Pause
from tensorcas_mlflow.containers._pickle_symbols import Blob
from tensorcas_mlflow.containers._pickle_walker import End, Walker
from tensorcas_mlflow.containers._tape import SkippingTape
from tensorcas_mlflow.containers._torch_pickle import LIMITS
from tensorcas_mlflow.errors import FormatError

_HEAD_BYTES = 16
_MAX_DEPTH = 8


def walk_pickles(tape: SkippingTape, file_bytes: int) -> list[Machine]:
    """Walk every pickle of a file, with the arrays that joblib has put into it.

    Args:
        tape: The file.
        file_bytes: Its size.

    Raises:
        FormatError: It is no pickle, or too long to be walked, or something follows the last one.
    """
    walker = Walker(tape, LIMITS, watched=WRAPPERS, places=True)
    walked: list[Machine] = []
    while True:
        reason = walker.go_on()
        if reason is Pause.PAYLOAD:
            walker.pass_payload()
        elif reason is Pause.BUILT:
            _pass_array(walker)
        elif reason is Pause.STOP:
            over = walker.machine
            if len(walker.machines) > 1:
                walker.leave()
                # The array that the wrapper stands for is what the pickle in its place makes.
                walker.machine.stack[-1].args = (over.stack[-1],)
                walker.machine.is_cut |= over.is_cut
            else:
                walked.append(over)
                if walker.at == file_bytes:
                    return walked
                if not is_pickle(walker.peek(_HEAD_BYTES)):
                    raise FormatError(f"{file_bytes - walker.at} bytes follow the pickle")
                walker.begin()
        elif reason is End.BUDGET:
            raise FormatError("its pickle is too long to be looked through")
        elif reason is not End.WINDOW:
            raise FormatError(f"what follows byte {walker.at} is no pickle, or it ends there")
        if walker.at > file_bytes:
            raise FormatError("it ends in its pickle")
        tape.pass_over(walker.at - tape.position)


def _pass_array(walker: Walker) -> None:
    """Pass an array that joblib has put after its wrapper."""
    wrapper = walker.machine.stack[-1]
    array = wrapped_array(wrapper)
    if array is None or len(walker.machines) > _MAX_DEPTH:
        raise FormatError("it has an array of joblib's that is not understood")
    if array.dtype.hasobject:
        walker.enter()
        return
    if array.is_padded:
        n_padding = walker.peek(1)
        walker.skip(1 + n_padding[0] if n_padding else 0)
    wrapper.add_elements([Blob(array.n_bytes, walker.at)], 1)
    walker.skip(array.n_bytes)
