"""What of an experiment cannot work on a layout, said in one sentence before anything runs there.

    refuse(experiment, layout, how)             # all of it: the model is looked at, without its values
    refuse_settings(experiment, layout, how)    # what needs no model

`meshrun run` and `submit` ask before they start processes, and a trainer asks again.
"""

from __future__ import annotations

from meshrun.experiment import Experiment
from meshrun.layout import Layout
from meshrun.parallel.demands import demands_of
from meshrun.parallel.how import How, refuse_how
from meshrun.train.in_backward import refuse_in_backward
from meshrun.train.optim import refuse_unless_separate


def refuse(experiment: Experiment, layout: Layout, how: How) -> None:
    """Say what of an experiment cannot work on a layout, before anything runs there."""
    demands_of(experiment).refuse(layout)
    refuse_settings(experiment, layout, how)


def refuse_settings(experiment: Experiment, layout: Layout, how: How) -> None:
    """What can be told without the model, which `build` asks itself."""
    experiment.refuse_impossible_length()
    refuse_how(experiment, layout, how)
    refuse_in_backward(experiment, layout, how, shown=False, looks_first=False)
    refuse_unless_separate(experiment.optimizer, layout)
