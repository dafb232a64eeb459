from accel_plugins.dcp.index import Entry as Entry
from accel_plugins.dcp.index import entries as entries
from accel_plugins.dcp.index import read_index as read_index
from accel_plugins.dcp.index import write_index as write_index
from accel_plugins.dcp.read import read_all as read_all
from accel_plugins.dcp.read import read_into as read_into
from accel_plugins.dcp.write import ShardWriter as ShardWriter
