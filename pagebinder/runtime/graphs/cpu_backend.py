"""Capture and replay on a CPU: every op of a call is recorded with its operands, and run again from the record.

    call:    a = mm(static_x, w)    b = relu(a)    out.copy_(b)
    record:  #0 = mm(<static_x>, <w>)   #1 = relu(#0)   copy_(<out>, #1)        sizes and numbers as they were then

What holds on a GPU holds here: shapes, scalars and addresses are those of the capture, values are those of the
replay, and a read of a value on the host is an error. So everything but the device's own calls can be tested
without one. There is nothing to gain in speed: a CPU has no launches to save.

Compiled code (inductor's) cannot be seen op by op: such a call is kept whole and called again.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from pagebinder.ambient import inference
from pagebinder.errors import CacheCapacityError, GraphCaptureError
from pagebinder.graph_tools import storage_of
from pagebinder.runtime.graphs.backend import Staging, Tensors
from pagebinder.runtime.streams.branches import MAIN

HOST_READS = {torch.Tag.data_dependent_output, torch.Tag.cudagraph_unsafe}


class CpuGraphBackend:
    """See the module's docstring and `GraphBackend`."""

    name = "cpu"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._peaks: dict[int, int] | None = {}  # by stream

    def static(self, num_bytes: int) -> torch.Tensor:
        try:
            return torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
        except (RuntimeError, MemoryError) as error:
            raise CacheCapacityError(
                f"{num_bytes / 2**20:,.1f} MiB for captured steps cannot be allocated: capture smaller sizes."
            ) from error

    def staging(self, num_bytes: int) -> Staging:
        return _HostStaging(num_bytes)

    def upload(self, staging: Staging, static: torch.Tensor, num_bytes: int) -> None:
        static[:num_bytes].copy_(staging.memory[:num_bytes])

    def capture(self, call: Callable[[], Tensors], *, is_opaque: bool, held_bytes: int = 0):
        with inference():
            if is_opaque:
                self._peaks = None
                outputs = tuple(call())
                return _WholeCall(call, outputs), outputs
            recorder = Recorder()
            with recorder:
                outputs = tuple(call())
        self._count(recorder, outputs, held_bytes)
        return RecordedCalls(recorder, outputs), outputs

    def _count(self, recorder: Recorder, outputs: Tensors, held_bytes: int) -> None:
        """Add up what a capture takes: memory of a stream serves no other one, but all captures."""
        if self._peaks is not None:
            for stream, peak in recorder.peaks(outputs).items():
                peak += held_bytes if stream == MAIN else 0
                self._peaks[stream] = max(self._peaks.get(stream, 0), peak)

    def measured_bytes(self) -> int | None:
        return None if self._peaks is None else sum(self._peaks.values())

    def finish(self) -> None:
        pass


class _HostStaging:
    def __init__(self, num_bytes: int) -> None:
        self.memory = torch.zeros(num_bytes, dtype=torch.uint8, device="cpu")
        self.array = self.memory.numpy()

    def wait(self) -> None:
        pass


@dataclass(frozen=True)
class Slot:
    """Stands for the tensor that an earlier recorded call made."""

    number: int


