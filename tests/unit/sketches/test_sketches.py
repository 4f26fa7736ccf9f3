"""The state-machine API carries FedOptima's and DLion's flow of messages, in any order that a network allows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pml.statemachine import LinkMeasured
from tests.driver import Cluster
from tests.unit.sketches import dlion, fedoptima
from tests.unit.sketches.linear import Array, Model

SEEDS = st.integers(0, 1 << 32)
TRUE = np.linspace(-1.0, 1.0, 6, dtype=np.float32)


def data(seed: int, *, column: bool) -> tuple[Array, Array]:
    x = np.random.default_rng(seed).standard_normal((64, len(TRUE))).astype(np.float32)
    y = x @ TRUE
    return x, y[:, None] if column else y


# ------------------------------------------------------------------------------------------------------ FedOptima


def front() -> Model:
    rng = np.random.default_rng(9)
    return {
        "front": (rng.standard_normal((len(TRUE), 3)) / 2).astype(np.float32),
        "head": (rng.standard_normal((3, 1)) / 2).astype(np.float32),
    }


def device(seed: int) -> fedoptima.Device:
    return fedoptima.Device(*data(seed, column=True), local_steps=5)


class Training:
    """A server `s` and devices `d0`, `d1`, ... with its bound on activations checked after every step."""

    def __init__(self, seed: int, devices: int, *, omega: int = 6, stop_at: int = 20, **options: Any) -> None:
        staleness = options.pop("max_staleness", 1000)
        back = np.zeros((3, 1), np.float32)
        self.server = fedoptima.Server(front(), back, omega, stop_at, staleness)
        self.devices = {f"d{i}": device(i) for i in range(devices)}
        links = [("s", name) for name in self.devices]
        self.cluster = Cluster({"s": self.server, **self.devices}, seed, links=links, **options)

    def run(self, steps: int | None = None) -> None:
        end = None if steps is None else self.cluster.steps + steps

        def done() -> bool:
            held = sum(len(seat.queue) for seat in self.server.seats.values())
            assert held <= self.server.peak <= self.server.omega
            return self.cluster.finished() or (end is not None and self.cluster.steps >= end)

        self.cluster.run(until=done)

    def check_answers(self) -> None:
        for name, machine in self.devices.items():
            if name in self.cluster.alive:
                # One answer for each model, the last may be Stop; and the model that a device begins with.
                assert machine.models_sent - 1 <= machine.replies - 1 <= machine.models_sent


@given(seed=SEEDS, devices=st.integers(1, 5), omega=st.integers(1, 8))
def test_fedoptima_ends_whatever_the_order_and_every_model_is_answered(seed: int, devices: int, omega: int) -> None:
    training = Training(seed, devices, omega=omega)
    training.run()
    assert training.cluster.result("s") == 20
    training.check_answers()
    assert [report.fields["t"] for report in training.cluster.reports["s"]] == list(range(1, 21))


def test_fedoptima_learns_on_both_sides() -> None:
    training = Training(1, 3, stop_at=60)
    training.run()
    losses = training.server.losses
    assert np.mean(losses[-10:]) < 0.3 * np.mean(losses[:10])
    x, y = data(100, column=True)
    model = training.server.model
    before, after = (float(((x @ m["front"] @ m["head"] - y) ** 2).mean()) for m in (front(), model))
    assert after < 0.3 * before


def test_devices_train_on_while_a_slow_server_computes_and_what_it_cannot_take_is_discarded() -> None:
    training = Training(2, 4, omega=2, pace={"s": 0.05})
    training.run()
    for machine in training.devices.values():
        assert machine.steps > 2 * machine.streamed
    streamed = sum(machine.streamed for machine in training.devices.values())
    assert 0 <= streamed - len(training.server.losses) <= 2 + 1  # queued or under way, and one that was being computed


def test_no_device_is_served_much_less_than_another_that_streams_as_fast() -> None:
    training = Training(3, 4, omega=8, stop_at=60, pace={"s": 1e-2, **{f"d{i}": 1e-3 for i in range(4)}})
    training.run()
    counts = [seat.count for seat in training.server.seats.values()]
    assert max(counts) - min(counts) <= 2


def test_a_model_that_is_too_old_is_dropped_but_answered() -> None:
    training = Training(4, 3, max_staleness=1, stop_at=40, pace={"d0": 4e-3, "d1": 1e-3, "d2": 1e-3})
    training.run()
    assert training.server.stale.count("d0") > 2
    training.check_answers()


@given(seed=SEEDS, at=st.integers(0, 400))
def test_a_device_that_leaves_is_purged_and_gives_its_credit_to_the_others(seed: int, at: int) -> None:
    training = Training(seed, 3, omega=1)
    training.run(at)
    training.cluster.kill("d0")
    training.run()
    assert "d0" not in training.server.seats
    assert not [peer for peer, _ in training.server.models if peer == "d0"]
    training.check_answers()


def test_a_device_that_joins_late_begins_at_the_least_count_and_takes_part() -> None:
    training = Training(5, 2, stop_at=60)
    training.run(400)
    least = min(seat.count for seat in training.server.seats.values())
    assert least > 0
    training.devices["d9"] = device(9)
    training.cluster.join("d9", training.devices["d9"], links=["s"])
    training.cluster.run(until=lambda: "d9" in training.server.seats)
    assert training.server.seats["d9"].count >= least
    training.run()
    assert "d9" in {report.fields["device"] for report in training.cluster.reports["s"]}


def test_without_its_server_a_device_finishes() -> None:
    training = Training(6, 2)
    training.run(100)
    training.cluster.kill("s")
    training.run()
    assert [training.cluster.result(name) for name in training.devices] == [d.steps for d in training.devices.values()]


# ---------------------------------------------------------------------------------------------------------- DLion


def group(count: int, **options: Any) -> dict[str, dlion.Worker]:
    made = {"batch": 4, "iterations": 40, "group": count} | options
    return {f"w{i}": dlion.Worker(*data(i, column=False), **made) for i in range(count)}


def error(worker: dlion.Worker) -> float:
    return float(np.abs(worker.weights - TRUE).max())


@given(seed=SEEDS, count=st.integers(2, 5), bound=st.sampled_from([None, 0, 1, 3]))
def test_dlion_ends_whatever_the_order_and_keeps_its_bound(seed: int, count: int, bound: int | None) -> None:
    workers = group(count, iterations=15, bound=bound)
    cluster = Cluster(workers, seed)

    def done() -> bool:
        iterations = [worker.iteration for name, worker in workers.items() if not worker.finished]
        if bound is not None and len(iterations) == count:
            assert max(iterations) - min(iterations) <= bound + 1
        return cluster.finished()

    cluster.run(until=done)


def test_dlion_learns_with_full_links_and_with_thin_ones() -> None:
    errors = {}
    for bandwidth in (1e9, 1.0):
        workers = group(3, iterations=200, pull_every=1000, bound=1)
        cluster = Cluster(workers, seed=1)
        for name in workers:
            for other in [other for other in workers if other != name]:
                cluster.feed(name, LinkMeasured(other, bandwidth, 0.001))
        cluster.run(until=cluster.finished)
        errors[bandwidth] = [error(worker) for worker in workers.values()]
    assert max(errors[1e9]) < 0.05
    assert max(errors[1.0]) < 0.2


def test_every_message_fits_its_own_links_budget_unless_that_is_below_one_entry() -> None:
    workers = group(3, iterations=60)
    cluster = Cluster(workers, seed=2, pace=dict.fromkeys(workers, 0.01))
    cluster.feed("w0", LinkMeasured("w1", 2500.0, 0.001))
    cluster.feed("w0", LinkMeasured("w2", 1700.0, 0.001))
    cluster.feed("w0", LinkMeasured("w2", None, 0.002))  # a round trip alone leaves the bandwidth as it is
    cluster.run(until=cluster.finished)
    for _, size, budget in workers["w0"].sent:
        assert size <= max(budget, dlion.HEADER + dlion.ENTRY)
    mean = {peer: np.mean([size for to, size, _ in workers["w0"].sent if to == peer]) for peer in ("w1", "w2")}
    assert mean["w1"] > mean["w2"]


def test_newer_gradients_take_the_place_of_those_that_wait() -> None:
    workers = group(2, iterations=60)
    cluster = Cluster(workers, seed=3, pace={"w1": 0.05})
    cluster.run(until=cluster.finished)
    assert workers["w0"].lost > 0
    assert workers["w0"].lost > workers["w1"].lost


def test_the_others_pull_from_the_worker_with_the_lowest_loss() -> None:
    workers = group(3, iterations=60, pull_every=5)
    workers["w2"].weights = TRUE.copy()
    cluster = Cluster(workers, seed=4)
    cluster.run(until=cluster.finished)
    assert workers["w2"].pulls < max(workers["w0"].pulls, workers["w1"].pulls)
    assert max(map(error, workers.values())) < 0.02


@given(seed=SEEDS, at=st.integers(0, 300))
def test_a_worker_that_dies_holds_nobody_up(seed: int, at: int) -> None:
    workers = group(3, iterations=15, bound=0)
    cluster = Cluster(workers, seed)
    cluster.run(until=lambda: workers["w0"].started and workers["w2"].started)
    cluster.run(until=lambda: cluster.steps >= at or cluster.finished())
    cluster.kill("w1")
    cluster.run(until=lambda: cluster.finished("w0", "w2"))


@pytest.mark.parametrize("which", ["fedoptima", "dlion"])
def test_the_same_seed_is_the_same_training(which: str) -> None:
    def once() -> Any:
        if which == "fedoptima":
            training = Training(7, 3)
            training.run()
            return training.cluster.steps, training.server.model["front"].tobytes()
        workers = group(3)
        cluster = Cluster(workers, seed=7)
        cluster.run(until=cluster.finished)
        return cluster.steps, [worker.weights.tobytes() for worker in workers.values()]

    assert once() == once()
