"""Dropout that does not know the mesh: what is dropped depends on the sample and not on the rank that computes it.

    moment = Moment(seed=0)
    key_dropouts(model, moment)                # nn.Dropout becomes KeyedDropout, in place; names and hooks stay
    for step, ids in …:
        moment.step, moment.ids = step, ids    # before each forward pass: which samples are these?
        model(inputs)

Whether an element is dropped is a hash of (seed, step, sample id, module name, how many times the module has been
called in this forward pass, index of the element in its sample), so ranks that hold other samples, tokens or features
draw what one process would. A sample's elements are seen as rows (all dims but the last) and columns (the last one):
a row gets two 32-bit words from 64-bit arithmetic on small tensors, and only 32-bit arithmetic is done on all elements.
Integers wrap the same way on every device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from meshrun.errors import RunFailed
from meshrun.parallel.moment import Call, Moment, Turn

Part = tuple[int, int]
"""(part, parts): this part of that many equal, contiguous ones."""


def key_dropouts(model: nn.Module, moment: Moment) -> list[str]:
    """Turn every dropout of a model into its keyed version, and name those that were turned.

    `AlphaDropout` and `FeatureAlphaDropout` stay as they are: `composed_dropout` replaces what they call.
    """
    turned = []
    for name, module in model.named_modules():
        if (keyed := KEYED.get(type(module))) is not None:
            module.__class__ = keyed
            become_keyed(module, moment, name)
            turned.append(name)
    for layer in model.modules():
        if isinstance(layer, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
            for module in layer.modules():
                if isinstance(module, KeyedDropout):
                    module.batch_dim = 0 if layer.self_attn.batch_first else 1
    return turned


class Keyed(nn.Module):
    """What all modules have that draw by key."""

    moment: Moment
    turn: Turn

    @property
    def name(self) -> str:
        """The module's name in the whole model: assign it anew where a model was cut."""
        return str(self.__dict__["_name"])

    @name.setter
    def name(self, name: str) -> None:
        self.__dict__["_name"] = name
        self.turn = self.moment.turn_of(name)

    @property
    def rate(self) -> float:
        """Of what it drops."""
        return float(getattr(self, "p", 0.0) or getattr(self, "dropout", 0.0))

    def sample_words(self, x: Tensor) -> Tensor:
        """A 64-bit word for each sample of the micro-batch, other ones at the next call."""
        return self.words_of(self.next_call(), x)

    def next_call(self) -> Call:
        """The call that this is; the module's next one is the call after it."""
        call = self.turn.now
        self.turn.now = call.after()
        return call

    def words_of(self, call: Call, x: Tensor) -> Tensor:
        """A 64-bit word for each sample; one word for all where they share the tensor."""
        moment = self.moment
        if moment.ids is None:
            raise RunFailed(f"the module '{self.name}' draws random numbers by sample, but nobody said which ones: ids")
        if moment.alone and moment.batch_dim is None and self.name in moment.alone:
            raise RunFailed(
                f"'{self.name or 'the model'}' drops for one sample after the other, and nothing says which one a "
                f"tensor of shape {tuple(x.shape)} belongs to; let it compute all samples of a batch at once"
            )
        assert moment.key is not None
        word = moment.key + call.word
        if word.device.type != "cpu":  # a single number of the host goes with tensors of any device
            word = word.to(x.device)
        if call.place is not None and call.place.dim is None:
            return mixed(torch.zeros(1, dtype=torch.int64, device=x.device) + word)
        return mixed(moment.ids.to(x.device) * SAMPLE + word)

    def misfit(self, x: Tensor, wanted: str) -> RunFailed:
        samples = 0 if self.moment.ids is None else len(self.moment.ids)
        return RunFailed(
            f"the module '{self.name}' got a tensor of shape {tuple(x.shape)} for a micro-batch of {samples} samples; "
            f"{wanted} must be the batch, so that what is dropped is the same on every mesh"
        )


