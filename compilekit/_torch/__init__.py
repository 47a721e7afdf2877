"""The private-API room: every underscored torch or triton name lives in here.

Small functions, each citing the torch file it relies on and what differs between the
supported versions. `runtime` serves the runtime layer and imports nothing beyond what
plain ``import torch`` loads; everything else serves the compiler side. `versions` says
which torch minors are supported.
"""
