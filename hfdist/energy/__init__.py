"""How much energy the devices and the hosts of a run take: measured where a machine can, else estimated.

Loads no torch. A rank has a `RankMeter`; the ranks tell each other their sources, so that nothing is counted twice.
"""

from hfdist.energy.rank_meter import EnergySources, RankMeter, describe_sources, is_known, name_sources, num_devices

__all__ = ["EnergySources", "RankMeter", "describe_sources", "is_known", "name_sources", "num_devices"]
