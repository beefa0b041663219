"""Cost of uploading models through a server with a store as its destination, against a plain server.

Two servers run at once, each under uvicorn with two workers. Every model folder is uploaded to both in turns, in
alternating order, so a disturbance slows both; the medians are shown, and the final disk space of both.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import mlflow
import torch
from mlflow import MlflowClient

from benchmarks.harness import Options, Section, Series, Table, disk_bytes, show_bytes, show_ratio
from tests.deploy.servers import UVICORN, Server, serve

TITLE = "uploads to a server whose destination is a store"
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
    """Save a network, then half-trained, then unchanged, repeatedly; yield a label of the change, and the folder."""
    for number in range(N_ROUNDS):
        network = make_network(number)
        for kind in ("all of it", "half of it", "nothing"):
            if kind == "half of it":
                train_half(network)
            place = folder / f"{number}-{kind}"
            mlflow.pytorch.save_model(network, place, pip_requirements=[], serialization_format="pickle")
            yield kind, place


def upload(server: Server, folder: Path) -> float:
    """Upload a folder to a new run, and return the seconds."""
    mlflow.set_tracking_uri(server.uri)
    client = MlflowClient(server.uri)
    run_id = client.create_run("0").info.run_id
    begin = time.perf_counter()
    client.log_artifacts(run_id, str(folder), "model")
    return time.perf_counter() - begin


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
    """Upload all models to both servers; return seconds by new content, and by server."""
    taken: dict[str, dict[str, list[float]]] = {}
    for number, (kind, folder) in enumerate(models(scratch / "models")):
        for name in sorted(servers, reverse=bool(number % 2)):
            taken.setdefault(kind, {}).setdefault(name, []).append(upload(servers[name], folder))
    return taken


def run(options: Options) -> Section:
    """Upload everything to both, and measure their disk space."""
    section = Section("server_upload", TITLE)
    with options.folder() as scratch, both_servers(scratch) as servers:
        (scratch / "models").mkdir()
        taken = measure(servers, scratch)
        title = f"{N_LAYERS * WIDTH * WIDTH * 4 / 1e6:.0f} MB a model"
        table = Table(title, ("what is new", "plain s", "ours s", "ours to plain"))
        for kind, times in taken.items():
            plain, ours = (Series(tuple(times[name])) for name in ("plain", "ours"))
            section.keep(kind, {"plain": plain, "ours": ours})
            table.add(kind, f"{plain.median:.3f}", f"{ours.median:.3f}", show_ratio(ours.over(plain)))
        plain_bytes, our_bytes = (disk_bytes(servers[name].store_root) for name in ("plain", "ours"))
    table.add("bytes kept", show_bytes(plain_bytes), show_bytes(our_bytes), f"{our_bytes / plain_bytes:.2f} x")
    section.tables.append(table)
    return section
