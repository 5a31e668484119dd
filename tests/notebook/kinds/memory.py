"""Memory: arrays of numpy, tensors of PyTorch, frames of pandas, tables of Arrow, and who shares it with whom."""

from __future__ import annotations

from tests.notebook.kinds.kind import Kind, refused, travels

__all__ = ["ARRAYS", "FRAMES", "TENSORS"]

NP = "import numpy as np\n"
PD = "import pandas as pd\n"
TORCH = "import torch\n"
QUANTIZED = "import warnings; warnings.simplefilter('ignore'); import torch\n"  # PyTorch calls them deprecated

ARRAYS: list[Kind] = [
    travels("an array", NP + "x = np.arange(6.0)", "x.sum() == 15", "x[0] = 7", "x[0] == 7 and x.flags.writeable"),
    travels(
        "an array of 16 MiB", NP + "x = np.zeros(2 << 20)", "x[-1] == 0", "x[-1] = 5", "x[-1] == 5 and x.sum() == 5"
    ),
    travels(
        "an array in Fortran's order",
        NP + "x = np.asfortranarray(np.arange(6).reshape(2, 3))",
        "x.flags.f_contiguous and x[1, 2] == 5",
        "x[0, 1] = 9",
        "x[0, 1] == 9 and x.flags.f_contiguous",
    ),
    travels(
        "an array backwards",
        NP + "y = np.arange(5); x = y[::-1]",
        "x[0] == 4 and np.shares_memory(x, y)",
        "x[0] = 9",
        "y[4] == 9 and x[0] == 9",
    ),
    travels(
        "every second element of an array",
        NP + "y = np.arange(6); x = y[::2]",
        "x.tolist() == [0, 2, 4]",
        "x += 1",
        "y.tolist() == [1, 1, 3, 3, 5, 5] and np.shares_memory(x, y)",
    ),
    travels(
        "a view of a column",
        NP + "y = np.zeros((3, 2)); x = y[:, 1]",
        "np.shares_memory(x, y)",
        "x[:] = 1",
        "y.sum() == 3",
    ),
    travels(
        "two views that overlap",
        NP + "z = np.zeros(6); x, y = z[:4], z[2:]",
        "np.shares_memory(x, y)",
        "x[3] = 1; y[0] = 2",
        "z.tolist() == [0, 0, 2, 1, 0, 0] and y[1] == 1",
    ),
    travels(
        "an array without elements",
        NP + "x = np.zeros((0, 3), 'f4')",
        "x.shape == (0, 3) and x.dtype == 'f4' and x.flags.writeable",
    ),
    travels("an array of no dimensions", NP + "x = np.array(5)", "x.shape == () and x == 5", "x[...] = 6", "x == 6"),
    travels("a number of numpy", NP + "x = np.float32(1.5)", "type(x) is np.float32 and x == 1.5"),
    travels(
        "a structured array",
        NP + "x = np.zeros(2, [('a', 'i4'), ('b', 'f8', (2,))])",
        "x.dtype.names == ('a', 'b')",
        "x['b'][1] = 5",
        "x['b'][1].tolist() == [5, 5]",
    ),
    travels(
        "a field of a structured array",
        NP + "y = np.zeros(3, [('a', 'i4'), ('b', 'f8')]); x = y['b']",
        "np.shares_memory(x, y)",
        "x[0] = 5",
        "y['b'][0] == 5",
    ),
    travels(
        "an array of objects",
        NP + "y = []; x = np.array([y, 'a', None], object)",
        "x[0] is y",
        "y.append(1); x[1] = y",
        "x[0] is x[1] is y and y == [1]",
    ),
    travels(
        "a view of an array of objects",
        NP + "y = np.array([[1], 'a', None], object); x = y[1:]",
        "x[0] == 'a' and np.shares_memory(x, y)",
        "x[0] = [2]",
        "y[1] == [2] and x[0] is y[1]",
    ),
    travels(
        "a structured array of objects",
        NP + "y = []; x = np.empty(2, [('o', object), ('n', int)]); x['o'][0] = y",
        "x['o'][0] is y",
        "y.append(1); x['n'] = 3",
        "x['o'][0] is y and y == [1] and x['n'][1] == 3",
    ),
    travels(
        "an array that is made read-only, and a view of it",
        "import numpy as np\nx = np.arange(3.); y = x[1:]",
        "x.sum() == 3",
        "x.flags.writeable = False; y[0] = 5",
        "not x.flags.writeable and x.sum() == 7",
    ),
    travels(
        "an array that cannot be written",
        NP + "x = np.arange(3); x.flags.writeable = False",
        "x.sum() == 3 and not x.flags.writeable",
    ),
    travels(
        "an array of texts, of dates",
        NP + "x = [np.array(['a', 'bcd']), np.array(['2024-01-01'], 'M8[D]')]",
        "x[0][1] == 'bcd' and x[1][0] == np.datetime64('2024-01-01')",
        "x[0][0] = 'z'",
        "x[0][0] == 'z'",
    ),
    travels(
        "an array in the other byte order",
        NP + "x = np.arange(3, dtype='>i4')",
        "x.tolist() == [0, 1, 2] and x.dtype == np.dtype('>i4')",
        "x[1] = 300",
        "x[1] == 300",
    ),
    travels(
        "an array that shows one number many times",
        NP + "x = np.broadcast_to(np.float64(3), (2, 1000))",
        "x.sum() == 6000",
    ),
    travels(
        "a masked array and its data",
        NP + "y = np.arange(4.0); x = np.ma.array(y, mask=[0, 1, 0, 0], copy=False)",
        "x.sum() == 5 and x[1] is np.ma.masked",
        "x[0] = 9; x[2] = np.ma.masked",
        "x.sum() == 12 and y[0] == 9",
    ),
    travels(
        "a matrix",
        NP + "x = np.asmatrix(np.eye(2)) if hasattr(np, 'asmatrix') else np.eye(2)",
        "(x * x).sum() == 2",
        "x[0, 0] = 3",
        "x[0, 0] == 3",
    ),
    travels(
        "a record array",
        NP + "x = np.rec.array([(1, 2.0)], dtype=[('a', int), ('b', float)])",
        "x.a[0] == 1",
        "x.b[0] = 5",
        "x[0].b == 5 and type(x) is np.recarray",
    ),
    travels(
        "an array of one's own kind",
        NP + "class A(np.ndarray):\n    unit = ''\n"
        "    def __array_finalize__(self, o): self.unit = getattr(o, 'unit', '')\n"
        "y = np.zeros(3); x = y.view(A); x.unit = 'm'",
        "x.unit == 'm' and type(x) is A and np.shares_memory(x, y)",
        "x[0] = 1; x.unit = 'cm'",
        "x.unit == 'cm' and y[0] == 1 and x[0] == 1",
    ),
    travels(
        "a file that is mapped as an array",
        NP + "import tempfile\nf = tempfile.mktemp()\nx = np.memmap(f, 'f4', 'w+', shape=(4,)); x[:] = 1; x.flush()",
        "x.sum() == 4 and type(x) is np.memmap",
        "x[0] = 5; x.flush()",
        "x[0] == 5 and np.fromfile(f, 'f4')[0] == 5 and not __import__('os').unlink(f)",
        note="it is opened there, from the same file",
    ),
    travels(
        "an array over a byte array",
        NP + "y = bytearray(8); x = np.frombuffer(y, 'u1')",
        "x.sum() == 0",
        "x[0] = 1",
        "y[0] == 1 and not y.__setitem__(1, 9) and x[1] == 9",
    ),
    travels(
        "an array over an array.array",
        NP + "import array\ny = array.array('d', [1, 2]); x = np.asarray(y)",
        "x.sum() == 3",
        "x[0] = 5",
        "y[0] == 5 and not y.__setitem__(1, 9) and x[1] == 9",
    ),
    travels(
        "a random generator of numpy",
        NP + "x = np.random.default_rng(5); y = np.random.default_rng(5)",
        "x.bit_generator.state == y.bit_generator.state",
        "z = x.random()",
        "z == y.random() and x.bit_generator.state == y.bit_generator.state",
    ),
    travels(
        "numpy's old random state",
        NP + "x = np.random.RandomState(5)",
        "x is not None",
        "z = x.rand()",
        "x.get_state()[2] == 2",
    ),
    travels("a universal function of numpy", NP + "x = np.add", "x is np.add"),
    refused("a universal function of one's own", NP + "x = np.frompyfunc(lambda a: a, 1, 1)", "a numpy.ufunc"),
    travels(
        "a polynomial of numpy", NP + "x = np.polynomial.Polynomial([1, 2])", "x(2) == 5", "x.coef[0] = 3", "x(2) == 7"
    ),
    travels("a vectorized function", NP + "x = np.vectorize(lambda a: a + 1)", "x([1])[0] == 2"),
]

