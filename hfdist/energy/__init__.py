"""How much energy the devices and the hosts of a run take: measured where a machine can, else estimated.

Loads no torch. A rank has a `RankMeter`; the ranks tell each other their places, so that nothing is counted twice.
"""

from hfdist.energy.meter import Meter, Source
from hfdist.energy.rank_meter import Place, RankMeter, describe_sources, name_sources

__all__ = ["Meter", "Place", "RankMeter", "Source", "describe_sources", "name_sources"]
