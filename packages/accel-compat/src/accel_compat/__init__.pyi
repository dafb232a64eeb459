from accel_compat.alias import REFERENCE_VERSION as REFERENCE_VERSION
from accel_compat.alias import AliasDistribution as AliasDistribution
from accel_compat.alias import install as install
from accel_compat.alias import is_installed as is_installed
