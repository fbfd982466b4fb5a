"""Refuse to start on another package that is called ``ops``; what comes from there goes through here."""

import ops

if not getattr(ops, "__packload_ops__", False):
    _where = getattr(ops, "__file__", None) or list(getattr(ops, "__path__", ["an unknown place"]))
    raise ImportError(
        f"packload needs the package 'ops' that is installed with it, but 'import ops' found {_where}. "
        "Rename or uninstall that package, or take its folder off sys.path, then import packload again."
    )

Axis = ops.Axis
Grid = ops.Grid
PackedTensor = ops.PackedTensor
