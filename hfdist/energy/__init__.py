"""How much energy the devices and the hosts of a run take: measured where a machine can, else estimated.

Loads no torch. A rank has a `RankMeter`; the ranks tell each other their places, so that nothing is counted twice.
"""

from hfdist.energy.rank_meter import Place, RankMeter, describe_sources, is_known, name_sources, num_devices

__all__ = ["Place", "RankMeter", "describe_sources", "is_known", "name_sources", "num_devices"]
