"""Everything that can go wrong for a user, and every reason not to fuse, in one file.

Errors derive from `EvtError`; each message says what happened and what to do next. A `Reason` is
not an error: it says why a node stayed with Inductor, and `explain` shows it.
"""

from __future__ import annotations

from dataclasses import dataclass


class EvtError(Exception):
    """Base of all errors that torch_evt raises on purpose."""


class OptionError(EvtError):
    """An option that does not exist or has the wrong type or value."""


class TreeError(EvtError):
    """A tree, or its text, that breaks a rule of the grammar (`tree/ir.py`)."""


class PassError(EvtError):
    """One of our passes raised or left an invalid graph; shown under `evt.strict`."""


class TargetError(EvtError):
    """A device name that `devices.py` does not know."""


class WorkloadError(EvtError):
    """A workload that needs something which is not installed."""


class ExplainError(EvtError):
    """A model that cannot be explained as asked."""


class BenchError(EvtError):
    """A measurement that cannot be made as asked."""


class VerifyError(EvtError):
    """A model whose step cannot be verified as asked."""


class RegionError(EvtError):
    """Under `evt.verify`: a region that did not compute what its tree says."""


@dataclass(frozen=True)
class Reason:
    """Why a node was not fused.

    code: a stable, short identifier. text: a sentence for people, without the node's name.
    """

    code: str
    text: str

    def __str__(self) -> str:
        return self.text


# Why a node was not fused. Codes are stable; texts are for people.
BARE = Reason("bare", "no arithmetic stands next to the product, and a plain product is cuBLAS's")
SLOWER = Reason("slower", "no region of it would make the plan faster")
TAKEN = Reason("taken", "its neighbours belong to a region with a larger gain")
OPERAND_DTYPE = Reason("operand-dtype", "no main loop takes operands of this dtype")
EMPTY = Reason("empty", "a dimension has size 0")
NO_HALF = Reason("no-half", "only backward needs it although it is computed in forward")
NOT_FUSIBLE = Reason("not-fusible", "its user is no operation that an epilogue can hold")
VALUE_DTYPE = Reason("value-dtype", "an epilogue computes in fp32, and this value is not")
SHAPE = Reason("shape", "its user's shape is not rows by columns of the product")
BROADCAST = Reason("broadcast", "an operand's broadcast has no index map")
STRIDE = Reason("stride", "its stored value would not be row-major or column-major")
ORDER = Reason("order", "fusing would make two kernels wait for each other")
OTHER_HALF = Reason("other-half", "its user belongs to the other half")
PARTIAL_SUM = Reason("partial-sum", "its reduction is over part of the rows or columns")
REDUCE_KIND = Reason("reduce-kind", "the main loop does not hold this kind of reduction")
RECOMPUTED_MAX = Reason(
    "recomputed-max",
    "a maximum is fused only over the product itself, whose value is not recomputed",
)
TOO_MANY = Reason("too-many", "the region would need more loads or stores than the main loop holds")
DEVICES = Reason("devices", "an operand lies on another device")
DISABLED = Reason("disabled", "switched off by evt.disable")

REASONS = (
    BARE, SLOWER, TAKEN, OPERAND_DTYPE, EMPTY, NO_HALF, NOT_FUSIBLE, VALUE_DTYPE, SHAPE,
    BROADCAST, STRIDE, ORDER, OTHER_HALF, PARTIAL_SUM, REDUCE_KIND, RECOMPUTED_MAX, TOO_MANY,
    DEVICES, DISABLED,
)  # fmt: skip
