"""Settings of IPython: how results, errors and figures are shown."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterable
from typing import Any, Final

from sublet.notebook.settings.setting import ALL, Entries, Setting, nothing, single


def of_ipython() -> Iterable[Setting]:
    yield Setting(
        key="IPython display",
        about="`%precision`, `%pprint`, `%xmode`, `InteractiveShell.ast_node_interactivity`",
        read=_shell_settings,
        write=_set_shell_settings,
        module="IPython",
        default=lambda: _FRESH_SHELL,
        assigned=("IPython:ast_node_interactivity",),
    )
    yield Setting(
        key="inline figures",
        about="`%config InlineBackend.figure_format` and its `rc`, `close_figures`; `set_matplotlib_formats`",
        read=_inline_settings,
        write=_set_inline_settings,
        module="IPython",
        default=lambda: _FRESH_INLINE,
    )
    yield Setting(
        key="figures as images",
        about="the first figure that `pyplot` makes, `%matplotlib inline`",
        read=_figures_shown,
        write=_show_figures,
        module="matplotlib.figure",
        default=nothing,
    )
    yield Setting(
        key="interactive figures",
        about="`plt.ion`, `plt.ioff`",
        read=_interactive,
        write=_set_interactive,
        module="matplotlib.pyplot",
        default=nothing,
    )
    yield single(
        "SymPy printing",
        "`sympy.init_printing`, without printers of your own",
        _sympy_printing,
        _set_sympy_printing,
        module="sympy",
        default=lambda: None,
        stored=("sympy.printing.printer.Printer", "sympy.printing.defaults.Printable"),
    )


_FRESH_SHELL: Final[Entries] = {
    "ast_node_interactivity": "last_expr",
    "sphinxify_docstring": False,
    "show_rewritten_input": True,
    "text.pprint": True,
    "text.max_width": 79,
    "text.max_seq_length": 1000,
    "text.verbose": False,
    "text.float_format": "%r",
    "xmode": "Context",
}
_FRESH_INLINE: Final[Entries] = {
    "figure_formats": ("png",),
    "rc": {},
    "print_figure_kwargs": {"bbox_inches": "tight"},
    "close_figures": True,
}
_INLINE: Final = ("rc", "print_figure_kwargs", "close_figures")


def _shell() -> Any:
    return sys.modules["IPython"].get_ipython()


def _shell_settings() -> Entries:
    shell = _shell()
    if shell is None:
        return {}
    text = shell.display_formatter.formatters["text/plain"]
    found = {name: getattr(*_place_of(name, shell, text)) for name in _FRESH_SHELL if name != "xmode"}
    return found | {"xmode": shell.InteractiveTB.mode}


def _place_of(name: str, shell: Any, text: Any) -> tuple[Any, str]:
    return (text, name.removeprefix("text.")) if name.startswith("text.") else (shell, name)


def _set_shell_settings(values: Entries, gone: tuple[str, ...]) -> None:
    shell = _shell()
    if shell is None:
        return
    text = shell.display_formatter.formatters["text/plain"]
    for name, value in values.items():
        if name == "xmode":
            shell.InteractiveTB.set_mode(value)
        elif name == "text.float_format":
            _set_float_format(text, value)
        else:
            setattr(*_place_of(name, shell, text), value)


def _set_float_format(text: Any, value: str) -> None:
    """Not by ``%precision``, which sets NumPy's print options as well: they have a row of their own."""
    numpy: Any = sys.modules.get("numpy")
    options = None if numpy is None else numpy.get_printoptions()
    text.float_precision = value if value != "%r" else ""
    if options is not None:
        numpy.set_printoptions(precision=options["precision"])


def _inline_settings() -> Entries:
    """Of the backend's configuration; before there is one, what ``%config`` has noted for it."""
    shell = _shell()
    if shell is None:
        return {}
    backend = getattr(sys.modules.get("matplotlib_inline.config"), "InlineBackend", None)
    if backend is not None and backend.initialized():
        one = backend.instance()
        return {"figure_formats": _figure_formats(one), **{name: _own_dict(getattr(one, name)) for name in _INLINE}}
    noted = shell.config.get("InlineBackend", {})
    found = {**_FRESH_INLINE, **{name: noted[name] for name in _FRESH_INLINE if name in noted}}
    if noted.get("figure_format"):
        found["figure_formats"] = (noted["figure_format"],)
    return {**found, "figure_formats": tuple(sorted(found["figure_formats"]))}


def _own_dict(one: Any) -> Any:
    return dict(one) if isinstance(one, dict) else one


_FORMATS: Final = {"image/png": "png", "image/jpeg": "jpeg", "image/svg+xml": "svg", "application/pdf": "pdf"}


