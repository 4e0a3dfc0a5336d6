"""`Ranks`: the processes that compute one model, as each of them sees the others. `Leader` starts them and tells them each step.

Rank 0 is the process of the caller: it has the scheduler, and what a step does is one value, its plan. The others run the same
code on the same plans, so they draw the same tokens and need no answer. docs/design/tensor-parallel.md describes it.
"""

import atexit
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from minirt import errors
from minirt.device import free_memory, is_out_of_memory, pick_device
from minirt.engine.execute.sampler import StepOutOfMemory
from minirt.errors import DeviceError, MinirtError, RankFailedError, UnsupportedError
from minirt.layers.base import BUILT_IN, Forward, Implementation, Layer
from minirt.loading.options import LoadOptions
from minirt.modeling.parameters import Shard
from minirt.parallel.messages import Ring, pack
from minirt.parallel.reduction import Reduction
from minirt.parallel.runner import RankRunner
from minirt.settings import settings_of
from minirt.speculative.options import SpeculativeOptions
from minirt.step.batch import Batch
from minirt.step.kv_cache import KVCache, LayerCache
from minirt.user_code import imported

BEAT_SECONDS = 0.5  # between signs of life of a rank
SILENT_SECONDS = 6.0  # without one, a rank counts as stopped
START_SECONDS = 120.0  # until all ranks have imported what they need
STEP_SECONDS = 120.0  # that a step may take until it is queued, or until its tokens are there
_ALONE = ("layers", "capture", "edits")  # settings with functions, or whose results other ranks do not have


def failed(error: BaseException) -> RankFailedError:
    """The error of a rank whose step has raised an exception."""
    if isinstance(error, StepOutOfMemory) or is_out_of_memory(error):
        hint = "load the model again, with less --kv-cache-memory or --max-num-seqs, to leave more for activations"
        return RankFailedError("no memory left for a step", found=str(error).strip().partition("\n")[0], hint=hint)
    return RankFailedError(f"{type(error).__name__}: {error}", hint="load the model again")


class StepRefused(StepOutOfMemory):
    """All ranks have refused a step, because one has no memory for it: they are at the same step, and can go on."""


