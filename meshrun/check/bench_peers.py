"""The peers that `meshrun bench train` compares with, each written as its own documentation shows it.

    PEERS["fabric"].make(task)          # a `Side`: one update each time it is asked
    PEERS["fabric"].missing             # None, or why it is not compared with here

All get the experiment's own model, data, loss, optimizer, schedule and clipping. The names of the functions are those
of `--peers`; "compile" rows are what someone writes who knows what makes torch fast.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshrun import mesh
from meshrun.check.bench_task import OwnLoop, Side, Task
from meshrun.data.feed import to_device
from meshrun.train.loop import Trainer

COMPILER = ("torch._dynamo", "torch._inductor.compile_fx")


@dataclass(frozen=True)
class Peer:
    """A way to train."""

    title: str
    make: Callable[[Task], Side]
    needs: tuple[str, ...] = ()
    """What must be importable."""
    compiles: bool = False
    unfit: str | None = None
    """Why it cannot train this, even where it is importable."""

    @property
    def packages(self) -> tuple[str, ...]:
        """What is imported before its start is timed."""
        return (*self.needs, *(COMPILER if self.compiles else ()))

    @property
    def missing(self) -> str | None:
        absent = [each for each in self.needs if importlib.util.find_spec(each) is None]
        return f"{absent[0]} is not installed" if absent else self.unfit


def meshrun(task: Task) -> Side:
    """What `meshrun run` does in one process, less what it writes down."""
    return Told(task)


class Told:
    """Updates of our own trainer, which also tells what it has chosen."""

    def __init__(self, task: Task) -> None:
        mesh.use(mesh.Meeting(device=task.device.type))
        trainer = Trainer(task.experiment, mesh.start(), how=task.how, workers=task.workers, lr_scale=task.scale)
        self._placed, self._steps = trainer.placed, _steps(trainer)

    def __iter__(self) -> Told:
        return self

    def __next__(self) -> Any:
        return next(self._steps)

    def close(self) -> None:
        self._steps.close()

    @property
    def chosen(self) -> dict[str, Any]:
        """What of how a step is computed was left to us."""
        return self._placed.chosen

    @property
    def notes(self) -> list[str]:
        return self._placed.notes

    @property
    def parameters(self) -> int:
        return sum(each.numel() for each in self._placed.model.parameters())


def _steps(trainer: Trainer) -> Generator[Any]:
    yield from trainer.steps()


def bare(task: Task) -> Side:
    """https://docs.pytorch.org/docs/stable/notes/amp_examples.html"""
    model = task.model().to(task.device)
    yield from _bare(task, model, model, None)


def bare_compiled(task: Task) -> Side:
    """All that makes torch itself fast: compiled, fused optimizer, images with their channels last."""
    model = task.model().to(task.device)
    if task.device.type == "cuda" and any(isinstance(each, nn.Conv2d) for each in model.modules()):
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high" if task.bf16 else "highest")
    yield from _bare(task, model, task.compiled(model), True)


def _bare(task: Task, model: nn.Module, called: Any, fused: bool | None) -> Side:
    model.train()
    optimizer = task.optimizer(model)
    if fused:
        for group in optimizer.param_groups:
            if "fused" in group:
                group["fused"] = True
    schedule = task.schedule(optimizer)
    for step, batch in enumerate(task.loader()):
        inputs, targets = to_device(batch, task.device)
        with task.autocast():
            loss = task.loss(called, step, inputs, targets)
        loss.backward()
        if task.experiment.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), task.experiment.clip)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        yield loss.detach()


def fabric(task: Task, compiled: bool = False) -> Side:
    """https://lightning.ai/docs/fabric/stable/fundamentals/convert.html, …/advanced/compile.html"""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator=task.device.type, devices=1, precision="bf16-mixed" if task.bf16 else "32-true")
    fabric.launch()
    model: Any = task.model()
    optimizer: Any = task.optimizer(model)
    schedule = task.schedule(optimizer)
    model, optimizer = fabric.setup(task.compiled(model) if compiled else model, optimizer)
    model.train()
    loader: Any = fabric.setup_dataloaders(task.loader())
    for step, (inputs, targets) in enumerate(loader):
        optimizer.zero_grad()
        with fabric.autocast():
            loss = task.loss(model, step, inputs, targets)
        fabric.backward(loss)
        if task.experiment.clip is not None:
            fabric.clip_gradients(model, optimizer, max_norm=task.experiment.clip)
        optimizer.step()
        schedule.step()
        yield loss.detach()


def fabric_compile(task: Task) -> Side:
    return fabric(task, compiled=True)


