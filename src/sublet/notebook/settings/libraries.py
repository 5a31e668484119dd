"""Settings of the libraries that notebooks use most: torch, NumPy, pandas, matplotlib, plotly and more."""

from __future__ import annotations

import copy
import importlib
import inspect
import sys
import warnings
from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Any, Final

from sublet.notebook.on_demand import bring
from sublet.notebook.settings.setting import ALL, MAIN, Entries, Setting, SettingKind, call_of, nothing, single

TORCH_PRINT: Final = {"precision": 4, "threshold": 1000, "edgeitems": 3, "linewidth": 80, "sci_mode": None}

INDUCTOR: Final = "torch._inductor.config"
"""The compiler's settings."""


def of_libraries() -> Iterable[Setting]:
    torch = "torch"
    yield single(
        "torch default dtype",
        "`torch.set_default_dtype`",
        lambda: str(sys.modules[torch].get_default_dtype()).removeprefix("torch."),
        lambda name: sys.modules[torch].set_default_dtype(getattr(sys.modules[torch], name)),
        module=torch,
        default=lambda: "float32",
    )
    yield single(
        "torch gradients",
        "`torch.set_grad_enabled`",
        call_of("torch.is_grad_enabled"),
        call_of("torch.set_grad_enabled"),
        module=torch,
        default=lambda: True,
        kind=SettingKind.LOCAL,
    )
    yield single(
        "torch anomaly detection",
        "`torch.autograd.set_detect_anomaly`",
        lambda: (_torch().is_anomaly_enabled(), _torch().is_anomaly_check_nan_enabled()),
        lambda both: _torch().autograd.set_detect_anomaly(both[0], check_nan=both[1]),
        module=torch,
        default=lambda: (False, True),
    )
    yield single(
        "torch determinism",
        "`torch.use_deterministic_algorithms`",
        lambda: (
            _torch().are_deterministic_algorithms_enabled(),
            _torch().is_deterministic_algorithms_warn_only_enabled(),
        ),
        _set_deterministic,
        module=torch,
        default=lambda: (False, False),
    )
    yield single(
        "torch determinism of compiled code",
        "`torch.use_deterministic_algorithms`, for what `torch.compile` makes",
        lambda: getattr(sys.modules[INDUCTOR], "deterministic", None),
        lambda is_so: setattr(sys.modules[INDUCTOR], "deterministic", is_so),
        module=INDUCTOR,
        default=lambda: False,
        stored=(INDUCTOR,),
    )
    yield _attributes(
        "torch cudnn",
        "`torch.backends.cudnn.deterministic`, `benchmark`, `enabled`",
        "torch.backends.cudnn",
        {"deterministic": False, "benchmark": False, "enabled": True},
        module=torch,
    )
    yield single(
        "torch matmul precision",
        "`torch.set_float32_matmul_precision`",
        call_of("torch.get_float32_matmul_precision"),
        call_of("torch.set_float32_matmul_precision"),
        module=torch,
        default=lambda: "highest",
    )
    yield single(
        "torch threads",
        "`torch.set_num_threads`",
        call_of("torch.get_num_threads"),
        call_of("torch.set_num_threads"),
        module=torch,
    )
    yield Setting(
        key="torch print options",
        about="`torch.set_printoptions`",
        read=_torch_print,
        write=lambda values, gone: _torch().set_printoptions(**{**_torch_print(), **values}),
        module=torch,
        default=lambda: TORCH_PRINT,
        stored=("torch._tensor_str.PRINT_OPTS",),
    )
    yield single(
        "torch hooks",
        "the number of the next hook: a hook never takes the place of one that was added on the other side",
        lambda: _torch().utils.hooks.RemovableHandle.next_id,
        lambda given: setattr(_torch().utils.hooks.RemovableHandle, "next_id", given),
        module=torch,
        default=lambda: 0,
        stored=("torch.utils.hooks.RemovableHandle",),
    )
    yield Setting(
        key="NumPy errors",
        about="`numpy.seterr`",
        read=call_of("numpy.geterr"),
        write=lambda values, gone: sys.modules["numpy"].seterr(**values),
        module="numpy",
        default=lambda: {"divide": "warn", "over": "warn", "under": "ignore", "invalid": "warn"},
        kind=SettingKind.LOCAL,
    )
    yield Setting(
        key="NumPy print options",
        about="`numpy.set_printoptions`",
        read=call_of("numpy.get_printoptions"),
        write=_set_numpy_print,
        module="numpy",
        default=lambda: _FRESH_NUMPY_PRINT,
        kind=SettingKind.LOCAL,
    )
    accessors = _Accessors()
    yield Setting(
        key="pandas accessors",
        about="`register_dataframe_accessor` and its like, of a class that has a name in the notebook",
        read=accessors.read,
        write=accessors.write,
        module="pandas",
        default=nothing,
        stored=tuple(f"pandas.{kind}" for kind in PANDAS_KINDS),
    )
    yield single(
        "tqdm of pandas",
        "`tqdm.pandas()`",
        _tqdm_of_pandas,
        _set_tqdm_of_pandas,
        module="pandas",
        default=lambda: None,
        stored=tuple(f"pandas.{kind}" for kind in PANDAS_KINDS),
    )
    pandas = _PandasOptions()
    yield Setting(
        key="pandas options",
        about="`pandas.set_option`, `pandas.options`",
        read=pandas.read,
        write=pandas.write,
        module="pandas",
        default=pandas.default,
        stored=("pandas._config.config._global_config",),
    )
    parameters = _RcParams()
    yield Setting(
        key="matplotlib parameters",
        about="`rcParams`, `plt.rc`, `plt.style.use`; not the backend",
        read=parameters.read,
        write=parameters.write,
        module="matplotlib",
        default=parameters.default,
        stored=("matplotlib.rcParams",),
        assigned=("matplotlib:rcParams",),
    )
    yield Setting(
        key="scikit-learn",
        about="`sklearn.set_config`",
        read=call_of("sklearn.get_config"),
        write=lambda values, gone: sys.modules["sklearn"].set_config(**values),
        module="sklearn",
        default=lambda: _FRESH_SKLEARN,
        kind=SettingKind.LOCAL,
    )
    colors = _ColorNames()
    yield Setting(
        key="matplotlib colors",
        about="names of colors that a program has set, as `seaborn.set_theme` and `set_color_codes` do",
        read=colors.read,
        write=colors.write,
        module="matplotlib.colors",
        default=nothing,
        stored=("matplotlib.colors._colors_full_map",),
    )
    templates = _PlotlyTemplates()
    yield Setting(
        key="plotly templates",
        about="`plotly.io.templates`: the default, and those that a program has added or changed; not `renderers`",
        read=templates.read,
        write=templates.write,
        module="plotly.io",
        default=nothing,
        stored=("plotly.io.templates",),
        assigned=("plotly:default",),
    )
    yield Setting(
        key="plotly express",
        about="`plotly.express.defaults`",
        read=lambda: {name: getattr(_express_defaults(), name) for name in _express_defaults().__slots__},
        write=_set_express,
        module="plotly.express",
        default=nothing,
        stored=("plotly.express.defaults",),
    )
    yield Setting(
        key="altair",
        about="`altair.data_transformers`, `altair.theme` (or `themes`); not `renderers`",
        read=_altair,
        write=_set_altair,
        module="altair",
        default=nothing,
        stored=tuple(f"altair.{name}" for name in ALTAIR_REGISTRIES),
    )
    yield Setting(
        key="polars",
        about="`polars.Config`",
        read=_polars,
        write=_set_polars,
        module="polars",
        default=nothing,
    )
    yield Setting(
        key="xarray",
        about="`xarray.set_options`",
        read=call_of("xarray.get_options"),
        write=_set_xarray,
        module="xarray",
        default=nothing,
        stored=("xarray.core.options.OPTIONS",),
    )
    yield Setting(
        key="JAX",
        about="`jax.config.update`; not which platform and which device",
        read=_jax,
        write=_set_jax,
        module="jax",
        default=nothing,
    )
    yield _attributes(
        "mpmath",
        "`mpmath.mp.dps`, `prec`, `pretty`",
        "mpmath.mp",
        {"prec": 53, "pretty": False},
        module="mpmath",
    )
    yield _attributes(
        "Pillow size limit",
        "`PIL.Image.MAX_IMAGE_PIXELS`",
        "PIL.Image",
        {"MAX_IMAGE_PIXELS": 89478485},
        module="PIL.Image",
    )
    yield _attributes(
        "Pillow truncated images",
        "`PIL.ImageFile.LOAD_TRUNCATED_IMAGES`",
        "PIL.ImageFile",
        {"LOAD_TRUNCATED_IMAGES": False},
        module="PIL.ImageFile",
    )


