"""Weights on disk: what was written comes back, whole, and nothing else is ever read."""

from __future__ import annotations

import errno
import json
import math
import os
import pickle
import resource
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from meshrun import UserError
from meshrun.state.weights import load_weights, save_tensors, save_weights, whole


def net(width: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 2))


class Tied(nn.Module):
    """The embedding is also the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """As a layout hands them over: parameters and buffers under their own names, a tied one once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def test_others_may_read_weights_as_any_file_of_the_user(tmp_path: Path):
    save_weights(tensors(net()), tmp_path / "w.safetensors", {})
    (tmp_path / "note").touch()
    assert (tmp_path / "w.safetensors").stat().st_mode == (tmp_path / "note").stat().st_mode


def test_weights_and_buffers_come_back(tmp_path: Path):
    saved, other = net(), net()
    saved[1].running_mean += 3
    save_weights(tensors(saved), tmp_path / "w.safetensors", {"step": 7})
    load_weights(other, tmp_path / "w.safetensors")
    for name, value in saved.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name
    with safe_open(tmp_path / "w.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(saved.state_dict())


def test_what_is_written_about_them_comes_back_as_it_was(tmp_path: Path):
    about = {"step": 120, "loss": 0.0712345678901234, "name": "val", "done": True}
    save_weights(tensors(net()), tmp_path / "w.safetensors", about)
    assert load_weights(net(), tmp_path / "w.safetensors") == about


def test_a_score_that_is_no_number_is_written_as_json_that_every_reader_takes(tmp_path: Path):
    about = {"step": 4, "loss": 0.5, "accuracy": math.nan, "worst": math.inf}
    save_weights(dict(nn.Linear(2, 2).named_parameters()), tmp_path / "w.safetensors", about)
    with safe_open(tmp_path / "w.safetensors", framework="pt") as file:
        written = json.loads(file.metadata()["about"], parse_constant=pytest.fail)
    assert (written["step"], written["accuracy"], written["worst"]) == (4, None, None)
    found = load_weights(nn.Linear(2, 2), tmp_path / "w.safetensors")
    assert found["worst"] == math.inf and math.isnan(found["accuracy"])


def test_tied_weights_are_written_once_and_come_back_tied(tmp_path: Path):
    saved, other = Tied(), Tied()
    save_weights(tensors(saved), tmp_path / "w.safetensors", {"step": 3})
    with safe_open(tmp_path / "w.safetensors", framework="pt") as file:
        assert len(list(file.keys())) == 1
    assert load_weights(other, tmp_path / "w.safetensors") == {"step": 3}
    assert torch.equal(other.embed.weight, saved.embed.weight) and other.head.weight is other.embed.weight


def test_a_file_of_another_program_is_read_without_a_word_about_it(tmp_path: Path):
    save_file(net().state_dict(), tmp_path / "w.safetensors", metadata={"format": "pt"})
    assert load_weights(net(), tmp_path / "w.safetensors") == {}


def test_folders_on_the_way_are_made(tmp_path: Path):
    save_tensors({"a": torch.ones(2)}, tmp_path / "x" / "y" / "w.safetensors", {})
    assert (tmp_path / "x" / "y" / "w.safetensors").is_file()


def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path):
    path = tmp_path / "w.safetensors"
    save_tensors({"a": torch.ones(2)}, path, {})
    old = path.read_bytes()
    shared = torch.zeros(4)
    with pytest.raises(RuntimeError, match="share memory"):
        save_tensors({"a": shared, "b": shared}, path, {})
    with pytest.raises(TypeError):
        save_weights(tensors(net()), path, {"bad": object()})
    assert [each.name for each in tmp_path.iterdir()] == ["w.safetensors"] and path.read_bytes() == old


