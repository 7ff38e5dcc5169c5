"""Capture and replay with CUDA graphs; `make gpu` runs its tests.

warm-up      on a side stream, before every capture: kernels are compiled and loaded, libraries make their handles
             and work spaces; none of that is allowed inside a capture
capture      on the same side stream, all graphs from one memory pool: they never run at once, so a later graph
             takes the memory that an earlier, larger one has given back. A capture runs nothing, so the graph is
             replayed once: the piece behind it warms up on its results, and ids among them must be ids
replay       on the caller's current stream
upload       one copy from pinned memory, not waited for; an event says when the host may write there again
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from pagebinder.collector import collector_paused
from pagebinder.errors import CacheCapacityError, GraphCaptureError
from pagebinder.runtime.graphs.backend import Tensors

WARMUPS = 2


class CudaGraphBackend:
    """See the module's docstring and `GraphBackend`."""

    name = "cuda"

    def __init__(self, device: torch.device) -> None:
        self.device = torch.device(
            "cuda", torch.cuda.current_device() if device.index is None else device.index
        )
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(self.device)
        self._start_bytes: int | None = None  # reserved before the first capture
        self._measured_bytes: int | None = None
        self._static_bytes = 0  # since the first capture

    def static(self, num_bytes: int) -> torch.Tensor:
        try:
            memory = torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
            self._static_bytes += 0 if self._start_bytes is None else num_bytes
            return memory
        except torch.OutOfMemoryError as error:
            free, _ = torch.cuda.mem_get_info(self.device)
            raise CacheCapacityError(
                f"{num_bytes / 2**20:,.1f} MiB for captured steps cannot be allocated on {self.device}, which has "
                f"{free / 2**20:,.1f} MiB free: capture smaller sizes, or give less kv_cache_bytes."
            ) from error

    def staging(self, num_bytes: int) -> _PinnedStaging:
        return _PinnedStaging(num_bytes)

    def upload(self, staging: _PinnedStaging, static: torch.Tensor, num_bytes: int) -> None:
        static[:num_bytes].copy_(staging.memory[:num_bytes], non_blocking=True)
        staging.uploaded.record(torch.cuda.current_stream(self.device))

    def capture(self, call: Callable[[], Tensors], *, is_opaque: bool, held_bytes: int = 0):
        try:
            with torch.cuda.device(self.device), torch.inference_mode():
                self._warm_up(call)
                if self._start_bytes is None:  # behind the first warm-up: work spaces of libraries are theirs
                    gc.collect()
                    torch.cuda.empty_cache()
                    self._start_bytes = torch.cuda.memory_reserved(self.device)
                graph, outputs = self._capture(call)
                graph.replay()
                return graph, outputs
        except torch.OutOfMemoryError as error:
            raise CacheCapacityError(
                "The GPU's memory ran out while a step was captured: capture smaller sizes (the largest comes first "
                "and takes the most), or give less kv_cache_bytes."
            ) from error

    def _capture(self, call: Callable[[], Tensors]):
        graph, caller = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
        with torch.inference_mode(False):
            # Makes the state of random numbers that all graphs share: were it made in inference mode, nobody else
            # could capture outside of it for as long as our graphs live.
            graph.register_generator_state(torch.cuda.default_generators[self.device.index])
        # The collector must not free anything in the middle of a capture: what it finds may be another graph, or an
        # event, which cannot be destroyed then.
        with collector_paused():
            return graph, self._record(graph, call, caller)

    def _record(self, graph, call: Callable[[], Tensors], caller) -> Tensors:
        try:
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                return tuple(call())
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._give_up_capture()
            # Ending a capture that has failed is an error too, and hides the one that made it fail.
            first = error.__context__ if isinstance(error.__context__, Exception) else error
            if isinstance(first, torch.OutOfMemoryError):
                raise first from None
            raise GraphCaptureError(
                f"A step cannot be captured in a CUDA graph: {first}\nAn op that waits for the device must be "
                'registered with capture="never", so that the graph is cut around it.'
            ) from error
        finally:
            torch.cuda.set_stream(caller)  # a capture whose end raises leaves its own stream behind

    def _give_up_capture(self) -> None:
        """Tell the allocator that a capture is over whose end has raised: else it goes on asking a graph that is gone
        whether memory is for its pool, and the pool is never given back."""
        device, pool = self.device.index, self._pool
        leave_capture_of_random_numbers(device)
        try:
            torch._C._cuda_endAllocateToPool(device, pool)
        except RuntimeError:
            return  # it was told: the end failed later, and the graph gives the pool back itself
        torch._C._cuda_releasePool(device, pool)
        self._pool = torch.cuda.graph_pool_handle()  # one without users cannot be used again

    def _warm_up(self, call: Callable[[], Tensors]) -> None:
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(WARMUPS):
                call()
        current.wait_stream(self._stream)
        torch.cuda.synchronize(self.device)

    def measured_bytes(self) -> int | None:
        return self._measured_bytes

    def finish(self) -> None:
        """What warm-ups left in the allocator's cache goes back; what stays is the pool of the graphs."""
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        if self._start_bytes is not None:
            grown = torch.cuda.memory_reserved(self.device) - self._start_bytes
            self._measured_bytes = max(0, grown - self._static_bytes)


def leave_capture_of_random_numbers(device: int) -> None:
    """A capture whose end has raised leaves torch's generator in a state that draws for a graph only: it goes on with
    a copy of that, which is in no capture."""
    generator = torch.cuda.default_generators[device]
    generator.graphsafe_set_state(generator.clone_state())


class _PinnedStaging:
    def __init__(self, num_bytes: int) -> None:
        self.memory = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True, device="cpu")
        self.array = self.memory.numpy()
        self.uploaded = torch.cuda.Event()

    def wait(self) -> None:
        self.uploaded.synchronize()  # returns at once if it was never recorded
