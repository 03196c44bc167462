import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from meshrun.train import uncompiled

OPTIMIZERS = """
import json, sys
import torch
from meshrun.train.uncompiled import leave_out_the_compiler

if "without" in sys.argv:
    leave_out_the_compiler()
    leave_out_the_compiler()
weights, hooked = [], []
kinds = (torch.optim.SGD, {"momentum": 0.9}), (torch.optim.Adam, {}), (torch.optim.AdamW, {}), (torch.optim.RMSprop, {})
for kind, options in kinds[: 4 if "all" in sys.argv else 3]:
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(5))
    optimizer = kind([parameter], lr=0.1, **options)
    optimizer.register_step_post_hook(lambda *_: hooked.append(1))
    for _ in range(3):
        optimizer.zero_grad()
        (parameter**3).sum().backward()
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
    assert parameter.is_leaf and parameter.requires_grad
    weights.append(parameter.tolist())
print(json.dumps([weights, len(hooked), "torch._dynamo" in sys.modules]))
"""


@functools.cache
def trained(*words: str) -> tuple[list[list[float]], int, bool]:
    done = subprocess.run([sys.executable, "-c", OPTIMIZERS, *words], check=True, capture_output=True, timeout=120)
    weights, hooked, compiler = json.loads(done.stdout)
    return weights, hooked, compiler


def test_optimizers_do_the_same_without_the_compiler_and_call_their_hooks() -> None:
    weights, hooked, compiler = trained("without")
    assert (hooked, compiler) == (9, False)
    assert trained("all")[0][:3] == weights


def test_an_optimizer_that_needs_the_compiler_gets_it_and_all_go_on_as_before() -> None:
    assert trained("without", "all") == trained("all")
    assert trained("all")[1:] == (12, True)


SLOW = (
    "torch._dynamo",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.fx.experimental.symbolic_shapes",
    "sympy",
)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_training_in_one_process_that_compiles_nothing_imports_no_compiler_and_no_dtensors(
    tmp_path: Path, precision: str
) -> None:
    words = ["run", "digits", "--steps", "2", "--eval-first", "5", "--device", "cpu", "--runs", str(tmp_path)]
    program = (
        "import atexit, json, sys\n"
        f"atexit.register(lambda: print(json.dumps([each for each in {SLOW} if each in sys.modules]), flush=True))\n"
        "from meshrun.cli.main import main\n"
        f"sys.argv[1:] = {[*words, '--precision', precision]}\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, timeout=120, text=True)
    assert json.loads(done.stdout.splitlines()[-1]) == []


def test_neither_a_model_without_values_nor_branches_of_a_backward_pass_import_them() -> None:
    program = f"""
import sys
from contextlib import nullcontext
import torch
from meshrun.parallel.construct import blueprint
from meshrun.parallel.memory import cannot_stay, give_memory
from meshrun.train.branches import Branches

plan = blueprint(lambda: torch.nn.Embedding(3, 3), seed=0, objection=cannot_stay)  # drawn from a normal distribution
assert plan.reason is None and plan.model.weight.is_meta, plan.reason
give_memory(plan.model, torch.device("cpu"))
plan.fill(lambda name, values: plan.model.weight.data.copy_(values))
met = []
with Branches(nullcontext, lambda: met.append(1)):
    torch.nn.Conv2d(3, 3, 1)(torch.ones(1, 3, 2, 2, requires_grad=True)).sum().backward()
assert met
print([each for each in {SLOW} if each in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, timeout=120, text=True)
    assert done.stdout == "[]\n"


def test_torchs_own_wrapper_is_called_once_the_compiler_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    class Kind:
        def zero_grad(self) -> str:
            return "wrapped"

    monkeypatch.setattr(uncompiled, "COMPILER", "a compiler of tests")
    uncompiled._replace(Kind, "zero_grad", lambda _: "plain")  # type: ignore[arg-type]
    assert Kind().zero_grad() == "plain"
    monkeypatch.setitem(sys.modules, "a compiler of tests", sys)
    assert Kind().zero_grad() == "wrapped"
