"""Runs somebody's kernel of the gated delta rule on tensor files, and times it.

    python bridge.py PEER FOLDER

PEER is fla, flash_qla, flashinfer, or MODULE:FUNCTION, a callable that this Python can import (the current folder is
searched too). It is called as

    function(q, k, v, g, beta, *, scale, initial_state, cu_seqlens)            GDN
    function(q, k, v, g, b, w, *, scale, initial_state, cu_seqlens)            GDN-2

with q, k [B, T, HK, K], v, w [B, T, HV, V], g, beta [B, T, HV] or g, b [B, T, HV, K], g the log decay, initial_state
[N, HV, K, V] or None, cu_seqlens [N + 1] or None. Keywords that it does not take are left out, `output_final_state=True`
is added where it takes that. It returns o, or (o, final_state), or a dictionary of results by their names.

With PyTorch the tensors are torch tensors, on the GPU where there is one, and gradients come by autograd. Otherwise they
are numpy arrays, or without numpy `Array`s, which have `shape` and a flat `data`; GDNLAB_PEER_ARRAYS=torch, numpy or plain
chooses. There are gradients then only if the function takes `do` and `dht`, and returns `dq`, `dk`, ... in a dictionary.

Requests come as lines of JSON on standard input, answers go as lines of JSON to standard output; whatever else prints goes
to standard error. Needs nothing but the standard library and what the peer itself needs.
"""

import array
import importlib
import importlib.metadata
import inspect
import itertools
import json
import logging
import os
import re
import shutil
import signal
import struct
import sys
import tempfile
import threading
import time
import traceback

CALLS = {
    ("fla", "gdn"): "fla.ops.gated_delta_rule:chunk_gated_delta_rule",
    ("fla", "gdn2"): "fla.ops.gdn2:chunk_gdn2",
    ("flash_qla", "gdn"): "flash_qla:chunk_gated_delta_rule",
    ("flashinfer", "gdn"): "flashinfer.gdn_prefill:chunk_gated_delta_rule",
}
INSTALL = {"fla": "flash-linear-attention", "flash_qla": "flash-qla", "flashinfer": "flashinfer-python"}
GATES = {"gdn": ("g", "beta"), "gdn2": ("g", "b", "w")}
PACKAGES = (
    "torch", "triton", "fla-core", "flash-linear-attention", "flash-qla", "tilelang", "flashinfer-python", "numpy",
)
# Lines of an error that an answer repeats.
LINES = 3
SETTINGS = re.compile(r"(TRITON_F32_DEFAULT|FLA_\w+|FLASH_QLA_\w+|FLASHINFER_\w+|CUDA_VISIBLE_DEVICES)")


class Unsupported(Exception):
    """The peer has no such call."""


class Array:
    """Numbers without numpy: `data`, a flat list in row-major order, and `shape`."""

    def __init__(self, shape, data):
        self.shape, self.data = tuple(shape), list(data)

    def tolist(self):
        """Nested lists, the last axis innermost."""
        rows = self.data
        for extent in reversed(self.shape[1:]):
            rows = [rows[at : at + extent] for at in range(0, len(rows), extent)] if extent else []
        return rows

    @classmethod
    def of(cls, value):
        """An array of nested lists, or of anything with `shape` and a flat `data`."""
        if hasattr(value, "shape") and hasattr(value, "data"):
            return cls(value.shape, value.data)
        shape, rows = [], value
        while isinstance(rows, (list, tuple)):
            shape.append(len(rows))
            rows = rows[0] if rows else None
        for _ in shape[1:]:
            value = list(itertools.chain.from_iterable(value))
        return cls(shape, value)


class Plain:
    """Tensors as `Array`s."""

    name = "plain"

    def decode(self, dtype, shape, raw):
        if dtype == "BF16":
            words = array.array("H", raw)
            raw = array.array("I", (word << 16 for word in words)).tobytes()
            dtype = "F32"
        if dtype == "F16":
            return Array(shape, struct.unpack(f"<{len(raw) // 2}e", raw))
        return Array(shape, array.array({"F64": "d", "F32": "f", "I64": "q", "I32": "i"}[dtype], raw))

    def encode(self, value):
        value = Array.of(value)
        return "F64", value.shape, array.array("d", value.data).tobytes()