FRAMES: list[Kind] = [
    travels(
        "a frame",
        PD + "x = pd.DataFrame({'a': [1, 2], 'b': list('uv')})",
        "x.a.sum() == 3",
        "x.loc[0, 'a'] = 9",
        "x.a.tolist() == [9, 2] and x.b[1] == 'v'",
    ),
    travels(
        "a frame that gets a column",
        PD + "x = pd.DataFrame({'a': [1.0, 2]})",
        "list(x.columns) == ['a']",
        "x['b'] = x.a * 2",
        "x.b.sum() == 6",
    ),
    travels(
        "a series",
        PD + "x = pd.Series([1, 2], index=list('ab'), name='s')",
        "x['b'] == 2 and x.name == 's'",
        "x['b'] = 5",
        "x['b'] == 5",
    ),
    travels(
        "a series whose name changes",
        PD + "x = pd.Series([1], name='s')",
        "x.name == 's'",
        "x.name = 't'",
        "x.name == 't'",
    ),
    travels(
        "a frame with attributes beside its columns",
        "import pandas as pd\nx = pd.DataFrame({'a': [1]}); x.of = y = pd.Series([2]); y.of = [3]; x.w = y.of[0]",
        "x.of.of == [3] and x.w == 3",
        "x.of.of.append(4); del x.w; x.n = 5",
        "x.of.of == [3, 4] and x.n == 5 and not hasattr(x, 'w')",
    ),
    travels(
        "a frame with attributes",
        PD + "x = pd.DataFrame({'a': [1]}); x.attrs['k'] = 1",
        "x.attrs == {'k': 1}",
        "x.attrs['k'] = 2",
        "x.attrs == {'k': 2}",
    ),
    travels(
        "a frame and its column",
        PD + "x = pd.DataFrame({'a': [1, 2]}); y = x['a']",
        "y.sum() == 3",
        "x.loc[0, 'a'] = 9",
        "y.sum() == 3 and x.a.sum() == 11",
        note="pandas copies on write, and does so there too",
    ),
    travels(
        "dates with a zone, categories",
        PD + "x = pd.DataFrame({'t': pd.date_range('2024', periods=2, tz='UTC'), 'c': pd.Categorical(['u', 'v'])})",
        "str(x.t.dt.tz) == 'UTC' and list(x.c.cat.categories) == ['u', 'v']",
        "x.loc[0, 'c'] = 'v'",
        "x.c.tolist() == ['v', 'v']",
    ),
    travels(
        "a frame with lists in it",
        PD + "y = [1]; x = pd.DataFrame({'a': [y, None]})",
        "x.a[0] is y",
        "y.append(2)",
        "y == [1, 2] and x.a[0] == [1, 2]",
    ),
    travels("an index of several levels", PD + "x = pd.MultiIndex.from_product([[1, 2], list('ab')])", "len(x) == 4"),
    travels(
        "what a frame gives out as loc, iloc and at",
        "import pandas as pd\ny = pd.DataFrame({'a': [1, 2]}); x = [y.loc, y.iloc, y.at, y]",
        "x[0].obj is x[1].obj is x[2].obj is x[3]",
        "x[0][0] = 5; x[2][1, 'a'] = 6",
        "x[3].a.tolist() == [5, 6] and x[0].obj is x[1].obj is x[2].obj is x[3]",
    ),
    travels("groups of a frame", PD + "x = pd.DataFrame({'a': [1, 1], 'b': [2, 3]}).groupby('a')", "x.b.sum()[1] == 5"),
    travels(
        "a timestamp, an interval, NA",
        PD + "x = (pd.Timestamp('2024'), pd.Interval(0, 1), pd.NA)",
        "x[0].year == 2024 and 0.5 in x[1] and x[2] is pd.NA",
    ),
    travels(
        "a table of Arrow", "import pyarrow as pa\nx = pa.table({'a': [1, None]})", "x.column('a').null_count == 1"
    ),
    travels(
        "an array of Arrow and its slice",
        "import pyarrow as pa\ny = pa.array(range(9)); x = y.slice(2, 3)",
        "x.to_pylist() == [2, 3, 4]",
    ),
]

