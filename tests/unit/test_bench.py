"""The benches: that they measure what they say, report it truthfully, and leave no process behind. No test here is about time."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from p2pml.cli.bench import add_parser, link, reduce, report
from p2pml.cli.bench.gloo import GlooReducer
from p2pml.cli.bench.harness import ContestantFailed, Group, installed_loops
from p2pml.cli.bench.hivemind_ import HivemindReducer
from p2pml.cli.bench.memory import PeakMemory
from p2pml.cli.bench.report import MET, MISSED_OR_FAILED, NOT_JUDGED, Target
from p2pml.cli.bench.zmq_ import ZmqEnd

MEMBER = """
import os, threading
from p2pml.cli.bench.harness import Member

class Faulty(Member):
    async def listen(self):
        return f"address of {self.rank}"
    async def join(self, addresses):
        self.addresses = addresses
    async def known(self):
        return self.rank, self.addresses, os.getpid()
    async def fail(self):
        if self.rank == 1:
            raise ValueError("rank one does not want to")
    async def die(self):
        if self.rank == 1:
            os._exit(7)
        threading.Event().wait()
    async def hang(self):
        threading.Event().wait()
"""
ABSENT = {"no_such_package": "pip install 'p2pml[bench]'"}


def command(*words: str) -> int:
    """Run `p2pml bench ...` in this process; returns its exit status."""
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers(required=True))
    arguments = parser.parse_args(["bench", *words])
    status: int = arguments.run(arguments)
    return status


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A member class in a module that workers can import."""
    (tmp_path / "faulty_member.py").write_text(MEMBER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "faulty_member", raising=False)
    return __import__("faulty_member").Faulty


# ------------------------------------------------------------------------------------------------------------- harness


def gone(pids: list[int]) -> bool:
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=20)
    return not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def test_group_runs_in_processes_of_its_own(faulty: Any) -> None:
    with Group("faulty", faulty, 3) as group:
        answers = group.call("known")
        pids = [pid for _, _, pid in answers]
        assert [rank for rank, _, _ in answers] == [0, 1, 2]
        assert all(addresses == [f"address of {rank}" for rank in range(3)] for _, addresses, _ in answers)
        assert len({*pids, psutil.Process().pid}) == 4
    assert gone(pids)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("fail", r"worker 1 failed in 'fail':[\s\S]*ValueError: rank one does not want to"),
        ("die", r"worker 1 died \(exit status 7\)"),
        ("hang", r"no answer to 'hang' from worker 0, 1 within 0.5 s"),
    ],
)
def test_failure_is_explained_and_ends_the_workers(faulty: Any, method: str, message: str) -> None:
    with Group("faulty", faulty, 2) as group:
        pids = [pid for _, _, pid in group.call("known")]
        with pytest.raises(ContestantFailed, match=message):
            group.call(method, timeout=0.5 if method == "hang" else 30)
        assert gone(pids)


