"""One file per probe; a line here registers it."""

from scantling.audits.probes import future, neighbours, packing, padding, shift
from scantling.audits.registry import Probe

PROBES: dict[str, Probe] = {
    probe.name: probe
    for probe in (
        future.PROBE,
        shift.PROBE,
        padding.PROBE,
        neighbours.PROBE,
        packing.PROBE,
    )
}
"""By name, in the order in which they are asked."""
