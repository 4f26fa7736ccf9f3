"""MDLdroid's synchronous training (Alg. 1): all peers train on their own data, and combine what they have learned, by rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from p2pml.errors import P2PMLError
from p2pml.protocols.chainsgd.agent import Options
from p2pml.protocols.chainsgd.machine import AverageResult, ChainGroup, Contribution
from p2pml.protocols.chainsgd.member import GOODBYE, GroupEnd, entry
from p2pml.protocols.chainsgd.schedule import Scheduler
from p2pml.protocols.training.merge import Accumulator
from p2pml.protocols.training.segments import BoundTensors
from p2pml.statemachine import Compute, Computed, Effect, Finish, Report, TimerFired, on

if TYPE_CHECKING:
    from p2pml.protocols.training.data import Data
    from p2pml.protocols.training.trainer import StepResult, Trainer

Recorder = Callable[[str, int, Mapping[str, Any], float], None]
"""Called, by a worker thread, with 'contribution' or 'result', the round, the tensors, and their weight."""

_TRAIN, _EVALUATE = "chainsgd train", "chainsgd evaluate"


@dataclass(frozen=True, slots=True)
class TrainingEnd:
    """How training ended for this peer, and the fields of its 'round' reports."""

    end: GroupEnd
    rounds: Sequence[Mapping[str, Any]]


@dataclass(slots=True)
class _Round:
    number: int
    began: float
    trained: StepResult | None = None
    fields: dict[str, Any] = field(default_factory=dict)


class ChainSGD(ChainGroup):
    """One peer that trains in a group; see `ChainGroup` for `agent`, `options`, `scheduler`, `addresses`, `resources`.

    trainer: the model, and the data it is trained on here. held_out: what it is evaluated on after each round, if
    given. rounds: after which the group ends (the agent's counts), and by which the learning rate is scheduled; None:
    never by itself. steps_per_round: None for one pass over the own data.
    combine: what is averaged: the models after local training, or, with 'delta', what that training changed (with one
    more copy of the model in memory); integers and booleans that cannot be subtracted are averaged as they are.
    weighting: all peers count alike, or by the samples that they have trained on in the round. record: see `Recorder`.

    Reports 'round' with round, loss (of local training), seconds, samples, members, weight, counted, and what evaluation
    gives, its loss as held_out_loss. Finishes with a `TrainingEnd`.
    """

    name = "chainsgd"

    def __init__(
        self,
        trainer: Trainer,
        held_out: Data | None = None,
        *,
        agent: str | None = None,
        options: Options | None = None,
        scheduler: Scheduler | None = None,
        addresses: Sequence[str] = (),
        resources: float = 1.0,
        rounds: int | None = None,
        steps_per_round: int | None = None,
        combine: Literal["parameters", "delta"] = "parameters",
        weighting: Literal["equal", "samples"] = "equal",
        record: Recorder | None = None,
    ) -> None:
        from p2pml.protocols.training.tensors import state_tensors

        if combine not in ("parameters", "delta") or weighting not in ("equal", "samples"):
            raise ValueError(
                f"combine is 'parameters' or 'delta', weighting 'equal' or 'samples', not {combine}, {weighting}"
            )
        super().__init__(
            state_tensors(trainer.model),
            agent=agent,
            options=replace(options or Options(), rounds=rounds),
            scheduler=scheduler,
            addresses=addresses,
            resources=resources,
        )
        self.trainer = trainer
        self.held_out = held_out
        self.rounds = rounds
        self.steps_per_round = steps_per_round
        self.delta = combine == "delta"
        self.by_samples = weighting == "samples"
        self.record = record
        self.history: list[Mapping[str, Any]] = []
        # With 'delta': what the tensors were before the round; with all later rounds' results while this peer is behind.
        self._base: dict[str, Any] = {}
        self._missed = 0  # the last round whose result is in there
        self._round: _Round | None = None
        self._evaluating = 0
        self._end: GroupEnd | None = None

    # --------------------------------------------------------------------------------------------------------- rounds

    def round_began(self, round_: int) -> Iterator[Effect]:
        """Train, unless the last round's training is still going on."""
        if self._round is None:
            self._round = _Round(round_, self.now)
            self._base = {name: tensor.clone() for name, tensor in self._subtractable()}
            yield Compute(_TRAIN, self._train, (round_,), cost=self._samples_per_round)

    def round_ended(self, result: AverageResult | P2PMLError) -> Iterator[Effect]:
        """Evaluate the group's model; the next round's training comes after that."""
        done, self._round = self._round, None
        if done is None:
            return
        if isinstance(result, AverageResult):
            trained = done.trained
            assert trained is not None
            done.fields = {
                "round": result.round,
                "loss": trained.loss,
                "samples": trained.samples,
                "members": len(result.members),
                "weight": result.weight,
                "counted": result.counted,
            }
            self._evaluating += 1
            yield Compute(_EVALUATE, self._evaluate, (done,))
        else:
            for name, base in self._base.items():
                self.tensors[name].add_(base)
            if self._end is None:
                yield Report("no result", {"round": done.number, "reason": str(result)})

    @on(Computed)
    @entry
    def computed(self, event: Computed) -> Iterator[Effect]:
        """Hand in what training gave, or report what evaluation found."""
        if event.tag == _TRAIN and self._round is not None:
            self._round.trained = event.result
            yield from self.offer(Contribution(weight=self._weight(event.result)))
        elif event.tag == _EVALUATE:
            done, metrics = event.result
            self._evaluating -= 1
            done.fields |= {"seconds": self.now - done.began, **metrics}
            self.history.append(done.fields)
            yield Report("round", done.fields)
            if self._end is not None and not self._evaluating:
                yield self._finish(self._end)
        else:
            yield from super().computed(event)

    @on(TimerFired)
    @entry
    def fired(self, event: TimerFired) -> Iterator[Effect]:
        """A peer that was told to stop and had its time goes, whatever is being evaluated."""
        if event.name == GOODBYE:
            self._evaluating = 0
        yield from super().fired(event)

    def ended(self, end: GroupEnd) -> Iterator[Effect]:
        """Finish when the last evaluation is through.

        The first reason stands: an agent that has stopped the group leaves while others still evaluate.
        """
        if self._end is None:
            self._end = end
        for effect in super().ended(end):
            if not isinstance(effect, Finish):
                yield effect
            elif not self._evaluating:
                yield self._finish(self._end)

    def _finish(self, end: GroupEnd) -> Effect:
        return Finish(TrainingEnd(end, self.history))

    def _weight(self, trained: StepResult) -> float:
        return float(trained.samples) if self.by_samples else 1.0

    @property
    def _samples_per_round(self) -> float:
        steps = self.trainer.steps_per_epoch if self.steps_per_round is None else self.steps_per_round
        return float(steps * self.trainer.batch_size)

    # ------------------------------------------------------------------------------------- what worker threads do

    def _train(self, round_: int) -> StepResult:
        progress = (round_ - 1) / self.rounds if self.rounds else 0.0
        if self.steps_per_round is None:
            result = self.trainer.epoch(progress)
        else:
            result = self.trainer.steps(self.steps_per_round, progress)
        for name, base in self._base.items():
            self.tensors[name].sub_(base)
        if self.record is not None:
            self.record("contribution", round_, self.tensors, self._weight(result))
        return result

    def write_result(self, accumulator: Accumulator, bound: BoundTensors) -> None:
        """With 'delta', what a round gave is added to what the model was before."""
        super().write_result(accumulator, bound)
        if not self.joined:
            return
        if self.record is not None:
            self.record("result", self.last_round, self.tensors, accumulator.weights[0])
        for name, base in self._base.items():
            if self._missed == self.last_round:
                self.tensors[name].copy_(base)
            else:
                self.tensors[name].add_(base)

    def missed_result(self, accumulator: Accumulator) -> None:
        """With 'delta', a change that is not added up is lost."""
        if self._base and self.last_round != self._missed:
            self._missed = self.last_round
            changes = accumulator.result()
            for name, base in self._base.items():
                base.add_(changes[name].torch())

    def _evaluate(self, done: _Round) -> tuple[_Round, dict[str, float]]:
        self.trainer.model_replaced()
        if self.held_out is None:
            return done, {}
        metrics = self.trainer.evaluate(self.held_out)
        return done, {"held_out_loss" if name == "loss" else name: value for name, value in metrics.items()}

    def _subtractable(self) -> Iterator[tuple[str, Any]]:
        if self.delta:
            for name, tensor in self.tensors.items():
                if tensor.is_floating_point() or tensor.is_complex() or str(tensor.dtype).startswith("torch.int"):
                    yield name, tensor

    def prepare_model(self) -> None:
        """With 'delta' the accumulator has the last round's change, and the model is here."""
        if self.delta and self._bound is not None and self.reduction is not None:
            self.reduction.hold(self._bound)
