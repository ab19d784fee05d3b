"""What the ladder tries at every state: a name, and code that must pass.

`d` is the device's name, `x` a host tensor of 4 x 4 numbers; `same` compares a
device tensor with a host tensor, `same_module` a module's two results.
"""

PROBES = {
    "Runtime": {
        "device name": "torch.device(d, 1)",
        "device count": "assert torch.openreg.device_count() > 0",
        "current device": """
with torch.openreg.device(1):
    assert torch.openreg.current_device() == 1""",
        "device properties": "torch.openreg.get_device_properties(0).name",
        "fork is noticed": "assert torch.openreg._is_in_bad_fork() is False",
        "torch.accelerator is available": """
assert torch.accelerator.is_available()
assert torch.accelerator.current_accelerator().type == d""",
        "set_device_index": """
torch.accelerator.set_device_index(1)
assert torch.accelerator.current_device_index() == 1""",
        "device_index as a context": """
with torch.accelerator.device_index(1):
    assert torch.accelerator.current_device_index() == 1""",
        "synchronize": "torch.accelerator.synchronize()",
        "Stream as a context": """
with torch.Stream(device=d) as stream:
    assert torch.accelerator.current_stream() == stream""",
        "Event timing": """
start, end = (torch.Event(d, enable_timing=True) for _ in range(2))
start.record(); end.record(); end.synchronize()
assert start.elapsed_time(end) >= 0""",
        "memory statistics": """
y = torch.empty(1024, device=d)
assert torch.accelerator.memory_allocated() >= 4096""",
        "empty_cache": "torch.accelerator.empty_cache()",
        "UntypedStorage": "torch.UntypedStorage(8, device=d)",
        "pin_memory": """
assert x.pin_memory().is_pinned()
same(x.pin_memory().to(d, non_blocking=True), x)""",
        "Generator": "torch.Generator(device=d).manual_seed(1)",
        "manual_seed reproduces": """
torch.manual_seed(3); a = torch.randn(4, device=d)
torch.manual_seed(3); same(torch.randn(4, device=d), a.cpu())""",
    },
    "Front end": {
        "import torch is enough": """
import importlib.metadata
assert importlib.metadata.entry_points(group="torch.backends").names""",
        "tensor.openreg()": "same(x.openreg(), x)",
        "save and load": """
import io
file = io.BytesIO(); torch.save(x.to(d), file); file.seek(0)
y = torch.load(file); assert y.device.type == d; same(y, x)""",
        "deepcopy": "import copy; same(copy.deepcopy(x.to(d)), x)",
        "DLPack": "same(torch.from_dlpack(x.to(d)), x)",
        "DataLoader pins": """
from torch.utils.data import DataLoader
for batch in DataLoader(x, pin_memory=True):
    assert batch.is_pinned()""",
        "module.to": """
layer = torch.nn.Linear(4, 4)
same(layer.to(d).weight, layer.weight)""",
        "load_state_dict": """
a, b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4, device=d)
b.load_state_dict(a.state_dict()); same(b.weight, a.weight)""",
        "print a tensor": "assert 'openreg' in repr(x.to(d))",
        "numpy() is refused": """
y = x.to(d)
try: y.numpy()
except TypeError: pass
else: raise AssertionError""",
    },
    "Operators": {
        "empty": "assert torch.empty(2, device=d).device.type == d",
        "zeros, ones, arange": """
for make in (torch.zeros, torch.ones, torch.arange):
    same(make(4, device=d), make(4))""",
        "copy there and back": "same(x.to(d), x)",
        "copy between devices": "same(x.to(d + ':0').to(d + ':1'), x)",
        "views": "same(x.to(d)[1:, ::2].t(), x[1:, ::2].t())",
        "float64": "same(x.double().to(d), x.double())",
        "half, bfloat16, int64, complex": """
for t in (torch.half, torch.bfloat16, torch.int64, torch.complex64):
    same(x.to(t).to(d), x.to(t))""",
        "resize_": """
y = x.to(d).resize_(8, 8); same(y.flatten()[:16], x.flatten())""",
        "item": "assert x.to(d)[1, 2].item() == x[1, 2].item()",
        "x + 1": "same(x.to(d) + 1, x + 1)",
        "x @ x": "same(x.to(d) @ x.to(d), x @ x)",
        "sum": "same(x.to(d).sum(), x.sum())",
        "boolean index": "y = x.to(d); same(y[y > 5], x[x > 5])",
        "index out of range": """
y, wrong = x.to(d), torch.tensor([99]).to(d)
try:
    y[wrong]; torch.accelerator.synchronize()
except (IndexError, RuntimeError) as error: assert "99" in str(error)
else: raise AssertionError""",
        "sort": """
same(x.to(d).sort(descending=True)[0], x.sort(descending=True)[0])""",
        "conv2d": "same_module(torch.nn.Conv2d(1, 2, 3), x[None, None])",
        "layer norm": "same_module(torch.nn.LayerNorm(4), x)",
        "batch norm": "same_module(torch.nn.BatchNorm1d(4), x)",
        "attention": """
q = torch.rand(1, 2, 4, 8)
attend = torch.nn.functional.scaled_dot_product_attention
same(attend(*[q.to(d)] * 3), attend(q, q, q))""",
        "LSTM": "same_module(torch.nn.LSTM(4, 4), x)",
        "embedding": """
same_module(torch.nn.Embedding(9, 4), torch.tensor([1, 5]))""",
        "linalg.svdvals": """
same(torch.linalg.svdvals(x.to(d)), torch.linalg.svdvals(x))""",
        "sparse COO": "same(x.to(d).to_sparse().to_dense(), x)",
    },
    "High-level modules": {
        "backward": """
y = x.to(d).requires_grad_(); (y * y).sum().backward()
same(y.grad, 2 * x)""",
        "train with Adam": """
torch.manual_seed(0); layer = torch.nn.Linear(4, 1).to(d)
adam = torch.optim.Adam(layer.parameters(), 0.1)
losses = []
for _ in range(3):
    adam.zero_grad(); loss = layer(x.to(d)).square().mean()
    loss.backward(); adam.step(); losses.append(loss.item())
assert losses[-1] < losses[0]""",
        "clip_grad_norm_": """
y = x.to(d).requires_grad_(); y.sum().backward()
torch.nn.utils.clip_grad_norm_([y], 1.0)
assert abs(y.grad.norm().item() - 1) < 1e-3""",
        "custom operator": """
@torch.library.custom_op("probe::twice", mutates_args=())
def twice(a: torch.Tensor) -> torch.Tensor:
    return a + a
same(twice(x.to(d)), 2 * x)""",
        "vmap and grad": """
f = torch.func.vmap(torch.func.grad(lambda v: v.square().sum()))
same(f(x.to(d)), f(x))""",
        "autocast": """
with torch.autocast(d, dtype=torch.bfloat16):
    assert (x.to(d) @ x.to(d)).dtype == torch.bfloat16""",
        "GradScaler": """
y = x.to(d).requires_grad_(); scaler = torch.amp.GradScaler(d)
sgd = torch.optim.SGD([y], 0.1)
scaler.scale(y.sum()).backward(); scaler.step(sgd); scaler.update()
assert y.detach().cpu().lt(x).all()""",
        "compile, aot_eager": """
f = torch.compile(lambda v: v.sin() + 1, backend="aot_eager")
same(f(x.to(d)), x.sin() + 1)""",
        "compile, Inductor": """
f = torch.compile(lambda v: v.sin() + 1); same(f(x.to(d)), x.sin() + 1)""",
        "compile, training": """
layer = torch.nn.Linear(4, 1).to(d)
torch.compile(layer)(x.to(d)).sum().backward()
same(layer.weight.grad, x.sum(0, keepdim=True))""",
        "graph replay": """
y = x.to(d); graph = torch.accelerator.Graph()
with graph: z = y + 1
y.zero_(); graph.replay(); same(z, torch.ones(4, 4))""",
        "quantized tensor": """
y = torch.quantize_per_tensor(x.to(d), 0.1, 0, torch.qint8)
z = torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)
same(y.dequantize(), z.dequantize())""",
        "torch.export": """
layer = torch.nn.Linear(4, 4).to(d)
exported = torch.export.export(layer, (x.to(d),)).module()
same(exported(x.to(d)), layer(x.to(d)).cpu())""",
        "profiler": """
from torch.profiler import ProfilerActivity, profile
with profile(activities=[ProfilerActivity.PrivateUse1]) as p:
    x.to(d) + 1
assert any(e.device_time_total > 0 for e in p.key_averages())""",
        "all_reduce": """
dist = torch.distributed
dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
y = x.to(d); dist.all_reduce(y); same(y, x)""",
        "DTensor": """
from torch.distributed.tensor import distribute_tensor, init_device_mesh
dist = torch.distributed
dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
same(distribute_tensor(x.to(d), init_device_mesh(d, (1,))).full_tensor(), x)""",
    },
}