def lightning(task: Task) -> Side:
    """https://lightning.ai/docs/pytorch/stable/starter/introduction.html"""
    from lightning.pytorch import Callback, LightningModule
    from lightning.pytorch import Trainer as LightningTrainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = task.model()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            inputs, targets = batch
            return task.loss(self.model, batch_idx, inputs, targets)

        def configure_optimizers(self) -> Any:
            optimizer = task.optimizer(self.model)
            return [optimizer], [{"scheduler": task.schedule(optimizer), "interval": "step"}]

    def body(tell: Callable[[Any], bool]) -> None:
        class After(Callback):
            def on_train_batch_end(self, trainer: Any, _: Any, outputs: Any, *__: Any) -> None:
                trainer.should_stop = not tell(outputs["loss"])

        trainer = LightningTrainer(
            accelerator="gpu" if task.device.type == "cuda" else "cpu",
            devices=1,
            precision="bf16-mixed" if task.bf16 else "32-true",
            max_steps=task.total_steps,
            gradient_clip_val=task.experiment.clip,
            callbacks=[After()],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )
        trainer.fit(Module(), task.loader())

    return OwnLoop(body)


def accelerate(task: Task) -> Side:
    """https://huggingface.co/docs/accelerate/basic_tutorials/migration"""
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16" if task.bf16 else "no", cpu=task.device.type == "cpu")
    model = task.model()
    optimizer = task.optimizer(model)
    prepared: Any = accelerator.prepare(model, optimizer, task.loader(), task.schedule(optimizer))
    model, optimizer, loader, schedule = prepared
    model.train()
    for step, (inputs, targets) in enumerate(loader):
        optimizer.zero_grad()
        with accelerator.autocast():
            loss = task.loss(model, step, inputs, targets)
        accelerator.backward(loss)
        if task.experiment.clip is not None:
            accelerator.clip_grad_norm_(model.parameters(), task.experiment.clip)
        optimizer.step()
        schedule.step()
        yield loss.detach()


def transformers(task: Task) -> Side:
    """https://huggingface.co/docs/transformers/trainer"""
    from transformers import Trainer as TransformersTrainer
    from transformers import TrainerCallback, TrainingArguments

    class OfTask(TransformersTrainer):
        seen = 0
        loss: Any = None

        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            self.seen += 1
            loss = task.loss(model, self.seen - 1, *inputs)
            self.loss = loss.detach()
            return loss

        def get_train_dataloader(self) -> Any:
            return task.loader()

    def body(tell: Callable[[Any], bool]) -> None:
        class After(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                del args, state
                control.should_training_stop = not tell(trainer.loss)

        with tempfile.TemporaryDirectory(prefix="meshrun-bench-") as folder:
            arguments = TrainingArguments(
                output_dir=folder,
                max_steps=task.total_steps,
                per_device_train_batch_size=task.experiment.batch,
                bf16=task.bf16,
                use_cpu=task.device.type == "cpu",
                max_grad_norm=task.experiment.clip or 0.0,
                logging_strategy="no",
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                remove_unused_columns=False,
            )
            model = task.model()
            optimizer = task.optimizer(model)
            trainer = OfTask(
                model,
                arguments,
                train_dataset=task.experiment.train,
                optimizers=(optimizer, task.schedule(optimizer)),
                callbacks=[After()],
            )
            trainer.train()

    return OwnLoop(body)


def deepspeed(task: Task) -> Side:
    """https://www.deepspeed.ai/getting-started/"""
    import deepspeed

    with tempfile.TemporaryDirectory(prefix="meshrun-bench-") as folder:
        deepspeed.init_distributed(
            "nccl" if task.device.type == "cuda" else "gloo",
            auto_mpi_discovery=False,
            init_method=f"file://{folder}/store",
            rank=0,
            world_size=1,
        )
        model = task.model()
        optimizer: Any = task.optimizer(model)
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            lr_scheduler=task.schedule(optimizer),
            config={
                "train_micro_batch_size_per_gpu": task.experiment.batch,
                "gradient_clipping": task.experiment.clip or 0.0,
                "torch_autocast": {"enabled": task.bf16, "dtype": "bfloat16"},
            },
        )
        engine.train()
        for step, batch in enumerate(task.loader()):
            inputs, targets = to_device(batch, engine.device)
            loss = task.loss(engine, step, inputs, targets)
            engine.backward(loss)
            engine.step()
            yield loss.detach()


def nothing(task: Task) -> Side:
    """Of a peer that is never made."""
    raise AssertionError(task)


MESHRUN = Peer("meshrun", meshrun)
PEERS = {
    "bare": Peer("bare torch", bare),
    "bare-compiled": Peer("bare torch, compiled, fused", bare_compiled, compiles=True),
    "fabric": Peer("Lightning Fabric", fabric, ("lightning",)),
    "fabric-compile": Peer("Lightning Fabric + compile", fabric_compile, ("lightning",), compiles=True),
    "lightning": Peer("Lightning Trainer", lightning, ("lightning",)),
    "accelerate": Peer("Accelerate", accelerate, ("accelerate",)),
    "transformers": Peer("transformers' Trainer", transformers, ("transformers", "accelerate")),
    "deepspeed": Peer("DeepSpeed", deepspeed, ("deepspeed",)),
    "torchtitan": Peer("torchtitan", nothing, ("torchtitan",), unfit="torchtitan trains only its own models"),
}
