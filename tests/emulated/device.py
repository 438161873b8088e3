"""A CUDA device that computes, on a CPU: its tensors say that they are on ``cuda:0``.

:class:`DeviceTensor` lies over real memory of the host, and :class:`Emulating` gives one to whoever
asks for a tensor on ``cuda``. Every operation then comes through :func:`dispatch`, which

* refuses to mix tensors of host and device, as CUDA does,
* puts what a GPU would launch behind the work of the current stream (``queues.py``), and gives back
  memory in which nothing stands yet (``memory.py``),
* copies to the host when the stream gets there, or waits where a program must,
* records what is launched during a capture (``graphs.py``), and refuses what CUDA refuses then,
* counts launches, copies and waits, and where in the program they come from.

Knows neither SGLang nor the plugin. Kernels that are no operations of torch are run by
:func:`launch`.
"""

from __future__ import annotations

import functools
import random
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from tests.emulated.memory import Block, pin, pinned, poison
from tests.emulated.queues import Stream, Work

CUDA, CPU, META = torch.device("cuda", 0), torch.device("cpu"), torch.device("meta")

#: Share of launches behind which some stream runs ahead, where streams do.
OFTEN = 0.2

#: Parts of file names whose frames are not where a program did something.
_OURS = ("/tests/emulated/", "/torch/", "/triton/runtime/", "contextlib.py", "functools.py")


class Refused(RuntimeError):
    """A call that CUDA would refuse as well."""


class Capture(Protocol):
    """Where launches go instead of a stream."""

    def add(self, name: str, work: Work) -> None:
        """Something was launched."""

    def allocated(self, block: Block, memory: Tensor) -> None:
        """Memory of the graph's own pool."""


class Device:
    """The one device: its streams, what is captured, and what was counted."""

    def __init__(self) -> None:
        self.streams: weakref.WeakValueDictionary[int, Stream] = weakref.WeakValueDictionary()
        """By number, all but the default one."""
        self.default = self.current = Stream()
        self.capture: Capture | None = None
        self.in_turn = False
        """Everything is done when it is launched, as where nothing runs beside the host."""
        self.ahead: random.Random | None = None
        """Lets streams run ahead of the host now and then; ``None``: all is as late as can be."""
        self.tally: Counter[str] = Counter()
        self.sites: Counter[tuple[str, str]] = Counter()
        """Counts by the line of the program that caused them."""
        self._compiled: set[Hashable] = set()
        self.compiled: list[str] = []
        """Names of kernels, once for each key that they had to be compiled for."""

    def reset(self) -> None:
        """An unused device."""
        self.__init__()

    def count(self, what: str) -> None:
        """One more of that."""
        self.tally[what] += 1
        self.sites[what, _site()] += 1

    def launch(self, name: str, work: Work, kind: str = "launches") -> None:
        """Work for the current stream, or for the graph that is captured."""
        if self.capture is not None:
            self.tally["captured"] += 1
            self.capture.add(name, work)
            return
        self.count(kind)
        self.current.give(work)
        if self.in_turn:
            self.finish()
        elif self.ahead is not None and self.ahead.random() < OFTEN:
            self._run_ahead(self.ahead)

    def compile(self, name: str, key: Hashable) -> None:
        """A kernel is needed as this ``key`` says; a GPU's host would wait, where it is new."""
        if key not in self._compiled:
            self._compiled.add(key)
            self.compiled.append(name)

    def allocate(self, memory: Tensor) -> DeviceTensor:
        """A tensor in fresh ``memory``."""
        poison(memory)
        if self.capture is None:
            self.current.reuse()
            block = Block(memory, self.current)
        else:
            block = Block(memory, None)
            self.capture.allocated(block, memory)
        return DeviceTensor(memory, block)

    def wait(self, finish: Work | None = None, kind: str = "syncs") -> None:
        """The host waits until ``finish`` is through, or the current stream; :class:`Refused` while
        capturing.
        """
        self.refuse_in_capture("the host waits")
        self.count(kind)
        with computing():
            (finish or self.current.finish)()

    def finish(self) -> None:
        """All work of the current stream is done."""
        with computing():
            self.current.finish()

    def idle(self) -> None:
        """All work of all streams is done."""
        with computing():
            for stream in self._every():
                stream.finish()

    def _run_ahead(self, chance: random.Random) -> None:
        stream = chance.choice(self._every())
        with computing():
            stream.finish(chance.randint(stream.done, stream.given))

    def _every(self) -> list[Stream]:
        return [self.default, *(self.streams[n] for n in sorted(self.streams.keys()))]

    def refuse_in_capture(self, what: str) -> None:
        """:class:`Refused` while a graph is captured."""
        if self.capture is not None:
            raise Refused(f"CUDA error: {what} while the stream is capturing (at {_site()})")


