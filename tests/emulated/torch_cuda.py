"""``torch.cuda`` over the emulated device, for as long as a block lasts."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from tests.emulated.device import CUDA, DEVICE, OPERATIONS, Emulating, computing
from tests.emulated.graphs import Graph
from tests.emulated.memory import pin, pinned
from tests.emulated.queues import Event, Stream

#: What the device says of itself: an H200.
PROPERTIES = SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, total_memory=143_771 << 20, multi_processor_count=132,
    warp_size=32, max_threads_per_multi_processor=2048, L2_cache_size=60 << 20,
    shared_memory_per_block_optin=232_448, shared_memory_per_multiprocessor=233_472,
    regs_per_multiprocessor=65_536, uuid="emulated", is_integrated=False, is_multi_gpu_board=False,
    gcnArchName="",
)  # fmt: skip


class CudaStream(Stream):
    """In place of ``torch.cuda.Stream``."""

    device, device_index, device_type, priority = CUDA, 0, 1, 0
    _numbers = itertools.count(1)

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()
        self.cuda_stream = self.stream_id = next(self._numbers)
        self._before: list[Stream] = []
        DEVICE.streams[self.stream_id] = self

    def __enter__(self) -> CudaStream:
        self._before.append(DEVICE.current)
        DEVICE.current = self
        return self

    def __exit__(self, *_: Any) -> None:
        DEVICE.current = self._before.pop()

    def wait_event(self, event: CudaEvent) -> None:
        """Order later work after the event."""
        if DEVICE.capture is None:  # a graph keeps the order in which it was captured
            self.wait(event)

    def wait_stream(self, other: CudaStream) -> None:
        """Order later work after all work of the other stream."""
        self.wait_event(other.record_event())

    def record_event(self, event: CudaEvent | None = None) -> CudaEvent:
        """An event behind all that it was given."""
        event = event or CudaEvent()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """The host waits."""
        DEVICE.wait(self.finish)

    def query(self) -> bool:
        """Whether nothing is left to do."""
        return self.done == self.given


class CudaEvent(Event):
    """In place of ``torch.cuda.Event``."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def record(self, stream: Stream | None = None) -> None:
        if DEVICE.capture is None:
            super().record(stream or DEVICE.current)

    def wait(self, stream: Stream | None = None) -> None:
        """A stream waits."""
        if DEVICE.capture is None:
            (stream or DEVICE.current).wait(self)

    def synchronize(self) -> None:
        DEVICE.wait(super().synchronize, "event waits")

    def query(self) -> bool:
        with computing():
            return super().query()

    def elapsed_time(self, other: CudaEvent) -> float:
        """Milliseconds, which the emulated device does not know."""
        del other
        return 1.0


class _Within:
    """A context manager around a stream, or none."""

    def __init__(self, stream: CudaStream | None = None, *_: Any, **__: Any) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        if isinstance(self._stream, CudaStream):
            self._stream.__enter__()

    def __exit__(self, *error: Any) -> None:
        if isinstance(self._stream, CudaStream):
            self._stream.__exit__(*error)


class _Capturing:
    """In place of ``torch.cuda.graph``."""

    def __init__(self, cuda_graph: Graph, pool: Any = None, stream: Any = None, **_: Any) -> None:
        self._graph, self._stream = cuda_graph, stream or CudaStream()

    def __enter__(self) -> None:
        torch.cuda.synchronize()
        self._stream.__enter__()
        self._graph.capture_begin()

    def __exit__(self, *error: Any) -> None:
        self._graph.capture_end()
        self._stream.__exit__(*error)


def _synchronize(*_: Any, **__: Any) -> None:
    """The host waits for all streams."""
    DEVICE.wait(DEVICE.idle)


def _set_stream(stream: CudaStream) -> None:
    DEVICE.current = stream


def _always(value: Any) -> Any:
    return lambda *_, **__: value


_make_tensor = torch.tensor


