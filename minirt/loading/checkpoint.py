"""Fills a model's weights: from safetensors files, strictly checked and streamed, or with random values."""

import math
import mmap
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import torch

from minirt.device import on_device
from minirt.errors import CheckpointError, DeviceError, OutOfMemoryError, inside
from minirt.files import parse_json
from minirt.modeling.config import shown
from minirt.modeling.formats import CHUNK, E4M3, FLOATS, FP8, INT32, INT64, UINT8, TensorSpec
from minirt.modeling.model import Model
from minirt.modeling.parameters import Parameter
from minirt.sizes import format_size
from minirt.wording import warn

_DTYPES = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, E4M3: FP8, INT32: torch.int32, INT64: torch.int64,
    UINT8: torch.uint8,
}  # fmt: skip
# Buffers that old transformers releases saved. The runtime computes them from the config.
DERIVED = "rotary_emb.inv_freq"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
# Scales of FP8 attention; minirt computes one for each token and head of an FP8 KV cache. "output_scale" of k_proj and v_proj is
# an older name of theirs.
ATTENTION_SCALES = ("k_scale", "v_scale", "kv_scale", "q_scale", "prob_scale", "output_scale")
# Beginnings that wrappers of PyTorch add to the name of every tensor: torch.compile, DistributedDataParallel, FSDP.
_WRAPPERS = ("_orig_mod.", "module.", "_fsdp_wrapped_module.")
# Bytes of a file that a thread reads or maps at a time, unless one tensor is larger. So the whole file never counts as the
# process's memory.
PART_BYTES = 16 << 20
GAP_BYTES = 64 << 10  # of a file between what is used; smaller gaps are read, too: it takes less time than a read for each part
MAX_PINNED = 128 << 20  # bytes of a thread's pinned buffer; a tensor that is larger, and not read in pieces, is mapped
THREADS = 4  # that fill a GPU's memory
MAX_SHOWN = 200  # characters of a name or a text from a file in a message
_UNREADABLE = "not a readable safetensors file"
_OTHER = "config.json describes another model, or another format of its weights"
_TRANSPOSED = "it is stored transposed, as in files of some other architectures; transpose its last two dimensions"
MAX_HEADER = 16 << 20  # bytes; a header takes about 100 for each tensor

_LFS_POINTER = b"version https://git-lfs"  # how the text begins that a clone without Git LFS has instead of a file
# Beginnings of the names of tensors that belong to no decoder layer. A checkpoint may have them; they are not used.
_VISION = ("model.visual.", "visual.", "model.vision_tower.", "vision_tower.", "model.multi_modal_projector.",
           "multi_modal_projector.", "model.vision_adapter.", "model.vision_projection.",
           "model.embed_vision.", "model.vision_embedder.")  # fmt: skip