DEVICE = Device()


@contextmanager
def computing() -> Iterator[None]:
    """Work is done inside the block, on the host's own tensors."""
    with _disable_current_modes(), torch.inference_mode():
        yield


def _site() -> str:
    """The innermost line of the program that is not ours or torch's."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not any(part in name for part in _OURS):
            short = name.split("site-packages/")[-1]
            return f"{short}:{frame.f_lineno}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "?"


class DeviceTensor(torch.Tensor):
    """A tensor on the device; ``host`` is the same memory as the host sees it."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    host: Tensor
    block: Block

    @staticmethod
    def __new__(cls, host: Tensor, block: Block) -> DeviceTensor:
        tensor: DeviceTensor = torch.Tensor._make_subclass(
            cls, host, False, dispatch_device=True, device_for_backend_keys=CUDA
        )
        tensor.host, tensor.block = host, block
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})

    @property
    def data(self) -> Tensor:
        """Itself, without a gradient."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, DeviceTensor):
            raise Refused("a parameter of the device cannot be given data of the host")
        torch.Tensor.data.__set__(self, value)
        self.host, self.block = value.host, value.block

    def record_stream(self, stream: Stream) -> None:
        """Its memory is not used again before this stream is done with it."""
        self.block.record(stream)

    def is_pinned(self, *_: Any) -> bool:
        return False

    def pin_memory(self, *_: Any) -> Tensor:
        raise Refused("cannot pin 'cuda' tensors: only dense CPU tensors can be pinned")

    def get_device(self) -> int:
        return 0

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.host.untyped_storage()

    def numpy(self, **_: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy: use Tensor.cpu() first")

    def __array__(self, *_: Any) -> Any:
        return self.numpy()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self, **_: Any) -> str:
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype})"  # reading it would wait

    def __deepcopy__(self, memo: Any) -> DeviceTensor:
        copy = self.clone()
        assert isinstance(copy, DeviceTensor)
        return copy


class Emulating(TorchDispatchMode):
    """Inside the block the device is there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})


#: Functions in place of compiled operations, by qualified name: called with the device's tensors.
OPERATIONS: dict[str, Callable[..., Any]] = {}

#: The rest of the names is in the namespace ``aten``.
#: These are given memory without a launch.
_ALLOCATING = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
#: These change what a tensor is, not what stands in it.
_RESHAPING = {"set_", "resize_", "transpose_", "squeeze_", "unsqueeze_", "as_strided_", "t_"}
#: These give back what they are given, and do not say that they are views.
_ALIASING = {"_unsafe_view", "lift_fresh", "lift"}
#: The shape of what they give back is data, so that the host waits.
_READING = {
    "_local_scalar_dense", "_unique2", "bincount", "equal", "is_nonzero", "masked_select",
    "nonzero", "unique_consecutive", "unique_dim",
}  # fmt: skip
#: Matrix products: a GPU adds up in float32 whatever it is given, and many a CPU is slow otherwise.
_PRODUCTS = {"mm", "bmm", "addmm", "baddbmm"}
#: These look tensors up by tensors, which may lie on the host, and count masks there.
_LOOKING_UP = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}


