"""What a user gives wrong: one sentence that names the value and the flag, exit status 2, no traceback."""

from __future__ import annotations

import errno
import importlib
import json
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from meshrun.cli.main import main
from meshrun.data.order import Order
from tests.launch.command import TINY, Ended, meshrun

WRONG = str(Path(__file__).parent / "programs" / "wrong.py")

Call = Callable[..., Ended]


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Call]:
    """Runs a command line in this process, for what starts no ranks: importing torch once is enough."""
    from meshrun import mesh

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def called(*words: object) -> Ended:
        with pytest.raises(SystemExit) as ended:
            main(["run", *map(str, words)])
        said = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        mesh.finish()
        return Ended(ended.value.code, said.out, said.err)

    yield called
    mesh.use(mesh.Meeting())
    mesh.finish()


RAISES = """
import torch
from meshrun import Experiment, mean_squared_error

class Data(list):
    def __getitem__(self, index):
        if "{place}" == "data":
            raise {raised}
        return torch.ones(2), torch.ones(1)

def loss(outputs, targets):
    raise {raised}

def experiment():
    model = lambda: torch.nn.Linear(2, 1)
    return Experiment(model, Data(range(8)), loss, lambda given: torch.optim.SGD(given, lr=0.1), batch=4, steps=2)
"""


def check_refusal(plain: Ended, sentence: str) -> None:
    """Exit status 2 and one sentence, the last that is read."""
    assert plain.status == 2, plain.err
    assert len(plain.sentences) == 1
    assert re.search(sentence, plain.sentences[0]), plain.sentences[0]
    assert plain.err.endswith(f"meshrun: {plain.sentences[0]}\n")
    assert "Traceback" not in plain.err
    assert not [line for line in plain.err.splitlines() if not line.strip()]