def _tensor(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
    """``torch.tensor``, whose own code would ask a driver for pinned memory."""
    made = _make_tensor(*args, **kwargs)
    return pin(made) if pin_memory else made


@contextmanager
def installed(free: int = 120 << 30) -> Iterator[None]:
    """The device is there: fresh, idle, and the only one, with so many bytes ``free``."""
    DEVICE.reset()
    DEVICE.default = DEVICE.current = CudaStream()
    instead = {
        "Stream": CudaStream, "ExternalStream": CudaStream, "Event": CudaEvent,
        "CUDAGraph": Graph, "graph": _Capturing, "stream": _Within, "StreamContext": _Within,
        "device": _Within, "synchronize": _synchronize, "set_stream": _set_stream,
        "current_stream": lambda *_: DEVICE.current, "default_stream": lambda *_: DEVICE.default,
        "is_current_stream_capturing": lambda: DEVICE.capture is not None,
        "is_available": _always(True), "is_initialized": _always(True), "device_count": _always(1),
        "current_device": _always(0), "set_device": _always(None), "_lazy_init": _always(None),
        "get_device_properties": _always(PROPERTIES), "get_device_capability": _always((9, 0)),
        "get_device_name": _always(PROPERTIES.name), "get_arch_list": _always(["sm_90"]),
        "is_bf16_supported": _always(True), "can_device_access_peer": _always(True),
        "mem_get_info": _always((free, 140 << 30)), "memory_reserved": _always(0),
        "memory_allocated": _always(0), "max_memory_allocated": _always(0),
        "max_memory_reserved": _always(0), "reset_peak_memory_stats": _always(None),
        "memory_stats": lambda *_: defaultdict(int), "empty_cache": _always(None),
        "ipc_collect": _always(None), "graph_pool_handle": _always((0, 1)),
        "manual_seed": _always(None), "manual_seed_all": _always(None),
    }  # fmt: skip
    with ExitStack() as stack:
        stack.enter_context(patch.multiple(torch.cuda, **instead))
        stack.enter_context(patch.object(torch, "tensor", _tensor))
        stack.enter_context(patch.object(torch.Tensor, "is_pinned", lambda t, *_: pinned(t)))
        stack.enter_context(patch.object(torch.Tensor, "pin_memory", lambda t, *_: pin(t.clone())))
        # Without a driver the guards of torch's own code do nothing, as under its fake tensors.
        torch._C._ensureCUDADeviceGuardSet()
        # Else torch.tensor(..., device="cuda") would not come through the dispatcher.
        torch._C._set_only_lift_cpu_tensors(True)
        stack.callback(torch._C._set_only_lift_cpu_tensors, False)
        stack.enter_context(Emulating())
        yield
    DEVICE.reset()


@contextmanager
def compiled_as_it_is() -> Iterator[None]:
    """For a process of its own: no compiler, one library of collectives, and implementations for
    CUDA in Python are called with the device's tensors.
    """
    make_group, make_more = dist.init_process_group, dist.new_group
    implement, generator = torch.library.Library.impl, torch.Generator

    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_id", None)
        return make_group(*(("gloo", *args[1:]) if args else ()), **_by_gloo(kwargs, not args))

    def new_group(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_id", None)
        return make_more(*args, **_by_gloo(kwargs, "backend" in kwargs))

    def impl(library: Any, name: Any, function: Any, key: str = "", **options: Any) -> Any:
        if library.ns == "aten" or not callable(function):
            return implement(library, name, function, key, **options)
        OPERATIONS[f"{library.ns}::{name if isinstance(name, str) else name.name()}"] = function
        return None

    class OfTheHost(generator):
        def __new__(cls, device: Any = None) -> Any:
            del device
            return generator.__new__(generator)

    with ExitStack() as stack:
        for owner, name, instead in (
            (torch, "compile", lambda f=None, **_: f if callable(f) else lambda g: g),
            (torch, "Generator", OfTheHost),
            (torch, "get_device_module", _always(torch.cuda)),
            (dist, "init_process_group", init_process_group),
            (dist, "new_group", new_group),
            (torch.library.Library, "impl", impl),
        ):
            stack.enter_context(patch.object(owner, name, instead))
        # A parameter of the host cannot become one of the device in place.
        before = torch.__future__.get_overwrite_module_params_on_conversion()
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        stack.callback(torch.__future__.set_overwrite_module_params_on_conversion, before)
        yield


def _by_gloo(kwargs: dict[str, Any], say: bool) -> dict[str, Any]:
    return {**kwargs, "backend": "gloo"} if say else kwargs