def dispatch(func: Any, args: Any, kwargs: Any) -> Any:
    """One operation of torch, on tensors of host and device."""
    if func is torch.ops.prim.device.default:
        return CUDA if isinstance(args[0], DeviceTensor) else args[0].device
    space, _, name = func._schema.name.partition("::")
    leaves = tree_leaves((args, kwargs))
    given = [leaf for leaf in leaves if isinstance(leaf, DeviceTensor)]
    if func._schema.name in OPERATIONS and (given or _on_cuda(kwargs.get("device"))):
        with Emulating():
            return OPERATIONS[func._schema.name](*args, **kwargs)
    if space not in ("aten", "prim") and given and space not in ("c10d", "_c10d_functional"):
        raise NotImplementedError(f"no reference for {func._schema.name} (at {_site()})")
    if not (given or _on_cuda(kwargs.get("device"))):
        return _on_host(func, name, args, kwargs)
    if name == "is_pinned":
        return False
    if given and _made_on_host(name, kwargs):
        args, kwargs = tree_map_only(DeviceTensor, lambda t: t.host, (args, kwargs))
        return _on_host(func, name, args, kwargs)
    if _composite(func):  # in inference mode these come whole
        with Emulating():
            return func.decompose(*args, **kwargs)
    if (done := _copied(name, args, kwargs)) is not None:
        return done
    return _Operation(func, name, args, kwargs).run()