def test_a_disk_that_fills_up_leaves_the_old_file_and_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What is written goes under another name until it is complete."""
    path = tmp_path / "w.safetensors"
    save_tensors({"a": torch.ones(2)}, path, {})

    def half(tensors, name, metadata):
        del tensors, metadata
        Path(name).write_bytes(b"half of it")
        assert torch.equal(read(path), torch.ones(2)), "a reader in this moment sees the old file"
        raise OSError("no space left on device")

    monkeypatch.setattr("meshrun.state.weights.save_file", half)
    with pytest.raises(OSError, match="no space"):
        save_tensors({"a": torch.zeros(2)}, path, {})
    assert torch.equal(read(path), torch.ones(2))
    assert [each.name for each in tmp_path.iterdir()] == ["w.safetensors"]


def read(path: Path) -> torch.Tensor:
    with safe_open(path, framework="pt") as file:
        return file.get_tensor("a")


def test_a_write_that_the_system_refuses_is_an_error_of_the_system(tmp_path: Path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError) as error:
            save_weights({"weight": torch.ones(1000)}, tmp_path / "last.safetensors", {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (error.value.errno, error.value.filename) == (errno.EFBIG, str(tmp_path / "last.safetensors"))


def test_weights_of_another_shape_are_refused_in_a_sentence(tmp_path: Path):
    path = tmp_path / "w.safetensors"
    save_weights(tensors(net(4)), path, {})
    with pytest.raises(UserError) as caught:
        load_weights(net(5), path)
    assert str(caught.value).startswith(f"the weights in {path} are of another model: ")
    assert "0.weight" in str(caught.value) and "\n" not in str(caught.value)


def test_weights_of_other_names_are_refused_in_a_sentence(tmp_path: Path):
    path = tmp_path / "w.safetensors"
    save_weights(tensors(net()), path, {})
    with pytest.raises(UserError, match=r"are of another model: .*embed"):
        load_weights(Tied(), path)


class Trap:
    """Unpickled, it leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def test_a_pickle_under_the_name_of_weights_is_refused_and_not_run(tmp_path: Path):
    path, sign = tmp_path / "w.safetensors", tmp_path / "sign"
    path.write_bytes(pickle.dumps(Trap(sign)))
    with pytest.raises(UserError, match=r"cannot read weights from .*w\.safetensors: "):
        load_weights(net(), path)
    torch.save({"0.weight": torch.ones(2)}, path)
    with pytest.raises(UserError, match=r"cannot read weights from .*w\.safetensors: "):
        load_weights(net(), path)
    assert not sign.exists()


def test_a_missing_file_is_refused_in_a_sentence(tmp_path: Path):
    with pytest.raises(UserError, match=r"cannot read weights from .*none\.safetensors: .*[Nn]o such file"):
        load_weights(net(), tmp_path / "none.safetensors")


def test_half_a_file_is_refused_in_a_sentence(tmp_path: Path):
    path = tmp_path / "w.safetensors"
    save_weights(tensors(net()), path, {})
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UserError, match="cannot read weights from"):
        load_weights(net(), path)


def test_weights_are_on_the_disk_before_their_file_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, done = tmp_path / "best.safetensors", []
    fsync, replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda file: (done.append(path.exists()), fsync(file)))
    monkeypatch.setattr(Path, "replace", lambda *given: (done.append("replace"), replace(*given))[1])
    save_weights({"w": torch.ones(3)}, path, {})
    assert done == [False, "replace"] and path.exists()


def test_a_view_is_written_without_the_rest_of_its_memory(tmp_path: Path):
    whole = torch.arange(1000.0)
    save_weights({"w": whole[10:20], "v": whole[500:502], "of w": whole[12:14]}, tmp_path / "a.safetensors", {})
    assert (tmp_path / "a.safetensors").stat().st_size < 1000
    assert load_file(tmp_path / "a.safetensors")["v"].tolist() == [500.0, 501.0]


def test_nothing_is_written_through_a_link_that_another_has_put_beside_it(tmp_path: Path):
    precious, path = tmp_path / "precious", tmp_path / "model.pt"
    precious.write_text("years of work")
    (tmp_path / f".model.pt.{os.getpid()}").symlink_to(precious)
    with whole(path) as beside:
        beside.write_text("weights")
    assert precious.read_text() == "years of work"
    assert path.read_text() == "weights" and not path.is_symlink()


def test_a_weight_in_another_order_of_memory_is_written_as_it_is_read(tmp_path: Path):
    turned = torch.arange(6.0).view(2, 3).t()
    save_weights({"w": turned}, tmp_path / "a.safetensors", {})
    assert torch.equal(load_file(tmp_path / "a.safetensors")["w"], turned)
