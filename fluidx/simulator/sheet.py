"""Costs of steps from the figures of a data sheet."""

from __future__ import annotations

from ..hardware.records import Device, Figure, Hardware
from ..ir.errors import FluidxError, nearest
from .estimate import CostEstimate
from .work import StepWork


class Sheet:
    """Costs from the figures of a data sheet: max(operations / reached speed, bytes / reached bandwidth) + a call."""

    def __init__(self, hardware: Hardware):
        self.hardware = hardware

    def estimate(self, work: StepWork) -> CostEstimate:
        device = self.hardware.device
        spread = max(device.bandwidth.spread, device.bandwidth_share.spread)
        nbytes = work.nbytes + work.copied + (work.widened if device.kind == "cpu" else 0)
        if (work.on_host or work.moves) and device.kind != "cpu":
            link = self.hardware.to_host
            if link is None:
                raise FluidxError(
                    f"op {work.first} works on host memory, and hardware {self.hardware.name} has no figures of the way there; add "
                    '"to_host" with latency and bandwidth to its file'
                )
            # host memory of one device: its ranks share it, and get no more than their links to the host; a copy passes the link once
            passing = nbytes / 2 if work.moves else nbytes
            return CostEstimate(passing / link.bandwidth.value + link.latency.value, link.bandwidth.spread, "sheet")
        memory = nbytes / (device.bandwidth.value * device.bandwidth_share.value)
        peak = _peak(device, work.dtype if work.product else "float32", work)
        arithmetic = work.flops / (peak.value * device.share.value)
        if arithmetic > memory:
            spread = max(peak.spread, device.share.spread)
        return CostEstimate(max(arithmetic, memory) + device.call.value, spread, "sheet")


def _peak(device: Device, dtype: str, work: StepWork) -> Figure:
    found = device.flops.get(dtype)
    if found is None:
        raise FluidxError(
            f"op {work.first} computes products of {dtype}, for which device {device.name} has no peak; "
            f'{nearest(dtype, device.flops, "it has those of")}; add "{dtype}" to its "flops"'
        )
    return found