class Numpy:
    """Tensors as numpy arrays; bf16, which numpy lacks, as float32."""

    name = "numpy"

    def __init__(self):
        import numpy

        self.numpy = numpy

    def decode(self, dtype, shape, raw):
        if dtype == "BF16":
            words = self.numpy.frombuffer(raw, "<u2").astype("<u4") << 16
            return words.view("<f4").reshape(shape).copy()
        kinds = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4"}
        return self.numpy.frombuffer(raw, kinds[dtype]).reshape(shape).copy()

    def encode(self, value):
        value = self.numpy.ascontiguousarray(value)
        kinds = {"float64": "F64", "float32": "F32", "float16": "F16"}
        if value.dtype.name in ("bfloat16", "longdouble", "float128"):
            value = value.astype("<f8")
        return known(kinds, value.dtype.name), value.shape, value.tobytes()


class Torch:
    """Tensors of PyTorch, on the GPU where there is one."""

    name = "torch"

    def __init__(self):
        import torch

        self.torch = torch
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.kinds = {
            "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
            "I64": torch.int64, "I32": torch.int32,
        }

    def decode(self, dtype, shape, raw):
        if not raw:
            return self.torch.empty(shape, dtype=self.kinds[dtype], device=self.device)
        return self.torch.frombuffer(bytearray(raw), dtype=self.kinds[dtype]).reshape(shape).to(self.device)

    def encode(self, value):
        import ctypes

        value = value.detach().to("cpu").contiguous()
        names = {kind: name for name, kind in self.kinds.items()}
        size = value.numel() * value.element_size()
        name = known(names, value.dtype)
        return name, tuple(value.shape), ctypes.string_at(value.data_ptr(), size) if size else b""


def known(kinds, dtype):
    """The format of results of this dtype: of those with a fraction, since a kernel gives no whole or complex numbers."""
    kind = kinds.get(dtype)
    if kind not in ("F64", "F32", "F16", "BF16"):
        raise TypeError(f"a result of dtype {dtype}: expected float64, float32, float16 or bfloat16")
    return kind


def arrays():
    """What tensors are handed over as."""
    known = {"torch": Torch, "numpy": Numpy, "plain": Plain}
    wanted = os.environ.get("GDNLAB_PEER_ARRAYS")
    if wanted:
        return known[wanted]()
    for kind in (Torch, Numpy):
        try:
            return kind()
        except ImportError:
            continue
    return Plain()


def read(path, kind):
    """The tensors of a safetensors file, and its metadata."""
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        body = memoryview(file.read())
    metadata = header.pop("__metadata__", {})
    tensors = {}
    for name, info in header.items():
        start, end = info["data_offsets"]
        tensors[name] = kind.decode(info["dtype"], info["shape"], bytes(body[start:end]))
    return tensors, metadata


def write(path, tensors, kind):
    """Writes a safetensors file; one that does not fit beside the case goes to the temporary folder instead."""
    header, parts, end = {}, [], 0
    for name, tensor in tensors.items():
        dtype, shape, raw = kind.encode(tensor)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + len(raw)]}
        parts.append(raw)
        end += len(raw)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    spare = os.path.join(tempfile.gettempdir(), os.path.basename(os.path.dirname(path)) + ".safetensors")
    try:
        return fill(path, text, parts)
    except OSError:
        return fill(spare, text, parts)