TENSORS: list[Kind] = [
    travels("a tensor", TORCH + "x = torch.arange(4.0)", "x.sum() == 6", "x[0] = 5", "x.sum() == 11"),
    travels(
        "two tensors with one storage",
        TORCH + "y = torch.zeros(4); x = y[1:3]",
        "x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()",
        "x += 1",
        "y.tolist() == [0, 1, 1, 0] and x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()",
    ),
    travels(
        "a transposed tensor",
        TORCH + "y = torch.zeros(2, 3); x = y.T",
        "x.shape == (3, 2) and not x.is_contiguous()",
        "x[2, 0] = 1",
        "y[0, 2] == 1",
    ),
    travels(
        "a tensor and its array",
        "import numpy as np\n" + TORCH + "y = np.zeros(3, 'f4'); x = torch.from_numpy(y)",
        "x.data_ptr() == y.ctypes.data",
        "x[0] = 1",
        "y[0] == 1 and x[0] == 1",
    ),
    travels(
        "a bfloat16, a bool, a complex tensor",
        TORCH + "x = [torch.ones(2, dtype=d) for d in (torch.bfloat16, torch.bool, torch.complex64)]",
        "x[0].dtype is torch.bfloat16 and x[2].is_complex()",
        "x[0][0] = 3; x[1][0] = False",
        "x[0][0] == 3 and not x[1][0]",
    ),
    travels("a tensor without elements", TORCH + "x = torch.empty(0, 3)", "x.shape == (0, 3)"),
    travels(
        "a tensor with a gradient",
        TORCH + "x = torch.ones(2, requires_grad=True); x.sum().backward()",
        "x.grad.tolist() == [1, 1] and x.is_leaf",
        "x.grad += 1",
        "x.grad.tolist() == [2, 2] and x.requires_grad",
    ),
    travels(
        "a tensor with attributes",
        TORCH + "x = torch.ones(2); x.me = [x]; x.half = x[:1]; x.half.of = 2",
        "x.me[0] is x and x.half.of == 2",
        "x.me.append(1); x.tag = 3; x.half.of = 4",
        "x.me[0] is x and x.me[1:] == [1] and x.tag == 3 and x.half.of == 4",
    ),
    travels(
        "a result with its graph",
        TORCH + "w = torch.ones(2, requires_grad=True); x = (w * 3).sum()",
        "x.item() == 3 * 2",
        note="its graph stays where it was made: on the other side it is a value, and backward() says so",
    ),
    travels(
        "a parameter on the memory of a tensor",
        TORCH + "y = torch.ones(2); x = [torch.nn.Linear(2, 2), y]",
        "x[1] is y",
        "x[0].scale = torch.nn.Parameter(y); x[1] += 1",
        "type(x[0].scale) is torch.nn.Parameter and x[0].scale.tolist() == [2, 2] and len([*x[0].parameters()]) == 3",
    ),
    travels(
        "a parameter",
        TORCH + "x = torch.nn.Parameter(torch.zeros(2))",
        "type(x) is torch.nn.Parameter",
        "x.data += 1",
        "x.sum() == 2 and x.requires_grad",
    ),
    travels(
        "a model",
        TORCH + "x = torch.nn.Linear(2, 1); y = x.weight",
        "x.weight is y",
        "y.data.fill_(1); x.bias.data.fill_(0)",
        "x(torch.ones(1, 2)).item() == 2 and x.weight is y",
    ),
    travels(
        "a model whose weights are frozen",
        TORCH + "x = torch.nn.Linear(1, 1); y = torch.optim.SGD(x.parameters()); z = x.weight",
        "x.weight is z and y.param_groups[0]['params'][0] is z",
        "for one in x.parameters(): one.requires_grad = False",
        "x.weight is z and y.param_groups[0]['params'][0] is z and not z.requires_grad",
    ),
    travels(
        "a tensor of inference mode",
        TORCH + "with torch.inference_mode(): x = torch.zeros(3)\ny = [x]",
        "x.is_inference() and y[0] is x",
        "with torch.inference_mode(): x[0] = 5",
        "y[0][0] == 5 and x.is_inference()",
    ),
    travels(
        "a model of one's own with its optimizer",
        TORCH + "class M(torch.nn.Module):\n    def __init__(self):\n"
        "        super().__init__(); self.a = torch.nn.Linear(1, 1)\n    def forward(self, v): return self.a(v)\n"
        "x = M(); y = torch.optim.Adam(x.parameters(), lr=0.1)\nz = x.a.weight.item()",
        "y.param_groups[0]['params'][0] is x.a.weight",
        "x(torch.ones(1, 1)).sum().backward(); y.step(); y.zero_grad()",
        "y.param_groups[0]['params'][0] is x.a.weight and abs(x.a.weight.item() - z + 0.1) < 1e-4 and "
        "y.state[x.a.weight]['step'] == 1",
    ),
    travels(
        "a lazy layer of PyTorch",
        TORCH + "torch.manual_seed(1); x = torch.nn.LazyLinear(2); y = torch.nn.Sequential(x)",
        "y[0] is x",
        "z = y(torch.ones(1, 3)).tolist()",
        "y[0] is x and type(x) is torch.nn.Linear and x.weight.shape == (2, 3) and y(torch.ones(1, 3)).tolist() == z",
    ),
    travels(
        "a layer of PyTorch with a parametrization",
        TORCH + "torch.manual_seed(1); x = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(2, 2)); "
        "y = torch.optim.SGD(x.parameters(), lr=1.0); z = x.weight.tolist()",
        "x.weight.tolist() == z and y.param_groups[0]['params'][-1] is x.parametrizations.weight.original1",
        "x(torch.ones(1, 2)).sum().backward(); y.step(); z = x.weight.tolist()",
        "x.weight.tolist() == z and isinstance(x, torch.nn.Linear) and "
        "y.param_groups[0]['params'][-1] is x.parametrizations.weight.original1 and "
        "torch.nn.utils.parametrize.is_parametrized(x, 'weight')",
    ),
    travels(
        "a layer of PyTorch that gets a parametrization, and one that loses it",
        TORCH + "spectral = torch.nn.utils.parametrizations.spectral_norm; parametrize = torch.nn.utils.parametrize\n"
        "torch.manual_seed(1); x = torch.nn.Linear(2, 2); y = torch.nn.Sequential(x, spectral(torch.nn.Linear(2, 2)))",
        "y[0] is x and parametrize.is_parametrized(y[1])",
        "spectral(x); parametrize.remove_parametrizations(y[1], 'weight'); y.eval(); z = y(torch.ones(1, 2)).tolist()",
        "y[0] is x and parametrize.is_parametrized(x) and type(y[1]) is torch.nn.Linear and "
        "y(torch.ones(1, 2)).tolist() == z",
    ),
    travels(
        "an optimizer with a hook and a scheduler",
        TORCH + "y = torch.nn.Linear(1, 1); x = torch.optim.SGD(y.parameters(), lr=0.1); seen = []\n"
        "z = torch.optim.lr_scheduler.StepLR(x, 1); x.register_step_post_hook(lambda *given: seen.append(1))",
        "z.optimizer is x and x.step._wrapped_by_lr_sched and len(x._optimizer_step_post_hooks) == 1",
        "y(torch.ones(1, 1)).sum().backward(); x.step(); z.step()",
        "seen == [1] and x._opt_called and abs(x.param_groups[0]['lr'] - 0.01) < 1e-9 and z.last_epoch == 1",
    ),
    travels(
        "a hook of a model and its handle",
        TORCH + "y = torch.nn.Linear(1, 1); seen = []; x = y.register_forward_hook(lambda *given: seen.append(1))",
        "len(y._forward_hooks) == 1 and x.hooks_dict_ref() is y._forward_hooks",
        "x.remove(); y(torch.ones(1, 1))",
        "not y._forward_hooks and not seen",
    ),
    travels(
        "a handle of a hook, without its model",
        TORCH + "x = torch.nn.Linear(1, 1).register_forward_hook(print)",
        "x.hooks_dict_ref() is None or len(x.hooks_dict_ref()) == 1",
        "x.remove()",
        "not x.hooks_dict_ref()",
    ),
    travels(
        "a parameter that is given other numbers as a whole",
        TORCH + "x = torch.nn.Parameter(torch.ones(2)); y = {'p': x}; z = x[:1].detach()",
        "x.tolist() == [1.0, 1.0] and y['p'] is x",
        "x.data = torch.zeros(3, 2)",
        "x.shape == (3, 2) and y['p'] is x and x.requires_grad and z.tolist() == [1.0]",
    ),
    travels(
        "a model whose numbers become shorter",
        TORCH + "x = torch.nn.Linear(2, 1); y = x.weight; opt_ = torch.optim.SGD(x.parameters(), lr=0.1)",
        "x.weight is y and opt_.param_groups[0]['params'][0] is y",
        "x.half()",
        "x.weight is y and opt_.param_groups[0]['params'][0] is y and y.dtype is torch.float16",
    ),
    travels(
        "a hook of a tensor and its handle",
        TORCH + "x = torch.ones(2, requires_grad=True); seen = []\ndef hook(g):\n    seen.append(1); return g * 2\n"
        "y = x.register_hook(hook)",
        "len(x._backward_hooks) == 1 and y.hooks_dict_ref() is x._backward_hooks",
        "(x * 3).sum().backward()",
        "seen == [1] and x.grad.tolist() == [6.0, 6.0]",
    ),
    travels(
        "a tensor whose hook was removed",
        TORCH + "x = torch.ones(2, requires_grad=True); y = x.register_hook(lambda g: g * 2)",
        "x.requires_grad and len(x._backward_hooks) == 1",
        "y.remove(); (x * 3).sum().backward()",
        "not x._backward_hooks and x.grad.tolist() == [3.0, 3.0]",
    ),
    travels(
        "a parameter with hooks before and after its gradient",
        TORCH + "x = torch.nn.Parameter(torch.ones(2)); seen = []\n"
        "x.register_hook(lambda g: g * 2)\n"
        "x.register_post_accumulate_grad_hook(lambda t: seen.append(t.grad.sum().item()))",
        "(len(x._backward_hooks), len(x._post_accumulate_grad_hooks)) == (1, 1)",
        "(x * 3).sum().backward()",
        "seen == [12.0] and x.grad.tolist() == [6.0, 6.0]",
    ),
    travels(
        "a drawing on an image of Pillow",
        "from PIL import Image, ImageDraw\ny = Image.new('RGB', (8, 8)); x = ImageDraw.Draw(y, 'RGBA'); x.note = [1]",
        "x._image is y and x.im is y.im and x.mode == 'RGBA' and x.note == [1]",
        "x.rectangle((0, 0, 3, 3), fill=(200, 0, 0, 128))",
        "x._image is y and x.im is y.im and 90 < y.getpixel((1, 1))[0] < 110",
    ),
    travels(
        "tied weights",
        TORCH + "x = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]); x[1].weight = x[0].weight",
        "x[1].weight is x[0].weight",
        "x[0].weight.data.fill_(2)",
        "x[1].weight is x[0].weight and x[1].weight.sum() == 8",
    ),
    travels(
        "the state of a model",
        TORCH + "y = torch.nn.Linear(2, 1); x = y.state_dict()",
        "x['weight'].data_ptr() == y.weight.data_ptr()",
        "x['weight'].fill_(3)",
        "y.weight.sum() == 6",
    ),
    travels(
        "a tensor of float8 or uint16",
        TORCH + "x = torch.tensor([1, 2]).to(torch.float8_e4m3fn); y = [x, torch.ones(2, dtype=torch.uint16)]",
        "x.dtype == torch.float8_e4m3fn and x.float().tolist() == [1, 2] and y[0] is x and y[1].tolist() == [1, 1]",
        "x.copy_(torch.tensor([3.0, 4.0])); y[1][0] = 7",
        "y[0] is x and x.float().tolist() == [3, 4] and y[1].tolist() == [7, 1]",
    ),
    travels(
        "a quantized tensor",
        QUANTIZED + "x = torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8)\ny = [x]",
        "x.dequantize().tolist() == [1, 1] and y[0] is x",
        "x.copy_(torch.quantize_per_tensor(torch.full((2,), 3.0), 0.25, 1, torch.qint8))",
        "y[0] is x and x.dequantize().tolist() == [3, 3] and (x.q_scale(), x.q_zero_point()) == (0.25, 1)",
    ),
    travels(
        "a tensor that is quantized by channel",
        QUANTIZED + "x = torch.quantize_per_channel(torch.ones(2, 2), torch.tensor([0.5, 1.0]), torch.tensor([0, 1]), "
        "0, torch.qint8)",
        "x.dequantize().tolist() == [[1, 1], [1, 1]] and x.q_per_channel_zero_points().tolist() == [0, 1]",
    ),
    travels("a sparse tensor", TORCH + "x = torch.eye(3).to_sparse()", "x.is_sparse and x.to_dense().sum() == 3"),
    travels(
        "a type, a device, a size of PyTorch",
        TORCH + "x = (torch.float16, torch.device('cpu'), torch.Size([2]))",
        "x[0] is torch.float16 and x[2] == (2,)",
    ),
    travels(
        "a data set and its loader",
        TORCH + "y = torch.utils.data.TensorDataset(torch.arange(4)); x = torch.utils.data.DataLoader(y, batch_size=2)",
        "[b[0].tolist() for b in x] == [[0, 1], [2, 3]] and x.dataset is y",
    ),
    travels(
        "a random generator of PyTorch",
        TORCH + "x = torch.Generator().manual_seed(5); y = torch.Generator().manual_seed(5)",
        "x.initial_seed() == 5",
        "z = torch.rand(1, generator=x)",
        "z == torch.rand(1, generator=y) and torch.rand(1, generator=x) == torch.rand(1, generator=y)",
    ),
    travels(
        "a largest element with its place",
        TORCH + "y = torch.tensor([1.0, 5]); x = torch.max(y, 0)",
        "x.indices == 1 and x.values == 5",
    ),
    travels(
        "a tensor under another's name, in a list",
        TORCH + "y = torch.zeros(2); x = [y, y]",
        "x[0] is x[1] is y",
        "x[0] += 1",
        "y.sum() == 2 and x[1] is y",
    ),
]