def _figure_formats(backend: Any) -> tuple[str, ...]:
    """Those that figures are shown in: ``set_matplotlib_formats`` changes them behind the back of the configuration."""
    figure, shell = getattr(sys.modules.get("matplotlib.figure"), "Figure", None), _shell()
    found = []
    if figure is not None and shell is not None:
        for mime, name in _FORMATS.items():
            printer = shell.display_formatter.formatters[mime].type_printers.get(figure)
            if printer is not None:
                called = getattr(getattr(printer, "func", printer), "__name__", "")
                found.append("retina" if called == "retina_figure" else name)
    return tuple(sorted(found or backend.figure_formats))


def _set_inline_settings(values: Entries, gone: tuple[str, ...]) -> None:
    """Until matplotlib is imported the backend knows no shell, and takes this up when it is."""
    shell = _shell()
    if shell is None:
        return
    backend = importlib.import_module("matplotlib_inline.config").InlineBackend.instance(parent=shell)
    for name in _INLINE:
        if name in values:
            setattr(backend, name, values[name])
    if "figure_formats" in values:
        backend.figure_formats = set(values["figure_formats"])
        if backend.shell is not None or _figures_shown():
            _select_formats(shell, backend)  # the formats may have been changed without the configuration


def _select_formats(shell: Any, backend: Any) -> None:
    select = importlib.import_module("IPython.core.pylabtools").select_figure_formats
    select(shell, backend.figure_formats, **backend.print_figure_kwargs)


def _figures_shown() -> Entries:
    """Whether the shell displays a figure as an image: it does so once the plotting backend has been activated."""
    figure, shell = getattr(sys.modules.get("matplotlib.figure"), "Figure", None), _shell()
    if figure is None or shell is None:
        return {}
    formatters = shell.display_formatter.formatters
    return {ALL: True} if any(figure in formatters[mime].type_printers for mime in _FORMATS) else {}


def _interactive() -> Entries:
    """Nothing before the plotting backend has been activated, which switches it on."""
    return {ALL: bool(sys.modules["matplotlib"].is_interactive())} if _figures_shown() else {}


def _set_interactive(values: Entries, gone: tuple[str, ...]) -> None:
    """The backend is activated before: its activation would switch it on again."""
    matplotlib: Any = sys.modules["matplotlib"]
    if not values or not hasattr(_shell(), "kernel"):
        return
    if "inline" in str(dict.get(matplotlib.rcParams, "backend", "")):
        importlib.import_module("matplotlib_inline.backend_inline")
    matplotlib.interactive(values[ALL])


def _show_figures(values: Entries, gone: tuple[str, ...]) -> None:
    """A figure that crossed is displayed as an image where ``pyplot`` has made none yet. Terminals show text."""
    shell = _shell()
    if values and hasattr(shell, "kernel") and not _figures_shown():
        _select_formats(shell, importlib.import_module("matplotlib_inline.config").InlineBackend.instance(parent=shell))


_OF_PRINTERS: Final = ("order", "use_unicode", "wrap_line", "num_columns")
_SYMPY_IMAGES: Final = {"_print_latex_png": "png", "_print_latex_matplotlib": "matplotlib"}


def _sympy_printing() -> dict[str, Any] | None:
    """Arguments of ``init_printing``, as the printers tell that it has set up. None: it was not called, or with
    functions of the program."""
    shell, printable = "IPython" in sys.modules and _shell(), sys.modules["sympy.printing.defaults"].Printable
    formatters = shell.display_formatter.formatters if shell else {}
    plain = formatters["text/plain"].type_printers.get(printable) if formatters else None
    if plain is None:
        return None
    text, png, svg = (formatters[one].type_printers.get(list) for one in ("text/latex", "image/png", "image/svg+xml"))
    image = _SYMPY_IMAGES.get(getattr(png, "__name__", ""), "svg" if svg is not None else False)
    known = dict.fromkeys(_OF_PRINTERS) | sys.modules["sympy.printing.printer"].Printer._global_settings
    nonlocals = inspect.getclosurevars(plain).nonlocals
    printer = getattr(nonlocals.get("stringify_func"), "__name__", "")
    if printer not in ("pretty", "sstrrepr"):
        return None
    found = {name: known[name] for name in _OF_PRINTERS} | {
        "pretty_print": printer == "pretty",
        "use_latex": image if text is None else True if png is not None else "mathjax",
        "print_builtin": inspect.getclosurevars(nonlocals["_can_print"]).nonlocals.get("print_builtin", True),
    }
    if text is not None:
        nonlocals = inspect.getclosurevars(text).nonlocals
        found |= {"latex_mode": nonlocals.get("latex_mode", "plain"), **nonlocals.get("settings", {})}
    return found


def _set_sympy_printing(given: dict[str, Any]) -> None:
    sys.modules["sympy"].init_printing(ip=_shell(), **given)
