"""Error feedback: what a codec took away is added to what goes next. One rule: outcomes decide.

A lossy average of parameters erases every progress smaller than half a step, for ever; with the
error fed back it only comes later (ALGORITHMS 2.11, DESIGN 4; Karimireddy et al. 2019). Both the
sender of contributions and the reducer of results keep a residual e:

    c = x + e                 `compensate`, before encode
    e' = c - decode(payload)  `commit`, once the outcome of the part says that it was included
    e' = e                    `commit`, if it was not: nobody has seen c

So x + e - e' = decode(payload) in every included round, and the sum of what was decoded differs
from the sum of what was meant by the current e alone, however many rounds there were. What stays is
a jitter of the size of e in each result (half a step of the codec), not a drift. e is bounded for
codecs that promise a contraction, and for no others (`Codec.contraction`).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping

import torch
from torch import Tensor

from moshpitd.errors import LocalProtocolError, TrainerError
from moshpitd.tensors.dtypes import DTYPES, dtype_name
from moshpitd.tensors.layout import Layout, Part, Region
from moshpitd.tensors.mapped import anonymous
from moshpitd.tensors.reduction import first_nonfinite
from moshpitd.tensors.slices import SLICE_BYTES, slice_bounds

# Every other dtype travels raw (see codecs.codec_for), so that nothing of it is ever left over.
LOSSY_DTYPE = "float32"
_STEP = SLICE_BYTES // DTYPES[LOSSY_DTYPE].itemsize


class ErrorFeedback:
    """The residual of one bucket, on one side (sender or reducer).

    Invariant: e lies where its element lies in the region, whatever the parts and members of the
    round were, so a change of the group or of `part_bytes` moves nothing. Parts of other dtypes
    than float32 have no residual and are let through.

    Calls about different parts may come from different threads; those about one part must not
    overlap (the caller holds the part's lock). `state_dict`, `fold`, `hand_over` and their like
    are for the time between rounds.

    Memory: one flat array of the region's size, taken at the first commit. On the CPU it is mapped
    zeros, of which only the pages count that somebody wrote: a reducer's residual costs its share.
    """

    def __init__(self, layout: Layout, *, device: torch.device | str = "cpu") -> None:
        self._regions = {region.dtype: region for region in layout.regions}
        self._device = torch.device(device)
        self._lock = threading.Lock()  # only for taking memory
        self._residuals: dict[str, Tensor] = {}
        self._held: dict[tuple[int, int], Tensor] = {}

    # -- in a round ---------------------------------------------------------------------------

    def compensate(self, part: Part, values: Tensor, out: Tensor | None = None) -> Tensor:
        """c = values + e, in `out` or in fresh memory; `values` (1-D, the part's) stay as they are.

        Never an alias of `values`: a bucket may hold the result by the time of `commit`.
        """
        region, start, stop = self._range(part, values)
        residual = self._residuals.get(region.dtype)
        out = torch.empty_like(values) if out is None else out
        if residual is None:
            return out.copy_(values.detach())
        return torch.add(values.detach(), residual[start:stop], out=out)

    def commit(self, part: Part, c: Tensor, decoded: Tensor, *, included: bool) -> None:
        """The outcome of a part: e' = c - decoded if it was included, else e' = e.

        `c` is what `compensate` gave, `decoded` what its payload decodes to. A difference that is
        not finite is refused (LocalProtocolError) and e stays: it would spoil every later round.
        """
        region, _, _ = self._range(part, c)
        self._range(part, decoded)
        if included and region.dtype == LOSSY_DTYPE:
            self._keep(part, c.detach() - decoded.detach())

    def hold(self, part: Part, c: Tensor, decoded: Tensor) -> None:
        """`commit` in two halves, where c cannot be kept until the outcome: keeps c - decoded.

        Holding a part again replaces what was held (a repeated push). `settle` is the other half.
        """
        region, _, _ = self._range(part, c)
        self._range(part, decoded)
        if region.dtype == LOSSY_DTYPE:
            self._held[part.offset_bytes, part.nbytes] = c.detach() - decoded.detach()

    def settle(self, part: Part, *, included: bool) -> None:
        """The outcome of a part that was held; LocalProtocolError if it was included but not held.

        Errors as for `commit`.
        """
        region, _, _ = self._range(part)
        held = self._held.pop((part.offset_bytes, part.nbytes), None)
        if held is not None and included:
            self._keep(part, held)
        elif included and region.dtype == LOSSY_DTYPE:
            raise LocalProtocolError(f"residual of part {part.index}: settled, but never held")

    def abandon(self) -> None:
        """The round is over: parts that are still held have no outcome, so they were not in."""
        self._held.clear()

    # -- between rounds -----------------------------------------------------------------------

    def norm(self) -> float:
        """l2 of the residual, without what is held. Reads all of it: for metrics, not per part."""
        total = 0.0
        for residual in self._residuals.values():
            for start, stop in slice_bounds(residual.numel(), step=_STEP):
                piece = torch.linalg.vector_norm(residual[start:stop], dtype=torch.float64)
                total += float(piece.item()) ** 2
        return math.sqrt(total)

    @property
    def nbytes(self) -> int:
        """Bytes of address space taken, and of parts that are held; 0 before the first commit."""
        tensors = (*self._residuals.values(), *self._held.values())
        return sum(one.numel() * one.element_size() for one in tensors)

    def fold(self, part: Part, values: Tensor) -> None:
        """values += e, e = 0: for a member's last contribution, which then travels lossless."""
        region, start, stop = self._range(part, values)
        residual = self._residuals.get(region.dtype)
        if residual is not None:
            values.detach().add_(residual[start:stop])
            residual[start:stop].zero_()

    def hand_over(self) -> dict[str, Tensor]:
        """The residual as plain values by dtype, out of here: whoever takes it over owns it now."""
        handed, self._residuals = self._residuals, {}
        self._held.clear()
        return handed

    def take_over(self, handed: Mapping[str, Tensor]) -> None:
        """e += what a leaving peer handed over. Its weight is the caller's matter: in an average
        e counts with the weight of whoever sends it, so scale it by (its weight / ours) before.

        TrainerError says which region does not fit, before anything is added.
        """
        for dtype, values in self._checked(handed).items():
            self._residual(self._regions[dtype]).add_(values)

    def clear(self) -> None:
        """Forget everything and give the memory back: the parameters were replaced (a snapshot)."""
        self._residuals.clear()
        self._held.clear()

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of the residual by dtype; regions without one are absent, and so is what is held:
        a checkpoint is taken between rounds, or as if the round had not included us."""
        return {dtype: residual.clone() for dtype, residual in self._residuals.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replace everything by what `state_dict` gave, of a layout with the same regions.

        TrainerError says what does not fit; nothing has changed then.
        """
        checked = self._checked(state)
        self.clear()
        for dtype, values in checked.items():
            self._residual(self._regions[dtype]).copy_(values)

    # -- below --------------------------------------------------------------------------------

    def _keep(self, part: Part, difference: Tensor) -> None:
        if first_nonfinite(difference) is not None:
            raise LocalProtocolError(f"residual of part {part.index}: it is not finite")
        region, start, stop = self._range(part, difference)
        self._residual(region)[start:stop].copy_(difference)

    def _residual(self, region: Region) -> Tensor:
        with self._lock:
            held = self._residuals.get(region.dtype)
            if held is None:
                row = DTYPES[region.dtype]
                if self._device.type == "cpu":
                    held = anonymous(region.numel * row.itemsize).view(row.torch_dtype)
                else:
                    held = torch.zeros(region.numel, dtype=row.torch_dtype, device=self._device)
                self._residuals[region.dtype] = held
            return held

    def _range(self, part: Part, values: Tensor | None = None) -> tuple[Region, int, int]:
        """The part's region and elements in it; the part may be of any cut of that region."""
        region, row = self._regions.get(part.dtype), DTYPES.get(part.dtype)
        if region is None or row is None:
            raise LocalProtocolError(f"residual: no region of dtype {part.dtype}")
        start, rest = divmod(part.offset_bytes - region.offset_bytes, row.itemsize)
        stop = start + part.numel
        if start < 0 or rest or stop > region.numel:
            raise LocalProtocolError(
                f"residual of part {part.index}: elements {start} to {stop} of {part.dtype}, "
                f"expected 0 to {region.numel}"
            )
        if values is not None and (
            values.shape != (part.numel,) or values.dtype != row.torch_dtype
        ):
            raise LocalProtocolError(
                f"residual of part {part.index}: got {dtype_name(values.dtype)} "
                f"{list(values.shape)}, expected {part.dtype} [{part.numel}]"
            )
        return region, start, stop

    def _checked(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        for dtype, values in state.items():
            region = self._regions.get(dtype)
            numel = region.numel if region is not None and dtype == LOSSY_DTYPE else 0
            if values.shape != (numel,) or dtype_name(values.dtype) != dtype or numel == 0:
                raise TrainerError(
                    f"residual {dtype!r}: {dtype_name(values.dtype)} {list(values.shape)}, "
                    f"expected {numel} elements of {LOSSY_DTYPE} as in this run's layout",
                    reason="schema_differs",
                )
            if first_nonfinite(values) is not None:
                raise TrainerError(
                    f"residual {dtype!r} holds NaN or infinity, expected finite values",
                    reason="not_finite",
                )
        return dict(state)