def test_workers_end_with_a_parent_that_is_killed(faulty: Any) -> None:
    program = """
import sys
if __name__ == "__main__":
    sys.path.insert(0, {folder!r})
    from faulty_member import Faulty
    from p2pml.cli.bench.harness import Group
    with Group("faulty", Faulty, 2) as group:
        print(*(pid for _, _, pid in group.call("known")), flush=True)
        group.call("hang")
"""
    folder = Path(sys.modules[faulty.__module__].__file__ or "").parent
    script = folder / "parent.py"
    script.write_text(program.format(folder=str(folder)))
    root = Path(__file__).resolve().parents[2]
    # Its end of the error output is kept from the test's: the resource tracker of multiprocessing may complain there.
    with subprocess.Popen(
        [sys.executable, str(script)],
        cwd=root,
        env={**__import__("os").environ, "PYTHONPATH": str(root)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        parent.kill()
    assert len(pids) == 2
    assert gone(pids)


# ---------------------------------------------------------------------------------------------------------------- link


def test_link_in_full(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "link.json"
    assert command("link", "--quick", "--only", "p2pml,sockets,streams", "--json", str(file)) == MET
    found = json.loads(file.read_text())
    loops = installed_loops()
    families = ("streams", "p2pml")
    names = {"sockets", *(f"{family}-{loop}" for family in families for loop in loops)}
    assert set(found["rounds"]) == set(found["medians"]) == names
    for name, measures in found["rounds"].items():
        assert {"throughput", "rate", "round_trip"} <= set(measures)
        for measure, values in measures.items():
            assert len(values) == found["settings"]["rounds"]
            assert min(values) > 0
            assert found["medians"][name][measure] == pytest.approx(np.median(values))
    for key, measure, other, worst in [
        ("throughput_ratio_to_sockets", "throughput", "sockets", min),
        ("small_rate_ratio_to_streams", "rate", "streams-{}", min),
        ("round_trip_ratio_to_streams", "round_trip", "streams-{}", max),
    ]:
        quotients = {
            loop: found["medians"][f"p2pml-{loop}"][measure] / found["medians"][other.format(loop)][measure]
            for loop in loops
        }
        assert found["per_loop"][key] == pytest.approx(quotients)
        assert found[key] == pytest.approx(worst(quotients.values()))
    assert found["throughput_ratio_to_zmq"] is None
    assert found["small_rate_ratio_to_websockets"] is None
    assert found["failed"] == found["unavailable"] == {}
    assert {target["name"].partition(" ")[0] for target in found["targets"]} == {
        "throughput_ratio_to_sockets",
        "small_rate_ratio_to_streams",
        "round_trip_ratio_to_streams",
    }
    assert found["machine"]["loops"] == loops
    shown = capsys.readouterr().out
    assert all(name in shown for name in names)


def test_link_without_a_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ZmqEnd, "needs", ABSENT)
    file = tmp_path / "link.json"
    assert command("link", "--quick", "--only", "zmq", "--json", str(file)) == MET
    found = json.loads(file.read_text())
    assert found["unavailable"] == {"zmq": "not installed: pip install 'p2pml[bench]'"}
    assert found["throughput_ratio_to_zmq"] is None
    assert "not installed: pip install 'p2pml[bench]'" in capsys.readouterr().out


def test_link_compares_like_with_like() -> None:
    middle = {
        "p2pml-asyncio": {"throughput": 8.0, "rate": 30.0, "round_trip": 4.0},
        "p2pml-uvloop": {"throughput": 9.0, "rate": 90.0, "round_trip": 3.0},
        "sockets": {"throughput": 10.0},
        "streams-asyncio": {"rate": 10.0, "round_trip": 2.0},
        "streams-uvloop": {"rate": 60.0, "round_trip": 2.0},
    }
    found = link.compare(middle, ["asyncio", "uvloop"])
    assert found["throughput_ratio_to_sockets"] == {"asyncio": 0.8, "uvloop": 0.9}
    assert found["small_rate_ratio_to_streams"] == {"asyncio": 3.0, "uvloop": 1.5}
    assert found["round_trip_ratio_to_streams"] == {"asyncio": 2.0, "uvloop": 1.5}
    assert found["throughput_ratio_to_zmq"] == {"asyncio": None, "uvloop": None}
    ratios = {ratio.key: ratio for ratio in link.RATIOS}
    for key, expected in [
        ("throughput_ratio_to_sockets", 0.8),
        ("round_trip_ratio_to_streams", 2.0),
        ("throughput_ratio_to_zmq", None),
    ]:
        assert link.worst(ratios[key], found[key]) == expected


def test_unknown_contestant_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command("link", "--only", "sockets,carrier-pigeons")
    assert "carrier-pigeons: choose from sockets, zmq" in capsys.readouterr().err


# -------------------------------------------------------------------------------------------------------------- reduce


def outcome(ours: list[float], theirs: list[float], memory: int) -> reduce.Outcome:
    return reduce.Outcome(
        seconds={reduce.OURS: {"40MB": ours}, "gloo": {"40MB": theirs}}, memory={reduce.OURS: {"40MB": memory}}
    )


def test_reduce_judges_the_medians() -> None:
    sizes = {"40MB": 40_000_000}
    outcomes = {2: outcome([1.0, 9.0, 2.0], [4.0, 4.0, 4.0], 80_000_000), 8: outcome([6.0], [5.0], 100_000_000)}
    ratios = reduce.compare(outcomes, sizes, "gloo")
    assert ratios == {"40MB": {"2": 0.5, "8": 1.2}}
    copies = reduce.memory_copies(outcomes, "40MB", 40_000_000)
    assert copies == {"2": 2.0, "8": 2.5}
    met = {target.name: target.met for target in reduce.judge({"gloo": ratios}, copies, sizes)}
    assert met == {
        "time_ratio_to_gloo (40MB, 2 peers)": True,
        "time_ratio_to_gloo (40MB, 8 peers)": False,
        "extra_memory_copies (40MB, 2 peers)": True,
        "extra_memory_copies (40MB, 8 peers)": False,
    }
    assert reduce.worst(ratios["40MB"]) == 1.2
    assert reduce.worst({"2": 1.0, "8": None}) is None


def test_reduce_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GlooReducer, "needs", ABSENT)
    monkeypatch.setattr(reduce, "FAMILIES", {"gloo": GlooReducer})
    file = tmp_path / "reduce.json"
    words = ("reduce", "--peers", "2", "--sizes", "4KB", "--rounds", "1", "--json", str(file))
    with pytest.raises(SystemExit):  # asked for by name, it is an error
        command(*words, "--against", "gloo")
    assert command(*words) == NOT_JUDGED
    found = json.loads(file.read_text())
    assert found["unavailable"] == {"gloo": "not installed: pip install 'p2pml[bench]'"}
    assert found["time_ratio_to_gloo"] is None
    assert found["extra_memory_copies"] is None


@pytest.mark.slow
def test_reduce_beside_gloo(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    file = tmp_path / "reduce.json"
    assert command("reduce", "--quick", "--peers", "2,3", "--json", str(file)) == MET
    found = json.loads(file.read_text())
    for peers in ("2", "3"):
        for name, sizes in found["seconds"][peers].items():
            assert set(sizes) == set(found["settings"]["sizes"]), name
            assert all(len(values) == found["settings"]["rounds"] and min(values) > 0 for values in sizes.values())
            assert min(found["extra_memory_bytes"][peers][name].values()) >= 0


def test_hivemind_says_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(HivemindReducer, "needs", {"no_such_package": "pip install hivemind"})
    with pytest.raises(SystemExit):
        command("reduce", "--against", "gloo,hivemind")
    assert "hivemind is not installed: pip install hivemind" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "sizes"),
    [("4KB,1MiB,46.4MB", [4000, 1 << 20, 46_400_000]), ("7B", [4]), ("1.5 kib", [1536]), ("1GB", [10**9])],
)
def test_sizes(text: str, sizes: list[int]) -> None:
    assert list(reduce.parse_sizes(text).values()) == sizes