def _attributes(key: str, about: str, path: str, fresh: Entries, *, module: str) -> Setting:
    """Attributes that a program assigns to what a library has under ``path``. ``fresh``: the library's own values."""
    library, _, rest = path.partition(".")

    def owner() -> Any:
        return sys.modules.get(path) or attrgetter(rest)(sys.modules[library])  # a package gets its modules after that

    def write(values: Entries, gone: tuple[str, ...]) -> None:
        for name, value in values.items():
            setattr(owner(), name, value)

    return Setting(
        key=key,
        about=about,
        read=lambda: {name: getattr(owner(), name) for name in fresh},
        write=write,
        module=module,
        default=lambda: fresh,
        assigned=tuple(f"{library}:{name}" for name in fresh),
    )


def _torch() -> Any:
    """torch, which is imported."""
    return sys.modules["torch"]


def _set_deterministic(both: tuple[bool, bool]) -> None:
    """torch's own setter imports its compiler, which takes as long as torch itself, to tell it the same: a side that
    has not imported the compiler is told without it, and the compiler has a row of its own."""
    directly = getattr(_torch()._C, "_set_deterministic_algorithms", None)
    if directly is None or INDUCTOR in sys.modules:
        _torch().use_deterministic_algorithms(both[0], warn_only=both[1])
    else:
        directly(both[0], warn_only=both[1])