class KeyedDropout(Keyed, nn.Dropout):
    """`nn.Dropout` by key.

    The batch is the dimension that tracing the model has found (`batch_dim.py`), of which each sample owns as many
    consecutive entries as any other. Where the model was not traced, it is dim 0 if that is a multiple of the number
    of samples; where only dim 1 has the size of the batch, that is it.
    """

    batch_dim: int | None = None
    """0 or 1: the batch is there even if the sizes would allow for the other; None: find out from the sizes."""

    part_of_sequence: Part | None
    """dim 1 of the input is this part of the (local) sequence."""
    part_of_features: Part | None
    """The last dim of the input is this part of the features."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.p in (0, 1) or self.moment.key is None:
            return super().forward(input)
        output = self.drop(input, self.p)
        return input.copy_(output) if self.inplace else output

    def drop(self, input: Tensor, p: float) -> Tensor:
        """The input without what is dropped at this rate."""
        call = self.next_call()
        words = self.words_of(call, input)
        if call.place is not None and call.place.dim is None:
            return self._kept(input[None], words, p)[0]
        dim = self._batch_dim(input, len(words), call)
        if call.place is not None and call.place.together is not None and len(words):
            if not call.place.together or self.part_of_sequence is not None:
                raise self.misfit(input, f"in dim {dim}, the entries of each sample in the same order,")
            apart = input.unflatten(dim, (-1, len(words), call.place.together)).movedim(dim + 1, 0)
            return self._kept(apart, words, p).movedim(0, dim + 1).flatten(dim, dim + 2)
        return self._kept(input, words, p) if dim == 0 else self._kept(input.movedim(dim, 0), words, p).movedim(0, dim)

    def _batch_dim(self, input: Tensor, samples: int, call: Call) -> int:
        shape, second = input.shape, input.dim() > 1
        if call.place is not None and call.place.dim is not None:
            dim = call.place.dim
            if dim >= input.dim() or (samples and shape[dim] % samples) or (not samples and shape[dim]):
                raise self.misfit(input, f"dim {dim} of what a Dropout gets")
            return dim
        second = second and shape[1] == samples and self.batch_dim != 0
        second = second and (self.batch_dim == 1 or (samples > 0 and shape[0] % samples > 0))
        if second:
            return 1
        if (samples and shape[0] % samples) or (not samples and shape[0]):
            raise self.misfit(input, "dim 0 of what a Dropout gets")
        if self.moment.unplaced is not None and self.batch_dim is None:
            return self._said(input, samples)
        return 0

    def _said(self, input: Tensor, samples: int) -> int:
        """Dim 0, unless the sizes would allow for dim 1 too: then what the user says."""
        if input.dim() < 2 or samples < 2 or input.shape[1] % samples:
            return 0
        if self.moment.batch_dim is None:
            raise RunFailed(
                f"the module '{self.name}' got a tensor of shape {tuple(input.shape)} for a micro-batch of {samples} "
                f"samples, of which both dim 0 and dim 1 may be the batch; the model does not tell, because "
                f"{self.moment.unplaced}: say which it is with Experiment(batch_dim=0) or Experiment(batch_dim=1)"
            )
        return self.moment.batch_dim

    def _kept(self, input: Tensor, words: Tensor, p: float) -> Tensor:
        """The input, whose dim 0 is the batch, without what is dropped."""
        shape = input.shape
        rows = self._rows(shape, shape[0] // max(len(words), 1), input.device)
        columns = of_part(shape[-1] if input.dim() > 1 else 1, self.part_of_features, input.device)
        return dropped(input, keeps(words, rows, columns, p).view(shape), p)

    def _rows(self, shape: torch.Size, each: int, device: torch.device) -> Tensor:
        """The index in its sample, and in the unsplit tensor, of each row that a sample owns."""
        sizes, sequence = list(shape[1:-1]), 0
        if each != 1 or not sizes:
            # A sample owns several entries of dim 0: these stand for dim 1 where that is the last.
            sequence = min(1, len(sizes))
            sizes.insert(0, each)
        axes = [(of_part(size, None, device), size) for size in sizes]
        positions, part = self.moment.positions, self.part_of_sequence
        if part is not None:
            axes[sequence] = of_part(sizes[sequence], part, device), sizes[sequence] * part[1]
        if positions is not None:
            self._place(axes, positions.to(device), sequence)
        index = axes[0][0]
        for axis, size in axes[1:]:
            index = (index[:, None] * size + axis).flatten()
        return index

    def _place(self, axes: list[tuple[Tensor, int]], positions: Tensor, sequence: int) -> None:
        """Under context parallelism, put the tokens' positions where the sequence is.

        That is dim 1, or dim 2 of attention's (batch, heads, queries, keys), or it is in dim 0 with the batch; a tensor
        of other sizes has no tokens.
        """
        length = self.moment.length
        if length is None:
            raise RunFailed("the positions of the tokens are known but not the length of their sequence: length")
        mine = positions_of_part(positions, self.part_of_sequence)
        for axis, found in ((sequence, mine), (sequence + 1, positions), (0, mine)):
            if axis < len(axes) and len(axes[axis][0]) == len(found):
                axes[axis] = found, length
                return


class _KeyedChannels(Keyed):
    """A dropout of whole channels: the element's index is that of its channel, and the features are the channels."""

    p: float
    inplace: bool
    part_of_sequence: Part | None
    part_of_features: Part | None
    batched: tuple[int, ...]
    """The numbers of dims of an input that has a batch; with one less it is a single sample."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.p in (0, 1) or self.moment.key is None:
            return super().forward(input)
        output = self.drop(input, self.p)
        return input.copy_(output) if self.inplace else output

    def drop(self, input: Tensor, p: float) -> Tensor:
        """The input without the channels that are dropped at this rate."""
        call = self.next_call()
        words, place = self.words_of(call, input), call.place
        batch = input if input.dim() in self.batched else input.unsqueeze(0)
        samples, (entries, channels) = len(words), batch.shape[:2]
        elsewhere = place is not None and (place.dim or place.together == 0)
        if elsewhere or batch.dim() not in self.batched or entries != samples * (each := entries // max(samples, 1)):
            raise self.misfit(input, f"dim 0 of what a {type(self).__name__.removeprefix('Keyed')} gets")
        axis = of_part(channels, self.part_of_features or self.part_of_sequence, input.device)
        positions = self.moment.positions
        if positions is not None:
            mine = positions_of_part(positions, self.part_of_sequence)
            axis = mine.to(input.device) if len(mine) == channels else axis
        kept = keeps(words, torch.arange(each, device=input.device), axis, p)
        if place is not None and place.together:
            kept = kept.view(samples, -1, place.together, channels).transpose(0, 1).contiguous()
        kept = kept.view(entries, channels, *[1] * (batch.dim() - 2))
        return dropped(batch, kept, p).view(input.shape)


class KeyedDropout1d(_KeyedChannels, nn.Dropout1d):
    batched = (3,)


class KeyedDropout2d(_KeyedChannels, nn.Dropout2d):
    # torch takes three dims for (batch, channels, length).
    batched = (3, 4)


class KeyedDropout3d(_KeyedChannels, nn.Dropout3d):
    batched = (5,)


KEYED: dict[type[nn.Module], type[Keyed]] = {
    nn.Dropout: KeyedDropout,
    nn.Dropout1d: KeyedDropout1d,
    nn.Dropout2d: KeyedDropout2d,
    nn.Dropout3d: KeyedDropout3d,
}


def become_keyed(module: nn.Module, moment: Moment, name: str) -> None:
    """Give a module whose class has become a keyed one what such a module has."""
    module.moment = moment  # type: ignore[assignment]
    module.name = name  # type: ignore[assignment]
    module.part_of_sequence = module.part_of_features = None  # type: ignore[assignment]


def draws(module: nn.Module) -> bool:
    """Whether a module drops anything by key."""
    return isinstance(module, Keyed) and module.rate > 0


def of_part(size: int, part: Part | None, device: torch.device) -> Tensor:
    """The indices, in the whole, of a part with this many elements."""
    start = size * part[0] if part else 0
    return torch.arange(start, start + size, device=device)


def positions_of_part(positions: Tensor, part: Part | None) -> Tensor:
    return positions.tensor_split(part[1])[part[0]] if part else positions


def dropped(x: Tensor, kept: Tensor, p: float) -> Tensor:
    # Multiplied in this order, the backward pass needs only `kept`: a byte an element.
    return x * kept * (1 / (1 - p))


# The odd constants are those of splitmix64, and of a searched 32-bit hash with little bias
# (github.com/skeeto/hash-prospector), as signed numbers.
SAMPLE = 0x2545F4914F6CDD1D
_MIX64 = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)
_MIX32 = (0x7FEB352D, 0x846CA68B - (1 << 32))


def keeps(words: Tensor, rows: Tensor, columns: Tensor, p: float) -> Tensor:
    """Which of the elements (sample, row, column) stay when each is dropped with probability p."""
    # The numbers are uniform over int32, so the lowest p of them are dropped.
    return hashed(words, rows, columns) >= round(p * (1 << 32)) - (1 << 31)


def hashed(words: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """A number in int32 for every (sample, row, column)."""
    # Only words are multiplied and never an index alone: where a compiler knows a range, it takes for granted that the
    # product does not overflow, and is wrong.
    row = mixed(words[:, None] + rows)[:, :, None]
    # An odd factor and a summand of each row's own, so that no two rows see the columns alike.
    factor, start, column = (row >> 32).to(torch.int32) | 1, row.to(torch.int32), columns.to(torch.int32)
    if _one_kernel(column):
        return _kernel(_HASHED)(column, factor, start)
    h = column * factor
    h += start
    h ^= (h >> 16) & 0xFFFF
    h *= _MIX32[0]
    h ^= (h >> 15) & 0x1FFFF
    h *= _MIX32[1]
    return h


def mixed(z: Tensor) -> Tensor:
    """Every bit of a 64-bit word depends on all of them after this (splitmix64)."""
    if _one_kernel(z):
        return _kernel(_MIXED)(z)
    # Shifts of signed numbers copy the sign; the masks make zeros of these copies.
    z = (z ^ (z >> 30) & 0x3FFFFFFFF) * _MIX64[0]
    z = (z ^ (z >> 27) & 0x1FFFFFFFFF) * _MIX64[1]
    return z ^ (z >> 31) & 0x1FFFFFFFF


# A GPU would read and write all elements once for each operation; compiled code fuses these by itself.
_HASHED = f"""
template <typename T> T hashed(T column, T factor, T start) {{
    unsigned int h = (unsigned int)column * (unsigned int)factor + (unsigned int)start;
    h = (h ^ (h >> 16)) * {_MIX32[0]}u;
    return (T)((h ^ (h >> 15)) * {_MIX32[1] % (1 << 32)}u);
}}"""
_MIXED = f"""
template <typename T> T mixed(T word) {{
    unsigned long long z = (unsigned long long)word;
    z = (z ^ (z >> 30)) * {_MIX64[0] % (1 << 64)}ull;
    z = (z ^ (z >> 27)) * {_MIX64[1] % (1 << 64)}ull;
    return (T)(z ^ (z >> 31));
}}"""


def _one_kernel(x: Tensor) -> bool:
    return x.is_cuda and torch.version.hip is None and not torch.compiler.is_compiling()


@functools.cache
def _kernel(source: str) -> Callable[..., Tensor]:
    kernel: Callable[..., Tensor] = torch.cuda.jiterator._create_jit_fn(source)
    return kernel
