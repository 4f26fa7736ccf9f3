from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from p2pml.cli import deviation


def keep(folder: Path, round_: int, weights: list[float], *, error: float = 0.0, wrong_peer: int = 0) -> None:
    rng = np.random.default_rng(round_)
    models = [
        {
            "layer.weight": rng.normal(size=(3, 4)).astype(np.float32),
            "file": np.array([n], np.int64),
            "none": np.zeros(0),
        }
        for n in range(len(weights))
    ]
    shares = np.array(weights) / sum(weights)
    mean = sum(share * model["layer.weight"].astype(np.float64) for share, model in zip(shares, models, strict=True))
    counter = np.rint([sum(share * n for n, share in enumerate(shares))]).astype(np.int64)
    for n, (model, weight) in enumerate(zip(models, weights, strict=True)):
        deviation.record(folder, "contribution", round_, f"peer-{n}", model, weight)
        off = error if n == wrong_peer else 0.0
        result = {"layer.weight": (mean + off).astype(np.float32), "file": counter, "none": np.zeros(0)}
        deviation.record(folder, "result", round_, f"peer-{n}", result, sum(weights))


@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [851.0, 12.0, 3.5]])
def test_the_mean_is_recognised(tmp_path: Path, weights: list[float]) -> None:
    keep(tmp_path, 1, weights)
    keep(tmp_path, 2, weights)
    found = deviation.measure(tmp_path, 3)
    assert found is not None
    assert found.rounds == 2
    assert found.identical
    assert found.absolute < 2e-7
    assert found.relative <= found.absolute


def test_one_peer_that_has_something_else_is_found(tmp_path: Path) -> None:
    keep(tmp_path, 1, [1.0, 2.0])
    keep(tmp_path, 2, [1.0, 2.0], error=0.01, wrong_peer=1)
    found = deviation.measure(tmp_path, 2)
    assert found is not None
    assert not found.identical
    assert found.absolute == pytest.approx(0.01, rel=1e-3)


def test_all_peers_with_the_same_wrong_mean(tmp_path: Path) -> None:
    keep(tmp_path, 1, [1.0, 3.0])
    for n in range(2):  # as if the weights were not used
        contributions = [dict(np.load(tmp_path / f"contribution-1-peer-{k}.npz")) for k in range(2)]
        plain = {
            name.removeprefix("tensor:"): np.mean([one[name] for one in contributions], 0).astype(
                contributions[0][name].dtype
            )
            for name in contributions[0]
            if name != "weight"
        }
        deviation.record(tmp_path, "result", 1, f"peer-{n}", plain, 4.0)
    found = deviation.measure(tmp_path, 2)
    assert found is not None
    assert found.identical
    assert found.absolute > 0.1


def test_rounds_that_not_all_kept_are_left_out(tmp_path: Path) -> None:
    keep(tmp_path, 1, [1.0, 1.0])
    assert deviation.measure(tmp_path, 3) is None
