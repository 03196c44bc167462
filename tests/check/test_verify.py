"""Whether a program trains the same everywhere: planted mistakes are caught and named, correct ones raise no alarm."""

from __future__ import annotations

import functools
import importlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from meshrun import mesh
from meshrun.check.causes import likely_cause
from meshrun.check.probe import LARGEST, WEIGHTS, Found, Probing, probe
from meshrun.check.verify import Allowed, Measured, Verdict, allow, judge, measure, weight_differences
from meshrun.layout import parse
from meshrun.parallel.how import How
from tests import warm
from tests.launch.command import MODULE, Ended
from tests.ranks import run_on_ranks

PROGRAMS = Path(__file__).parent / "programs"
TOLERANCE = 1e-5


def train(program: str, layout: str, micro: int | None, folder: Path, **how: bool) -> None:
    """The body of a rank."""
    file, _, function = program.partition(":")
    mesh.use(mesh.Meeting(layout=layout, device="cpu"))
    experiment = getattr(importlib.import_module(f"tests.check.programs.{file}"), function)()
    probing = Probing(
        folder, How(sync_batchnorm=how.get("sync_batchnorm", False)), backwards=how.get("backwards", False)
    )
    probe(replace(experiment, micro=micro or experiment.micro), mesh.start(), probing)


@dataclass
class Compared:
    """A layout held against one process, as `meshrun verify` does it."""

    measured: Measured
    noise: Measured
    allowed: Allowed
    verdict: Verdict
    found: Found
    cause: str


