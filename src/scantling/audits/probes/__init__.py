"""One file per probe; a line here registers it."""

from scantling.audits.probes import (
    accumulation,
    cache,
    checkpoint,
    chunks,
    ends,
    future,
    kept,
    kernels,
    length,
    maps,
    neighbours,
    order,
    packing,
    padding,
    place,
    places,
    precision,
    quantised,
    reference,
    reload,
    repeat,
    rotation,
    shift,
    source,
    tied,
    window,
)
from scantling.audits.registry import Probe

PROBES: dict[str, Probe] = {
    probe.name: probe
    for probe in (
        repeat.PROBE,
        future.PROBE,
        shift.PROBE,
        padding.PROBE,
        neighbours.PROBE,
        packing.PROBE,
        cache.PROBE,
        chunks.PROBE,
        window.PROBE,
        source.PROBE,
        order.PROBE,
        rotation.PROBE,
        places.PROBE,
        tied.PROBE,
        reload.PROBE,
        checkpoint.PROBE,
        accumulation.PROBE,
        kernels.PROBE,
        maps.PROBE,
        precision.PROBE,
        quantised.PROBE,
        kept.PROBE,
        length.PROBE,
        place.PROBE,
        ends.PROBE,
        reference.PROBE,
    )
}
"""By name, in the order in which they are asked; whether a model repeats comes first, before it has seen long rows."""
