"""The metrics of all replicas on one page, told apart by the label `replica`.

Knows the text format of Prometheus; deliberately not how the pages were asked for.
"""

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

LABEL = "replica"


class _Families(Collector):
    def __init__(self, families: Mapping[str, Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return iter(self._families.values())


def one_page(pages: Mapping[str, str]) -> bytes:
    """The pages of these replicas as one."""
    families: dict[str, Metric] = {}
    for replica, page in sorted(pages.items()):
        for family in text_string_to_metric_families(page):
            merged = families.setdefault(
                family.name, Metric(family.name, family.documentation, family.type)
            )
            merged.samples += [
                sample._replace(labels={**sample.labels, LABEL: replica})
                for sample in family.samples
            ]
    registry = CollectorRegistry()
    registry.register(_Families(families))
    return generate_latest(registry)
