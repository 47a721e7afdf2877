"""The names and types of Inductor's options.

Source: torch/_inductor/config.py through torch/utils/_config_module.py
(ConfigModule.get_config_copy, get_type), the same in torch 2.11 and 2.13.
"""

from __future__ import annotations

import types


def inductor_options() -> dict[str, type]:
    """Every option that ``[compile.options]`` may set, by dotted name.

    Returns:
        Name → type of its value, or ``object`` where torch states none that a value
        can be checked against: unions, containers, and options whose default is None.

    Source: torch/__init__.py, _TorchCompileInductorWrapper.apply_options (2.11, 2.13),
    which checks names and types in the same way and skips generic types.
    """
    from torch._inductor import config

    # ConfigModule is put in place of the module while it's imported; mypy can't see it.
    get_type = config.get_type  # type: ignore[attr-defined]
    return {name: _checkable(get_type(name)) for name in config.get_config_copy()}


def _checkable(kind: object) -> type:
    if isinstance(kind, types.GenericAlias) or not isinstance(kind, type):
        return object
    return kind if kind in (bool, int, float, str) else object