class Ranks:
    """What the ranks have in common. As a context: an exception within ends all ranks.

    Attributes:
        shard: which share of the model this rank has.
        device: of this rank.
        reduction: how the ranks exchange what a step needs.
        runner: the class that runs the steps.
    """

    runner = RankRunner
    _step_bytes = 0  # of the largest step, by this rank's memory plan

    def __init__(self, shard: Shard, device: torch.device, folder: str, signs: Tensor) -> None:
        self.shard, self.device = shard, device
        self.reduction = Reduction(shard.rank, shard.ranks, device, folder, signs)

    def prepare(self, model: Any) -> None:
        """Reserve memory for what ranks exchange in steps of this model. All ranks call it."""
        self.reduction.prepare(model.config.hidden_size, model.dtype)

    def agree(self, plan: Any) -> Any:
        """The least of all ranks' memory plans. Waits for them."""
        names = "pages", "context", "max_num_batched_tokens", "max_num_seqs", "snapshots"
        windows = sorted(plan.window_pages)
        values = [getattr(plan, name) for name in names] + [plan.window_pages[window] for window in windows]
        self._step_bytes, least = plan.step, self.reduction.least(values)
        of_windows = dict(zip(windows, least[len(names) :], strict=True))
        return replace(plan, **dict(zip(names, least, strict=False)), window_pages=of_windows)

    def admit(self, model: Any, cache: KVCache, batch: Batch) -> None:
        """Wait until all ranks know that each has memory for a step without a CUDA graph.

        Raises:
            StepRefused: on all ranks, if one has too little.
        """
        if (rank := self.first(not self.has_memory(model, cache, batch))) is not None:
            raise StepRefused(None, f"too little on rank {rank}")

    def first(self, holds: bool) -> int | None:
        """The first rank of which something holds; None: of none. Waits for all ranks."""
        rank = self.reduction.least([self.shard.rank if holds else self.shard.ranks])[0]
        return rank if rank < self.shard.ranks else None

    def has_memory(self, model: Any, cache: KVCache, batch: Batch) -> bool:
        """Whether this rank has memory for a step: as much as the plan has for the largest one, or what a dry run takes."""
        if self.device.type != "cuda" or free_memory(self.device) >= self._step_bytes:
            return True
        if any(row.implementation != "triton" for row in model.plan.rows):  # others would write to the cache
            return True
        from minirt.kernels.compile.ahead_of_time import without_launches

        try:
            with without_launches(self.device):
                model.dry_run(batch, cache)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return False
        return True

    def checked(self, chosen: Implementation) -> Implementation:
        """An implementation of users that must add the products of all ranks; else results would be wrong."""
        if chosen.name in BUILT_IN:
            return chosen

        def factory(layer: Layer) -> Forward:
            forward = chosen.factory(layer)

            def summing(x: Tensor, batch: Batch, kv: LayerCache | None) -> Tensor:
                before = self.reduction.sums
                out = forward(x, batch, kv)
                if self.reduction.sums == before:
                    what = f"implementation {chosen.name!r} does not add the products of all ranks"
                    hint = "add layer.summed(product) to the residual, not the product"
                    raise UnsupportedError(what, where=layer.name, expected="a call of layer.summed", found="none", hint=hint)
                return out

            return summing if layer.sharded and layer.residual and callable(forward) else forward

        return replace(chosen, factory=factory)

    def step(self, what: str, value: Any) -> AbstractContextManager[Any]:
        """Context in which this rank does a part of a step, `start` or `forward` of a plan or `draw` with masks, or what others
        do by a `call`: the function "module:name" of their model and of arguments."""
        return nullcontext()

    def check(self) -> None:
        """Raise the error if a rank has failed."""

    def waiting(self) -> AbstractContextManager[Any]:
        """Context in which this rank waits for a step's end."""
        return nullcontext()

    def close(self) -> None:
        """End the other ranks, if this one has started them."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if error is not None:
            self.close()


def plain_options(options: LoadOptions) -> dict[str, Any]:
    """The options that are not the default, as plain values.

    Raises:
        UnsupportedError: one is a function or an object, which other processes cannot have.
    """
    plain = dict[str, Any]()
    for name, record in settings_of(LoadOptions).items():
        value = getattr(options, name)
        if value == record.default or (isinstance(value, dict) and not value):
            continue
        if isinstance(value, SpeculativeOptions):
            value = {field: getattr(value, field) for field in settings_of(SpeculativeOptions)}
        value = {key: str(one) for key, one in value.items()} if name == "loras" else value
        value = str(value) if isinstance(value, Path) else list(value) if isinstance(value, list | tuple) else value
        try:
            json.dumps(value)
        except TypeError:
            what, hint = "a function or an object does not reach the other ranks", "leave it out, or use one GPU"
            raise UnsupportedError(what, where=name, expected="a plain value", found=type(value).__name__, hint=hint) from None
        plain[name] = value
    return plain


def signs_in(ring: Ring, ranks: int) -> Tensor:
    """`Peers.signs`, in the memory that the ranks share."""
    return torch.frombuffer(ring.page, dtype=torch.int32, count=2 * ranks).view(2, ranks)


def device_of(rank: int, first: torch.device, ranks: int) -> torch.device:
    """The device of a rank: GPUs in order, from that of rank 0 on; on a CPU, all have the same."""
    if first.type != "cuda":
        return first
    start, count = first.index or 0, torch.cuda.device_count()
    if start + ranks > count:
        expected, shown = f"{ranks} GPUs from cuda:{start} on", f"{max(0, count - start)}"
        hint = "CUDA_VISIBLE_DEVICES says which GPUs there are"
        raise DeviceError("not enough GPUs", where=f"--tensor-parallel {ranks}", expected=expected, found=shown, hint=hint)
    return torch.device("cuda", start + rank)


class Leader(Ranks):
    """Rank 0: starts the others, watches them, and sends them each part of a step before it does that part itself.

    Attributes:
        failure: why the ranks have ended, if one has failed.
    """

    def __init__(self, options: LoadOptions) -> None:
        ranks, first = options.tensor_parallel, pick_device(options.device)
        plain = plain_options(options) | {"tensor_parallel": ranks}
        devices = [str(device_of(rank, first, ranks)) for rank in range(ranks)]
        self.failure: MinirtError | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="minirt-")
        self._ring = Ring(ranks - 1)
        self._signs = (signs := signs_in(self._ring, ranks)).numpy()  # of the same memory: read for each step
        self._sockets, self._processes = list[socket.socket](), list[subprocess.Popen]()
        self._said = [b""] * (ranks - 1)  # of each rank, what is no whole line yet
        self._states, self._beats = [""] * (ranks - 1), [0.0] * (ranks - 1)
        self._deadline: float | None = None
        self._closed, self._changed = False, threading.Condition()
        for rank in range(1, ranks):
            here, process = _start(self._ring)
            self._sockets.append(here)
            self._processes.append(process)
            start = {"rank": rank, "folder": self._folder.name, "options": plain | {"device": devices[rank]}, "imports": imported}
            here.sendall(f"{json.dumps(start)}\n".encode())
        self._kill = weakref.finalize(self, _kill, self._processes, self._sockets)  # also at exit
        threading.Thread(target=_watch, args=(weakref.ref(self), self._sockets), name="minirt-ranks", daemon=True).start()
        with self:
            self._until("ready", START_SECONDS)
            super().__init__(Shard(0, ranks), torch.device(devices[0]), self._folder.name, signs)

    def _until(self, state: str, seconds: float) -> None:
        """Wait until all ranks have said this."""
        with self._changed:
            done = self._changed.wait_for(lambda: self.failure is not None or set(self._states) == {state}, seconds)
        self.check()
        if not done:
            self._fail(RankFailedError(f"the ranks have not started within {seconds:g} s", where=self._place))
            self.check()

    @property
    def _place(self) -> str:
        return f"--tensor-parallel {1 + len(self._processes)}"

    def check(self) -> None:
        if self.failure is None and not self._closed and self._signs[0, 0]:
            self._end_after(RankFailedError(f"a rank has not answered for {SILENT_SECONDS:g} s", where=self._place))
        if self.failure is not None:
            with self._changed:  # `_fail` first ends what waits on this device, before which no CUDA graph can be dropped
                raise self.failure.copy()

    def step(self, what: str, value: Any) -> AbstractContextManager[Any]:
        return self._step(what, value)

    @contextmanager
    def _step(self, what: str, value: Any) -> Iterator[None]:
        self._send((what, value))
        try:
            with nullcontext() if what == "call" else self.waiting():
                yield
        except (MinirtError, StepRefused):
            raise
        except Exception as error:
            self._end_after(error)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        self._deadline = time.monotonic() + STEP_SECONDS
        try:
            yield
        finally:
            self._deadline = None
        self.check()

    def _end_after(self, error: BaseException) -> None:
        """End the ranks, which are no longer at the same step, after an exception in this one: theirs may be the cause."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure is not None, 2 * BEAT_SECONDS)
        if self.failure is None:
            self._fail(error if isinstance(error, RankFailedError) else failed(error).within("rank 0"))
        failure = self.failure.copy() if self.failure is not None else RankFailedError("a rank failed")
        raise failure from error

    def _send(self, message: Any) -> None:
        self.check()
        self._ring.write(pack(message), self._announce)

    def _announce(self) -> None:
        self.check()
        for connection in self._sockets:
            with suppress(OSError):  # full: it is told already; closed: the watch says so
                connection.send(b"!", socket.MSG_DONTWAIT)

    def _fail(self, error: MinirtError) -> None:
        """The ranks have failed: end those that are left, and what waits for them on this device."""
        with self._changed:
            if self.failure is not None or self._closed:
                return
            self.failure = error
            self._signs[0, 0] = 1  # ends the waits
            self._changed.notify_all()
            _kill(self._processes, [])
            self._abort()

    def _abort(self) -> None:
        """End what waits for other ranks on a GPU. In a thread: the driver may wait for CUDA graphs that still exist."""
        if (reduction := getattr(self, "reduction", None)) is not None and self.device.type == "cuda":
            (thread := threading.Thread(target=reduction.abort, daemon=True)).start()
            thread.join(3.0)
            if thread.is_alive():
                atexit.register(_leave, thread)

    def heard(self, place: int, data: bytes) -> None:
        """A rank has said something, or has ended (b"")."""
        self._beats[place] = time.monotonic()
        if not data:
            with suppress(subprocess.TimeoutExpired):
                self._processes[place].wait(1.0)
            code, hint = self._processes[place].returncode, "load the model again"
            what = f"the process of rank {place + 1} has ended (exit code {code})"
            self._fail(RankFailedError(what, where=self._place, hint=hint))
            return
        *lines, self._said[place] = (self._said[place] + data).split(b"\n")
        for line in filter(None, lines):
            message = json.loads(line)
            if isinstance(message, dict):
                kind = getattr(errors, message.pop("class"), RankFailedError)
                self._fail(kind(**message).within(f"rank {place + 1}"))
            else:
                with self._changed:
                    self._states[place] = message
                    self._changed.notify_all()

    def look(self) -> bool:
        """Look whether a rank is silent, or a step takes too long. Returns whether to go on."""
        now, hint = time.monotonic(), "load the model again"
        for place, (state, beat) in enumerate(zip(self._states, self._beats, strict=True)):
            if state == "serving" and now - beat > SILENT_SECONDS:
                what = f"rank {place + 1} has not answered for {SILENT_SECONDS:g} s"
                self._fail(RankFailedError(what, where=self._place, hint=hint))
        if (deadline := self._deadline) is not None and now > deadline:
            what = f"a step has not ended within {STEP_SECONDS:g} s"
            self._fail(RankFailedError(what, where=self._place, hint=hint))
        return self.failure is None and not self._closed

    def close(self) -> None:
        if self._closed:
            return
        if self.failure is None:
            with suppress(MinirtError):
                self._send(("end", None))
        self._closed = True
        limit = time.monotonic() + 2.0
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, limit - time.monotonic()))
        self._kill()
        self._abort()
        self._folder.cleanup()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if error is None:
            return
        if isinstance(error, Exception) and not isinstance(error, MinirtError):
            with suppress(RankFailedError):
                self._end_after(error)
        failure = self.failure
        self.close()
        if failure is not None:
            raise failure.copy() from error