REFUSALS = {
    "axis with a typo": (["--layout", "fdsp=2"], r"'fdsp=2' has no axis 'fdsp' \(did you mean fsdp\?\).*\(--layout\)$"),
    "degree that is no number": (["--layout", "dp=two"], r"'dp=two' .* degree 'two'.*\(--layout\)$"),
    "degree of zero": (["--layout", "dp=0"], r"'dp=0' .* degree 0.*\(--layout\)$"),
    "empty layout": (["--layout", ""], r"layout '' is empty.*\(--layout\)$"),
    "layout of more ranks than there are": (
        ["--layout", "dp=3", "--procs", 2],
        r"'dp=3' needs 3 ranks but this run has 2; layouts of 2 ranks near it: dp=2 \(--layout\)$",
    ),
    "pipeline of a model in one piece": (
        ["--layout", "pp=2", "--procs", 2],
        r"'pp=2' cuts the model into 2 stages, but the model has no segments.*ranks that work: .*dp=2.*\(--layout\)$",
    ),
    "sequences where there are none": (
        ["--layout", "cp=2", "--procs", 2],
        r"cp needs a target for every token.*ranks that work: .*dp=2.*\(--layout\)$",
    ),
    "option that is none": (
        ["--widht", 3],
        r"No such option: --widht \(meshrun run .*wrong.py --help lists what is valid\)$",
    ),
    "close to an option": (["--sample", 3], r"--sample\b.*--samples"),
    "option without a value": (["--samples"], "'--samples' requires an argument"),
    "value of another type": (["--samples", "many"], r"samples is 'many'; it must be a whole number \(--samples\)$"),
    "word too many": (["again"], r"extra argument.*again"),
    "missing file of options": (["--config", "no.toml"], r"cannot read no.toml: No such file .*\(--config\)$"),
    "empty dataset": (["--samples", 0], "train has no samples; a dataset must have at least one"),
    "batch above the dataset": (["--batch", 21], r"batch is 21 but .* only 20 samples; .*\(--batch\)$"),
    "batch of nothing": (["--batch", 0], r"batch is 0; it must be .* at least 1 \(--batch\)$"),
    "no steps": (["--steps", 0], r"steps is 0; it must be .* at least 1 \(--steps\)$"),
    "less than no epochs": (["--epochs", -1], r"epochs is -1.0; it must be a finite number above 0 \(--epochs\)$"),
    "micro-batch of nothing": (["--micro", 0], r"micro is 0; it must be .* at least 1 \(--micro\)$"),
    "clip of nothing": (["--clip", 0], r"clip is 0.0; it must be a number above 0.*\(--clip\)$"),
    "precision that is none": (["--precision", "fp8"], r"precision is 'fp8'; .*bf16, float8 \(--precision\)$"),
    "order that is none": (["--shuffle", "some"], r"shuffle is 'some'; .* full, window .*\(--shuffle\)$"),
    "no processes": (["--procs", 0], r"procs is 0; it must be at least 1 \(--procs\)$"),
    "less than no readers": (["--workers", -1], r"workers is -1; it must be at least 0 \(--workers\)$"),
    "port that is none": (["--port", 70000], r"port is 70000; .* between 1 and 65535 \(--port\)$"),
    "no time": (["--timeout", 0], r"timeout is 0.0; .*\(--timeout\)$"),
    "name with a folder": (["--name", "a/b"], r"name is 'a/b'; .*\(--name\)$"),
    "runs where a file is": (["--runs", WRONG], r"cannot make a run directory in .*wrong.py: .*\(--runs\)$"),
    "fewer GPUs than ranks": (
        ["--device", "cuda", "--procs", 99],
        r"shows \d+ GPUs? but 99 ranks are to run there; .*\(--procs\), or use --device cpu$",
    ),
    "NCCL without GPUs": (["--device", "cpu", "--backend", "nccl"], r"backend nccl needs GPUs.*\(--backend\)$"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_wrong_option_is_one_sentence_for_people_and_one_document_for_scripts(call: Call, case: str):
    words, sentence = REFUSALS[case]
    plain = call(WRONG, *words)
    check_refusal(plain, sentence)
    assert plain.out == ""
    as_json = call(WRONG, "--json", *words)
    assert as_json.document == {"error": plain.sentences[0], "status": 2}
    assert (as_json.status, as_json.sentences) == (2, plain.sentences)


TARGETS = {
    "": r"run needs a TARGET: a Python file, file.py:function, or a recipe's name",
    "none.py": r"'none.py' does not exist; give a Python file, file.py:function, or a recipe's name$",
    "digitz": r"'digitz' is neither a Python file nor a recipe; did you mean 'digits'\? recipes are: digits",
    "data.csv": r"'data.csv' is neither a Python file nor a recipe",
    f"{WRONG}:": r"wrong.py:' names no function; give file.py, or file.py:function$",
    f"{WRONG}:absent": r"wrong.py has no function 'absent'; it must have one that returns an Experiment$",
    f"{WRONG}:NUMBER": r"NUMBER in wrong.py is int; it must be a function that returns an Experiment",
    f"{WRONG}:returns_nothing": r"returns_nothing\(\) of wrong.py returned NoneType; it must return an Experiment$",
    f"{WRONG}:returns_a_table": r"returns_a_table\(\) of wrong.py returned dict; it must return an Experiment$",
    f"{WRONG}:empty_evaluation": r"evals\['val'\] has no samples; a dataset must have at least one$",
    f"{WRONG}:no_dataset": r"train is 3 of type int; it must be a map-style dataset",
    f"{WRONG}:neither_steps_nor_epochs": r"neither epochs nor steps; give one of them, or --steps$",
    f"{WRONG}:tensor_for_a_loss": r"loss returned Tensor; it must return Loss\(total, count\)",
    f"{WRONG}:loss_of_many_numbers": r"loss returned a Loss whose total is \(4, 1\); it must be a tensor with one",
    f"{WRONG}:metric_is_a_number": r"the metric 'error' returned float; it must return Loss\(total, count\)",
    f"{WRONG}:samples_are_no_pairs": r"a sample is Tensor; a dataset must give pairs of \(inputs, targets\), or",
    f"{WRONG}:no_module": r"Experiment\(model=…\) returned str; it must return a torch nn.Module$",
    f"{WRONG}:nothing_to_train": r"the model has no parameter that requires a gradient",
    f"{WRONG}:no_optimizer": r"Experiment\(optimizer=…\) returned NoneType; it must return a torch Optimizer$",
    f"{WRONG}:missing_data": r"missing_data\(\) of wrong.py needs 'nowhere/points.csv', which does not exist$",
}


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: Path(target).name or "no target")
def test_wrong_target_or_experiment_is_one_sentence(call: Call, target: str):
    check_refusal(call(*filter(None, [target])), TARGETS[target])


def test_a_level_of_computing_twice_that_is_none_is_refused_before_there_is_a_run(call: Call, tmp_path: Path):
    said = r"recompute is 'blah'; it must be auto, none, full, selective, or every-K .*\(--recompute\)$"
    check_refusal(call(WRONG, "--recompute", "blah", "--procs", 2), said)
    (tmp_path / "options.toml").write_text('recompute = "blah"')
    check_refusal(call(WRONG, "--config", "options.toml"), said)
    assert [each.name for each in tmp_path.iterdir()] == ["options.toml"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("def experiment(:", "broken.py is not valid Python"),
        ("import no_such_module\ndef experiment(): ...", "broken.py cannot be imported: No module named"),
        ("raise ValueError('in the middle')\ndef experiment(): ...", "in line 1: ValueError: in the middle"),
    ],
)
def test_file_that_cannot_be_read_is_named(call: Call, tmp_path: Path, text: str, sentence: str):
    path = tmp_path / "broken.py"
    path.write_text(text)
    ended = call(path)
    assert sentence in ended.sentences[0]
    assert ended.status == (1 if "raise" in text else 2)
    assert "Traceback" not in ended.err


