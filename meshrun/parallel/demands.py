"""What a model asks of a layout: known from its constructor alone, before any process exists.

    demands = demands_of(experiment)
    demands.refuse(layout)                        # a sentence with the nearest layouts that work
    demands.objection(layout)                     # the same as a value: why not, or None

The model is traced on the meta device, so that this takes no memory, however large it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.utils.data import default_collate

from meshrun.errors import SharedError, UserError
from meshrun.experiment import Experiment, sample_of
from meshrun.layout import Layout, nearest, parse
from meshrun.parallel import cp, pp, segments, tp
from meshrun.parallel.construct import blueprint
from meshrun.parallel.schedule import chunks_of
from meshrun.parallel.values import refuse_other, without_values


@dataclass
class Demands:
    """What a model asks of a layout."""

    experiment: Experiment
    model: nn.Module
    """On the meta device."""
    segments: list[str]
    plan: tp.Plan
    _traces: list[pp.Trace] = field(default_factory=list)

    def objection(self, layout: Layout) -> str | None:
        """Why this layout cannot work, or None."""
        try:
            self._check(layout)
        except UserError as error:
            return str(error)
        return None

    def refuse(self, layout: Layout) -> None:
        """A `UserError` for a layout that cannot work, with the nearest that can."""
        text = self.objection(layout)
        if text is not None:
            fitting = nearest(layout, layout.size, works=lambda near: self.objection(near) is None)
            alone = [parse(f"{axis}={layout.size}") for axis in ("fsdp", "tp") if axis != "tp" or self.plan.styles]
            fitting += [each for each in alone if each not in fitting and self.objection(each) is None]
            near = f"; layouts of {layout.size} ranks that work: {'; '.join(map(str, fitting))}" if fitting else ""
            raise SharedError(f"{text.removesuffix(' (--layout)')}{near} (--layout)")

    def trace(self) -> pp.Trace:
        if not self._traces:
            self._traces.append(pp.follow(self.model, self.segments, self.sample()))
        return self._traces[0]

    def sample(self) -> tuple[Any, Any]:
        """A batch of the first sample twice: batch norm refuses to train on one value a channel."""
        first = sample_of(self.experiment.train, 0)
        inputs, targets = (self.experiment.collate or default_collate)([first, first])
        return inputs, targets

    def _check(self, layout: Layout) -> None:
        stages = layout.pp * chunks_of(layout)
        if layout.pp > 1 and not self.segments:
            raise UserError(
                f"layout '{layout}' cuts the model into {stages} stages, but the model has no segments: it is one "
                f"piece; name them with Experiment(segments=lambda model: [model.embed, *model.blocks, model.head])"
            )
        if layout.pp > 1 and stages > len(self.segments):
            raise UserError(
                f"layout '{layout}' needs {stages} stages, but the model has only {len(self.segments)} segments"
            )
        if layout.tp > 1:
            tp.check(self.model, self.plan, layout.tp)
            self._check_sequence(layout)
        if layout.cp > 1:
            inputs, targets = self.sample()
            inputs, _, positions = cp.split(inputs, targets, 0, layout.cp)
            cp.with_positions(self.model, inputs, positions)
        if layout.pp > 1:
            pp.refuse_hidden(self.model, self.trace(), self.trace().cuts(stages), self.sample(), self.experiment.loss)

    def _check_sequence(self, layout: Layout) -> None:
        """Where the plan keeps activations in parts along the sequence, these must be equal."""
        if not any(style in tp.ALONG_SEQUENCE for style in self.plan.styles.values()):
            return
        tokens = cp.tokens_of(self.sample()[0]).shape[1]
        if tokens % (layout.tp * layout.cp):
            parts = f"tp={layout.tp}" + (f" and cp={layout.cp}" if layout.cp > 1 else "")
            raise UserError(
                f"sequences have {tokens} tokens, which {parts} cannot cut into {layout.tp * layout.cp} equal parts; "
                f"make the length a multiple of that"
            )


def demands_of(experiment: Experiment, model: nn.Module | None = None) -> Demands:
    """What the experiment's model asks of a layout; the model is built without values, unless it is given."""
    if model is None:
        made = blueprint(experiment.model, experiment.seed)
        refuse_other(made.model, has_values=made.reason is not None)
        model = without_values(made)
    try:
        found = segments.find(model, experiment.segments)
        plan = tp.plan_for(model, experiment.tensor_plan)
    except UserError as error:
        raise SharedError(str(error)) from error
    return Demands(experiment, model, found, plan)