DRAFTS = "mtp."  # of multi-token prediction
_EXTRAS = {DRAFTS: "the model has no layers of multi-token prediction"}
_EXTRAS |= dict.fromkeys(_VISION, "a vision encoder is not supported")
_EXTRAS |= dict.fromkeys(("model.audio_tower.", "model.embed_audio."), "sound is not supported")
# How the names of a decoder's tensors begin in a model with a vision encoder → how they begin without one.
_TEXT = {
    "model.language_model.": "model.", "language_model.model.": "model.", "language_model.lm_head.": "lm_head.",
    "language_model.": "model.",
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """One tensor of the checkpoint, as its file's header describes it.

    Attributes:
        start, nbytes: its place in the file, and its size.
        stored_name: its name in the file; see `_usual_names`.
    """

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str
    start: int = 0
    nbytes: int = 0
    stored_name: str | None = None

    @property
    def place(self) -> str:
        """File and name, for messages."""
        return f"{self.file}: {self.name[:MAX_SHOWN]}"


Entries = Mapping[str, Entry]  # by name


class _Piece(NamedTuple):
    """A range of a tensor's first dimension from `first` on, or the whole tensor.

    Attributes:
        start: its place in the file, in bytes.
        used: of each so many bytes (the last number), how many are used, and from where on; None: all.
    """

    entry: Entry
    first: int
    shape: tuple[int, ...]
    start: int
    nbytes: int
    used: tuple[int, int, int] | None = None


def read_header(path: Path) -> Iterator[Entry]:
    """The tensors of a file. safetensors checks the header, except that it silently takes the last of repeated names."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():  # opening a named pipe would wait
        raise CheckpointError("is not a file, or is a broken link", where=path, hint="get the file again")
    try:
        with path.open("rb") as file:
            start = file.read(len(_LFS_POINTER))
            if start == _LFS_POINTER:
                hint = "run git lfs pull in its folder, or download the model again"
                raise CheckpointError("is a pointer of Git LFS, not the weights", where=path, hint=hint)
            length = int.from_bytes(start[:8], "little")
            if length > MAX_HEADER:
                what, hint = f"{_UNREADABLE}: the header is too long", "download it again; it may be of another kind"
                raise CheckpointError(what, where=path, expected=f"at most {MAX_HEADER} bytes", found=length, hint=hint)
            with safe_open(path, framework="pt", device="cpu"):
                file.seek(8)
                header = parse_json(file.read(length).decode(), path, error=CheckpointError)
    except (SafetensorError, OSError, ValueError) as error:
        what = f"{_UNREADABLE}: {str(error)[:MAX_SHOWN]}"
        raise CheckpointError(what, where=path, hint="download it again; it may be truncated") from error
    header.pop("__metadata__", None)
    for name, tensor in header.items():
        if not isinstance(tensor, dict) or not isinstance(tensor["dtype"], str):  # safetensors also takes a list
            what, expected = f"{_UNREADABLE}: a tensor is not described as usual", "dtype, shape, data_offsets"
            raise CheckpointError(what, where=f"{path}: {name[:MAX_SHOWN]}", expected=expected, found=shown(tensor))
        begin, end = tensor["data_offsets"]
        yield Entry(name, path, tuple(tensor["shape"]), tensor["dtype"], 8 + length + begin, end - begin)


def check_total_size(entries: Entries, stated: float | None) -> None:
    """Warn if the tensors have another size than `stated`, the index's number of bytes (None: it has none).

    This is not an error: every file is checked on its own, and a conversion to another dtype may leave the old number in the
    index.
    """
    size = sum(entry.nbytes for entry in entries.values())
    if stated not in (None, size):
        what = f"the index states {shown(stated)} bytes of tensor data (metadata.total_size), but its files hold {size}"
        warn(f"{_folder(entries)}: {what}")


def read_headers(files: Sequence[Path], index: dict[str, str] | None = None, *, tied: bool = False) -> dict[str, Entry]:
    """Read the headers of safetensors files: name → `Entry` of every tensor. Reads no tensor data.

    Names that differ in a known way from those of transformers are changed, with a warning: see `_usual_names`.

    Args:
        files: safetensors files.
        index: tensor name → file name, from model.safetensors.index.json; it must agree with the files.
        tied: whether the model's head is the embedding, so that it does not matter whether the files or the index have a head.
    Raises:
        CheckpointError: a file is unreadable, a tensor is in two files, or the index disagrees with the files.
    """
    entries: dict[str, Entry] = {}
    for path in files:
        for entry in read_header(path):
            if entry.name in entries:
                names = f"{entries[entry.name].file.name}, {path.name}"
                raise CheckpointError("the tensor is in two files", where=entry.name[:MAX_SHOWN], found=names)
            entries[entry.name] = entry
    if index is not None:
        _check_index(files[0].parent, entries, index, tied)
    return _usual_names(entries, tied)


def _check_index(folder: Path, entries: Entries, index: Mapping[str, str], tied: bool) -> None:
    not_needed = {name for name in entries.keys() ^ index.keys() if name.endswith(DERIVED) or (tied and name == HEAD)}
    if not_needed:
        what = f"the index and the files disagree about tensors that are not needed: {some_names(sorted(not_needed))}"
        warn(f"{folder}: {what}")
    files = {name: entry.file.name for name, entry in entries.items()}
    for name, file in index.items():
        if name not in not_needed and files.get(name) != file:
            what, place = "the index and the files disagree", f"{folder}: {name[:MAX_SHOWN]}"
            raise CheckpointError(what, where=place, expected=file, found=files.get(name, "in no file"))
    if extra := sorted(entries.keys() - index.keys() - not_needed):
        what = f"{len(extra)} tensors are missing from the index"
        raise CheckpointError(what, where=entries[extra[0]].file, found=some_names(extra))


def _usual_names(entries: dict[str, Entry], tied: bool) -> dict[str, Entry]:
    """The tensors under the names of transformers' class with a head.

    All names may begin with the prefix of a wrapper; "model." may be missing, in a file of the class without a head; a tied
    embedding may be stored as the head; and those of a decoder in a model with a vision encoder have a prefix, which is usual.
    """
    changed, folder = _text_names(entries), _folder(entries)
    while prefix := next((p for p in _WRAPPERS if changed and all(name.startswith(p) for name in changed)), None):
        changed = {name.removeprefix(prefix): entry for name, entry in changed.items()}
        warn(f"{folder}: all names of tensors begin with {prefix}, which is left out")
    if EMBEDDING.removeprefix("model.") in changed and not any(name.startswith("model.") for name in changed):
        changed = {name if name.startswith("lm_head.") else f"model.{name}": entry for name, entry in changed.items()}
        warn(f'{folder}: the names of tensors do not begin with "model.", as in files of a model without a head')
    if tied and HEAD in changed and EMBEDDING not in changed:
        changed = {EMBEDDING if name == HEAD else name: entry for name, entry in changed.items()}
        warn(f"{folder}: the embedding, which is also the head, is stored as {HEAD}")
    return {name: replace(entry, name=name, stored_name=entry.name) for name, entry in changed.items()}


def shows_tied(entries: Entries, default: bool) -> bool:
    """Whether the head is the embedding, by the tensors: there is one of them only, or the head is a copy.

    A copy is looked for if the architecture ties its head by default. Else it is loaded as a head, with the same result.
    """
    if EMBEDDING not in entries or not any(name.startswith("lm_head.") and not name.endswith(".bias") for name in entries):
        return True
    return default and HEAD in entries and _same(entries[HEAD], entries[EMBEDDING])


def _same(first: Entry, second: Entry) -> bool:
    alike = (first.shape, first.dtype) == (second.shape, second.dtype) and len(first.shape) == 2 and first.dtype in FLOATS
    if not (alike and first.file.is_file() and second.file.is_file()):
        return False
    pairs = zip(_pieces(first, True), _pieces(second, True), strict=True)
    return all(torch.equal(_bytes(one), _bytes(other)) for one, other in pairs)


def _bytes(piece: _Piece) -> torch.Tensor:
    parts: list[torch.Tensor] = []
    _read([piece], lambda _, tensor: parts.append(tensor.view(torch.uint8)))
    return parts[0]


def text_name(name: str) -> str:
    """The name of a decoder's tensor or module without a vision encoder."""
    prefix = next((p for p in _TEXT if name.startswith(p)), None)
    return name if prefix is None else _TEXT[prefix] + name.removeprefix(prefix)


def _text_names(entries: dict[str, Entry]) -> dict[str, Entry]:
    """The tensors, with the names of a decoder in a model with a vision encoder as those of the decoder alone."""
    changed: dict[str, Entry] = {}
    for name, entry in entries.items():
        plain = text_name(name)
        if plain in changed or (plain != name and plain in entries):
            what, names = "the decoder's tensor is there twice", f"{name[:MAX_SHOWN]} and {plain[:MAX_SHOWN]}"
            raise CheckpointError(what, where=entry.file, expected="one of them", found=names)
        changed[plain] = entry
    return changed


class Matched(NamedTuple):
    """The tensors of a checkpoint, by what loading does with them.

    Attributes:
        wanted: tensor name → its holders (two for a tied head that is quantized), and what it must be.
        unused: names of the tensors that the model does not use; see `warn_of_extras`.
        zero_biases: names of biases of linears that have none. They are not used, and must be zero.
    """

    wanted: dict[str, tuple[list[Parameter], TensorSpec]]
    unused: tuple[str, ...]
    zero_biases: tuple[str, ...]


def match(model: Model, entries: Entries, allow_unused: bool = False) -> Matched:
    """Match the checkpoint's tensors with the weight holders of the model.

    Args:
        allow_unused: accept tensors that the model does not use, for a model composed of part of a checkpoint. Those that belong
            to no decoder layer, such as those for multi-token prediction, are always accepted.
    Raises:
        CheckpointError: a tensor is missing, has a wrong shape or is not a float tensor, or is unexpected.
    """
    wanted: dict[str, tuple[list[Parameter], TensorSpec]] = {}
    for parameter in model.parameters():
        for spec in (TensorSpec(*given) for given in parameter.expected()):
            holders, first = wanted.setdefault(spec.name, ([], spec))
            if first != spec:
                raise CheckpointError("two layers hold this tensor, packed differently", where=spec.name)
            holders.append(parameter)
    missing = [name for name in wanted if name not in entries]
    if missing:
        what = f"{len(missing)} of {len(wanted)} tensors are missing"
        hint = "the checkpoint is incomplete, or config.json describes another model"
        raise CheckpointError(what, where=_folder(entries), expected=some_names(missing), hint=hint)
    for name, (_, spec) in wanted.items():
        entry = entries[name]
        if entry.shape != spec.shape and entry.shape not in spec.also:
            transposed = len(spec.shape) == 3 and entry.shape == (spec.shape[0], *spec.shape[:0:-1])
            hint, shape = _TRANSPOSED if transposed else _OTHER, list(entry.shape)
            raise CheckpointError("wrong shape", where=entry.place, expected=list(spec.shape), found=shape, hint=hint)
    config, modules = model.config, {module for parameter in model.parameters() for module in parameter.modules}
    biases = tuple(n for n in entries if n not in wanted and n.endswith(".bias") and n.removesuffix(".bias") in modules)
    scales = model.formats.unused_scales if model.formats else ()
    for entry in (entries[name] for name in scales):
        heads, kind = config.num_kv_heads, "KV"
        if entry.name.endswith((".q_scale", ".prob_scale")):
            heads, kind = config.num_heads, "query"
        if math.prod(entry.shape) not in (1, heads):
            what, expected = "wrong shape of a scale", f"one value, or one for each of {heads} {kind} heads"
            raise CheckpointError(what, where=entry.place, expected=expected, found=list(entry.shape), hint=_OTHER)
    checked = {*scales, *biases}
    for entry in (entries[n] for n in entries if n in wanted or n in checked or _tied_copy(model, n)):
        dtypes = wanted[entry.name][1].dtypes if entry.name in wanted else FLOATS
        if entry.dtype not in dtypes:
            raise CheckpointError("wrong dtype", where=entry.place, expected=" or ".join(dtypes), found=entry.dtype, hint=_OTHER)
    known = wanted.keys() | checked
    unused = tuple(sorted(n for n in entries if not (n in known or n.endswith(DERIVED) or _tied_copy(model, n))))
    extras = set(attention_scales(unused, modules))
    others = tuple(start for start in _EXTRAS if not any(name.startswith(start) for name in wanted))
    unexpected = [name for name in unused if name not in extras and not name.startswith(others)]
    if unexpected and not allow_unused:
        what, hint = f"{len(unexpected)} unexpected tensors", "config.json describes another model"
        raise CheckpointError(what, where=entries[unexpected[0]].file, found=some_names(unexpected), hint=hint)
    return Matched(wanted, unused, biases)


def attention_scales(names: Iterable[str], modules: Iterable[str]) -> list[str]:
    """The names of ATTENTION_SCALES in attention layers: of the layer, of one of its `modules`, or of its part "attn"."""
    layers = {layer for module in modules if "." in (layer := module.rpartition(".")[0])}
    ends = [(name, *name.rpartition(".")[::2]) for name in names]
    return [n for n, prefix, last in ends if last in ATTENTION_SCALES and layers & {prefix, prefix.rpartition(".")[0]}]


def warn_of_extras(unused: Iterable[str], model: Path | str) -> None:
    """Warn of unused tensors that belong to no decoder layer. `unused`: those from `match` that need a warning."""
    for start, what in _EXTRAS.items():
        if count := sum(name.startswith(start) for name in unused):
            warn(f"{model}: {count} tensors {start}* are not used: {what}")
    if count := sum(name.rpartition(".")[2] in ATTENTION_SCALES for name in unused):
        warn(f"{model}: {count} scales of FP8 attention are not used: FP8 pages have a scale for each token and head")


def _tied_copy(model: Model, name: str) -> bool:
    return name == HEAD and model.config.tie_word_embeddings


def load(
    model: Model, entries: Entries, *, allow_unused: bool = False, check_weights: bool = False,
    progress: Callable[[int, int], None] | None = None, change: Callable[[str, torch.Tensor, int], torch.Tensor] | None = None,
) -> tuple[int, tuple[str, ...]]:  # fmt: skip
    """Stream a checkpoint into an allocated model and cast it to the model's dtype.

    Args:
        entries: see `read_headers`.
        allow_unused: see `match`.
        check_weights: refuse NaN and Inf; the error names the tensor.
        progress: called with the bytes that are done, and those in total.
        change: (name, rows of a tensor, the first one) → the rows to load.
    Returns:
        The number of bytes read, and the checkpoint tensors that the model does not use.
    Raises:
        CheckpointError: see `match`; or a tied head differs from the embedding; or a NaN or Inf.
    """
    wanted, unused, biases = match(model, entries, allow_unused)
    tied = [entries[n] for n in entries if n not in wanted and _tied_copy(model, n)]
    work = [piece for name, of in wanted.items() for piece in _pieces(entries[name], of[1].pieces, _used(*of))]
    if check_weights or change is not None:
        work = [piece._replace(used=None) for piece in work]

    def place(piece: _Piece, tensor: torch.Tensor) -> None:
        entry, (holders, spec) = piece.entry, wanted[piece.entry.name]
        if check_weights and (bad := _not_finite(tensor)):
            raise CheckpointError(f"{bad} NaN or Inf values", where=entry.place)
        if spec.scale is not None:
            _check_scale(entry, tensor, spec.scale == "nonzero")
        if spec.values is not None and (values := tensor.tolist()) != list(spec.values):
            raise CheckpointError("wrong values", where=entry.place, expected=list(spec.values), found=shown(values))
        tensor = tensor if change is None else change(entry.name, tensor, piece.first)
        with inside(entry.place):
            for holder in holders:
                holder.load(entry.name, tensor, piece.first)

    groups = _groups(work)
    total, done = _read_bytes(work), 0
    on_gpu = model.device.type == "cuda"
    buffers = PinnedBuffers(_buffer_bytes(groups), model.device) if on_gpu else None
    pool = ThreadPoolExecutor(THREADS if on_gpu else 1)
    try:
        for size in pool.map(lambda group: _read(group, place, buffers), groups):
            done += size
            if progress:
                progress(done, total)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        if buffers is not None:
            buffers.close()
    if model.formats:
        read_tensors([entries[name] for name in model.formats.unused_scales], _check_scale)
    read_tensors([entries[name] for name in biases], _check_zero)
    read_tensors(tied, lambda entry, tensor: _check_tied(model, entry, tensor))
    if on_gpu:
        torch.cuda.current_stream(model.device).synchronize()
    return total, unused


def _used(holders: Sequence[Parameter], spec: TensorSpec) -> tuple[int, int, int] | None:
    """What all holders of a tensor use of it (`Parameter.used`), if that is the same, and no value is checked."""
    used = {holder.used(spec) for holder in holders}
    return used.pop() if len(used) == 1 and spec.scale is None and spec.values is None else None


def _pieces(entry: Entry, may_be_split: bool = False, used: tuple[int, int, int] | None = None) -> Iterator[_Piece]:
    """The tensor as a whole, or in pieces of at most PART_BYTES if its first dimension may be split. `used`: see `Parameter`."""
    count, *rest = entry.shape or (1,)
    begin, end, size = 0, count, entry.nbytes // max(1, count)
    if used is not None and entry.nbytes:
        item = entry.nbytes // math.prod(entry.shape)
        start, kept, period = used = used[0] * item, used[1] * item, used[2] * item
        if period == entry.nbytes and may_be_split and not (start % size or kept % size):
            begin, end, used = start // size, (start + kept) // size, None
        elif period < entry.nbytes and period - kept < GAP_BYTES:
            used = None
    if not may_be_split or (entry.nbytes <= PART_BYTES and (begin, end) == (0, count)):
        yield _Piece(entry, 0, entry.shape, entry.start, entry.nbytes, used)
        return
    step = max(1, PART_BYTES // size)
    for first in range(begin, end, step):
        rows = min(step, end - first)
        yield _Piece(entry, first, (rows, *rest), entry.start + first * size, rows * size, used)


def _groups(pieces: Iterable[_Piece]) -> list[list[_Piece]]:
    """Split the pieces of each file, in the file's order, into groups that one thread reads at a time.

    A group spans at most PART_BYTES of the file, unless it is a single larger piece.
    """
    groups: list[list[_Piece]] = []
    for piece in sorted(pieces, key=lambda piece: (str(piece.entry.file), piece.start)):
        first = groups[-1][0] if groups else piece
        if not groups or piece.entry.file != first.entry.file or piece.start + piece.nbytes - first.start > PART_BYTES:
            groups.append([])
        groups[-1].append(piece)
    return groups


class PinnedBuffers:
    """Page-locked (pinned) host memory, a buffer for each thread. A GPU reads it directly, without a copy by the driver.

    It is not PyTorch's pinned memory, which would stay with the process after loading.

    Args:
        nbytes: of each buffer.
        device: the GPU; None: the memory is not pinned.
    """

    def __init__(self, nbytes: int, device: torch.device | None) -> None:
        self.nbytes, self._device = nbytes, device
        self._thread, self._pinned = threading.local(), list[tuple[int, mmap.mmap]]()

    def of_thread(self) -> mmap.mmap:
        """The calling thread's buffer, allocated at its first call.

        Raises:
            OutOfMemoryError: the host has no memory for it.
            DeviceError: the system or the driver refuses to pin it.
        """
        if not hasattr(self._thread, "buffer"):
            try:
                buffer = mmap.mmap(-1, self.nbytes)
            except OSError as error:
                what, expected = "no host memory left for a loading buffer", format_size(self.nbytes, up=True)
                raise OutOfMemoryError(what, expected=expected, found=error.strerror, hint="free host memory") from error
            if self._device is not None:
                self._pin(buffer, self._device)
            self._thread.buffer = buffer
        return self._thread.buffer

    def _pin(self, buffer: mmap.mmap, device: torch.device) -> None:
        start = torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()
        with on_device(device):  # else CUDA would take memory of another GPU for this thread
            code = torch.cuda.cudart().cudaHostRegister(start, self.nbytes, 0)
        try:
            torch.cuda.check_error(code)
        except RuntimeError as error:
            what, expected = "host memory cannot be pinned", f"{format_size(self.nbytes)} for each of {THREADS} loading threads"
            hint = "raise the limit of locked memory (ulimit -l); in a container or a virtual machine, allow locked memory"
            raise DeviceError(what, where=str(device), expected=expected, found=str(error), hint=hint) from error
        self._pinned.append((start, buffer))

    def close(self) -> None:
        """Unpin the memory. No thread may use its buffer any more.

        A call fails only if the GPU has failed before. The error of that failure is on its way, or the next call raises it.
        """
        while self._pinned and self._device is not None:
            start, _ = self._pinned.pop()
            with on_device(self._device):
                torch.cuda.cudart().cudaHostUnregister(start)


@torch.inference_mode()
def _read(group: Sequence[_Piece], place: Callable[[_Piece, torch.Tensor], None], buffers: PinnedBuffers | None = None) -> int:
    """Read a part of a file into this thread's buffer, or map it, and call `place` with each piece. Returns the number of bytes.

    The header is not read again: with thousands of tensors, safetensors takes milliseconds for it.
    """
    path, begin, size = group[0].entry.file, group[0].start, _size(group)
    before = 0
    memory: mmap.mmap | bytes = b""
    try:
        with path.open("rb", buffering=0) as file:
            if size and buffers is not None and size <= buffers.nbytes:
                memory = buffers.of_thread()
                for start, stop in _ranges(group):
                    _fill(memory, file, start, stop - start, start - begin)
            elif size:
                before = begin % mmap.ALLOCATIONGRANULARITY
                # ACCESS_COPY, since PyTorch warns of memory that it may not write. Nothing is written, so nothing is copied.
                memory = mmap.mmap(file.fileno(), size + before, access=mmap.ACCESS_COPY, offset=begin - before)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot be read: {error}", where=path, hint="the file has changed while it was read") from error
    for piece in group:
        dtype, count, offset = _DTYPES[piece.entry.dtype], math.prod(piece.shape), before + piece.start - begin
        tensor = torch.frombuffer(memory, dtype=dtype, count=count, offset=offset) if count else torch.empty(0, dtype=dtype)
        place(piece, tensor.view(piece.shape))
    return _read_bytes(group)


def _ranges(group: Sequence[_Piece]) -> list[tuple[int, int]]:
    """(begin, end) of the parts of a file that a group is read from: what is used, and gaps of less than GAP_BYTES."""
    ranges = list[tuple[int, int]]()
    for piece in group:
        first, count, period = piece.used or (0, piece.nbytes, max(1, piece.nbytes))
        for start in range(piece.start + first, piece.start + piece.nbytes, period):
            begin = ranges.pop()[0] if ranges and start - ranges[-1][1] < GAP_BYTES else start
            ranges.append((begin, start + count))
    return ranges


def _read_bytes(group: Iterable[_Piece]) -> int:
    """Bytes of a group that are used."""
    return sum(piece.nbytes if piece.used is None else piece.nbytes // piece.used[2] * piece.used[1] for piece in group)


def _size(group: Sequence[_Piece]) -> int:
    """Bytes from the beginning of a group to its end, including tensors in between that are not loaded."""
    return group[-1].start + group[-1].nbytes - group[0].start


def _buffer_bytes(groups: Iterable[Sequence[_Piece]]) -> int:
    """Bytes of a thread's buffer: of the largest group of at most MAX_PINNED. Larger ones are mapped."""
    return max((size for size in map(_size, groups) if size <= MAX_PINNED), default=0)


def _fill(memory: mmap.mmap, file: FileIO, begin: int, size: int, place: int = 0) -> None:
    """Read `size` bytes of the file, from `begin` on, to a place in `memory`. A single read may return fewer: it is repeated."""
    file.seek(begin)
    with memoryview(memory) as view:
        done = 0
        while done < size:
            with view[place + done : place + size] as rest:
                count = file.readinto(rest)
            if not count:
                raise OSError(f"it ends after {begin + done} bytes")
            done += count


def read_tensors(entries: Iterable[Entry], check: Callable[[Entry, torch.Tensor], None]) -> None:
    """Call `check` with each of these tensors, whose memory is not to be used after the call."""
    for group in _groups(piece for entry in entries for piece in _pieces(entry)):
        _read(group, lambda piece, tensor: check(piece.entry, tensor))


def _not_finite(tensor: torch.Tensor) -> int:
    """How many values are NaN or infinite. They are looked at in pieces, since FP8 has to be widened for that."""
    pieces = tensor.flatten().split(CHUNK)
    return sum(int((~torch.isfinite(piece.float() if piece.itemsize == 1 else piece)).sum()) for piece in pieces)


def _check_scale(entry: Entry, tensor: torch.Tensor, negative: bool = False) -> None:
    """Refuse a scale that is not finite and above 0 (`negative`: not 0): the weights times it would be garbage."""
    values = tensor.float()
    good = torch.isfinite(values) & ((values != 0) if negative else (values > 0))
    if not good.all():
        what = f"{int((~good).sum())} of {good.numel()} scales are unusable"
        first, expected = shown(values[~good].flatten()[0].item()), f"finite numbers {'other than' if negative else 'above'} 0"
        raise CheckpointError(what, where=entry.place, expected=expected, found=first)


def _check_zero(entry: Entry, tensor: torch.Tensor) -> None:
    """Refuse a bias of a linear that has none, unless it adds nothing."""
    if tensor.any():
        what, values = "the model has no bias here", f"{int((tensor != 0).sum())} values that are not zero"
        hint = "config.json describes another model"
        raise CheckpointError(what, where=entry.place, expected="no bias, or zeros", found=values, hint=hint)


def _check_tied(model: Model, entry: Entry, tensor: torch.Tensor) -> None:
    table = model.layers[0].table.weight  # type: ignore[attr-defined]  # the embedding
    if tensor.shape != table.shape or not torch.equal(tensor.to(table.device, table.dtype), table):
        what = "config.json ties the head to the embedding, but the checkpoint has a different head"
        raise CheckpointError(what, where=entry.place, hint="set tie_word_embeddings to false in config.json")


def randomize(model: Model, seed: int = 0, rank: int = 0) -> None:
    """Fill the model with random weights. They depend only on the seed, the device type and, of shards, the rank."""
    generator, of_rank = (torch.Generator(model.device).manual_seed(seed + offset) for offset in (0, 1_000_003 * (1 + rank)))
    for parameter in model.parameters():
        parameter.randomize(of_rank if parameter.sharded else generator)


def some_names(names: Sequence[str], count: int = 4) -> str:
    return ", ".join(name[:MAX_SHOWN] for name in names[:count]) + (f", … ({len(names)} in total)" if len(names) > count else "")


def _folder(entries: Entries) -> Path | str:
    return next(iter(entries.values())).file.parent if entries else "checkpoint"
