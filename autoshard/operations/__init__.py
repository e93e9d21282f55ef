"""Functions with a sharding rule and any number of distributed implementations, of which the planner takes one.

`operation.py` says what such a function is. `primitive.py` binds a call of it as one equation of a jaxpr, `split.py`
says how one call is split, and `call.py` runs it on shards.
"""

from autoshard.operations.operation import Implementation, Operation, operation
from autoshard.operations.split import CallRun, CallSplit

__all__ = ["CallRun", "CallSplit", "Implementation", "Operation", "operation"]
