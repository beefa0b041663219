"""What uploading models costs through a server whose destination is a store, against a plain one.

Run it with ``make bench-server``, or ``python -m benchmarks.server_upload``, on a machine that does nothing else.
Two servers run at once, each under uvicorn with two workers; every model folder is uploaded to both in turns, the order
changing, so that what slows one slows the other; the medians are printed, and what both keep on disk in the end.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import mlflow
import torch
from mlflow import MlflowClient

from tests.deploy.servers import UVICORN, Server, serve

N_ROUNDS = 5
WIDTH = 2048
"""Of a layer: 16 MB of weights."""
N_LAYERS = 8


def make_network(seed: int) -> torch.nn.Module:
    """Make a network of 128 MB."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(N_LAYERS)])


def train_half(network: torch.nn.Module) -> None:
    """Change the last half of a network's layers."""
    with torch.no_grad():
        for layer in list(network)[N_LAYERS // 2 :]:  # type: ignore[call-overload]
            layer.weight.add_(torch.randn_like(layer.weight) * 0.01)


def models(folder: Path) -> Iterator[tuple[str, Path]]:
    """Save a network, then half-trained, then as it is, again and again; what is new in it, and its folder."""
    for number in range(N_ROUNDS):
        network = make_network(number)
        for kind in ("all of it", "half of it", "nothing"):
            if kind == "half of it":
                train_half(network)
            place = folder / f"{number}-{kind}"
            mlflow.pytorch.save_model(network, place, pip_requirements=[], serialization_format="pickle")
            yield kind, place


def upload(server: Server, folder: Path) -> float:
    """Upload a folder to a new run, and give the seconds that took."""
    mlflow.set_tracking_uri(server.uri)
    client = MlflowClient(server.uri)
    run_id = client.create_run("0").info.run_id
    begin = time.perf_counter()
    client.log_artifacts(run_id, str(folder), "model")
    return time.perf_counter() - begin


def disk_bytes(folder: Path) -> int:
    """Add up the files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@contextmanager
def both_servers(scratch: Path) -> Iterator[dict[str, Server]]:
    """Run a plain server and one of ours."""
    with ExitStack() as stack:
        servers = {}
        for name, scheme in (("plain", ""), ("ours", "tensorcas://")):
            (scratch / name).mkdir()
            options = (*UVICORN, "--artifacts-destination", f"{scheme}{scratch}/{name}/artifacts")
            servers[name] = stack.enter_context(serve(scratch / name, options))
        yield servers


def measure(servers: dict[str, Server], scratch: Path) -> dict[str, dict[str, list[float]]]:
    """Upload all models to both servers; seconds by what is new, and by server."""
    taken: dict[str, dict[str, list[float]]] = {}
    for number, (kind, folder) in enumerate(models(scratch / "models")):
        for name in sorted(servers, reverse=bool(number % 2)):
            taken.setdefault(kind, {}).setdefault(name, []).append(upload(servers[name], folder))
    return taken


def main() -> None:
    """Print a table: seconds of one upload, medians of all rounds, and bytes on disk."""
    with tempfile.TemporaryDirectory() as folder, both_servers(scratch := Path(folder)) as servers:
        (scratch / "models").mkdir()
        taken = measure(servers, scratch)
        print(f"{N_ROUNDS} uploads of each of {N_LAYERS * WIDTH * WIDTH * 4 / 1e6:.0f} MB, medians in seconds")
        print(f"{'what is new':14}{'plain':>8}{'ours':>8}{'ratio':>8}")
        for kind, times in taken.items():
            plain, ours = (statistics.median(times[name]) for name in ("plain", "ours"))
            print(f"{kind:14}{plain:>8.3f}{ours:>8.3f}{ours / plain:>8.2f}")
        plain_bytes, our_bytes = (disk_bytes(servers[name].store_root) for name in ("plain", "ours"))
        print(f"on disk: plain {plain_bytes:,} B, ours {our_bytes:,} B ({our_bytes / plain_bytes:.1%})")


if __name__ == "__main__":
    main()