class _Operation:
    """One of the device's own."""

    def __init__(self, func: Any, name: str, args: Any, kwargs: Any) -> None:
        self.func, self.name, self.given = func, name, (args, kwargs)
        flat, spec = tree_flatten((args, kwargs))
        self.tensors = [leaf for leaf in flat if isinstance(leaf, Tensor)]
        self._refuse_mixtures()
        self.args, self.kwargs = tree_unflatten([_as_seen(leaf) for leaf in flat], spec)
        self._now = functools.partial(func, *self.args, **self.kwargs)
        """Does it on what the host sees. It holds no block: work that is still to be done does not
        keep memory from being used again.
        """
        if name in _PRODUCTS and not func._schema.is_mutable:
            self._now = functools.partial(_in_float32, self._now)
        if self.kwargs.get("pin_memory"):
            raise Refused("only dense CPU tensors can be pinned")

    def run(self) -> Any:
        """Launch it, or do it now where nothing has to be launched."""
        if self.func.is_view or self.name in _ALIASING:
            return self._wrapped(self._now(), self.block)
        if self.name in _RESHAPING:
            return self._reshaped()
        if self.name in _ALLOCATING:
            return tree_map_only(Tensor, DEVICE.allocate, self._now())
        if self._reads_host():
            DEVICE.wait()
            return self._fresh(self._now())
        if self.func._schema.is_mutable:
            DEVICE.launch(self.name, self._now)
            return self._what_was_given()
        return self._launched()

    @property
    def block(self) -> Block:
        """The first tensor's."""
        return next(t.block for t in self.tensors if isinstance(t, DeviceTensor))

    def _launched(self) -> Any:
        """New tensors, in which the results will stand."""
        try:
            shapes = tree_map_only(Tensor, _meta, (self.args, self.kwargs))
            shapes = tree_map_only(torch.device, lambda _: META, shapes)
            like = self.func(*shapes[0], **shapes[1])
        except (NotImplementedError, RuntimeError):
            # No shapes without data: it is done now, or fails as it does on the host.
            DEVICE.refuse_in_capture(f"{self.func} has no shape without its data")
            DEVICE.count("unmodelled")
            DEVICE.finish()
            return self._fresh(self._now())
        results = tree_map_only(Tensor, lambda t: DEVICE.allocate(_empty(t)), like)
        into = [t.host for t in tree_leaves(results) if isinstance(t, DeviceTensor)]
        DEVICE.launch(self.name, functools.partial(_put, self._now, into))
        return results

    def _fresh(self, values: Any) -> Any:
        """Results that are there already."""

        def filled(value: Tensor) -> DeviceTensor:
            tensor = DEVICE.allocate(_empty(value))
            tensor.host.copy_(value)
            return tensor

        with computing():
            return tree_map_only(Tensor, filled, values)

    def _reshaped(self) -> Any:
        """Done to the tensor's description, at once."""
        DEVICE.finish()  # it may move what stands in it
        tensor, source = self.tensors[0], self.tensors[-1]
        self._now()
        assert isinstance(tensor, DeviceTensor)
        block = source.block if isinstance(source, DeviceTensor) else tensor.block
        tensor.data = DeviceTensor(tensor.host, block)
        return tensor

    def _what_was_given(self) -> Any:
        """The tensors that are written to, as they came in."""
        args, kwargs = self.given
        written = [
            kwargs[a.name] if a.name in kwargs else args[i]
            for i, a in enumerate(self.func._schema.arguments)
            if a.alias_info is not None and a.alias_info.is_write
            and (a.name in kwargs or i < len(args))
        ]  # fmt: skip
        count = len(self.func._schema.returns)
        return None if count == 0 else written[0] if count == 1 else tuple(written)

    def _wrapped(self, values: Any, block: Block) -> Any:
        return tree_map_only(Tensor, lambda value: DeviceTensor(value, block), values)

    def _refuse_mixtures(self) -> None:
        """Numbers travel with a launch, indices are uploaded; nothing else may lie elsewhere."""
        host = [t for t in self.tensors if not isinstance(t, DeviceTensor) and t.dim() > 0]
        if not host or self.name in _ALLOCATING or self.name.startswith(("new_", "set_")):
            return
        if self.name not in _LOOKING_UP or not isinstance(self.tensors[0], DeviceTensor):
            raise Refused(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"cuda:0 and cpu! ({self.func}, at {_site()})"
            )
        DEVICE.refuse_in_capture("indices are copied from pageable memory")
        DEVICE.count("pageable")

    def _reads_host(self) -> bool:
        """Whether the host must see data before it can go on."""
        if self.name == "repeat_interleave":
            return self.kwargs.get("output_size") is None
        if self.name not in _LOOKING_UP:
            return self.name in _READING
        masks = [t for t in self.args[1] if isinstance(t, Tensor) and t.dtype == torch.bool]
        # One number for all that a mask chooses is written where the mask is.
        fills = self.name != "index" and len(self.args) > 2 and self.args[2].numel() == 1
        return bool(masks) and not fills


def _in_float32(product: functools.partial[Tensor]) -> Tensor:
    """The product, rounded once."""
    func, args, dtype = product.func, product.args, product.args[0].dtype
    if dtype not in (torch.bfloat16, torch.float16):
        return product()
    if func._schema.overload_name == "dtype":  # says what it is rounded to; GPUs alone have it
        func, args, dtype = func.overloadpacket.default, args[:-1], args[-1]
    args = tree_map_only(Tensor, Tensor.float, args)
    return func(*args, **product.keywords).to(dtype)


def _put(compute: Callable[[], Any], into: list[Tensor]) -> None:
    """Write the results where the caller expects them."""
    values = [value for value in tree_leaves(compute()) if isinstance(value, Tensor)]
    for memory, value in zip(into, values, strict=True):
        memory.copy_(value)


def launch(name: str, kernel: Callable[..., object], *args: Any, **kwargs: Any) -> None:
    """Launch a ``kernel`` that is no operation of torch: it gets the tensors as the host sees them,
    and writes into some of them.
    """
    flat, spec = tree_flatten((args, kwargs))
    for leaf in flat:
        if isinstance(leaf, Tensor) and not isinstance(leaf, DeviceTensor):
            raise Refused(f"kernel {name} is given a tensor of the host, {tuple(leaf.shape)}")
    seen_args, seen_kwargs = tree_unflatten([_as_seen(leaf) for leaf in flat], spec)
    DEVICE.launch(name, lambda: kernel(*seen_args, **seen_kwargs))