def fill(path, text, parts):
    """Writes the parts of a safetensors file; what cannot be written in full is not there."""
    try:
        with open(path, "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for raw in parts:
                file.write(raw)
        return path
    except OSError:
        if os.path.exists(path):
            os.remove(path)
        raise


class Call:
    """One call of the peer's function on one case."""

    def __init__(self, peer, kind, path):
        self.peer, self.kind = peer, kind
        self.tensors, metadata = read(path, kind)
        self.op = metadata.get("op") or ("gdn" if "beta" in self.tensors else "gdn2")
        target = peer if ":" in peer else CALLS.get((peer, self.op))
        if target is None:
            raise Unsupported(f"{peer} has no {self.op}")
        module, _, name = target.partition(":")
        self.function = importlib.import_module(module)
        if peer in INSTALL and kind.name != "torch":
            raise Unsupported(f"{peer} needs PyTorch, which this Python cannot import")
        for part in name.split("."):
            self.function = getattr(self.function, part)
        self.names = ("q", "k", "v") + GATES[self.op]
        scale = self.tensors.get("scale")
        if scale is None:
            self.scale = self.tensors["q"].shape[-1] ** -0.5
        else:
            self.scale = float(scale.data[0] if kind.name == "plain" else scale.reshape(-1)[0])
        self.settings = {}
        # What a library wants in another form is brought into it once, so that no time of it counts.
        if peer == "flash_qla" and "cu_seqlens" in self.tensors:
            self.tensors["cu_seqlens"] = self.tensors["cu_seqlens"].int()
        self.flat = self.flattened() if peer == "flashinfer" else None

    def keywords(self, **more):
        """The keywords that the function takes; refuses to leave out what matters."""
        parameters = inspect.signature(self.function).parameters
        any_keyword = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        given = {
            "scale": self.scale,
            "initial_state": self.tensors.get("initial_state"),
            "cu_seqlens": self.tensors.get("cu_seqlens"),
            "output_final_state": True,
            **more,
        }
        default_scale = self.tensors["q"].shape[-1] ** -0.5
        for name, value in list(given.items()):
            # What takes any keyword gets all that the documented signature has, also where it is None.
            documented = name in ("scale", "initial_state", "cu_seqlens")
            if name in parameters or (any_keyword and (documented or (value is not None and name != "output_final_state"))):
                continue
            matters = value is not None if name != "scale" else abs(value / default_scale - 1) > 1e-6
            if matters and name != "output_final_state":
                raise Unsupported(f"the function takes no '{name}', which this case has")
            del given[name]
        return given

    def forward(self):
        """Results by their names."""
        inputs = [self.tensors[name] for name in self.names]
        if self.peer == "flashinfer":
            return self.flashinfer()
        more = {}
        if self.peer == "fla" and self.op == "gdn2" and bool((self.tensors["g"] >= -5).all()):
            more["safe_gate"] = self.settings["safe_gate"] = True
        return named(self.function(*inputs, **self.keywords(**more)))

    def flattened(self):
        """The call as FlashInfer takes it: packed sequences alone, alpha in the place of its logarithm, V before K."""
        torch = self.kind.torch
        q, k, v, g, beta = (self.tensors[name] for name in self.names)
        batch, length = q.shape[:2]
        flat = lambda x: x.reshape(batch * length, *x.shape[2:]).contiguous()
        offsets = self.tensors.get("cu_seqlens")
        if offsets is None:
            offsets = torch.arange(batch + 1, device=q.device) * length
        state = self.tensors.get("initial_state")
        state = None if state is None else state.transpose(-1, -2).contiguous()
        shape = (len(offsets) - 1, v.shape[2], v.shape[3], q.shape[3])
        return {
            "q": flat(q), "k": flat(k), "v": flat(v), "g": flat(g.float().exp()), "beta": flat(beta.float()),
            "scale": self.scale, "initial_state": state, "cu_seqlens": offsets.long(), "output_final_state": True,
            "output_state": q.new_empty(shape, dtype=torch.float32),
        }

    def flashinfer(self):
        """Results with K before V again."""
        o, final_state = self.function(**self.flat)
        return {"o": o.reshape(self.tensors["v"].shape), "final_state": final_state.transpose(-1, -2)}

    def leaves(self):
        """Makes the inputs leaves of autograd, and the initial state with them."""
        torch = self.kind.torch
        if self.tensors.get("initial_state") is None:
            q, v, offsets = self.tensors["q"], self.tensors["v"], self.tensors.get("cu_seqlens")
            sequences = q.shape[0] if offsets is None else len(offsets) - 1
            shape = (sequences, v.shape[2], q.shape[3], v.shape[3])
            self.tensors["initial_state"] = torch.zeros(shape, dtype=torch.float32, device=q.device)
        names = self.names + ("initial_state",)
        return {name: self.tensors[name].requires_grad_() for name in names}

    def graph(self):
        """Leaves, results, and what autograd takes for the backward."""
        if self.peer == "flashinfer":
            raise Unsupported("flashinfer has no backward")
        leaves = self.leaves()
        results = self.forward()
        pairs = [(results["o"], self.tensors["do"])]
        if self.tensors.get("dht") is not None and results.get("final_state") is not None:
            pairs.append((results["final_state"], self.tensors["dht"]))
        outputs = [output for output, _ in pairs]
        if not all(output.requires_grad for output in outputs):
            raise Unsupported("its results do not come from autograd, so there is no backward")
        return leaves, results, outputs, [gradient.to(output.dtype) for output, gradient in pairs]

    def backward(self):
        """Results and gradients by their names."""
        if self.kind.name != "torch":
            if not {"do", "dht"} <= set(inspect.signature(self.function).parameters):
                raise Unsupported("without PyTorch there is a backward only where the function takes 'do' and 'dht'")
            inputs = [self.tensors[name] for name in self.names]
            more = {"do": self.tensors.get("do"), "dht": self.tensors.get("dht")}
            return named(self.function(*inputs, **self.keywords(**more)))
        leaves, results, outputs, gradients = self.graph()
        found = self.kind.torch.autograd.grad(outputs, list(leaves.values()), gradients, allow_unused=True)
        names = ["dh0" if name == "initial_state" else f"d{name}" for name in leaves]
        return {**results, **{name: grad for name, grad in zip(names, found) if grad is not None}}


def named(results):
    """What a function returned as results by their names."""
    if isinstance(results, dict):
        return {name: value for name, value in results.items() if value is not None}
    if not isinstance(results, tuple):
        results = (results,)
    return {name: value for name, value in zip(("o", "final_state"), results) if value is not None}


def samples(once, budget, flush=None):
    """Milliseconds of `once`, which returns them, within the budget."""
    taken, start = [], time.perf_counter()
    while len(taken) < budget["max_samples"]:
        if len(taken) >= budget["min_samples"] and 1e3 * (time.perf_counter() - start) >= budget["time_ms"]:
            break
        if flush is not None:
            flush()
        taken.append(once())
    return taken


def time_on_clock(work, budget):
    """Times by the clock on the wall, without a GPU."""
    def once():
        start = time.perf_counter()
        work()
        return 1e3 * (time.perf_counter() - start)

    once()
    return samples(once, budget), "clock"


def time_on_gpu(torch, work, budget, stream):
    """GPU times of replays of a CUDA graph, or of calls where it cannot be captured, each with a cold L2 cache."""
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    how, run = "graph", None
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            work()
        run = graph.replay
    except Exception:
        traceback.print_exc()
        torch.cuda.synchronize()
        how, run = "events", work
    buffer = torch.empty(budget["flush_bytes"], dtype=torch.uint8, device="cuda")
    warm = time.perf_counter()
    while True:
        run()
        torch.cuda.synchronize()
        if 1e3 * (time.perf_counter() - warm) >= budget["warm_up_ms"]:
            break

    def once():
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record(stream)
        run()
        after.record(stream)
        torch.cuda.synchronize()
        return before.elapsed_time(after)

    return samples(once, budget, lambda: buffer.fill_(0x5A)), how


def timed(call, backward, budget):
    """Samples in milliseconds of the forward, or of the backward alone, and how they were taken."""
    if call.kind.name != "torch":
        if backward:
            raise Unsupported("without PyTorch a backward cannot be timed apart from its forward")
        return time_on_clock(call.forward, budget)
    torch = call.kind.torch
    if call.kind.device != "cuda":
        with torch.set_grad_enabled(backward):
            return time_on_clock(work_of(torch, call, backward), budget)
    # Autograd runs a backward on the stream of its forward, so both are on the stream that is captured.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.set_grad_enabled(backward):
        return time_on_gpu(torch, work_of(torch, call, backward), budget, stream)


def work_of(torch, call, backward):
    """What is timed."""
    if not backward:
        return call.forward
    leaves, _, outputs, gradients = call.graph()
    inputs = list(leaves.values())
    return lambda: torch.autograd.grad(outputs, inputs, gradients, retain_graph=True, allow_unused=True)


class Dispatched(logging.Handler):
    """Which backends fla says that it chose, and which refused and why."""

    line = re.compile(r"\[FLA Backend\] (\S+) -> (\w+)( rejected: (.*))?")

    def __init__(self):
        super().__init__(logging.INFO)
        self.chosen, self.refused = {}, {}

    def emit(self, record):
        found = self.line.search(record.getMessage())
        if found:
            operation, backend, rejected, why = found.groups()
            if rejected:
                self.refused[f"{operation} by {backend}"] = why
            else:
                self.chosen[operation] = backend


def about(peer, kind, dispatched, call, done):
    """Versions and settings that results depend on, and where the call was done what ran."""
    versions = {"python": sys.version.split()[0]}
    package = peer.partition(":")[0].partition(".")[0]
    for name in (*PACKAGES, package):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    settings = {name: value for name, value in sorted(os.environ.items()) if SETTINGS.fullmatch(name)}
    facts = {"versions": versions, "settings": settings, "arrays": kind.name}
    if call is not None:
        settings.update({name: str(value) for name, value in call.settings.items()})
    if kind.name == "torch":
        settings["float32_matmul_precision"] = kind.torch.get_float32_matmul_precision()
        if kind.device == "cuda":
            facts["gpu"] = kind.torch.cuda.get_device_name()
    if package == "fla":
        chosen = ", ".join(f"{name} by {how}" for name, how in dispatched.chosen.items())
        if chosen or done:
            facts["backend"] = chosen or "Triton"
        facts["refused"] = dispatched.refused
    return facts


# What PyTorch says below every error of the GPU.
BOILERPLATE = re.compile(r"Search for `cuda|CUDA kernel errors might be|For debugging consider|Compile with `TORCH_USE")


def words(error):
    """What an error says, in one line: its first lines, without what stands below every error."""
    lines = [line.strip() for line in str(error).splitlines()]
    lines = [line for line in lines if line and not BOILERPLATE.match(line)]
    return " / ".join(lines[:LINES] + ["..."] * (len(lines) > LINES)) or repr(error)


def hint(peer, error):
    """What to do about an error that is known."""
    if isinstance(error, ModuleNotFoundError):
        package = (error.name or peer).partition(".")[0]
        if package == peer.partition(":")[0].partition(".")[0] and ":" in peer:
            return f"start this in the folder that holds {package}.py, or name that folder in PYTHONPATH"
        return f"pip install {INSTALL.get(package, package)}, or name another Python with --python or GDNLAB_PYTHON"
    if "#640" in str(error) or "chunk_bwd_dqkwg" in str(error):
        return (
            "on Hopper, fla's gated backward raises with Triton 3.4.0 to 3.7.0 unless tilelang is installed: "
            "pip install tilelang, or Triton 3.7.1 or newer"
        )
    return None


def spent(kind):
    """Whether the GPU refuses everything that this process asks for, as after an assertion or a bad address in a kernel."""
    if kind.name != "torch" or kind.device != "cuda":
        return False
    try:
        kind.torch.cuda.synchronize()
    except Exception:
        return True
    return False


def answer(peer, kind, dispatched, request):
    """The answer to one request."""
    call = None
    try:
        call = Call(peer, kind, request["case"])
        if request.get("timing"):
            taken, how = timed(call, request["backward"], request["timing"])
            reply = {"samples_ms": taken, "timed_by": how}
        else:
            reply = {"result": write(request["result"], call.backward() if request["backward"] else call.forward(), kind)}
        return {"ok": True, **reply, "about": about(peer, kind, dispatched, call, True)}
    except Exception as error:
        if not isinstance(error, Unsupported):
            traceback.print_exc()
        kinds = {Unsupported: "unsupported", ModuleNotFoundError: "missing"}
        what = kinds.get(type(error), "raised")
        text = words(error)
        reply = {"ok": False, "kind": what, "error": text if what == "unsupported" else f"{type(error).__name__}: {text}"}
        reply["spent"] = spent(kind)
        return {**reply, "hint": hint(peer, error), "about": about(peer, kind, dispatched, call, False)}


def end_with(parent, folder):
    """Ends this process group, and removes its files, when the process that started it is gone."""
    while os.getppid() == parent:
        time.sleep(0.5)
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(os.getpgid(0), signal.SIGKILL)


def main():
    peer, folder = sys.argv[1:3]
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    threading.Thread(target=end_with, args=(os.getppid(), folder), daemon=True).start()
    sys.path[0] = os.getcwd()
    dispatched = Dispatched()
    logger = logging.getLogger("fla")
    logger.addHandler(dispatched)
    logger.setLevel(logging.INFO)
    kind = arrays()
    for line in sys.stdin:
        print(json.dumps(answer(peer, kind, dispatched, json.loads(line))), file=replies, flush=True)


if __name__ == "__main__":
    main()