class Trainings:
    """One program's trainings, each on ranks that are forks of a warm process."""

    def __init__(self, program: str, folder: Path) -> None:
        self.program, self.folder = program, folder
        self.compared: dict[tuple[str, bool], Compared] = {}
        self.alone = self.run("dp=1", "alone")
        batch = getattr(importlib.import_module(f"tests.check.programs.{program.partition(':')[0]}"), self.name)().batch
        self.noise = self.measured(self.run("dp=1", "twin", -(-batch // 3)))
        self.allowed = allow(TOLERANCE, self.noise, len(Found.read(self.alone).losses))

    @property
    def name(self) -> str:
        return self.program.partition(":")[2]

    def run(self, layout: str, name: str, micro: int | None = None, **how: bool) -> Path:
        folder = self.folder / name
        folder.mkdir()
        given = {"program": self.program, "layout": layout, "micro": micro, "folder": folder, **how}
        run_on_ranks(__file__, "train", parse(layout).size, given, timeout=50)
        return folder

    def measured(self, folder: Path) -> Measured:
        return measure(Found.read(self.alone), Found.read(folder), (self.alone, folder))

    def on(self, layout: str, sync_batchnorm: bool = False) -> Compared:
        """Made once, however many tests look at it."""
        if (layout, sync_batchnorm) not in self.compared:
            self.compared[layout, sync_batchnorm] = self._compare(layout, sync_batchnorm)
        return self.compared[layout, sync_batchnorm]

    def _compare(self, layout: str, sync_batchnorm: bool) -> Compared:
        folder = self.run(layout, layout + "-synced" * sync_batchnorm, sync_batchnorm=sync_batchnorm)
        measured, found = self.measured(folder), Found.read(folder)
        verdict = judge(measured, self.allowed)
        cause = likely_cause(Found.read(self.alone), found, measured, self.allowed, verdict)
        return Compared(measured, self.noise, self.allowed, verdict, found, cause)


@pytest.fixture(scope="module")
def trainings_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trainings]:
    """One process and its twin are trained once a program."""
    return functools.cache(lambda program: Trainings(program, tmp_path_factory.mktemp("trainings")))


MISTAKES = {
    "mean_loss": ("dp=2", 1, "the loss returns a mean where it must return a sum"),
    "mean_of_means": ("dp=2", 1, "the loss returns a mean where it must return a sum"),
    "scaled_gradient": ("dp=2", 1, "the gradient is 2 times that of one process, and there are 2 ranks"),
    "scaled_and_clipped_gradient": ("dp=2", 1, "the gradient is 2 times that of one process"),
    "repeated_shard": ("dp=2", 1, "the dataset gives other data on these ranks: sample 1 is not"),
    "sharded_dataset": ("dp=2", 1, "the training set has 20 samples here and 40 in one process"),
    "augmented_data": ("dp=2", 1, "the dataset is not deterministic: sample"),
    "local_clipping": ("fsdp=2", 5, "the optimizer scales gradients by the norm of the part that its rank holds"),
    "noisy_collate": ("dp=2", 1, "the collate function draws random numbers"),
    "mixing_collate": ("dp=2", 1, "the inputs of a sample depend on the other samples of its micro-batch"),
    "noisy_augment": ("dp=2", 1, "Experiment(augment=…) draws random numbers of its own"),
    "changing_evaluation": ("dp=2", None, "the evaluation set 'val' is not deterministic"),
    "own_noise": ("dp=2", 1, "random numbers drawn at "),
    "batchnorm": ("dp=2", 1, r"BatchNorm (1) takes its statistics from a micro-batch, which has 6 samples here and 12"),
    "unknown_cause": ("dp=2", 1, "the forward pass computes something else from step 1 on, parameter layers.0.weight"),
    "nan_evaluation": ("dp=2", None, "the loss of the evaluation 'val' is nan here and 0."),
    "nan_buffer": ("dp=2", None, "the final values of second are not all numbers"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_caught_and_its_cause_is_named(name: str, trainings_of: Callable[[str], Trainings]):
    layout, step, sentence = MISTAKES[name]
    compared = trainings_of(f"mistakes:{name}").on(layout)
    assert not compared.verdict.ok
    assert compared.verdict.first_step == step
    assert compared.cause.startswith(sentence), compared.cause


def test_the_line_that_draws_random_numbers_is_named(trainings_of: Callable[[str], Trainings]):
    cause = trainings_of("mistakes:own_noise").on("dp=2").cause
    lines = (PROGRAMS / "mistakes.py").read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if "randn_like(x)" in text)
    assert f"{PROGRAMS / 'mistakes.py'}:{line}" in cause


@pytest.mark.parametrize("layout", ["dp=2", "fsdp=2"])
@pytest.mark.parametrize("name", ["multilayer", "convolutions", "encoder", "augmented", "time_first"])
def test_a_correct_program_raises_no_alarm(name: str, layout: str, trainings_of: Callable[[str], Trainings]):
    compared = trainings_of(f"correct:{name}").on(layout)
    assert compared.verdict.ok, (compared.cause, compared.measured, compared.allowed)
    assert not compared.allowed.depends_on_micro
    assert compared.measured.losses[0] < TOLERANCE


@pytest.mark.parametrize("layout", ["dp=2", "dp=3", "fsdp=2"])
def test_a_model_that_blows_rounding_up_raises_no_alarm(layout: str, trainings_of: Callable[[str], Trainings]):
    compared = trainings_of("correct:sines").on(layout)
    assert compared.measured.loss > 1e-2 and compared.noise.loss > 1e-2, "it must blow rounding up"
    assert compared.verdict.ok, (compared.cause, compared.measured, compared.allowed)


def test_a_mistake_is_caught_in_a_model_that_blows_rounding_up(trainings_of: Callable[[str], Trainings]):
    compared = trainings_of("mistakes:scaled_sines").on("dp=2")
    assert not compared.verdict.ok and compared.verdict.first_step == 1
    assert compared.cause.startswith("the gradient is 2 times")


def test_local_clipping_that_sees_the_whole_gradient_is_no_mistake(trainings_of: Callable[[str], Trainings]):
    assert trainings_of("mistakes:local_clipping").on("dp=2").verdict.ok


def test_batchnorm_over_all_ranks_is_no_mistake(trainings_of: Callable[[str], Trainings]):
    trainings = trainings_of("mistakes:batchnorm")
    assert trainings.allowed.depends_on_micro and trainings.allowed.losses[-1] == TOLERANCE
    assert trainings.on("dp=2", sync_batchnorm=True).verdict.ok
    noise = trainings.measured(trainings.run("dp=1", "backwards", sync_batchnorm=True, backwards=True))
    assert not noise.ids_equal and 0 < noise.grad_norm < TOLERANCE, "batches backwards show its rounding all the same"
    assert not allow(TOLERANCE, noise, len(noise.losses)).depends_on_micro


def test_gradient_norms_of_parameters_add_up_to_the_whole_on_every_layout(trainings_of: Callable[[str], Trainings]):
    trainings = trainings_of("correct:multilayer")
    on_layouts = [trainings.on(layout).found for layout in ("dp=2", "fsdp=2", "dp=2,fsdp=2")]
    for found in (Found.read(trainings.alone), *on_layouts):
        for norm, parameters in zip(found.grad_norms, found.gradients, strict=True):
            assert sum(value**2 for value in parameters.values()) ** 0.5 == pytest.approx(norm, rel=1e-5)
            assert list(parameters) == ["0.weight", "0.bias", "3.weight", "3.bias"]


def folder_of(path: Path, weights: dict[str, torch.Tensor], largest: dict[str, torch.Tensor] | None = None) -> Path:
    path.mkdir()
    save_file(weights, path / WEIGHTS)
    if largest is not None:
        save_file(largest, path / LARGEST)
    return path


def test_only_elements_that_noise_drives_are_left_out_of_the_weights(tmp_path: Path):
    base = {"a": torch.ones(4), "steps": torch.tensor(3)}
    mine = folder_of(tmp_path / "mine", base, {"a": torch.tensor([1.0, 1e-8, 0.0, 1.0])})
    for number, expected in enumerate((0.05, 0.0, 0.05, 0.05)):
        moved = base["a"].clone()
        moved[number] += 0.1
        theirs = folder_of(tmp_path / f"theirs{number}", {"a": moved, "steps": torch.tensor(9)})
        assert weight_differences(mine, theirs) == {"a": pytest.approx(expected)}


def measured(losses: list[float], **changes: object) -> Measured:
    fields = {
        "losses": losses,
        "grad_norms": losses,
        "parameters": [{"w": each} for each in losses],
        "weights": {"w": losses[-1]},
        "evals": 0.0,
        "counts_equal": True,
        "ids_equal": True,
    }
    return Measured(**{**fields, **changes})


def test_rounding_widens_the_tolerance_from_the_step_on_in_which_it_grows():
    allowed = allow(TOLERANCE, measured([1e-7, 1e-2, 1e-4]), 3)
    assert allowed.losses == pytest.approx([1e-5, 1e-1, 1e-1])
    assert judge(measured([1e-7, 9e-2, 9e-2], weights={"w": 1e-3}), allowed).ok
    verdict = judge(measured([1e-4, 9e-2, 9e-2]), allowed)
    assert not verdict.ok and verdict.first_step == 1 and verdict.first_parameter == "w"


def test_rounding_above_the_tolerance_in_one_number_widens_it_for_all():
    noise = measured([1e-7, 1e-7], grad_norms=[1e-7, 1e-3], weights={"w": 1e-7})
    allowed = allow(TOLERANCE, noise, 2)
    assert allowed.losses == pytest.approx([1e-5, 1e-2])
    assert allowed.weight == allowed.evals == pytest.approx(1e-2)


def test_a_model_that_depends_on_micro_batches_does_not_widen_the_tolerance():
    allowed = allow(TOLERANCE, measured([1e-2, 1e-2, 1e-2]), 3)
    assert allowed.depends_on_micro
    assert allowed.losses == [TOLERANCE] * 3 and allowed.weight == TOLERANCE


@pytest.mark.parametrize(
    "changes", [{"ids_equal": False}, {"counts_equal": False}, {"evals": 1e-3}, {"weights": {"w": 1e-3}}]
)
def test_each_quantity_alone_decides(changes: dict[str, object]):
    allowed = allow(TOLERANCE, None, 2)
    assert judge(measured([1e-7, 1e-7]), allowed).ok
    verdict = judge(measured([1e-7, 1e-7], **changes), allowed)
    assert not verdict.ok and verdict.first_step is None


NAN = math.nan
HOLDING_NAN = {
    "loss": {"losses": [1e-7, NAN]},
    "gradient norm": {"grad_norms": [1e-7, NAN]},
    "gradient": {"parameters": [{"v": 0.0, "w": 1e-7}, {"v": 0.0, "w": NAN}]},
    "weight": {"weights": {"v": 0.0, "w": NAN}},
    "evaluation": {"evals": NAN},
}


@pytest.mark.parametrize("case", HOLDING_NAN)
def test_a_nan_is_a_difference_wherever_it_stands(case: str):
    for allowed in (allow(TOLERANCE, None, 2), allow(TOLERANCE, measured([1e-7, 1e-3]), 2)):
        verdict = judge(replace(measured([1e-7, 1e-7]), **HOLDING_NAN[case]), allowed)
        assert not verdict.ok
        assert verdict.first_step == (None if case in ("weight", "evaluation") else 2)
        assert verdict.first_parameter == ("w" if case in ("gradient", "weight") else None)


@pytest.mark.parametrize("case", HOLDING_NAN)
def test_a_twin_that_holds_a_nan_widens_nothing(case: str):
    twin = replace(measured([1e-7, 1e-3]), **HOLDING_NAN[case], not_number="the loss is nan")
    allowed = allow(TOLERANCE, twin, 2)
    assert allowed.losses == allowed.grad_norms == allowed.parameters == [TOLERANCE] * 2
    assert allowed.weight == allowed.evals == TOLERANCE


def found_with(**changes: object) -> Found:
    steps = {"losses": [0.5, 0.25], "grad_norms": [2.0, 1.0], "gradients": [{"v": 1.0, "w": 1.0}] * 2}
    return replace(evaluated(loss=0.5, count=8, accuracy=0.5), **{**steps, **changes})


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize(
    "name, where, sentence",
    [
        ("losses", lambda bad: [0.5, bad], "the loss of step 2 is {} here and 0.25 in one process"),
        ("grad_norms", lambda bad: [2.0, bad], "the gradient norm of step 2 is {} here and 1 in one process"),
        ("gradients", lambda bad: [{"v": 1.0, "w": 1.0}, {"v": 1.0, "w": bad}], "the gradient norm of w at step 2 is"),
        ("evals", lambda bad: {"val": {"loss": bad, "count": 8, "accuracy": 0.5}}, "the loss of the evaluation 'val'"),
        ("evals", lambda bad: {"val": {"loss": 0.5, "count": 8, "accuracy": bad}}, "the accuracy of the evaluation"),
    ],
)
def test_measuring_names_what_is_no_number(
    name: str, where: Callable[[float], object], sentence: str, bad: float, tmp_path: Path
):
    folders = (folder_of(tmp_path / "a", {}, {}), folder_of(tmp_path / "b", {}))
    good, wrong = found_with(), found_with(**{name: where(bad)})
    for reference, other in ((good, wrong), (wrong, good), (wrong, wrong)):
        found = measure(reference, other, folders)
        assert not judge(found, allow(TOLERANCE, None, 2)).ok
        assert found.not_number
    found = measure(good, wrong, folders)
    assert found.not_number.startswith(sentence.format(bad))
    assert likely_cause(good, wrong, found, allow(TOLERANCE, None, 2), judge(found, allow(TOLERANCE, None, 2))) == (
        found.not_number
    )
    same = measure(good, good, folders)
    assert same.not_number is None and judge(same, allow(TOLERANCE, None, 2)).ok


def test_weights_that_are_missing_too_many_or_no_numbers_differ(tmp_path: Path):
    base = {"a": torch.ones(4), "b": torch.ones(2), "c": torch.ones(2, dtype=torch.complex64)}
    mine = folder_of(tmp_path / "mine", base, {"a": torch.ones(4)})
    cases = {
        "nan": ({**base, "b": torch.tensor([1.0, NAN])}, {"b": pytest.approx(NAN, nan_ok=True)}),
        "nan that noise drives": (
            {**base, "a": torch.tensor([1.0, 1.0, 1.0, NAN])},
            {"a": pytest.approx(NAN, nan_ok=True)},
        ),
        "less": ({"a": base["a"], "c": base["c"]}, {"b": math.inf}),
        "more": ({**base, "d": torch.ones(1)}, {"d": math.inf}),
        "another shape": ({**base, "b": torch.ones(3)}, {"b": math.inf}),
        "another phase": ({**base, "c": torch.tensor([1, 1j])}, {"c": 1.0}),
    }
    for number, (weights, expected) in enumerate(cases.values()):
        found = weight_differences(mine, folder_of(tmp_path / str(number), weights))
        assert {name: each for name, each in found.items() if each != 0} == expected


def evaluated(**scores: float) -> Found:
    found = {"layout": "dp=1", "world": 1, "replicas": 1, "losses": [1.0], "grad_norms": [1.0], "gradients": [{}]}
    rest = {"length": 1, "ids": "", "samples": {}, "unstable": [], "pieces": [1], "factors": [[1.0]], "torn": []}
    return Found(**found, **rest, evals={"val": scores})


def test_a_sample_on_the_border_is_no_difference_but_more_of_them_are(tmp_path: Path):
    folders = (folder_of(tmp_path / "a", {}, {}), folder_of(tmp_path / "b", {}))
    reference = evaluated(loss=0.5, count=1000, accuracy=0.9)
    for accuracy, expected in ((0.901, 0.0), (0.91, 0.01 / 0.9)):
        other = evaluated(loss=0.5, count=1000, accuracy=accuracy)
        assert measure(reference, other, folders).evals == pytest.approx(expected)
    assert not measure(reference, evaluated(loss=0.5, count=999, accuracy=0.9), folders).counts_equal


def verify(folder: Path, program: str, *words: object) -> Ended:
    """As people call it; with patience, for it starts several trainings on a machine that may be busy."""
    file, _, function = program.partition(":")
    command = [*MODULE, "verify", f"{PROGRAMS / file}.py:{function}", *map(str, words)]
    ran = warm.run(command, cwd=folder, capture_output=True, text=True, timeout=290, check=False)
    return Ended(ran.returncode, ran.stdout, ran.stderr)


@pytest.mark.timeout(300)
def test_verify_says_of_each_layout_whether_it_trains_the_same(tmp_path: Path):
    """One that is right, one that is wrong, and one that the model cannot have."""
    ended = verify(
        tmp_path, "mistakes:local_clipping", "--layouts", "dp=2; fsdp=2; pp=4", "--steps", 5, "--no-resume", "--json"
    )
    assert ended.status == 1, ended.err
    document = ended.document
    assert (document["ok"], document["steps"], document["tolerance"]) == (False, 5, 1e-5)
    same, wrong, impossible = document["layouts"]
    assert same["layout"] == "dp=2" and same["ok"] and same["cause"] is None and same["ids_equal"]
    assert max(same[name] for name in ("loss_diff", "grad_norm_diff", "weight_diff", "eval_diff")) < TOLERANCE
    assert wrong["layout"] == "fsdp=2" and not wrong["ok"] and wrong["first_step"] == 5 and wrong["loss_diff"] > 1e-3
    assert "norm of the part that its rank holds" in wrong["cause"]
    assert not impossible["ok"] and impossible["loss_diff"] is None and "4 stages" in impossible["cause"]
    assert document["noise"]["loss_diff"] < 1e-6
    assert "verify mistakes.py: 4 of 4, fsdp=2" in ended.err
    assert not list(tmp_path.iterdir()), "nothing is left behind unless asked for"


@pytest.mark.timeout(300)
def test_a_model_that_draws_is_not_the_same_where_a_layout_happens_to_draw_alike(tmp_path: Path):
    ended = verify(tmp_path, "mistakes:own_noise", "--layouts", "tp=2", "--json")
    assert ended.status == 1, ended.err
    (row,) = ended.document["layouts"]
    assert row["loss_diff"] < 1e-5 and not ended.document["ok"] and not row["ok"] and not row["judged"]
    assert row["cause"].startswith(f"random numbers drawn at {PROGRAMS / 'mistakes.py'}:")


@pytest.mark.timeout(300)
def test_a_nan_of_two_ranks_is_told_and_the_document_is_json(tmp_path: Path):
    ended = verify(tmp_path, "mistakes:nan_evaluation", "--layouts", "dp=2", "--steps", 2, "--json")
    assert ended.status == 1, ended.err
    document = json.loads(ended.out, parse_constant=pytest.fail)
    (row,) = document["layouts"]
    assert not document["ok"] and not row["ok"] and row["eval_diff"] is None
    assert document["not_numbers"] == {"/layouts/0/eval_diff": "NaN"}
    assert row["cause"].startswith("the loss of the evaluation 'val' is nan here and 0.")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("words, tolerance", [((), 1e-3), (("--tolerance", 1e-7), 1e-7)])
def test_a_tolerance_that_is_given_holds_in_any_precision(tmp_path: Path, words: tuple[object, ...], tolerance: float):
    given = ("--precision", "bf16", "--layouts", "pp=9", "--steps", 1, "--json", *words)
    assert verify(tmp_path, "mistakes:local_clipping", *given).document["tolerance"] == tolerance


@pytest.mark.timeout(300)
def test_a_rank_that_fails_is_a_layout_that_differs(tmp_path: Path):
    ended = verify(tmp_path, "mistakes:failing_rank", "--layouts", "dp=2", "--keep", "kept")
    assert ended.status == 1, ended.err
    assert "rank 1 on" in ended.out and "ValueError: bad luck" in ended.out
    assert "1 of 1 layouts do not train as one process does" in ended.out
    assert json.loads((tmp_path / "kept" / "dp1-1" / "found.json").read_text())["losses"]


REFUSALS = {
    "no layout": (["--layouts", " ; "], "layouts is ' ; '; it must name at least one"),
    "open layout": (["--layouts", "dp=*"], "layout 'dp=*' is open"),
    "unknown axis": (["--layouts", "xp=2"], "has no axis 'xp'"),
    "no tolerance": (["--tolerance", "0"], "tolerance is 0.0; it must be above 0 (--tolerance)"),
    "option of run": (["--procs", "2"], "No such option: --procs"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_bad_input_is_refused_in_one_sentence(case: str, capsys: pytest.CaptureFixture[str]):
    from meshrun.cli.main import main

    words, sentence = REFUSALS[case]
    with pytest.raises(SystemExit) as ended:
        main(["verify", f"{PROGRAMS / 'mistakes.py'}:mean_loss", *words])
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert said.startswith("meshrun: ") and said.count("\n") == 1 and sentence in said
