"""Many processes in one root: started, some of them killed, and what must be so afterwards."""

from __future__ import annotations

import io
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tensorcas_mlflow.backends import DATABASE_FILES
from tensorcas_mlflow.layout import Ref
from tensorcas_mlflow.maintenance import plan_gc, verify
from tensorcas_mlflow.store import Store
from tests.race.content import numbers_in
from tests.race.journal import Key, Value, allowed

END_S = 120
"""Seconds that a racer may take to end after its time is over; more is a hang."""
ROOT = Path(__file__).resolve().parents[2]


Counts = dict[str, dict[str, int]]
"""Counts of the racers, by role."""


@dataclass
class Running:
    """A racer."""

    role: str
    process: subprocess.Popen[str]
    is_killed: bool = False

    def wait_until_ready(self) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line == "ready\n", self.process.communicate()[1]

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()


@dataclass
class Race:
    """The processes in one root."""

    folder: Path
    """For samples, journals and databases; beside the store."""
    root: str
    seconds: float
    grace_s: float = 0.0
    environment: Mapping[str, str] = field(default_factory=dict)
    racers: list[Running] = field(default_factory=list)
    n_killed: int = 0

    def start(self, role: str, seconds: float) -> None:
        command = [sys.executable, "-m", "tests.race.racer", role, str(len(self.racers)), f"{seconds:.3f}"]
        process = subprocess.Popen(
            [*command, str(self.folder), self.root, str(self.grace_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                "TENSORCAS_THREADS": "2",
                **self.environment,
            },
        )
        self.racers.append(Running(role, process))

    def run(self, roles: Sequence[str], *, killed: Sequence[str] = (), every_s: float = 1.0) -> Counts:
        """Let processes of some roles run to the end, and kill and replace processes of others all the while.

        Returns:
            What those that were not killed have counted, added up by role.
        """
        draw = random.Random(len(roles))
        for role in [*roles, *killed]:
            self.start(role, self.seconds)
        for racer in self.racers:
            racer.wait_until_ready()
        until = time.monotonic() + self.seconds
        for racer in self.racers:
            racer.go()
        victims = self.racers[len(roles) :]
        while victims and time.monotonic() < until:
            time.sleep(draw.uniform(0.3, 1.7) * every_s)
            victim = draw.choice(victims)
            if victim.process.poll() is None:
                victim.process.kill()
                victim.process.communicate()
                victim.is_killed = True
                self.n_killed += 1
                victims.remove(victim)
                left_s = until - time.monotonic()
                if left_s > every_s:
                    self.start(victim.role, left_s)
                    self.racers[-1].go()
                    victims.append(self.racers[-1])
            else:
                victims.remove(victim)
        return self._end()

    def _end(self) -> Counts:
        counts: Counts = {}
        for racer in self.racers:
            if racer.is_killed:
                continue
            try:
                out, error = racer.process.communicate(timeout=END_S)
            except subprocess.TimeoutExpired:
                racer.process.send_signal(6)  # faulthandler says where it hangs
                out, error = racer.process.communicate(timeout=END_S)
                raise AssertionError(f"{racer.role} hangs:\n{error}") from None
            assert racer.process.returncode == 0, (
                f"{racer.role} ended with {racer.process.returncode}:\n{error[-4000:]}"
            )
            for what, n in json.loads(out.splitlines()[-1]).items():
                of_role = counts.setdefault(racer.role, {})
                of_role[what] = of_role.get(what, 0) + n
        return counts

    # --- afterwards

    def wrong(self, store: Store) -> list[str]:
        """Say what of the journals is not so in the store."""
        refs = {key_of(ref): ref for ref in store.checkpoints()}
        wanted: dict[Key, list[Value]] = {}
        for path in self.folder.glob("*.journal"):
            wanted |= allowed(path)
        wrong = [f"{key} is there and in no journal" for key in refs.keys() - wanted.keys()]
        for key, values in wanted.items():
            found = self._found(store, key, refs.get(key))
            if found not in values:
                wrong.append(f"{key} is {found!r} and should be one of {values}")
        return wrong

    def _found(self, store: Store, key: Key, ref: Ref | None) -> Value:
        if len(key) == 1:
            data: bytes | None = None
            plain = Path(store.uri.removeprefix("tensorcas://"), key[0])
            if ref is not None:
                out = io.BytesIO()
                out.writelines(store.iter_file(ref))
                data = out.getvalue()
            elif plain.is_file():
                data = plain.read_bytes()
            by_bytes = {path.read_bytes(): path.name for path in (self.folder / "samples").iterdir()}
            return None if data is None else by_bytes.get(data, "damaged")
        if ref is None:
            return None
        return numbers_in(store.read_tensors(store.manifest(ref)))


def key_of(ref: Ref) -> Key:
    return (ref.path,) if ref.kind == "file" else (ref.run_id, ref.step)


def assert_empties(store: Store) -> None:
    """Drop everything, collect, and see that nothing is left but the store's ``format``."""
    for ref in store.checkpoints():
        store.drop(ref)
    for _ in range(2):  # a dead collector's list goes with the second
        plan_gc(Store.open(store.uri), grace_s=0, max_waste=0).execute()
    left = [info.key for prefix in PREFIXES for info in store.backend.list(prefix)]

    assert [key for key in left if key != "condemned/@generation"] == []
    if store.uri.startswith("tensorcas://"):
        folder = Path(store.uri.removeprefix("tensorcas://"), ".tensorcas")
        files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
        assert files - DATABASE_FILES == {"format"}


PREFIXES = ("refs", "intents", "manifests", "packs", "index", "condemned")


def assert_sound(store: Store) -> None:
    report = verify(store, full=True)

    assert report.problems == (), str(report)
