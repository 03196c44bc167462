"""Export and inspect: other programs read what comes out, and one process needs little memory for it."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

from meshrun import UserError
from meshrun.cli.export import Form, _hf_config, export_command
from meshrun.cli.inspect import inspect_command
from meshrun.cli.model_record import ModelRecord, record_of
from meshrun.config import RunConfig, RunDirectory
from meshrun.recipes.llama import Llama, Shape, hf_parameters
from meshrun.state import export
from meshrun.state.checkpoint import BadCheckpoint, Checkpoint
from meshrun.state.export import to_hf, to_safetensors, to_torch
from meshrun.state.shards import bytes_of

from .places import numbers, saved
from .test_checkpoint import EVERY_TYPE

PROGRAM = """
import torch
from torch import nn
from meshrun import Experiment, cross_entropy

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight

def experiment():
    return Experiment(model=Net, train=[0], loss=cross_entropy, optimizer=torch.optim.SGD, batch=1, steps=1)
"""


def run_of(tmp_path: Path, target: str, **options: object) -> RunDirectory:
    return RunDirectory.create(RunConfig(target=target, options=dict(options), runs=tmp_path / "runs"))


@pytest.fixture
def tied(tmp_path: Path) -> RunDirectory:
    """A run of a program with a tied weight and running statistics, saved by two replicas at two steps."""
    (tmp_path / "net.py").write_text(PROGRAM)
    run = run_of(tmp_path, f"{tmp_path / 'net.py'}:experiment")
    for step in (3, 7):
        tensors = {
            "model/embed.weight": numbers(5, 3) + step,
            "model/norm.weight": numbers(3),
            "model/norm.bias": numbers(3),
            "buffer/norm.running_mean@0": torch.tensor([1.0, 2.0, 3.0]),
            "buffer/norm.running_mean@1": torch.tensor([3.0, 2.0, 1.0]),
            "buffer/norm.running_var@0": torch.ones(3),
            "buffer/norm.running_var@1": torch.ones(3),
            "buffer/norm.num_batches_tracked@0": torch.tensor(4),
            "buffer/norm.num_batches_tracked@1": torch.tensor(4),
            "optimizer/embed.weight/exp_avg": numbers(5, 3),
        }
        saved(run.checkpoints, tensors, step, {"best": {"step": 3, "loss": 0.5}})
    return run


@pytest.mark.parametrize("recorded", [True, False], ids=["model.json", "--run-program"])
def test_a_torch_export_loads_into_the_model_with_its_tied_weights(tied: RunDirectory, recorded: bool, capsys):
    if recorded:
        ModelRecord("Net", {"head.weight": "embed.weight"}).write(tied.path)
    assert export_command(tied.path, Form.TORCH, None, None, False, True, False, run_program=not recorded) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["note"] is None
    path = tied.path / "export" / "step-00000007.pt"
    assert (told["out"], told["step"], told["bytes"]) == (str(path), 7, path.stat().st_size)
    state = torch.load(path, weights_only=True)
    assert state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()
    assert torch.equal(state["embed.weight"], numbers(5, 3) + 7)
    assert state["norm.running_mean"].tolist() == [2.0, 2.0, 2.0]
    assert state["norm.num_batches_tracked"].item() == 4
    scope: dict[str, type[nn.Module]] = {}
    exec(PROGRAM, scope)
    model = scope["Net"]()
    model.load_state_dict(state)
    assert model.head.weight is model.embed.weight


def test_every_type_of_number_is_exported(tmp_path: Path):
    checkpoint = saved(tmp_path / "c", {f"model/{name}": tensor for name, tensor in EVERY_TYPE.items()})
    to_torch(checkpoint, tmp_path / "m.pt")
    to_safetensors(checkpoint, tmp_path / "m.safetensors")
    assert zipfile.ZipFile(tmp_path / "m.pt").testzip() is None
    for found in (
        torch.load(tmp_path / "m.pt", weights_only=True),
        torch.load(tmp_path / "m.pt", weights_only=True, mmap=True),
        load_file(tmp_path / "m.safetensors"),
    ):
        assert found.keys() == EVERY_TYPE.keys()
        for name, tensor in EVERY_TYPE.items():
            assert found[name].dtype == tensor.dtype
            assert bytes_of(found[name]) == bytes_of(tensor), name


def test_a_large_tensor_is_exported_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(export, "PART", 100)
    tensors = {"model/w": numbers(50, 7), "model/wide": numbers(2, 60), "model/n": torch.tensor(1.5)}
    to_safetensors(saved(tmp_path / "c", tensors), tmp_path / "m.safetensors")
    found = load_file(tmp_path / "m.safetensors")
    assert all(torch.equal(found[name.removeprefix("model/")], tensor) for name, tensor in tensors.items())


def test_large_models_are_cut_into_files_with_an_index(tmp_path: Path):
    tensors = {f"model/layer.{n}.weight": numbers(10, 10, seed=n) for n in range(5)}
    to_hf(saved(tmp_path / "c", tensors), tmp_path / "hf", {"model_type": "x"}, most=900)
    names = sorted(path.name for path in (tmp_path / "hf").iterdir())
    files = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    assert names == ["config.json", *files, "model.safetensors.index.json"]
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 2000}
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "hf" / file, framework="pt") as opened:
            assert torch.equal(opened.get_tensor(name), tensors[f"model/{name}"])


def test_the_llama_recipe_comes_out_as_hugging_face_s(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    run = run_of(tmp_path, "llama", preset="tiny", dropout=0.0)
    torch.manual_seed(1)
    model = Llama(Shape(2048, 96, layers=8, heads=8, kv_heads=4, ffn=192, context=128)).eval()
    saved(run.checkpoints, {f"model/{name}": each for name, each in model.state_dict().items()}, 2)
    export_command(run.path, Form.HF, tmp_path / "out", None, False, False, False)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert {name for name, _ in theirs.named_parameters()} == hf_parameters(model).keys()
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, model(tokens), rtol=1e-4, atol=1e-4)


def test_a_transformers_model_comes_out_with_its_config(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    (tmp_path / "theirs.py").write_text(
        "import torch, transformers\n"
        "from meshrun import Experiment, cross_entropy\n"
        "CONFIG = dict(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1,\n"
        "              num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=True)\n"
        "def model():\n"
        "    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG))\n"
        "def experiment():\n"
        "    return Experiment(model=model, train=[0], loss=cross_entropy, optimizer=torch.optim.SGD, batch=1,\n"
        "                      steps=1)\n"
    )
    scope: dict[str, object] = {}
    exec((tmp_path / "theirs.py").read_text(), scope)
    model = scope["model"]().eval()  # type: ignore[operator]
    run = run_of(tmp_path, f"{tmp_path / 'theirs.py'}:experiment")
    saved(run.checkpoints, {f"model/{name}": each.detach() for name, each in model.named_parameters()}, 2)
    record_of(model).write(run.path)
    export_command(run.path, Form.HF, tmp_path / "out", None, False, False, False)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokens = torch.arange(9)[None]
    with torch.no_grad():
        assert torch.equal(theirs(tokens).logits, model(tokens).logits)


def test_the_checkpoint_is_chosen_by_step_or_score(tied: RunDirectory, tmp_path: Path):
    def exported(name: str, path: Path = tied.path, **choice: object) -> torch.Tensor:
        arguments = {"out": tmp_path / name, "step": None, "best": False, "as_json": False, "debug": False, **choice}
        export_command(path, Form.SAFETENSORS, **arguments)  # type: ignore[arg-type]
        return load_file(tmp_path / name)["embed.weight"] - numbers(5, 3)

    for found, step in (
        (exported("last"), 7),
        (exported("first", step=3), 3),
        (exported("best", best=True), 3),
        (exported("named", tied.checkpoints / "step-00000003"), 3),
    ):
        torch.testing.assert_close(found, torch.full((5, 3), float(step)))
    with pytest.raises(UserError, match="no checkpoint of step 4; it has steps 3, 7"):
        exported("none", step=4)
    with pytest.raises(UserError, match="--best and --step 3 name two checkpoints"):
        exported("two", step=3, best=True)
    with pytest.raises(UserError, match="is there already; remove it"):
        exported("last")
    with pytest.raises(UserError, match="nowhere does not exist"):
        exported("x", tmp_path / "nowhere")
    with pytest.raises(UserError, match="has no checkpoint yet"):
        exported("x", run_of(tmp_path, "digits").path)


def test_a_program_that_is_gone_costs_only_what_it_knew(tied: RunDirectory, tmp_path: Path, capsys):
    (tmp_path / "net.py").unlink()
    export_command(tied.path, Form.TORCH, None, None, False, True, False, run_program=True)
    assert "cannot be built here" in json.loads(capsys.readouterr().out)["note"]
    assert "head.weight" not in torch.load(tied.path / "export" / "step-00000007.pt", weights_only=True)


@pytest.mark.parametrize("form", [Form.TORCH, Form.HF, Form.SAFETENSORS])
def test_the_program_that_a_run_names_is_run_only_if_asked_for(tied: RunDirectory, tmp_path: Path, form: Form, capsys):
    """A run directory may come from anybody."""
    trace = tmp_path / "was-here"
    (tmp_path / "net.py").write_text(f"open({str(trace)!r}, 'w')\n{PROGRAM}")
    export_command(tied.path, form, tmp_path / "out", None, False, True, False)
    note = json.loads(capsys.readouterr().out)["note"]
    assert not trace.exists() and (tmp_path / "out").exists()
    if form is not Form.SAFETENSORS:
        assert note.endswith(f"--run-program builds the model by running {tmp_path / 'net.py'}:experiment")
        ModelRecord("Net", {}).write(tied.path)  # takes its place only where it is not asked for
        export_command(tied.path, form, tmp_path / "again", None, False, True, False, run_program=True)
        assert trace.exists()


DAMAGED = {
    "config.json": [b"", b"[1]", b"7", b"[" * 200_000, b"\xff", b'{"format": 9, "config": {}}', b'{"format": "x"}'],
    "model.json": [b"", b"[1]", b'{"model": 5}', b'{"model": "A", "tied": 5}', b'{"model": "A", "more": 1}'],
}


@pytest.mark.parametrize("file, damage", [(file, each) for file, all in DAMAGED.items() for each in all])
def test_damaged_documents_beside_a_checkpoint_cost_no_weights(
    tied: RunDirectory, tmp_path: Path, file: str, damage: bytes, capsys
):
    (tied.path / file).write_bytes(damage)
    for form in (Form.TORCH, Form.HF):
        assert export_command(tied.path, form, tmp_path / form, None, False, True, False) == 0
        assert json.loads(capsys.readouterr().out)["note"]
    assert torch.load(tmp_path / Form.TORCH, weights_only=True)["embed.weight"].shape == (5, 3)
    assert not (tmp_path / Form.HF / "config.json").exists()


def test_a_checkpoint_without_a_model_is_refused(tmp_path: Path):
    checkpoint = saved(tmp_path / "c", {"optimizer/w/exp_avg": numbers(2)})
    with pytest.raises(BadCheckpoint, match="holds no model"):
        to_safetensors(checkpoint, tmp_path / "m.safetensors")
    assert not (tmp_path / "m.safetensors").exists()


MEASURE = """
import re, sys
from pathlib import Path
from meshrun.state.checkpoint import Checkpoint
from meshrun.state import export