@pytest.mark.parametrize(
    "raised", ["SystemExit", "SystemExit(0)", "GeneratorExit", "StopIteration", "KeyError('\\udce9')"]
)
@pytest.mark.parametrize("place", ["loss", "data"])
def test_whatever_the_program_raises_ends_the_run_in_a_sentence(call: Call, tmp_path: Path, raised: str, place: str):
    path = tmp_path / f"raises_in_{place}.py"
    path.write_text(RAISES.format(raised=raised, place=place))
    ended = call(path, "--workers", 0, "--device", "cpu")
    assert ended.status == 1
    assert raised.partition("(")[0] in ended.sentences[0] and "rank 0" in ended.sentences[0]
    assert f"{path.name}:" in ended.err and "Traceback" not in ended.err


@pytest.mark.parametrize("command", [("verify",), ("run", "--procs", "2", "--layout", "fsdp=2"), ("stage",)])
def test_an_experiment_that_raises_outside_of_ranks_is_a_sentence_with_its_line(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "divides.py"
    path.write_text("def experiment(by: int = 0):\n    return 1 / by\n")
    with pytest.raises(SystemExit) as ended:
        main([command[0], str(path), *command[1:]])
    assert ended.value.code == 1
    said = f"meshrun: ZeroDivisionError: division by zero ({path}:2 in experiment; --debug shows the traceback)\n"
    assert capsys.readouterr().err.endswith(said)


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "RANK='x' is not a whole number"),
        ({"RANK": "5", "WORLD_SIZE": "2", "LOCAL_RANK": "5"}, "RANK=5 is not below WORLD_SIZE=2"),
        ({"OMPI_COMM_WORLD_RANK": "a", "OMPI_COMM_WORLD_SIZE": "b"}, "OMPI_COMM_WORLD_RANK='a' is not a whole number"),
    ],
)
def test_launcher_variables_that_cannot_be_are_refused_in_a_sentence(
    call: Call, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], sentence: str
):
    for name, value in {**variables, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    check_refusal(call(WRONG), sentence)


def test_debug_shows_the_traceback_of_a_refusal(call: Call):
    ended = call(WRONG, "--steps", 0, "--debug")
    assert ended.status == 2
    assert "Traceback" in ended.err and len(ended.sentences) == 1


def test_port_in_use_is_refused_before_anything_starts(call: Call):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = call(WRONG, "--procs", 2, "--port", port)
    check_refusal(ended, rf"port {port} cannot be used on this machine: Address already in use; leave --port away")


def test_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(["rnu", "digits"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        "meshrun: No such command 'rnu'. Did you mean 'run'? (meshrun --help lists what is valid)\n"
    )


def test_refusal_by_the_ranks_is_said_once(tmp_path: Path):
    ended = meshrun(tmp_path, "run", WRONG, "--procs", 2, "--samples", 0)
    check_refusal(ended, "train has no samples; a dataset must have at least one")
    assert ended.out == ""


def test_loss_that_is_no_loss_is_refused_on_two_ranks_in_one_document(tmp_path: Path):
    ended = meshrun(tmp_path, "run", f"{WRONG}:tensor_for_a_loss", "--procs", 2, "--json")
    check_refusal(ended, r"loss returned Tensor; it must return Loss\(total, count\)")
    assert ended.document == {"error": ended.sentences[0], "status": 2}
    assert "words of the user's program" in ended.err


def test_what_the_program_prints_does_not_get_into_the_document(tmp_path: Path):
    """In one process too, where the program has the same standard output; and while its file is imported."""
    program = tmp_path / "loud.py"
    lines = (f"import sys; sys.path.append({str(Path(WRONG).parent)!r})", "from wrong import *", "print('at import')")
    program.write_text("\n".join(lines))
    ended = meshrun(tmp_path, "run", f"{program}:tensor_for_a_loss", "--json")
    assert ended.document["status"] == 2
    for words in ("at import", "words of the user's program"):
        assert ended.err.count(words) == 1


def step_of(sample: int) -> tuple[int, list[int]]:
    """The step of `tiny.py` that reads a sample, counted from 1, and all samples of that step."""
    order = Order(20, 4, 0)
    for step in range(5):
        ids = order.batch_ids(step).tolist()
        if sample in ids:
            return step + 1, ids
    raise AssertionError(sample)


def test_loss_that_is_not_a_number_names_step_and_samples(call: Call):
    step, ids = step_of(7)
    ended = call(TINY, "--spoiled", 7)
    assert ended.status == 1
    named = ", ".join(map(str, ids))
    assert ended.sentences == [f"loss is nan at step {step}, on rank 0, with the training samples {named}"]
    assert "Traceback" not in ended.err


def test_loss_that_is_not_a_number_on_one_of_three_ranks_names_its_samples_only(tmp_path: Path):
    step, ids = step_of(7)
    ended = meshrun(tmp_path, "run", TINY, "--spoiled", 7, "--procs", 3, "--json")
    assert ended.status == 1
    (sentence,) = ended.sentences
    found = re.fullmatch(rf"loss is nan at step {step}, on rank (\d), with the training samples ([\d, ]+)", sentence)
    assert found
    named = json.loads(f"[{found[2]}]")
    assert 7 in named and set(named) < set(ids), "the samples of that rank, which are not the whole batch"
    assert ended.document["error"].startswith(sentence)
    assert "Traceback" not in ended.err


def test_a_plain_script_may_raise_whatever_there_is(call: Call, tmp_path: Path):
    (tmp_path / "script.py").write_text("raise BaseException('enough')\n")
    ended = call("script.py")
    assert ended.status == 1 and "Traceback" not in ended.err
    assert re.search(r"BaseException: enough \(.*script.py:1 in ", ended.sentences[0])


HUGE = {
    "a seed of too many bits": (["--seed", "99999999999999999999999"], r"seed is 9{23}; .* 64 bits \(--seed\)$"),
    "a time beyond reason": (
        ["--timeout", "1e300"],
        r"timeout is 1e\+300; it must be at most .* a year \(--timeout\)$",
    ),
    "no end of waiting": (["--timeout", "inf"], r"timeout is inf; it must be at most .* a year \(--timeout\)$"),
    "too many processes": (["--procs", "999999999"], r"procs is 999,999,999; it must be at most 4,096 \(--procs\)$"),
    "processes of too many digits": (["--procs", "9" * 5000], r"procs is '9*…?.*; it must be a whole number"),
    "batches ahead beyond reason": (["--prefetch", "9" * 9], r"prefetch is 999,999,999; it must be at most 4,096"),
    "too many digits between checkpoints": (
        ["--checkpoint", "9" * 5000],
        r"checkpoint is '9*.*; it must be auto, none",
    ),
    "too many threads": (["--threads", "99999"], r"threads is 99,999; it must be at most 4,096 \(--threads\)$"),
    "too many steps": (["--steps", "9" * 30], r"steps is 9.*; it must be at most 1,000,.* \(--steps\)$"),
    "too many epochs": (["--epochs", "1e300"], r"epochs is 1e\+300; together they must be at most .*\(--epochs\)$"),
    "a name that is too long": (["--name", "x" * 300], r"name is 'x*, of 300 characters; it is too long \(--name\)"),
    "a folder that is too long": (["--runs", "x" * 300], r"cannot make a run directory in x*: File name too long"),
}


@pytest.mark.parametrize("case", HUGE)
def test_numbers_and_names_beyond_reason_are_refused_before_anything_starts(call: Call, case: str):
    words, sentence = HUGE[case]
    check_refusal(call(WRONG, *words), sentence)


def test_a_target_whose_name_is_too_long_is_refused(call: Call):
    check_refusal(call("x" * 300), "is neither a Python file nor a recipe")
    check_refusal(call("x" * 300 + ".py"), "cannot be read: File name too long$")


NO_PROGRAMS = {
    "zeros": b"\0" * 20,
    "no UTF-8": b"x = '\xff'\n",
    "nested too deep": b"x = " + b"(" * 3000 + b")" * 3000,
    "another encoding, as it says": "# -*- coding: latin-1 -*-\nprint(ascii('é'))\n".encode("latin-1"),
}


@pytest.mark.parametrize("case", NO_PROGRAMS)
def test_a_file_that_is_no_program_is_refused_and_one_in_another_encoding_is_read(
    call: Call, tmp_path: Path, case: str
):
    (tmp_path / "odd.py").write_bytes(NO_PROGRAMS[case])
    ended = call("odd.py")
    if case.startswith("another"):
        assert ended.status == 0, ended.err
    else:
        check_refusal(ended, "odd.py is not valid Python: ")


@pytest.mark.parametrize("kind", ["pipe", "device without end"])
def test_options_in_a_pipe_or_a_device_are_refused_and_not_waited_for(call: Call, tmp_path: Path, kind: str):
    os.mkfifo(tmp_path / "pipe")
    path = tmp_path / "pipe" if kind == "pipe" else "/dev/zero"
    check_refusal(
        call(WRONG, "--config", path), r"cannot read .*: it is no plain file; it must be a TOML or JSON file \("
    )


def test_options_nested_too_deep_are_refused(call: Call, tmp_path: Path):
    for name, text in (("deep.toml", "a = " + "[" * 100_000), ("deep.json", "[" * 200_000)):
        (tmp_path / name).write_text(text)
        check_refusal(call(WRONG, "--config", name), rf"{name} is not valid (TOML|JSON): nested too deep \(--config\)$")


BEYOND = {
    "ranks of verify": (
        ["verify", WRONG, "--layouts", "dp=999999"],
        r"layout 'dp=999999' needs 999,999 ranks, .* at most 4,096 \(--layouts\)",
    ),
    "faults": (["chaos", WRONG, "--faults", "9999999999"], r"faults is 9999999999; .* at most 1,000,000 \(--faults\)"),
    "pixels": (
        ["convert-data", ".", "x.h5", "--images", "arrays", "--size", "999999999"],
        r"size is 999999999; it must be at most 16,384 pixels \(--size\)",
    ),
    "a word of launchers, by hand": (["rank", "x", "y"], "No such command 'rank'.*"),
    "another of them": (["nursery", "x", "y"], "No such command 'nursery'.*"),
}


@pytest.mark.parametrize("case", BEYOND)
def test_other_commands_refuse_numbers_beyond_reason_and_words_of_launchers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], case: str
):
    monkeypatch.chdir(tmp_path)
    words, sentence = BEYOND[case]
    with pytest.raises(SystemExit) as ended:
        main(words)
    said = capsys.readouterr().err
    assert ended.value.code == 2 and re.search(sentence, said), said


def test_too_many_open_files_names_the_limit(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    def refused(_words: list[str]) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), "data.bin")

    monkeypatch.setattr("meshrun.cli.main._dispatch", refused)
    with pytest.raises(SystemExit) as ended:
        main(["run", "digits"])
    assert ended.value.code == 1
    assert capsys.readouterr().err.startswith(
        "meshrun: data.bin: Too many open files (ulimit -n shows and sets how many"
    )


def test_ctrl_c_while_python_imports_is_a_sentence(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    class Importing(ModuleType):
        def __getattr__(self, name: str) -> None:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "meshrun.cli.main", Importing("meshrun.cli.main"))
    with pytest.raises(SystemExit) as ended:
        importlib.import_module("meshrun.__main__").main()
    assert (ended.value.code, capsys.readouterr().err) == (130, "meshrun: stopped by CTRL-C\n")