def _torch_print() -> Entries:
    options = sys.modules["torch._tensor_str"].PRINT_OPTS  # torch has no public way to read them
    return {name: getattr(options, name) for name in TORCH_PRINT}


def _set_numpy_print(values: Entries, gone: tuple[str, ...]) -> None:
    sys.modules["numpy"].set_printoptions(**values)


_FRESH_NUMPY_PRINT: Final[Entries] = {
    "edgeitems": 3,
    "threshold": 1000,
    "floatmode": "maxprec",
    "precision": 8,
    "suppress": False,
    "linewidth": 75,
    "nanstr": "nan",
    "infstr": "inf",
    "sign": "-",
    "formatter": None,
    "legacy": False,
}
_FRESH_SKLEARN: Final[Entries] = {
    "assume_finite": False,
    "working_memory": 1024,
    "print_changed_only": True,
    "display": "diagram",
    "pairwise_dist_chunk_size": 256,
    "enable_cython_pairwise_dist": True,
    "array_api_dispatch": False,
    "transform_output": "default",
    "enable_metadata_routing": False,
    "skip_parameter_validation": False,
}


class _PandasOptions:
    """Every option, by its full name."""

    def __init__(self) -> None:
        self._was: Any = None
        self._entries: Entries = {}

    def read(self) -> Entries:
        now = sys.modules["pandas"].options.d
        if now != self._was:
            self._entries = _flat(now)
            self._was = {group: _copied(one) for group, one in now.items()}
        return self._entries

    def write(self, values: Entries, gone: tuple[str, ...]) -> None:
        for name, value in values.items():
            sys.modules["pandas"].set_option(name, value)

    def default(self) -> Entries:
        known = getattr(sys.modules.get("pandas._config.config"), "_registered_options", {})
        return {name: known[name].defval if name in known else one for name, one in self.read().items()}


PANDAS_KINDS: Final = ("DataFrame", "Series", "Index")