class Recorder(TorchDispatchMode):
    """Records ops below the dispatcher's autograd, and how long the memory that they make is used.

    Where streams are simulated, ops come in the order in which they run, and memory counts in the order in which the
    host launches: see `Watcher`.

    Raises GraphCaptureError for an op whose result depends on values that the host reads.
    """

    def __init__(self, device: torch.device | None = None, inside: Callable | None = None) -> None:
        """`device`: where ops are made to work. `inside(op, operands, options)`: results of an op by the ops that it
        consists of, which are recorded in its place; or None."""
        super().__init__()
        self._device, self._inside = device, inside
        self.calls: list[tuple] = []  # (op, flat operands, their tree, flat results as Slot or None)
        self.num_slots = 0
        self._storage_of: list[int] = []  # by slot
        self._num_bytes: list[int] = []  # by storage
        self._stream_of: list[int] = []
        self._first: list[tuple[int, int]] = []  # place and number of a call
        self._last: list[tuple[int, int]] = []
        self._held: dict[int, int] = {}  # by storage: until which place
        self._places: list[int] = []  # by call
        self._place, self._stream, self._num_places = 0, MAIN, 0

    def next_place(self) -> int:
        self._num_places += 1
        return self._num_places

    def launch_at(self, place: int, stream: int) -> None:
        self._place, self._stream = place, stream

    def hold(self, value: object, place: int) -> None:
        for tensor in tree_flatten(value)[0]:
            slot = self._slot_of(tensor)
            if isinstance(slot, Slot):
                storage = self._storage_of[slot.number]
                self._held[storage] = max(place, self._held.get(storage, 0))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if HOST_READS & set(func.tags):
            raise GraphCaptureError(
                f"{func.name()} reads a value on the host, which a captured graph cannot do: register the op with "
                'capture="never", so that the graph is cut around it, or choose another provider.'
            )
        if self._device is not None:
            args, kwargs = self._moved(func, args, kwargs or {})
        if self._inside is not None:
            with self:
                result = self._inside(func, args, kwargs or {})
            if result is not None:
                return result
        flat, tree = tree_flatten((args, kwargs or {}))
        if torch.Tag.dynamic_output_shape in func.tags and not _has_fixed_size(flat):
            raise GraphCaptureError(
                f"The size of what {func.name()} returns depends on values: it has no fixed place."
            )
        operands = [self._slot_of(value) for value in flat]
        result = func(*args, **(kwargs or {}))
        results = tree_flatten(result)[0]
        inputs = [value for value in flat if isinstance(value, torch.Tensor)]
        slots = [self._new_slot(value, inputs) for value in results]
        for operand in operands:
            if isinstance(operand, Slot):
                storage = self._storage_of[operand.number]
                self._last[storage] = max(self._last[storage], self._now)
        self.calls.append((func, operands, tree, slots))
        self._places.append(self._place)
        return result

    @property
    def _now(self) -> tuple[int, int]:
        return self._place, len(self.calls)

    def _moved(self, func, args, kwargs):
        flat, tree = tree_flatten((args, kwargs))
        flat = [self._device if isinstance(value, torch.device) else value for value in flat]
        args, kwargs = tree_unflatten(flat, tree)
        makes_tensors = not any(isinstance(value, torch.Tensor) for value in flat)
        if makes_tensors and any(a.name == "device" for a in func._schema.arguments):
            kwargs = {**kwargs, "device": self._device}
        return args, kwargs

    def _slot_of(self, value):
        recorded = getattr(value, "_recorded", None) if isinstance(value, torch.Tensor) else None
        return recorded[1] if recorded is not None and recorded[0] is self else value

    def _new_slot(self, value, inputs: Sequence[torch.Tensor]) -> Slot | None:
        if not isinstance(value, torch.Tensor) or any(value is x for x in inputs):
            return None  # a number, or an operand that was changed in place
        slot = Slot(self.num_slots)
        self.num_slots += 1
        value._recorded = (self, slot)
        base = next((x for x in inputs if storage_of(x) == storage_of(value)), None)
        owner = None if base is None else self._slot_of(base)
        if isinstance(owner, Slot):
            storage = self._storage_of[owner.number]
        else:
            storage = len(self._num_bytes)
            size = (
                value.untyped_storage().nbytes() if base is None else 0
            )  # a view of what is not ours is free
            self._num_bytes.append(size)
            self._stream_of.append(self._stream)
            self._first.append(self._now)
            self._last.append(self._now)
        self._storage_of.append(storage)
        return slot

    def peak_bytes(self, outputs: Sequence[torch.Tensor] = ()) -> int:
        """Most memory that is in use between two calls: from the call that makes it to the last that reads it, or to
        where the host drops it."""
        return sum(self.peaks(outputs).values())

    def peaks(self, outputs: Sequence[torch.Tensor] = ()) -> dict[int, int]:
        """The same by stream, as each has memory of its own."""
        found = {}
        for stream, lives in self.lives(outputs).items():
            changes = [0] * (len(self._places) + 2)
            for num_bytes, first, last in lives:
                changes[first] += num_bytes
                changes[last + 1] -= num_bytes
            found[stream] = max(itertools.accumulate(changes))
        return found

    def lives(self, outputs: Sequence[torch.Tensor] = ()) -> dict[int, list[tuple[int, int, int]]]:
        """By stream what is in use when: (bytes, number of the call that makes it, that of the last that needs it);
        outputs last beyond all calls."""
        order = sorted((place, number) for number, place in enumerate(self._places))
        rank = {call: i for i, call in enumerate(order)}
        last = [rank[call] for call in self._last]
        for storage, place in self._held.items():
            last[storage] = max(last[storage], bisect.bisect(order, (place, len(order))) - 1)
        for value in outputs:
            slot = self._slot_of(value)
            if isinstance(slot, Slot):
                last[self._storage_of[slot.number]] = len(order)
        found = {stream: [] for stream in (MAIN, *self._stream_of)}
        for storage, num_bytes in enumerate(self._num_bytes):
            life = (num_bytes, rank[self._first[storage]], last[storage])
            found[self._stream_of[storage]].append(life)
        return found


def _has_fixed_size(operands: Sequence) -> bool:
    """Of an op that may select by values: it selects by numbers of rows alone."""
    _, *choices = (x for x in operands if isinstance(x, torch.Tensor))
    return bool(choices) and all(x.dtype in (torch.int32, torch.int64) for x in choices)


class RecordedCalls:
    """Runs what a `Recorder` saw; values are dropped after their last use."""

    def __init__(self, recorder: Recorder, outputs: Sequence[torch.Tensor]) -> None:
        self._num_slots = recorder.num_slots
        kept = [recorder._slot_of(value) for value in outputs]
        self._outputs = [(slot.number, value) for slot, value in zip(kept, outputs) if isinstance(slot, Slot)]
        last: dict[int, int] = {}
        for index, (_, operands, _, slots) in enumerate(recorder.calls):
            for operand in (*operands, *slots):
                if isinstance(operand, Slot):
                    last[operand.number] = index
        for number, _ in self._outputs:
            last.pop(number, None)
        drops: dict[int, list[int]] = {}
        for number, index in last.items():
            drops.setdefault(index, []).append(number)
        self._calls = [(*call, drops.get(index, ())) for index, call in enumerate(recorder.calls)]

    def replay(self) -> None:
        values: list = [None] * self._num_slots
        with inference():
            for func, operands, tree, slots, drops in self._calls:
                flat = [values[x.number] if type(x) is Slot else x for x in operands]
                args, kwargs = tree_unflatten(flat, tree)
                results = tree_flatten(func(*args, **kwargs))[0]
                for slot, value in zip(slots, results):
                    if slot is not None:
                        values[slot.number] = value
                for number in drops:
                    values[number] = None
            for number, output in self._outputs:
                output.copy_(values[number])


class _WholeCall:
    def __init__(self, call: Callable[[], Tensors], outputs: Tensors) -> None:
        self._call, self._outputs = call, outputs

    def replay(self) -> None:
        with inference():
            for output, value in zip(self._outputs, self._call(), strict=True):
                if output is not value:
                    output.copy_(value)