def _on_host(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Operations of the host only, and memory that the device may copy from."""
    if name == "_pin_memory":
        return pin(args[0].clone())
    if name == "is_pinned":
        return pinned(args[0])
    if not kwargs.get("pin_memory"):
        return func(*args, **kwargs)
    return tree_map_only(Tensor, pin, func(*args, **{**kwargs, "pin_memory": False}))


def _copied(name: str, args: Any, kwargs: Any) -> Any:
    """Result of a copy between host and device; ``None`` for another operation."""
    if name == "_foreach_copy_":
        if all(isinstance(t, DeviceTensor) for t in (*args[0], *args[1])):
            return None
        for into, source in zip(*args[:2], strict=True):
            with Emulating():
                into.copy_(source, non_blocking=_non_blocking(args, kwargs))
        return args[0]
    if name == "copy_":
        into, source = args[:2]
        if isinstance(into, DeviceTensor) and isinstance(source, DeviceTensor):
            return None
        if isinstance(into, DeviceTensor):
            _upload(into.host, source, _non_blocking(args, kwargs))
        else:
            _download(into, source.host, _non_blocking(args, kwargs))
        return into
    if name != "_to_copy":
        return None
    source, goes = args[0], kwargs.get("device")
    if goes is None or _on_cuda(goes) == isinstance(source, DeviceTensor):
        return None
    dtype = kwargs.get("dtype") or source.dtype
    seen = source.host if isinstance(source, DeviceTensor) else source
    memory = torch.empty_like(seen, dtype=dtype)
    non_blocking = bool(kwargs.get("non_blocking"))
    if not isinstance(source, DeviceTensor):
        tensor = DEVICE.allocate(memory)
        _upload(tensor.host, source, non_blocking)
        return tensor
    _download(pin(memory) if non_blocking else memory, seen, non_blocking)
    return memory


def _upload(into: Tensor, source: Tensor, non_blocking: bool) -> None:
    """From the host. Out of pinned memory it is read when the stream gets there."""
    if not pinned(source):
        if source.numel():
            DEVICE.refuse_in_capture("a copy from pageable memory")
        DEVICE.count("pageable")
        source = source.clone()
    DEVICE.launch("H2D", lambda: into.copy_(source), "H2D")
    if not non_blocking and DEVICE.capture is None:
        DEVICE.wait()


def _download(into: Tensor, source: Tensor, non_blocking: bool) -> None:
    """To the host. Into pinned memory it is written when the stream gets there, not before."""
    if non_blocking and pinned(into):
        with computing():
            poison(into)
        DEVICE.launch("D2H", lambda: into.copy_(source), "D2H")
        return
    DEVICE.wait()
    DEVICE.count("D2H")
    with computing():
        into.copy_(source)


def _non_blocking(args: Any, kwargs: Any) -> bool:
    return bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False))


def _on_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def _as_seen(leaf: Any) -> Any:
    """An argument as the host runs the operation on it."""
    if isinstance(leaf, DeviceTensor):
        return leaf.host
    if isinstance(leaf, Tensor):
        return leaf.clone()
    return CPU if isinstance(leaf, torch.device) and leaf.type == "cuda" else leaf


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=META)


def _empty(like: Tensor) -> Tensor:
    return torch.empty_strided(like.size(), like.stride(), dtype=like.dtype)


def _made_on_host(name: str, kwargs: Any) -> bool:
    """Whether it is a new tensor of the host, of which one of the device says the shape only."""
    device = kwargs.get("device")
    shaped = name.startswith("new_") or name.endswith("_like")
    return shaped and device is not None and not _on_cuda(device)


@functools.cache
def _composite(func: Any) -> bool:
    key = "CompositeImplicitAutograd"
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key))