class ByName:
    """Accessor of pandas: the class that the notebook has under a name, which is looked up when it is used."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, data: Any) -> Any:
        return self._found()(data)

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return getattr(self._found(), attribute)

    def _found(self) -> Any:
        bring(self.name)
        try:
            return getattr(sys.modules[MAIN], self.name)
        except AttributeError:  # pandas would take it for a column that is not there
            raise RuntimeError(
                f"this accessor of pandas is {self.name} of the notebook, which the cell does not have: "
                f"name {self.name} in the cell, or give it with --in"
            ) from None


class _Accessors:
    """Accessors that the notebook's own classes are, by the name of the class; those of libraries come with them."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Any, int]] = {}
        """What was registered, and how often that was another."""

    def read(self) -> Entries:
        pandas, main = sys.modules["pandas"], vars(sys.modules[MAIN])
        found: dict[str, Any] = {}
        for kind in PANDAS_KINDS:
            owner = getattr(pandas, kind)
            for name in owner._accessors:
                accessor = getattr(vars(owner).get(name), "_accessor", None)
                made = accessor.name if type(accessor) is ByName else _own_name(accessor, main)
                if not made:
                    continue
                key = f"{kind}.{name}"
                before, number = self._known.get(key, (None, 0))
                if before is not accessor:
                    self._known[key] = accessor, number + 1
                found[key] = made, self._known[key][1]
        return found

    def write(self, values: Entries, gone: tuple[str, ...]) -> None:
        pandas: Any = sys.modules["pandas"]
        for key, (made, number) in values.items():
            kind, name = key.split(".")
            with warnings.catch_warnings():  # of one that takes the place of another
                warnings.simplefilter("ignore")
                register = getattr(pandas.api.extensions, f"register_{kind.lower()}_accessor")
                self._known[key] = register(name)(ByName(made)), number
        for key in gone:
            kind, name = key.split(".")
            owner = getattr(pandas, kind)
            if name in vars(owner):
                delattr(owner, name)
            owner._accessors.discard(name)


def _own_name(made: Any, main: Mapping[str, Any]) -> str:
    """Of a class or function of the notebook, if that is what it has under that name."""
    name = getattr(made, "__name__", "") if getattr(made, "__module__", None) == MAIN else ""
    return name if name and main.get(name) is made else ""


def _tqdm_of_pandas() -> Any:
    """The kind of progress bar of ``DataFrame.progress_apply``, and its arguments; None: there is none."""
    added = vars(sys.modules["pandas"].DataFrame).get("progress_apply")
    if added is None:
        return None
    held = inspect.getclosurevars(added).nonlocals
    kind = held.get("cls")
    if not isinstance(kind, type) or kind.__module__ == MAIN:
        return None
    return kind.__module__, kind.__qualname__, dict(held.get("tqdm_kwargs", {}))


def _set_tqdm_of_pandas(value: tuple[str, str, dict[str, Any]]) -> None:
    module, name, given = value
    getattr(importlib.import_module(module), name).pandas(**given)