def resident(kind):
    return int(re.search(kind + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

export.PART //= 2
checkpoint = Checkpoint.open(Path(sys.argv[1]))
for name in sys.argv[3:]:
    Path("/proc/self/clear_refs").write_text("5")  # forget the most so far, which is that of the imports
    before = resident("VmRSS")
    getattr(export, name)(checkpoint, Path(sys.argv[2], name))
    print(name, resident("VmHWM") - before)
"""


def test_export_needs_less_memory_than_the_largest_tensor(tmp_path: Path):
    largest, forms = 96 << 20, ("to_safetensors", "to_hf", "to_torch")
    tensors = {"model/large": torch.zeros(1024, largest // 4096)} | {
        f"model/{n}": torch.zeros(4 << 20) for n in range(3)
    }
    folder = saved(tmp_path / "c", tensors).path
    command = [sys.executable, "-c", MEASURE, str(folder), str(tmp_path), *forms]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    needed = dict(line.split() for line in ended.stdout.splitlines())
    assert tuple(needed) == forms
    assert all(int(each) < largest for each in needed.values()), needed


def test_inspect_lists_and_verifies(tied: RunDirectory, capsys):
    assert inspect_command(tied.path, None, True, False) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["ok"], told["problems"], told["step"], told["layout"], told["world"]) == (True, [], 7, "dp=1", 1)
    assert told["tensors"][0] == {"name": "model/embed.weight", "dtype": "float32", "shape": [5, 3], "bytes": 60}
    assert told["state"]["best"] == {"step": 3, "loss": 0.5}
    assert inspect_command(tied.checkpoints / "step-00000003", None, False, False) == 0
    shown = capsys.readouterr().out
    assert "model/embed.weight" in shown and "5 x 3" in shown
    assert "step 3, saved on dp=1 by 1 rank" in shown
    assert "all checksums are right" in shown


def test_inspect_lists_kind_after_kind_and_numbers_by_value(tmp_path: Path, capsys):
    wanted = ["model/b.2.w", "model/b.10.w", "buffer/b.2.m@0", "optimizer/b.2.w/step", "rng/0/torch", "totals/losses"]
    state = {"best": None, "habits": {}, "kept": {}, "groups": [], "totals": {}, "draws": False}
    saved(tmp_path, dict.fromkeys(["rng/0/torch", *reversed(wanted)], numbers(2)), 3, state)
    assert inspect_command(tmp_path, None, True, False) == 0
    assert [tensor["name"] for tensor in json.loads(capsys.readouterr().out)["tensors"]] == wanted
    assert inspect_command(tmp_path, None, False, False) == 0
    shown = capsys.readouterr().out
    assert "  best: null" in shown and "habits" not in shown and "groups" not in shown


def test_inspect_finds_damage(tied: RunDirectory, capsys):
    path = tied.checkpoints / "step-00000007" / "rank-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 4
    path.write_bytes(content)
    assert inspect_command(tied.path, None, True, False) == 1
    told = json.loads(capsys.readouterr().out)
    assert not told["ok"]
    assert "rank-00000.safetensors has a wrong checksum" in told["problems"][0]
    path.unlink()
    assert inspect_command(tied.path, None, False, False) == 1
    assert "rank-00000.safetensors cannot be read: No such file" in capsys.readouterr().err
    (path.parent / "manifest.json").write_text("{}")
    assert inspect_command(tied.path, None, True, False) == 1
    assert "is no manifest of meshrun" in json.loads(capsys.readouterr().out)["problems"][0]
    with pytest.raises(BadCheckpoint):
        Checkpoint.open(path.parent)


def test_the_llama_logits_do_depend_on_the_weights():
    """Else the comparison with Hugging Face's would hold for any export."""
    shape = Shape(64, 32, layers=1, heads=4, kv_heads=2, ffn=48, context=16)
    first, second = Llama(shape).eval(), Llama(shape).eval()
    with torch.no_grad():
        assert functional.mse_loss(first(torch.arange(9)[None]), second(torch.arange(9)[None])) > 1e-6


def test_second_names_are_of_weights_that_are_there_and_hide_none(tmp_path: Path):
    checkpoint = saved(tmp_path / "c", {"model/embed": numbers(2, 3), "model/head": numbers(2, 3) + 1})
    to_torch(checkpoint, tmp_path / "m.pt", {"head": "embed", "tail": "embed", "lost": "gone"})
    found = torch.load(tmp_path / "m.pt", weights_only=True)
    assert found.keys() == {"embed", "head", "tail"}
    assert torch.equal(found["head"], numbers(2, 3) + 1), "a weight of its own, though it was tied before"
    assert found["tail"].data_ptr() == found["embed"].data_ptr()


def test_whole_numbers_of_a_buffer_are_exported_exactly(tmp_path: Path):
    large = (1 << 60) + 1
    tensors = {"model/w": numbers(1), **{f"buffer/seen@{replica}": torch.tensor(large) for replica in range(2)}}
    to_safetensors(saved(tmp_path / "c", tensors), tmp_path / "m.safetensors")
    assert load_file(tmp_path / "m.safetensors")["seen"].item() == large, "its mean would be rounded"


def test_statistics_in_half_precision_are_averaged_in_full(tmp_path: Path):
    """In bfloat16 256 + 1 is 256."""
    values = (256.0, 1.0, 1.0)
    tensors = {f"buffer/mean@{replica}": torch.tensor([value]).bfloat16() for replica, value in enumerate(values)}
    to_safetensors(saved(tmp_path / "c", {"model/w": numbers(1), **tensors}), tmp_path / "m.safetensors")
    assert load_file(tmp_path / "m.safetensors")["mean"].tolist() == [86.0]


def test_a_weight_that_is_larger_than_a_file_should_be_has_one_of_its_own(tmp_path: Path):
    checkpoint = saved(tmp_path / "c", {"model/a": numbers(100), "model/b": numbers(2), "model/c": numbers(200)})
    to_hf(checkpoint, tmp_path / "m", most=40)
    assert sorted(path.name for path in (tmp_path / "m").glob("*.safetensors")) == [
        f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)
    ]


def test_a_buffer_whose_name_has_an_at_sign_keeps_it(tmp_path: Path):
    tensors = {"model/w": numbers(1), "buffer/at@home@0": torch.ones(1), "buffer/at@home@1": 3 * torch.ones(1)}
    to_safetensors(saved(tmp_path / "c", tensors), tmp_path / "m.safetensors")
    found = load_file(tmp_path / "m.safetensors")
    assert found.keys() == {"w", "at@home"} and found["at@home"].item() == 2


def test_a_link_in_the_usual_place_of_exports_is_not_followed(tied: RunDirectory, tmp_path: Path):
    """Whoever has made the run directory would choose where this user writes."""
    (tmp_path / "home").mkdir()
    (tied.path / "export").symlink_to(tmp_path / "home")
    with pytest.raises(UserError, match=r"export is a link, which is not followed; give a place \(--out\)"):
        export_command(tied.path, Form.SAFETENSORS, None, None, False, True, False)
    assert list((tmp_path / "home").iterdir()) == []


@pytest.mark.parametrize(
    ("own", "found"),
    [
        ({"hidden": 3}, {"hidden": 3, "torch_dtype": "float32"}),
        ({"torch_dtype": "float16"}, {"torch_dtype": "float16"}),
    ],
)
def test_a_config_that_names_the_type_of_weights_keeps_it(tmp_path: Path, own: dict[str, Any], found: dict[str, Any]):
    checkpoint = saved(tmp_path / "c", {"model/w": numbers(1)})
    assert _hf_config(ModelRecord("Net", {}, own), checkpoint) == found
    assert _hf_config(ModelRecord("Net", {}), checkpoint) is None