def _leave(thread: threading.Thread) -> None:
    """End this process at its exit if the driver has not ended its calls, which would keep it."""
    if thread.is_alive():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _start(ring: Ring) -> tuple[socket.socket, subprocess.Popen]:
    """Start a rank: the connection to it, and its process."""
    here, there = socket.socketpair()
    numbers = there.fileno(), ring.descriptor
    command = [sys.executable or "", "-P", "-m", "minirt.parallel.follower", *map(str, numbers)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with there:
        process = subprocess.Popen(  # in a new session, a Ctrl-C on the terminal does not reach it
            command, pass_fds=numbers, env=environment, stdin=subprocess.DEVNULL, start_new_session=True
        )
    return here, process


def _kill(processes: list[subprocess.Popen], sockets: list[socket.socket]) -> None:
    for connection in sockets:
        connection.close()
    for process in processes:
        if process.poll() is None:
            process.kill()
            process.wait()


def _watch(leader: Callable[[], Leader | None], sockets: list[socket.socket]) -> None:
    """Read what the ranks say, until one has ended."""
    open_sockets = list(sockets)
    while open_sockets:
        try:
            readable, _, _ = select.select(open_sockets, [], [], BEAT_SECONDS)
        except (OSError, ValueError):  # closed
            return
        this = leader()
        if this is None:
            return
        for connection in readable:
            try:
                data = connection.recv(1 << 16)
            except OSError:
                data = b""
            this.heard(sockets.index(connection), data)
        if not this.look():
            return
        del this