def _flat(options: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, one in options.items():
        if isinstance(one, dict):
            found |= _flat(one, f"{before}{name}.")
        else:
            found[before + name] = one
    return found


def _copied(options: Any) -> Any:
    return {name: _copied(one) for name, one in options.items()} if isinstance(options, dict) else options


class _RcParams:
    """Of 340 parameters some are lists, which can be changed in place: those are compared with copies."""

    OF_THE_SIDE: Final = frozenset({"backend", "backend_fallback", "interactive", "webagg.address", "webagg.port"})

    def __init__(self) -> None:
        self._was: dict[str, Any] = {}
        self._lists: list[tuple[list[Any], list[Any]]] = []
        self._entries: Entries = {}

    def read(self) -> Entries:
        parameters: Any = sys.modules["matplotlib"].rcParams
        is_same = dict.__eq__(parameters, self._was)
        if is_same is not True or any(one != copy for one, copy in self._lists):
            self._was = dict(dict.items(parameters))
            self._lists = [(one, list(one)) for one in self._was.values() if type(one) is list]
            self._entries = {name: _own(one) for name, one in self._was.items() if name not in self.OF_THE_SIDE}
        return self._entries

    def write(self, values: Entries, gone: tuple[str, ...]) -> None:
        parameters: Any = sys.modules["matplotlib"].rcParams
        with (
            warnings.catch_warnings()
        ):  # of parameters that are deprecated and have been set by the program all the same
            warnings.simplefilter("ignore")
            for name, value in values.items():
                if name not in self.OF_THE_SIDE:
                    parameters[name] = value

    def default(self) -> Entries:
        found: Any = getattr(sys.modules["matplotlib"], "rcParamsOrig", None)
        if found is None:
            return self.read()
        return {name: _own(one) for name, one in dict.items(found) if name not in self.OF_THE_SIDE}


def _own(one: Any) -> Any:
    return list(one) if type(one) is list else one


class _ColorNames:
    """What matplotlib has under a name of a color where that is not what it came with."""

    def __init__(self) -> None:
        self._was: dict[str, Any] = {}
        self._entries: Entries = {}
        self._shipped: dict[str, Any] = {}

    def read(self) -> Entries:
        now = self._names()
        if not dict.__eq__(now, self._was):
            self._was = dict(now)
            shipped = self._shipped_names()
            self._entries = {name: one for name, one in now.items() if name not in shipped or shipped[name] != one}
        return self._entries

    def write(self, values: Entries, gone: tuple[str, ...]) -> None:
        names, shipped = self._names(), self._shipped_names()
        for name, value in {**values, **{name: shipped[name] for name in gone if name in shipped}}.items():
            names[name] = value  # one by one: ``update`` would leave what is cached
        for name in gone:
            if name not in shipped and name in names:
                del names[name]

    def _names(self) -> dict[str, Any]:
        found: dict[str, Any] = sys.modules["matplotlib.colors"].get_named_colors_mapping()
        return found

    def _shipped_names(self) -> dict[str, Any]:
        if not self._shipped:
            colors: Any = sys.modules["matplotlib.colors"]
            for table in colors.XKCD_COLORS, colors.CSS4_COLORS, colors.TABLEAU_COLORS, colors.BASE_COLORS:
                for one, other in ("grey", "gray"), ("gray", "grey"):
                    self._shipped |= {name.replace(one, other): value for name, value in table.items()}
                self._shipped |= table
        return self._shipped


class _PlotlyTemplates:
    """The default, and of templates what is in them. One of plotly's own is a class of its own until it is used."""

    def __init__(self) -> None:
        self._was: dict[str, Any] = {}
        self._entries: Entries = {}

    def read(self) -> Entries:
        templates: Any = sys.modules["plotly.io"].templates
        held = {name: getattr(one, "_props", None) for name, one in templates._templates.items()}
        now = {ALL: templates.default, **{name: props for name, props in held.items() if props is not None}}
        if now != self._was:
            self._entries = self._was = copy.deepcopy(now)
        return self._entries

    def write(self, values: Entries, gone: tuple[str, ...]) -> None:
        templates: Any = sys.modules["plotly.io"].templates
        template = importlib.import_module("plotly.graph_objects").layout.Template
        for name, props in values.items():
            if name != ALL:
                templates[name] = template(copy.deepcopy(props))
        if ALL in values:
            templates.default = values[ALL]
        for name in gone:
            if name in templates:
                del templates[name]


def _express_defaults() -> Any:
    return sys.modules["plotly.express"].defaults


def _set_express(values: Entries, gone: tuple[str, ...]) -> None:
    for name, value in values.items():
        setattr(_express_defaults(), name, value)


ALTAIR_REGISTRIES: Final = ("data_transformers", "theme", "themes")


def _altair() -> Entries:
    registries: dict[str, Any] = {name: vars(sys.modules["altair"]).get(name) for name in ALTAIR_REGISTRIES}
    found = {name: one for name, one in registries.items() if isinstance(getattr(one, "active", None), str)}
    return {name: (one.active, dict(one.options)) for name, one in found.items()}


def _set_altair(values: Entries, gone: tuple[str, ...]) -> None:
    for name, (active, options) in values.items():
        getattr(sys.modules["altair"], name).enable(active, **options)


def _polars() -> Entries:
    return {ALL: sys.modules["polars"].Config.save()}


def _set_polars(values: Entries, gone: tuple[str, ...]) -> None:
    sys.modules["polars"].Config.load(values[ALL])


def _set_xarray(values: Entries, gone: tuple[str, ...]) -> None:
    with warnings.catch_warnings():  # of options that are deprecated
        warnings.simplefilter("ignore")
        sys.modules["xarray"].set_options(**values)


JAX_OPTIONS: Final = (
    *("jax_enable_x64", "jax_debug_nans", "jax_debug_infs", "jax_disable_jit", "jax_check_tracer_leaks"),
    *("jax_default_matmul_precision", "jax_default_prng_impl", "jax_threefry_partitionable", "jax_random_seed_offset"),
    *("jax_numpy_rank_promotion", "jax_numpy_dtype_promotion", "jax_log_compiles", "jax_traceback_filtering"),
)


def _jax() -> Entries:
    config: Any = sys.modules["jax"].config
    return {name: getattr(config, name) for name in JAX_OPTIONS if hasattr(config, name)}


def _set_jax(values: Entries, gone: tuple[str, ...]) -> None:
    for name, value in values.items():
        sys.modules["jax"].config.update(name, value)