@pytest.mark.parametrize("text", ["", "3B", "4", "KB", "-4KB", "4KB,", "4TB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is no size"):
        reduce.parse_sizes(text)


@pytest.mark.parametrize("text", ["1", "2,1", "two", "2,", ""])
def test_what_is_no_number_of_peers(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command("reduce", "--peers", text)
    assert "is no list of numbers from 2 on" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------- memory and verdicts


@pytest.mark.parametrize("polled", [False, True])
def test_peak_memory(polled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if polled:

        def refuse(self: Path, text: str) -> int:
            raise PermissionError(str(self))

        monkeypatch.setattr(Path, "write_text", refuse)
    size = 64_000_000
    idle = PeakMemory()
    idle.stop()
    peak = PeakMemory()
    held = np.ones(size, np.uint8)
    if not polled:
        del held
    peak.stop()
    assert (peak.method == "polled") or not polled
    assert idle.extra < size / 4
    assert size * 0.9 < peak.extra < size * 1.5


def test_exit_status() -> None:
    met, missed = Target("a", 1.0, 0.8, at_least=True), Target("b", 2.0, 1.5, at_least=False)
    unknown = Target("c", None, 1.0, at_least=True)
    assert (met.met, missed.met, unknown.met) == (True, False, None)
    for targets, failed, quick, expected in [
        ([met], {}, False, MET),
        ([met, missed, unknown], {}, False, MISSED_OR_FAILED),
        ([met, unknown], {}, False, NOT_JUDGED),
        ([met], {"zmq": "died"}, False, MISSED_OR_FAILED),
        ([missed, unknown], {}, True, MET),
        ([missed], {"zmq": "died"}, True, MISSED_OR_FAILED),
    ]:
        assert report.exit_status(targets, failed, quick=quick) == expected
